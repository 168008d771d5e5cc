"""TensorPlay: a sound, whole-graph compiler for PyTorch programs.

The public names, each from one place. Any name that is not ours is torch's, so `import tensorplay as tp` serves a
program written for torch; `tp.functional` is `torch.nn.functional`.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from .capture.marks import (
    allow_in_graph,
    assume_constant_result,
    cudagraph_mark_step_begin,
    disable,
    disable_capture,
    is_compiling,
    is_dynamo_compiling,
    is_exporting,
    nested_compile_region,
    nonstrict_trace,
    substitute_in_graph,
)
from .compiled import compile
from .errors import (
    CompilerError,
    FallbackWarning,
    GraphCaptureError,
    RecompileLimitError,
    StrictNativeError,
    TensorPlayError,
    UnsupportedError,
    VerificationError,
)
from .explain import explain
from .registry import list_backends, register_backend

__version__ = "0.1.0"
__all__ = [
    "CompilerError", "FallbackWarning", "GraphCaptureError", "RecompileLimitError", "StrictNativeError",
    "TensorPlayError", "UnsupportedError", "VerificationError", "allow_in_graph", "assume_constant_result", "compile",
    "cudagraph_mark_step_begin", "disable", "disable_capture", "explain", "is_compiling", "is_dynamo_compiling",
    "is_exporting", "list_backends", "nested_compile_region", "nonstrict_trace", "register_backend", "substitute_in_graph",
]  # fmt: skip
_OWN_MODULES = ("compiler", "graph", "remat", "testing")  # loaded when first used


def __getattr__(name: str) -> Any:
    if name in _OWN_MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name == "functional":
        return torch.nn.functional
    try:
        return getattr(torch, name)
    except AttributeError:
        raise AttributeError(f"neither tensorplay nor torch has a name {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *_OWN_MODULES, "functional", *dir(torch)})
