"""The dtypes that kernels know, and how each is named, stored and computed with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

Torch = torch.dtype  # the row itself has a field `torch`


@dataclass(frozen=True)
class DType:
    """One row: how a torch dtype appears in text, C++ memory, Triton, and which dtype its arithmetic uses."""

    torch: Torch
    name: str  # in IR text and kernel names
    c: str  # element type in memory
    triton: str
    bytes: int
    compute: Torch  # half types compute in float32; integers and bool in themselves


ROWS = (
    DType(torch.float32, "f32", "float", "tl.float32", 4, torch.float32),
    DType(torch.float64, "f64", "double", "tl.float64", 8, torch.float64),
    DType(torch.bfloat16, "bf16", "bf16", "tl.bfloat16", 2, torch.float32),
    DType(torch.float16, "f16", "f16", "tl.float16", 2, torch.float32),
    DType(torch.int64, "i64", "i64", "tl.int64", 8, torch.int64),
    DType(torch.int32, "i32", "i32", "tl.int32", 4, torch.int32),
    DType(torch.int16, "i16", "i16", "tl.int16", 2, torch.int16),
    DType(torch.int8, "i8", "i8", "tl.int8", 1, torch.int8),
    DType(torch.uint8, "u8", "u8", "tl.uint8", 1, torch.uint8),
    DType(torch.bool, "b1", "b1", "tl.int1", 1, torch.bool),
)
TABLE = {row.torch: row for row in ROWS}
NAMES = {row.name: row.torch for row in ROWS}


def known(dtype: torch.dtype) -> bool:
    """Whether kernels can hold this dtype (complex, quantized and wide unsigned types fall back)."""
    return dtype in TABLE


def compute(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which arithmetic on `dtype` runs."""
    return TABLE[dtype].compute
