"""Views, copies with an index map, and indirect reads against eager: values, strides and aliasing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tensorplay.stax.loops.nodes import Extern
from tests.ops.programs import check, computes, lowered

X = torch.arange(120.0).reshape(4, 5, 6)
I = torch.tensor([[3, 0, 1], [2, 2, 3]])  # noqa: E741

VIEWS = {
    "t": lambda x: x[0].t(),
    "permute": lambda x: x.permute(2, 0, 1),
    "transpose": lambda x: x.transpose(-1, 0),
    "reshape": lambda x: x.reshape(20, 6),
    "view split": lambda x: x.view(2, 2, 5, 3, 2),
    "view merge": lambda x: x.view(-1),
    "view ones": lambda x: x.view(4, 1, 30, 1),
    "unsqueeze": lambda x: x.unsqueeze(1).unsqueeze(-1),
    "squeeze": lambda x: x[:1].squeeze(0),
    "select": lambda x: x[1, :, -1],
    "slice": lambda x: x[1:, ::2, -4:-1],
    "slice beyond": lambda x: x[2:100, 7:3],
    "expand": lambda x: x[:, :1].expand(4, 7, 6),
    "diagonal": lambda x: x.diagonal(1, 1, 2),
    "diagonal below": lambda x: x.diagonal(-2, 0, 2),
    "split": lambda x: x.split(2, 1),
    "split sizes": lambda x: x.split([1, 4], 1),
    "chunk": lambda x: x.chunk(3, 2),
    "unbind": lambda x: x.unbind(1),
    "unfold": lambda x: x.unfold(2, 3, 2),
    "movedim": lambda x: x.movedim(0, 2),
    "as_strided": lambda x: x.as_strided((3, 4), (10, 2), 5),
    "view of view": lambda x: x.transpose(0, 1)[1:3].unsqueeze(0),
}
COPIES = {
    "flip": lambda x: x.flip(0, 2),
    "roll": lambda x: x.roll((1, -2), (0, 2)),
    "roll flat": lambda x: x.roll(7),
    "repeat": lambda x: x.repeat(2, 1, 1, 3),
    "cat": lambda x: torch.cat([x, x[:2], x[3:]], 0),
    "cat inner": lambda x: torch.cat([x, x * 2], -1),
    "cat promotes": lambda x: torch.cat([x, x.int()], 1),
    "cat empty": lambda x: torch.cat([torch.empty(0), x, x[:0]], 0),
    "stack": lambda x: torch.stack([x, x + 1, x * 0], 1),
    "pad": lambda x: F.pad(x, (1, 2, 0, 1), value=3.5),
    "crop": lambda x: F.pad(x, (-1, 2, -2, 0)),
    "reflect": lambda x: F.pad(x, (2, 3), mode="reflect"),
    "replicate": lambda x: F.pad(x, (2, 3), mode="replicate"),
    "circular": lambda x: F.pad(x, (2, 3), mode="circular"),
    "tril": lambda x: x.tril(1),
    "triu": lambda x: x.triu(-2),
    "diag_embed": lambda x: torch.diag_embed(x, 1),
    "rot90": lambda x: (torch.rot90(x, 1), torch.rot90(x, 3, (1, 2)), torch.rot90(x, 2)),
    "select_scatter": lambda x: torch.select_scatter(x, x[0] * 2, 0, 2),
    "slice_scatter": lambda x: torch.slice_scatter(x, x[:, :2] * 2, 1, 1, 5, 2),
    "diagonal_scatter": lambda x: torch.diagonal_scatter(x, torch.ones(6, 4), 1, 0, 1),
    "contiguous of transposed": lambda x: x.transpose(0, 2).contiguous(),
    "reshape of transposed": lambda x: x.transpose(0, 1).reshape(20, 6),
    "channels last": lambda x: x[None].contiguous(memory_format=torch.channels_last),
}
INDEXED = {
    "index one": lambda x, i: x[i],
    "index two": lambda x, i: x[i, i],
    "index apart": lambda x, i: x[i, :, i],
    "index inner": lambda x, i: x[:, i],
    "index broadcast": lambda x, i: x[i, i[:, :1]],
    "index negative": lambda x, i: x[-i - 1],
    "index_select": lambda x, i: x.index_select(1, i[0]),
    "gather": lambda x, i: x[:, :, 0].gather(0, i),
    "embedding": lambda x, i: F.embedding(i, x[:, :, 0]),
    "take": lambda x, i: x.take(i - 2),
    "take_along_dim": lambda x, i: torch.take_along_dim(x[0], i[:, :1].expand(2, 6), 0),
    "gather of computed": lambda x, i: (x[:, :, 0].exp() + 1).gather(0, i),
    "single row": lambda x, i: x[:1][i * 0],
}


@pytest.mark.parametrize("name", VIEWS)
def test_view_aliases_and_computes(name: str) -> None:
    f = VIEWS[name]
    check(f, X)
    check(f, X.transpose(0, 1).contiguous().transpose(0, 1)) if "view" not in name and "as_" not in name else None

    def used(x):
        r = f(x)
        return [v * 2 + 1 for v in r] if isinstance(r, (tuple, list)) else r * 2 + 1

    check(used, X)
    if name != "as_strided":
        check(lambda x: f((x + 1).exp()), X / 100)
    check(lambda x: (f(x * 2), x * 2), X)


@pytest.mark.parametrize("name", COPIES)
def test_copy(name: str) -> None:
    check(COPIES[name], X)
    check(lambda x: COPIES[name](x.sin()), X)


@pytest.mark.parametrize("name", INDEXED)
def test_indirect(name: str) -> None:
    check(INDEXED[name], X, I)
    check(INDEXED[name], X, I.int() if "embed" in name or "index" in name else I)


def test_an_index_out_of_range_is_an_error() -> None:
    from tensorplay.stax.loops.interpret import interpret

    for f, bad in (
        (lambda x, i: x[i], 4), (lambda x, i: F.embedding(i, x[:, :, 0]), -1), (lambda x, i: x[:1][i], 1),
        (lambda x, i: x.index_select(0, i.flatten()), -1), (lambda x, i: x[:, :, 0].gather(0, i), 4),
    ):  # fmt: skip
        loops = lowered(f, X, I * 0)
        with pytest.raises(IndexError):
            interpret(loops, [X, torch.full_like(I, bad)])


def test_a_reshape_of_contiguous_memory_needs_no_division() -> None:
    text = str(lowered(lambda x: x.reshape(128, 64) + 1, torch.ones(64, 128)))
    assert "//" not in text and "%" not in text


def test_views_are_never_copied() -> None:
    loops = lowered(lambda x: x.t()[::2].unsqueeze(1).expand(4, 3, 8) + 1, torch.ones(8, 8))
    assert len(computes(loops)) == 1


def test_no_elements_and_no_dimensions() -> None:
    check(lambda x: (x + 1, x.sum(0), x.reshape(0, 3), x.t(), torch.cat([x, x])), torch.empty(3, 0))
    check(lambda x: (x.reshape(1, 1) * 2, x.expand(3), x.unsqueeze(0), x.sum(), x.exp()), torch.tensor(2.0))
    check(lambda x: (x.flip(0), x.repeat(2, 2), F.pad(x, (1, 1))), torch.empty(2, 0))


PARTS = {
    "alike": lambda x, n: [x + k for k in range(n)],
    "of several dtypes": lambda x, n: [x.to((torch.int32, torch.float16, torch.uint8)[k % 3]) for k in range(n)],
    "complex": lambda x, n: [x * complex(1, k) for k in range(n)],
    "turned": lambda x, n: [x.t().contiguous().t() if k % 2 else x for k in range(n)],
    "of nothing": lambda x, n: [torch.empty(0), *[x[:, :0]] * n],
}


@pytest.mark.parametrize("count", [1, 3, 13, 64, 65])
@pytest.mark.parametrize("kind", PARTS)
def test_any_number_of_tensors_of_any_dtype_side_by_side(kind: str, count: int) -> None:
    parts = PARTS[kind](X[0], count)
    for f in (torch.cat, torch.stack) if len({t.shape for t in parts}) == 1 else (torch.cat,):
        for dim in (0, 1, -1):
            found = check(lambda *xs, f=f, dim=dim: f(xs, dim), *parts, native=False)
            assert all(n.library for n in found.nodes if isinstance(n, Extern))
            if kind != "complex":
                check(lambda *xs, f=f, dim=dim: f([x * 2 for x in xs], dim) + 1, *parts, native=False)
