"""Python numbers that `Tensor.item()` reads, kept symbolic: the captured graph computes them anew at each call.

In: what `item` gave, and Python's operators on it.  Out: nodes whose values are Python numbers, in `meta["number"]`
their type; where the program turns a number into something else (a branch, a text, an index, a type), a gate.
Always: `value` is what eager has; a number answers `isinstance` as the float or int that it stands for, and C code
finds no number in its memory, so that it has to ask: every way out is one of the methods below.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import operator
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .trees import tensors

ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
PLAIN = (bool, int, float)


def power(a: Any, b: Any) -> Any:
    """A power of a negative constant: generated source reads -2 ** n as -(2 ** n)."""
    return a**b


def tensor_of(number: Any, **how: Any) -> torch.Tensor:
    """`torch.tensor` of a number as an operator on it; what this operator refuses, torch.tensor rounds or names itself."""
    try:
        return torch.scalar_tensor(number, **how)
    except (RuntimeError, OverflowError):
        return torch.tensor(number, **how)


RAISING = frozenset((operator.truediv, operator.floordiv, operator.mod, operator.pow, power))  # whatever becomes of their result

# torch functions of whose numbers nothing depends but values, by name without a trailing underscore
VALUES = frozenset(
    """
    add sub mul div pow rsub multiply subtract divide true_divide float_power floor_divide remainder fmod addcmul addcdiv
    lerp clamp clamp_min clamp_max clip masked_fill where eq ne lt le gt ge greater less fill full full_like new_full
    scalar_tensor tensor as_tensor xlogy copysign __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__
    __truediv__ __rtruediv__ __itruediv__ __rdiv__ __idiv__ __div__ __pow__ __rpow__ __ipow__ __floordiv__ __rfloordiv__ __mod__
    __rmod__ __lt__ __le__ __gt__ __ge__ __eq__ __ne__ __setitem__ _foreach_add _foreach_sub _foreach_mul _foreach_div
    _foreach_addcmul _foreach_addcdiv _foreach_pow _foreach_lerp _foreach_clamp_min _foreach_clamp_max _foreach_maximum
    _foreach_minimum
    """.split()
)
_ONLY_FLOAT = frozenset("full new_full __setitem__ pow __pow__ __rpow__ __ipow__ float_power _foreach_pow".split())


class Kept:
    """A number of the program. Once a gate has compared it, it is a constant of the version."""

    _value: Any
    _node: fx.Node
    _owner: list[Any]  # the recorder while it runs

    def __init__(self, value: Any, node: fx.Node, owner: list[Any]) -> None:
        self._value, self._node, self._owner = value, node, owner
        self._constant = False

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._value)

    def _settled(self) -> Any:
        """The value as a constant of the version, which a gate compares at each call."""
        if not self._constant and self._owner:
            self._constant = True
            self._owner[0].gate_on(type(self._value).__name__, self._node, self._value)
        return self._value

    def __bool__(self) -> bool:
        return _compared(self, operator.truth, (self,))

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        import numpy

        return numpy.asarray(self._settled(), *args, **kwargs)

    def __copy__(self) -> Kept:
        return self

    def __deepcopy__(self, memo: Any) -> Kept:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._owner:  # a pickle tells how it was made
            self._owner[0].without_numbers()
        return type(self._value), (self._settled(),)

    def __getattr__(self, name: str) -> Any:
        kind = type(self.__dict__["_value"])
        if not hasattr(kind, name):
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
        return getattr(self._settled(), name)


class KeptFloat(Kept, torch.SymFloat):
    """Stands for a float; torch's own argument parsers let a SymFloat pass as a number."""


class KeptInt(Kept, torch.SymInt):
    """Stands for an int."""


def kept(value: Any, node: fx.Node, owner: list[Any]) -> Any:
    """The number that the node computes, or the plain value where its type has no symbolic form."""
    kind = {float: KeptFloat, int: KeptInt}.get(type(value))
    return value if kind is None else kind(value, node, owner)


def is_kept(value: Any) -> bool:
    return type(value) in (KeptFloat, KeptInt)


def numbers_in(value: Any) -> list[Kept]:
    """The numbers in a call's arguments."""
    found, stack = [], [value]
    while stack:
        item = stack.pop()
        kind = type(item)
        if kind in (KeptFloat, KeptInt):
            found.append(item)
        elif kind in (list, tuple):
            stack.extend(item)
        elif kind is dict:
            stack.extend(item.values())
        elif kind is slice:
            stack.extend((item.start, item.stop, item.step))
    return found


def concrete(value: Any) -> Any:
    """A call's argument with plain numbers."""
    kind = type(value)
    if kind in (KeptFloat, KeptInt):
        return value._value
    if kind in (list, tuple):
        return kind([concrete(v) for v in value])
    if kind is dict:
        return {k: concrete(v) for k, v in value.items()}
    return slice(concrete(value.start), concrete(value.stop), concrete(value.step)) if kind is slice else value


def settle(value: Any) -> Any:
    """A call's argument with each number as a constant of the version."""
    for number in numbers_in(value):
        number._settled()
    return concrete(value)


def stay(func: Any, args: tuple, kwargs: dict, numbers: list[Kept]) -> bool:
    """Whether a torch function takes these numbers as values that any call may change."""
    name = getattr(func, "__name__", "")
    name = name if name.startswith("__") else name.removesuffix("_")
    if name not in VALUES or (name in _ONLY_FLOAT and any(type(n) is KeptInt for n in numbers)):
        return False
    if name == "__setitem__" and numbers_in(args[1]):
        return False
    if name in ("tensor", "as_tensor"):
        dtype = kwargs.get("dtype") or torch.float32
        if len(args) != 1 or not is_kept(args[0]) or kwargs.get("requires_grad") or not dtype.is_floating_point:
            return False
    if name == "full" and (numbers_in(args[:1]) or kwargs.get("out") is not None):
        return False
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors((args, kwargs))))


def _operate(number: Kept, op: Callable, operands: tuple) -> Any:
    """An operator of Python on numbers: a node, as long as all of them may vary."""
    values = tuple(x._value if is_kept(x) else x for x in operands)
    owner = number._owner
    varying = owner and any(is_kept(x) and not x._constant for x in operands)
    if not varying or any(type(v) not in PLAIN for v in values) or _type_depends(op, operands, values):
        return op(*[x._settled() if is_kept(x) else x for x in operands])
    try:
        result = op(*values)
    except ArithmeticError:
        return op(*[x._settled() if is_kept(x) else x for x in operands])
    if type(result) not in (int, float):
        return op(*[x._settled() if is_kept(x) else x for x in operands])
    return owner[0].number(op, tuple(x._node if is_kept(x) and not x._constant else concrete(x) for x in operands), result)


def _type_depends(op: Callable, operands: tuple, values: tuple) -> bool:
    """Whether the type of the result depends on a value that varies: an integer power may be a fraction."""
    return op is operator.pow and all(type(v) is not float for v in values) and is_kept(operands[1])


def _compared(number: Kept, op: Callable, operands: tuple) -> Any:
    values = tuple(x._value if is_kept(x) else x for x in operands)
    owner = number._owner
    if not owner or all(not is_kept(x) or x._constant for x in operands) or any(type(v) not in PLAIN for v in values):
        return op(*[x._settled() if is_kept(x) else x for x in operands])
    result = op(*values)
    node = owner[0].number_node(op, tuple(x._node if is_kept(x) and not x._constant else concrete(x) for x in operands))
    owner[0].python_valued.add(node)
    owner[0].gate_on("bool", node, result)
    return result


def _methods() -> dict[str, Any]:
    """Python's operators as methods, and every other method of a number, which makes it a constant."""
    found: dict[str, Any] = {}

    def binary(op: Callable, reflected: bool) -> Callable:
        def method(self: Kept, other: Any) -> Any:
            if isinstance(other, torch.Tensor):
                return NotImplemented
            return _operate(self, op, (other, self) if reflected else (self, other))

        return method

    def unary(op: Callable) -> Callable:
        return lambda self: _operate(self, op, (self,))

    def compare(op: Callable) -> Callable:
        def method(self: Kept, other: Any) -> Any:
            return NotImplemented if isinstance(other, torch.Tensor) else _compared(self, op, (self, other))

        return method

    def asking(name: str) -> Callable:
        def method(self: Kept, *args: Any, **kwargs: Any) -> Any:
            return getattr(self._settled(), name)(*settle(args), **settle(kwargs))

        return method

    for name in dir(float) + dir(int):
        if callable(getattr(float, name, None) or getattr(int, name)) and name not in _KEEP:
            found[name] = asking(name)
    for name in ARITHMETIC:
        op = getattr(operator, name)
        found[f"__{name}__"], found[f"__r{name}__"] = binary(op, False), binary(op, True)
    for name in COMPARISONS:
        found[f"__{name}__"] = compare(getattr(operator, name))
    for name in ("neg", "pos", "abs"):
        found[f"__{name}__"] = unary(getattr(operator, name))
    for name in ("__int__", "__float__", "__hash__", "__repr__", "__str__", "__format__"):
        found[name] = asking(name)
    return found


_TELLING = frozenset(("type", "vars", "dir", "__dict__", "SymInt", "SymFloat", "SymBool", "ExitStack", "closing"))
_KEEP = frozenset(
    """__new__ __init__ __class__ __getattribute__ __getattr__ __setattr__ __delattr__ __init_subclass__ __subclasshook__ __dir__
    __doc__ __sizeof__ __reduce__ __reduce_ex__ __bool__ __getstate__""".split()
)
for _name, _method in _methods().items():
    for _kind, _host in ((KeptFloat, float), (KeptInt, int)):
        if hasattr(_host, _name):
            setattr(_kind, _name, _method)


SWALLOWING: Any = contextlib.suppress.__exit__


@functools.lru_cache(maxsize=4096)
def tells_types_apart(code: types.CodeType) -> bool:
    """Whether code asks for the class of a value, or does anything about exceptions, which depend on it where C code asks,
    and which a program that is computed again meets without this code."""
    found = list(dis.get_instructions(code))
    for k, instruction in enumerate(found):
        named = isinstance(instruction.argval, str) and instruction.argval in _TELLING
        if named and (instruction.opname != "LOAD_CONST" or instruction.argval == "__dict__"):
            return True
        if instruction.opname == "PUSH_EXC_INFO" and found[k + 1].opname != "WITH_EXCEPT_START":
            return True
    return code.co_name == "__exit__"
