"""Operators on lists, one tensor at a time: eager's values, special ones included."""

from __future__ import annotations

import pytest
import torch

from tensorplay.stax.joint.decompose import rule

SPECIAL = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-40, 3.0, -2.5])
WITHOUT = {"_foreach_powsum.Scalar", "_foreach_mm"}  # no operator on one tensor; not for vectors


def overloads():
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::_foreach_")]
    found = [torch._C._get_schema(*(n.split(".") if "." in n else (n, ""))) for n in names]
    return sorted(f"{s.name.removeprefix('aten::')}.{s.overload_name}".rstrip(".") for s in found if not s.is_mutable)


def value(kind: str, position: int):
    if kind == "List[Tensor]":
        return [SPECIAL.roll(position + k) for k in range(3)]
    return {"List[number]": [0.5, 2, 1.5], "number": 2, "Tensor": torch.tensor([0.5, 2.0, 1.5])[1], "bool": False}.get(kind)


@pytest.mark.parametrize("name", [n for n in overloads() if n not in WITHOUT])
def test_as_eager(name):
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    arguments = op._schema.arguments
    given = {a.name: value(str(a.type), k) for k, a in enumerate(arguments)}
    if overload == "Tensor" and packet in ("_foreach_addcmul", "_foreach_addcdiv"):
        assert rule(op) is None  # the numbers are data
        return
    args, kwargs = [given[a.name] for a in arguments if not a.kwarg_only], {a.name: given[a.name] for a in arguments if a.kwarg_only}
    for got, want in zip(rule(op)(*args, **kwargs), op(*args, **kwargs), strict=True):
        assert got.dtype == want.dtype and torch.allclose(got, want, 0, 0, equal_nan=True)
        assert torch.equal(got.signbit(), want.signbit())
