"""How the calls that torch announces to a function mode are spelled in the captured graph, and what kind each is.

In: a callable as `__torch_function__` receives it.  Out: opcode, target and arguments of an fx node; the tables
METADATA, CONVERSIONS, ESCAPES that tell reads of metadata, data gates and things that cannot be captured apart.
Always: the spelled call gives the result of the announced one. Where Python has an operator, the target is the
operator, so that `x + w` is `operator.add` (torch announces `x + w` and `x.add(w)` as the same call).
"""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor

OPERATORS: dict[str, Callable] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "pow": operator.pow,
    "__add__": operator.add, "__sub__": operator.sub, "__mul__": operator.mul, "__truediv__": operator.truediv,
    "__pow__": operator.pow, "__floordiv__": operator.floordiv, "__mod__": operator.mod, "remainder": operator.mod,
    "matmul": operator.matmul, "__matmul__": operator.matmul, "__and__": operator.and_, "__or__": operator.or_,
    "__xor__": operator.xor, "__lshift__": operator.lshift, "__rshift__": operator.rshift, "__invert__": operator.invert,
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "ne": operator.ne, "eq": operator.eq,
    "__lt__": operator.lt, "__le__": operator.le, "__gt__": operator.gt, "__ge__": operator.ge, "__ne__": operator.ne,
    "__eq__": operator.eq, "neg": operator.neg, "__neg__": operator.neg, "__pos__": operator.pos, "positive": operator.pos,
    "__getitem__": operator.getitem, "__setitem__": operator.setitem,
}  # fmt: skip
_UNARY = {operator.neg, operator.pos, operator.invert}
_TERNARY = {operator.setitem}

# beside a number; between tensors they differ from the operator: x.__rdiv__(y) is x.reciprocal() * y, in the layout of x
REFLECTED: dict[str, Callable] = {
    "__radd__": operator.add, "__rsub__": operator.sub, "__rmul__": operator.mul, "__rdiv__": operator.truediv,
    "__rtruediv__": operator.truediv, "__rfloordiv__": operator.floordiv, "__rpow__": operator.pow,
    "__rmod__": operator.mod, "__rmatmul__": operator.matmul, "__rand__": operator.and_, "__ror__": operator.or_,
    "__rxor__": operator.xor, "__rlshift__": operator.lshift, "__rrshift__": operator.rshift,
}  # fmt: skip


def _of_tensor(names: str) -> set[Any]:
    """The callables that a mode sees for these methods and properties of Tensor."""
    found = set()
    for name in names.split():
        member: Any = getattr(Tensor, name, None)
        if member is not None:
            found.add(member if callable(member) else member.__get__)
    return found


METADATA: set[Any] = _of_tensor(
    "shape dtype device ndim layout requires_grad names itemsize nbytes is_cpu is_cuda is_sparse is_sparse_csr is_quantized "
    "is_mps is_meta is_nested is_mkldnn is_xla is_xpu is_ipu is_hpu is_maia is_mtia is_vulkan is_inference size dim "
    "stride numel nelement is_contiguous is_floating_point is_complex is_signed element_size __len__ get_device is_conj "
    "is_neg type ndimension has_names is_same_size __hash__ sparse_dim dense_dim _is_zerotensor dim_order "
    "is_distributed __dir__ get_data"
) | {
    torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor, torch.result_type, torch.can_cast,
    torch.promote_types, torch.is_same_size, torch.is_conj, torch.is_neg, torch.is_signed, torch.is_inference,
    torch.is_storage, torch.get_device,
}  # fmt: skip

# read from a placeholder these are not in the key by themselves: each read becomes a row of the state
PLACEHOLDER_METADATA: dict[Any, str] = {
    name: text for text in ("is_leaf", "storage_offset") for name in _of_tensor(text)
}

CONVERSIONS: dict[Any, str] = {
    Tensor.__bool__: "bool", Tensor.__int__: "int", Tensor.__float__: "float", Tensor.__index__: "index",
    Tensor.__complex__: "complex", Tensor.item: "item", Tensor.tolist: "tolist",
}  # fmt: skip

# what leaves the world of recorded values; each with the reason that the error states
ESCAPES: dict[Any, str] = {
    **dict.fromkeys(_of_tensor("numpy __array__ __array_wrap__ __dlpack__ __cuda_array_interface__"),
                    "hands the data to code that capture cannot see"),
    **dict.fromkeys(_of_tensor("data_ptr untyped_storage storage storage_type _typed_storage is_set_to "
                               "const_data_ptr mutable_data_ptr share_memory_ is_shared is_pinned"),
                    "reads the memory of a traced value"),
    **dict.fromkeys(_of_tensor("_version grad_fn output_nr _base _is_view _backward_hooks _post_accumulate_grad_hooks"),
                    "reads the history of a traced value"),
    **dict.fromkeys(_of_tensor("register_hook register_post_accumulate_grad_hook retain_grad"),
                    "attaches a hook or gradient storage to a traced value"),
    **dict.fromkeys(_of_tensor("apply_ map_ map2_"), "runs Python code on single elements"),
    **dict.fromkeys(_of_tensor("__reduce_ex__ __reduce__ __setstate__"), "copies or pickles a traced value"),
}  # fmt: skip


def _second(name: str) -> Callable[[tuple, dict], Any]:
    return lambda args, kwargs: args[1] if len(args) > 1 else kwargs.get(name)


def _batch_sizes(args: tuple, kwargs: dict) -> Any:
    """The lengths in the call of a recurrent layer on a packed sequence, whose weights come one place later."""
    return args[1] if len(args) > 3 and isinstance(args[3], (list, tuple)) else None


# arguments read on the host without a sign at any level: how to find the tensor in the call
SILENT_READS: dict[Any, Callable[[tuple, dict], Any]] = {
    **dict.fromkeys((torch.tensor_split, Tensor.tensor_split), _second("tensor_indices_or_sections")),
    torch._C._VariableFunctions._pack_padded_sequence: _second("lengths"),
    torch._C._VariableFunctions._pad_packed_sequence: _second("batch_sizes"),
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _batch_sizes),
}

# results that the host writes without an operator, computed from what the call reads silently: their positions
HOST_RESULTS: dict[Any, tuple[int, ...]] = {torch._C._VariableFunctions._pad_packed_sequence: (1,)}

# take a 0-dim tensor for a Python number, and read it at once: the node gets the number, which is a gate
TAKES_NUMBERS: set[Any] = _of_tensor("view reshape expand repeat new_zeros new_ones new_empty new_full narrow") | {
    torch.full, torch.arange, torch.zeros, torch.ones, torch.empty, torch.rand, torch.randn,
}  # fmt: skip
TAKES_INDICES: set[Any] = {Tensor.__getitem__, Tensor.__setitem__}  # the same, for the second argument

# write these arguments in training, and count the write before the dispatcher sees it: (flag, tensors) by position, name
EARLY_WRITES: dict[Any, tuple[tuple[int, str, bool], tuple[tuple[int, str], ...]]] = {
    torch.nn.functional.batch_norm: ((5, "training", False), ((1, "running_mean"), (2, "running_var"))),
    torch.batch_norm: ((5, "training", False), ((3, "running_mean"), (4, "running_var"))),
    torch.nn.functional.instance_norm: ((5, "use_input_stats", True), ((1, "running_mean"), (2, "running_var"))),
    torch.instance_norm: ((5, "use_input_stats", False), ((3, "running_mean"), (4, "running_var"))),
}


def early_writes(func: Any, args: tuple, kwargs: dict) -> list[Tensor]:
    """The tensors that the call will write without saying so in time."""
    row = EARLY_WRITES.get(func)
    if row is None:
        return []
    (position, name, default), tensors = row
    if not (args[position] if len(args) > position else kwargs.get(name, default)):
        return []
    found = [args[k] if len(args) > k else kwargs.get(n) for k, n in tensors]
    return [t for t in found if isinstance(t, Tensor)]


# change a tensor's Python-visible state without an operator that the dispatcher could see
SILENT_WRITES: set[Any] = _of_tensor("requires_grad_ set_ rename_")

# called for their effect on the mode of execution; the state is compared before each record instead
STATE_SETTERS: set[Any] = {torch._C._set_grad_enabled}


def is_setter(func: Any) -> bool:
    return getattr(func, "__name__", None) == "__set__"


def _is_member(func: Any, name: str) -> bool:
    """Whether a callable is the method of Tensor with this name; some reach a mode as bare functions of TensorBase."""
    member = getattr(Tensor, name, None)
    if member is None:
        return False
    return member == func or getattr(func, "__qualname__", "").partition(".")[0] in ("Tensor", "TensorBase", "_TensorBase")


class Call:
    """A callable that cannot be found by its name, as a node target with a name of its own."""

    def __init__(self, func: Any, name: str, module: str = __name__) -> None:
        self.func = func
        self.__name__ = self.__qualname__ = name
        self.__module__ = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.func(*args, **kwargs)


@functools.lru_cache(maxsize=4096)
def _importable(func: Any) -> bool:
    """Whether generated source, which names torch's functions, finds this one under its name."""
    module = getattr(func, "__module__", None)
    if not isinstance(func, (types.FunctionType, types.BuiltinFunctionType)):
        return True
    if module is None:  # fx guesses
        return any(getattr(place, func.__name__, None) is func for place in (torch, torch.nn.functional))
    if not isinstance(module, str):
        return True
    if module.partition(".")[0] != "torch":
        return True  # fx passes it by reference
    found = getattr(sys.modules.get(module), func.__name__, None)
    return found is func


def spell(func: Any, args: tuple, kwargs: dict) -> tuple[str, Any, tuple, dict]:
    """(opcode, target, args, kwargs) of the node that stands for `func(*args, **kwargs)`."""
    name = getattr(func, "__name__", None)
    if name == "__get__":
        return "call_function", getattr, (args[0], func.__self__.__name__), {}
    if name == "__set__":
        return "call_function", setattr, (args[0], func.__self__.__name__, args[1]), {}
    if type(name) is str and _is_member(func, name):
        op = OPERATORS.get(name)
        arity = 1 if op in _UNARY else 3 if op in _TERNARY else 2
        if op is not None and len(args) == arity and not kwargs:
            return "call_function", op, args, kwargs
        op = REFLECTED.get(name)
        if op is not None and len(args) == 2 and not kwargs and not isinstance(args[1], (Tensor, torch.fx.Node)):
            if op is operator.pow and str(args[1]).startswith("-"):
                op = torch.pow  # generated source reads -1 ** x as -(1 ** x)
            return "call_function", op, args[::-1], kwargs
        return "call_method", name, args, kwargs
    return "call_function", func if _importable(func) else Call(func, str(name)), args, kwargs


def describe(func: Any) -> str:
    """The callable as the user writes it."""
    name = getattr(func, "__name__", None) or repr(func)
    if name in ("__get__", "__set__"):
        return f"Tensor.{func.__self__.__name__}"
    if _is_member(func, name):
        return f"Tensor.{name}"
    module = getattr(func, "__module__", None)
    return f"{module}.{name}" if module else name
