"""The names of torch.compiler, for programs that write `tp.compiler.disable(f)`."""

from __future__ import annotations

from .capture.marks import (
    allow_in_graph,
    assume_constant_result,
    cudagraph_mark_step_begin,
    disable,
    is_compiling,
    is_dynamo_compiling,
    is_exporting,
    nested_compile_region,
    nonstrict_trace,
    substitute_in_graph,
)
from .compiled import compile
from .registry import list_backends

__all__ = [
    "allow_in_graph", "assume_constant_result", "compile", "cudagraph_mark_step_begin", "disable", "is_compiling",
    "is_dynamo_compiling", "is_exporting", "list_backends", "nested_compile_region", "nonstrict_trace", "substitute_in_graph",
]  # fmt: skip
