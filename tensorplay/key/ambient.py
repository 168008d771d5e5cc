"""Ambient state: what a function can see without an argument (rho of definition 2.2, and its like).

In: nothing; the state of the process and of this thread.  Out: a tuple with one value for each row of AMBIENT.
Always: read anew at every call and compared as a whole.  Modes that would see, or change, each operator of the
function are no key: `foreign_mode` names them, and such a call runs the function as it stands.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad as _forward_ad
from torch.nn.modules import module as _module

from ..native import native

_C = torch._C


def _autocast() -> tuple:
    if not _C._is_any_autocast_enabled():
        return ()
    return tuple(
        (device, torch.get_autocast_dtype(device)) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
    )


def _default_device() -> str:
    """Text of torch.set_default_device's or `with torch.device`'s device; '' where none is set."""
    if not _C._len_torch_function_stack():
        return ""
    return ",".join(str(m.device) for m in _function_modes() if type(m).__name__ == "DeviceContext")


def _attention() -> tuple[bool, ...]:
    return (
        _C._get_flash_sdp_enabled(), _C._get_mem_efficient_sdp_enabled(), _C._get_math_sdp_enabled(),
        _C._get_cudnn_sdp_enabled(),
    )  # fmt: skip


def _module_hooks() -> tuple:
    before, after = _module._global_forward_pre_hooks, _module._global_forward_hooks
    return (*before.values(), *after.values()) if before or after else ()


AMBIENT = (
    ("grad mode", torch.is_grad_enabled),
    ("inference mode", torch.is_inference_mode_enabled),
    ("autocast", _autocast),
    ("default dtype", torch.get_default_dtype),
    ("default device", _default_device),
    ("deterministic algorithms", _C._get_deterministic_algorithms),
    ("float32 matmul precision", _C._get_float32_matmul_precision),
    ("attention backends", _attention),
    ("anomaly mode", torch.is_anomaly_enabled),
    ("global module hooks", _module_hooks),
)
NAMES = tuple(name for name, _ in AMBIENT)
_READERS = tuple(read for _, read in AMBIENT)


def ambient() -> tuple:
    """The current values, in the order of AMBIENT."""
    return tuple([read() for read in _READERS])

def _function_state() -> Any:
    """The default device; None where another mode is active."""
    return None if foreign_mode() else _default_device()


# What the extension asks instead: callables, (asked, told) pairs (what `told` says where `asked` is true), (dictionary,
# key) pairs, dictionaries (whether they hold anything), each with the only answer for which the probes decide the
# whole ambient state, or ANY but None.
ANY = object()
PROBES: tuple[tuple[Any, Any], ...] = (
    (torch.is_grad_enabled, ANY),
    (torch.is_inference_mode_enabled, ANY),
    (torch.get_default_dtype, ANY),
    (_C._get_deterministic_algorithms, ANY),
    (_C._get_float32_matmul_precision, ANY),
    (_C._get_flash_sdp_enabled, ANY),
    (_C._get_mem_efficient_sdp_enabled, ANY),
    (_C._get_math_sdp_enabled, ANY),
    (_C._get_cudnn_sdp_enabled, ANY),
    (torch.is_anomaly_enabled, ANY),
    ((_C._is_any_autocast_enabled, _autocast), ANY),
    ((_C._len_torch_function_stack, _function_state), ANY),
    (_C._len_torch_dispatch_stack, 0),
    (_C._functorch.maybe_current_level, None),
    (_C._get_tracing_state, None),
    ((vars(_forward_ad), "_current_level"), -1),
    (_module._global_forward_pre_hooks, False),
    (_module._global_forward_hooks, False),
)


if native is not None:
    native.watch(tuple(probe for probe, _ in PROBES))


def decided(answers: tuple) -> bool:
    """Whether the answers of the probes say everything about the ambient state: nothing unusual is on."""
    return all(answer == want or (want is ANY and answer is not None) for answer, (_, want) in zip(answers, PROBES, strict=True))


def _function_modes() -> list[Any]:
    return [_C._get_function_stack_at(k) for k in range(_C._len_torch_function_stack())]


def foreign_mode() -> str:
    """Names what watches every operator of this thread: a mode, a functorch transform, a tracer; '' if nothing does."""
    if _C._len_torch_dispatch_stack():
        return _name(_C._get_dispatch_stack_at(_C._len_torch_dispatch_stack() - 1))
    if _C._len_torch_function_stack():
        for mode in reversed(_function_modes()):
            if type(mode).__name__ != "DeviceContext":
                return _name(mode)
    if _C._functorch.maybe_current_level() is not None:
        return "torch.func transform"
    if _C._get_tracing_state() is not None:
        return "torch.jit.trace"
    if _forward_ad._current_level >= 0:
        return "forward-mode AD"
    return ""


def _name(mode: Any) -> str:
    return f"{type(mode).__module__}.{type(mode).__qualname__}"
