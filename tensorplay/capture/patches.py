"""What capture changes in the process while it runs, all of it undone afterwards.

In: callbacks of the running capture.  Out: a context in which library code behaves as if no mode were active, custom
autograd functions stay whole, and effects that no operator shows are refused.
Always: every replacement passes through on other threads, and everything is put back in `finally`.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .kinds import is_library_file
from .marks import LEAVES, SUBSTITUTES

_ORIGINAL_HAS_TORCH_FUNCTION = torch.overrides.has_torch_function
_DISABLED = torch._C._disabled_torch_function_impl

# effects without an operator: owner, name, what the error says, whether torch's own code may do it unseen
REFUSED: tuple[tuple[Any, str, str, bool], ...] = (
    (builtins, "print", "prints", True),
    (builtins, "input", "reads the terminal", False),
    *[
        (where, name, reason, library)
        for where in (torch, torch.random)
        for name, reason, library in (
            ("manual_seed", "seeds the generator", False),
            ("seed", "seeds the generator", False),
            ("set_rng_state", "sets the generator's state", False),
            ("get_rng_state", "reads the generator's state", True),  # checkpoint keeps it for its backward
        )
    ],
)


def _cond(pred: Any, true_fn: Callable, false_fn: Callable, operands: Any = ()) -> Any:
    """torch.cond: a branch like any other; torch itself traces both with torch._dynamo."""
    return true_fn(*operands) if pred else false_fn(*operands)


def _while_loop(cond_fn: Callable, body_fn: Callable, carried_inputs: Any) -> Any:
    """while_loop: a loop like any other."""
    carried = tuple(carried_inputs)
    while cond_fn(*carried):
        carried = tuple(body_fn(*carried))
    return carried


# operators whose arguments are functions: module, name, what runs in their place
CONTROL: tuple[tuple[str, str, Callable], ...] = (
    ("torch", "cond", _cond), ("torch._higher_order_ops", "cond", _cond), ("torch._higher_order_ops", "while_loop", _while_loop),
)  # fmt: skip


# the beginning and the end of a torch.func transform: module, name, change of depth
LEVELS: tuple[tuple[str, str, int], ...] = tuple(
    (f"torch._functorch.{module}", f"_{kind}_{word}_nesting", change)
    for module, kinds in (("eager_transforms", ("grad", "jvp", "func")), ("vmap", ("vmap",)))
    for kind in kinds
    for word, change in (("increment", 1), ("decrement", -1))
)


def overrides_torch_function(args: Any) -> bool:
    """torch.overrides.has_torch_function as it answers while no mode is active."""
    for a in args:
        kind = type(a)
        if kind is not torch.Tensor and kind is not torch.nn.Parameter:
            override = getattr(kind, "__torch_function__", None)
            if override is not None and override is not _DISABLED:
                return True
    return False


_NEW_AS_HELD: Any = torch.nn.Parameter.__dict__["__new__"]
_NEW_PARAMETER: Any = getattr(_NEW_AS_HELD, "__func__", _NEW_AS_HELD)
_ON_APPLY: list[Callable[[type, tuple, dict], Any]] = []  # the callback of the running capture
_OWNER: list[int] = []  # the thread of the running capture


def _announce(cls: type, args: tuple, kwargs: dict) -> Any:
    if _ON_APPLY and _OWNER[-1] == threading.get_ident():
        return _ON_APPLY[-1](cls, args, kwargs)
    return apply_function(cls, args, kwargs)


class _Template:
    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        _ = __class__  # type: ignore[name-defined]
        from tensorplay.capture.patches import _announce

        return _announce(cls, args, kwargs)


# to torch 2.13 `Function.apply` is a Python function, whose code is exchanged, so that references taken earlier are seen
# too; where it is written in C, the attribute is, and a reference taken earlier is refused (execution.py)
_FUNCTION = torch.autograd.Function
_HELD = _FUNCTION.__dict__.get("apply")
_DESCRIPTOR: Any = inspect.getattr_static(_FUNCTION, "apply")
_APPLY = getattr(_HELD, "__func__", None)
if isinstance(_APPLY, types.FunctionType):
    _APPLY_CODE = _APPLY.__code__
    _APPLY_COPY = types.FunctionType(_APPLY_CODE, _APPLY.__globals__, "apply", _APPLY.__defaults__, _APPLY.__closure__)
else:
    _APPLY = None


def apply_function(cls: type, args: tuple, kwargs: dict) -> Any:
    """Function.apply as torch defines it."""
    if _APPLY is None:
        return _DESCRIPTOR.__get__(None, cls)(*args, **kwargs)
    return _APPLY_COPY(cls, *args, **kwargs)


@contextlib.contextmanager
def patched(recorder: Any) -> Iterator[None]:
    """The recorder's `on_apply` runs in place of Function.apply, `on_module` in place of the call of a module that is a
    leaf, `on_parameter` after a parameter was made, `on_level` where a torch.func transform begins (1) or ended (-1);
    `refuse` is called with the reason, and raises."""
    on_level, on_parameter, refuse = recorder.on_level, recorder.on_parameter, recorder.refuse
    owner = threading.get_ident()
    saved: list[tuple[Any, str, Any]] = []

    def replace(where: Any, name: str, new: Any) -> None:
        saved.append((where, name, getattr(where, name)))
        setattr(where, name, new)

    def refused(original: Any, reason: str, library: bool) -> Any:
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            seen = recorder.watch.seen
            inside = seen is not None and seen.reads is None  # a node of the library that does so again at each call
            inside = inside or (library and is_library_file(sys._getframe(1).f_code.co_filename))
            if threading.get_ident() == owner and not inside:
                refuse(f"{original.__name__}() {reason}, which a graph does not repeat")
            return original(*args, **kwargs)

        return stand_in

    def leveled(original: Any, change: int) -> Any:
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if threading.get_ident() == owner:
                on_level(change)
            return result

        return stand_in

    def substituted(original: Any, handler: Any) -> Any:
        inside: list[None] = []  # the handler may call the original

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != owner or inside:
                return original(*args, **kwargs)
            inside.append(None)
            try:
                return handler(*args, **kwargs)
            finally:
                inside.pop()

        return stand_in

    def parameter(cls: type, data: Any = None, requires_grad: bool = True) -> Any:
        made = _NEW_PARAMETER(cls, data, requires_grad)
        if threading.get_ident() == owner and cls is torch.nn.Parameter and type(data) in (torch.Tensor, torch.nn.Parameter):
            on_parameter(made, data, requires_grad)
        return made

    def call_module(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module in LEAVES and threading.get_ident() == owner:
            return recorder.on_module(module, args, kwargs)
        return module._wrapped_call_impl(*args, **kwargs)

    def has_torch_function(relevant_args: Any) -> bool:
        if threading.get_ident() == owner:
            return overrides_torch_function(relevant_args)
        return _ORIGINAL_HAS_TORCH_FUNCTION(relevant_args)

    _ON_APPLY.append(recorder.on_apply)
    _OWNER.append(owner)
    try:
        replace(torch.overrides, "has_torch_function", has_torch_function)
        for where, name, reason, library in REFUSED:
            replace(where, name, refused(getattr(where, name), reason, library))
        for original, handler in SUBSTITUTES.items():
            module = sys.modules.get(getattr(original, "__module__", None) or "")
            if getattr(module, original.__name__, None) is original:
                replace(module, original.__name__, substituted(original, handler))
        for name, attribute, handler in CONTROL:
            if hasattr(sys.modules.get(name), attribute):
                replace(sys.modules[name], attribute, substituted(getattr(sys.modules[name], attribute), handler))
        for name, attribute, change in LEVELS:
            module = sys.modules.get(name)
            if hasattr(module, attribute):
                replace(module, attribute, leveled(getattr(module, attribute), change))
        if LEAVES:
            replace(torch.nn.Module, "__call__", call_module)
        torch.nn.Parameter.__new__ = parameter  # type: ignore[method-assign, assignment]
        if _APPLY is not None:
            _APPLY.__code__ = _Template.__dict__["apply"].__func__.__code__
        else:
            _FUNCTION.apply = classmethod(lambda cls, *args, **kwargs: _announce(cls, args, kwargs))  # type: ignore
        yield
    finally:
        if _APPLY is not None:
            _APPLY.__code__ = _APPLY_CODE
        elif _HELD is not None:
            _FUNCTION.apply = _HELD  # type: ignore[method-assign]
        elif "apply" in _FUNCTION.__dict__:
            del _FUNCTION.apply
        torch.nn.Parameter.__new__ = _NEW_AS_HELD  # type: ignore[method-assign]
        for where, name, original in reversed(saved):
            setattr(where, name, original)
        _ON_APPLY.pop()
        _OWNER.pop()


_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_ASKING = (torch.functional, torch.nn.functional, torch._tensor)  # modules whose functions ask for overrides


@contextlib.contextmanager
def opened(function: types.FunctionType) -> Iterator[None]:
    """Lets the body of a library function run under the mode: the question for overrides is answered with no."""
    owner = threading.get_ident()
    namespaces = {id(n): n for n in (function.__globals__, *[vars(m) for m in _ASKING])}.values()
    saved = [(n, {name: n[name] for name in _CHECKS if name in n}) for n in namespaces]

    def answer(original: Any) -> Any:
        return lambda *args: False if threading.get_ident() == owner else original(*args)

    try:
        for namespace, checks in saved:
            namespace.update({name: answer(original) for name, original in checks.items()})
        yield
    finally:
        for namespace, checks in saved:
            namespace.update(checks)
