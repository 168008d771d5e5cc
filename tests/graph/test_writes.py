"""Writes through views (section 4.9): every view operator and every in-place operator that torch has, and random programs."""

import os
import warnings

import pytest
import torch

import tensorplay as tp
from tensorplay.testing import near

from .programs import difference, observed, same
from .random_writes import program

aten = torch.ops.aten


def base():
    return torch.linspace(-2, 2, 48).view(4, 3, 4)


VIEWS = {
    "aten::alias": lambda x: aten.alias(x),
    "aten::as_strided": lambda x: x.as_strided((2, 3), (12, 4), x.storage_offset() + 1),
    "aten::chunk": lambda x: x.chunk(2, 0)[1],
    "aten::conj": lambda x: x.conj(),
    "aten::contiguous": lambda x: x.contiguous(),
    "aten::data": lambda x: x.data,
    "aten::detach": lambda x: x.detach(),
    "aten::diagonal": lambda x: x.diagonal(0, 0, 2),
    "aten::dsplit": lambda x: x.dsplit(2)[1],
    "aten::expand": lambda x: x.expand(4, 3, 4),
    "aten::expand_as": lambda x: x.expand_as(x),
    "aten::flatten": lambda x: x.flatten(1),
    "aten::hsplit": lambda x: x.hsplit([1])[1],
    "aten::imag": lambda x: x.imag if x.is_complex() else x[1],
    "aten::linalg_diagonal": lambda x: torch.linalg.diagonal(x),
    "aten::matrix_H": lambda x: x[0].H,
    "aten::adjoint": lambda x: x.adjoint(),
    "aten::mH": lambda x: x.mH,
    "aten::mT": lambda x: x.mT,
    "aten::moveaxis": lambda x: x.moveaxis(0, 1),
    "aten::movedim": lambda x: x.movedim((0, 1), (2, 0)),
    "aten::narrow": lambda x: x.narrow(1, 1, 2),
    "aten::numpy_T": lambda x: x[0].T,
    "aten::permute": lambda x: x.permute(2, 0, 1),
    "aten::positive": lambda x: x.positive(),
    "aten::ravel": lambda x: x.ravel(),
    "aten::real": lambda x: x.real,
    "aten::reshape": lambda x: x.reshape(4, 12),
    "aten::reshape_as": lambda x: x.reshape_as(x),
    "aten::resolve_conj": lambda x: x.resolve_conj(),
    "aten::resolve_neg": lambda x: x.resolve_neg(),
    "aten::select": lambda x: x.select(2, -1),
    "aten::slice": lambda x: x[1:3, :, ::2],
    "aten::split": lambda x: x.split(2, 0)[1],
    "aten::split_with_sizes": lambda x: x.split([1, 2], 1)[1],
    "aten::squeeze": lambda x: x[:, :1].squeeze(1),
    "aten::swapaxes": lambda x: x.swapaxes(0, 2),
    "aten::swapdims": lambda x: x.swapdims(0, 1),
    "aten::t": lambda x: x[1].t(),
    "aten::tensor_split": lambda x: x.tensor_split(3, 2)[0],
    "aten::transpose": lambda x: x.transpose(1, 2),
    "aten::unbind": lambda x: x.unbind(1)[2],
    "aten::unflatten": lambda x: x.unflatten(0, (2, 2)),
    "aten::unfold": lambda x: x.unfold(2, 2, 2),
    "aten::unsafe_chunk": lambda x: x.unsafe_chunk(2, 0)[0],
    "aten::unsafe_split": lambda x: x.unsafe_split(2, 0)[0],
    "aten::unsafe_split_with_sizes": lambda x: x.unsafe_split_with_sizes([1, 3], 0)[1],
    "aten::unsqueeze": lambda x: x.unsqueeze(1),
    "aten::view": lambda x: x.view(3, 16) if x.is_contiguous() else x[0],
    "aten::view_as": lambda x: x.view_as(x),
    "aten::view_as_real": lambda x: torch.view_as_real(x) if x.is_complex() else x,
    "aten::view_as_complex": lambda x: torch.view_as_complex(x.view(4, 3, 2, 2)) if x.is_contiguous() else x,
    "aten::view dtype": lambda x: x.view(torch.int32).view(torch.float32),
    "aten::vsplit": lambda x: x.vsplit(2)[1],
    "aten::to": lambda x: x.to(x.dtype),
    "aten::type_as": lambda x: x.type_as(x),
    "aten::atleast_3d": lambda x: torch.atleast_3d(x),
    "aten::_reshape_alias": lambda x: aten._reshape_alias(x, [4, 12], [12, 1]) if x.is_contiguous() else x,
    "aten::_unsafe_view": lambda x: aten._unsafe_view(x, [4, 12]) if x.is_contiguous() else x,
    "aten::lift_fresh": lambda x: aten.lift_fresh(x),
    "aten::broadcast_to": lambda x: x.broadcast_to(4, 3, 4),
}  # fmt: skip
OTHER_LAYOUTS = (
    "sparse", "nested", "jagged", "values", "indices", "crow", "ccol", "row_indices", "col_indices", "fw_primal", "make_dual",
    "unpack_dual", "_conj", "_neg_view", "_test_", "backward", "batch_gather", "view_of", "_lazy", "is_pinned", "quantized",
    "coalesce", "prim", "align_to", "refine_names", "rename", "_fw", "_autocast", "_to_", "dense", "pin_memory", "slice_inverse",
)  # fmt: skip


def compiled(f):
    return tp.compile(f, backend="aot_eager")


def check(f, *args):
    want = observed(f, args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cf = compiled(f)
        got = observed(cf, args)
    assert not refuses(cf)
    if isinstance(want[0], type):
        assert got[0] is want[0], difference(got, want)
    else:
        assert same(got, want), difference(got, want)


def test_every_view_operator_is_tested():
    found = set()
    for name in torch._C._jit_get_all_schemas():
        space, _, op = name.name.partition("::")
        packet = getattr(aten, op, None)
        overload = getattr(packet, name.overload_name or "default", None) if space == "aten" else None
        known = isinstance(overload, torch._ops.OpOverload) and torch._C._dispatch_has_kernel(overload.name())
        if known and overload.is_view and not any(w in op for w in OTHER_LAYOUTS):
            found.add(name.name)
    assert not sorted(found - VIEWS.keys())


@pytest.mark.parametrize("layout", ["contiguous", "permuted", "input"])
@pytest.mark.parametrize("name", VIEWS)
def test_a_write_through_a_view_shows_in_its_aliases(name, layout):
    view = VIEWS[name]

    def f(x):
        b = x if layout == "input" else x.exp() if layout == "contiguous" else x.exp().permute(1, 0, 2)
        row, column = b[1], b.transpose(0, 1)[0]
        v = view(b)
        v.mul_(-2)
        before = row + column[1:2].sum()
        view(b)[0].add_(1)
        return before, b * 1, row, column.sum(), v

    check(f, base())


def test_complex_views():
    def f(x):
        c = torch.view_as_complex(x.view(4, 3, 2, 2))
        c.real.mul_(3)
        c.imag[0].add_(1)
        torch.view_as_real(c)[1].neg_()
        return c * 1, x.sum(), c.conj() * 2

    check(f, base())


METHODS = sorted(
    name for name in dir(torch.Tensor)
    if (name.endswith("_") and not name.startswith("_") and name != "requires_grad_") or (name.startswith("__i") and hasattr(torch.Tensor, f"__{name[3:]}"))
)  # fmt: skip
NOT_ON_VALUES = {  # change what memory a tensor owns, or run Python on elements
    "set_", "resize_", "as_strided_", "resize_as_", "resize_as_sparse_", "sparse_resize_", "sparse_resize_and_clear_", "apply_", "map_",
    "map2_", "rename_", "share_memory_", "align_as_", "detach_", "sparse_mask_", "copy_sparse_to_sparse_",
}  # fmt: skip
index = torch.tensor([1, 0, 2])
mask = torch.tensor([[True, False, True, False]] * 3)
ARGUMENTS = (
    lambda v: (), lambda v: (2,), lambda v: (0.5,), lambda v: (v.detach().clone().abs() + 0.25,), lambda v: (v > 0,),
    lambda v: (0,), lambda v: (0, 1), lambda v: (v.flip(0), v.flip(1)), lambda v: (0, index, 3.0), lambda v: (0, index, v.flip(0)),
    lambda v: (0, index[:, None], v.flip(0)), lambda v: (0, index, v.flip(0), "amax"), lambda v: (mask, 3.0), lambda v: (mask, v.flip(0)),
    lambda v: (torch.eye(3), v.flip(0)), lambda v: (v @ v.t()[:, :3], v), lambda v: (index, v.flip(0)[:, 0], False),
    lambda v: ((index,), v.flip(0)), lambda v: (v.flip(0), 0.3), lambda v: (1, 0, 2, 1), lambda v: (1,), lambda v: (3, 5),
    lambda v: (2, 0, 1.0), lambda v: (v.flip(0)[None], torch.ones(1, 4, 4)), lambda v: (torch.ones(3), torch.arange(4.0)),
    lambda v: (torch.ones(4, 4), v + 1), lambda v: (torch.ones(1, 3, 2), torch.ones(1, 2, 4)), lambda v: (0, index[:, None], v.flip(0), "sum"),
)  # fmt: skip
PART = {"addmv_": lambda v: v[0], "baddbmm_": lambda v: v[None]}  # methods of vectors and of batches write a part of the view


def _works(name, make, dtype):
    v = PART.get(name, lambda v: v)(base()[0].to(dtype).clone())
    try:
        getattr(v, name)(*make(v))
    except Exception:
        return False
    return True


def calls(name):
    """The arguments with which an in-place method runs, by type of tensor."""
    found = []
    for dtype in (torch.float32, torch.int64, torch.bool, torch.float64):
        found += [(dtype, make) for make in ARGUMENTS if _works(name, make, dtype)]
        if found:
            break
    return found[:4]


def refuses(cf):
    """Why a compiled function ran eagerly, where it did."""
    return [f.reason for f in tp.explain(cf).fallbacks]


@pytest.mark.parametrize("name", [m for m in METHODS if m not in NOT_ON_VALUES])
def test_every_in_place_operator_through_views(name):
    found = calls(name)
    if not found:
        pytest.skip("no arguments for it")
    for dtype, make in found:

        def f(x, make=make, dtype=dtype):
            owned, given = x.to(dtype) * 1 if dtype != torch.bool else x > 0, x
            alias = owned.transpose(0, 1)
            target = PART.get(name, lambda v: v)(owned[1])
            getattr(target, name)(*make(target.clone()))
            if given.dtype == dtype:
                part = PART.get(name, lambda v: v)(given[2])
                getattr(part, name)(*make(part.clone()))
            return owned, alias[0], target

        check(f, base())


def test_custom_operators_that_write_are_one_node():
    @torch.library.custom_op("tensorplay_tests::scale_", mutates_args={"x"})
    def scale_(x: torch.Tensor, by: float) -> None:
        x.mul_(by)

    def f(x):
        y = x + 1
        v = y[0]
        scale_(v, 3.0)
        scale_(x, 0.5)
        return y * 2, v, x - 1

    x = torch.randn(3, 4)
    cf = tp.compile(f, backend="aot_eager", strict_native=False)
    assert same(observed(cf, (x,)), observed(f, (x,)))
    assert not tp.explain(cf).fallbacks
    native = tp.compile(f)
    assert same(observed(native, (x,)), observed(f, (x,)))
    assert [e.target for e in tp.explain(native).externs] and tp.explain(native).kernels


def test_custom_operators_that_read_what_they_write_stay_eager():
    @torch.library.custom_op("tensorplay_tests::roll_", mutates_args={"x"})
    def roll_(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 2

    def f(x):
        y = x + 1
        return roll_(y, y[0]), y

    def g(x):
        y = x + 1
        return roll_(y, x), y

    x = torch.randn(3, 4)
    with pytest.warns(tp.errors.FallbackWarning, match="already written"):
        cf = tp.compile(f)
        assert same(observed(cf, (x,)), observed(f, (x,)))
    check(g, x)


COUNT = int(os.environ.get("TP_TEST_PROGRAMS", "200"))  # 1000 for the whole claim


@pytest.mark.parametrize("first", range(0, COUNT, 20))
def test_random_programs(first):
    """Nested views and writes: values, types, strides, aliases, identities and inputs as in eager."""
    args = torch.linspace(-2, 2, 12).view(3, 4) + 0.03, torch.linspace(1, -1, 8).view(2, 4).t()
    for seed in range(first, first + 20):
        f = program(seed)
        want = observed(f, args)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cf = tp.compile(f, backend="aot_eager")
            for _ in range(2):
                got = observed(cf, args)
                if isinstance(want[0], type):
                    assert got[0] is want[0], f"program {seed}: {difference(got, want)}"
                else:
                    assert near(got[0], want[0], 1e-5) and got[1:] == want[1:], f"program {seed}: {difference(got, want)}"
        assert all(any(w in reason for w in UNSAYABLE) for reason in refuses(cf)), f"program {seed}: {refuses(cf)}"


# what no graph of values can say: a write in an order of eager's own, an input's own shape
UNSAYABLE = ("through an expanded view", "changes the shape of an input", "overlapping memory", "already written", "layout changed by a write", "beyond the elements")
