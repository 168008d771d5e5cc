"""Lowering as a whole: composition, realization, aliasing of outputs, write-backs, calls of torch, cost."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tensorplay.errors import UnsupportedError
from tensorplay.stax.loops.lower import lower
from tensorplay.stax.loops.nodes import Extern, Reduction, Ref
from tests.ops.programs import calls, check, computes, lowered, opgraph
from tests.work import work

X = torch.randn(4, 6)


def test_example_1_1_is_one_reduction() -> None:
    loops = check(lambda x, w: (torch.relu(x + w) * 2).sum(-1), torch.randn(64, 128), torch.randn(128), tolerance=1e-5)
    (node,) = computes(loops)
    assert node.loop.kind == "sum"
    assert [e.op for e in _chain(node.loop.body)] == ["mul", "clamp_min", "add", "load"]


def _chain(e):
    while e.children and not e.is_index:
        yield e
        e = e.children[0]


def test_a_chain_of_a_hundred_operators_is_one_loop() -> None:
    def f(x):
        for k in range(100):
            x = x * 1.01 if k % 2 else x + 0.5
        return x

    assert len(computes(check(f, X))) == 1


def test_a_cheap_value_is_computed_again_and_an_expensive_one_is_stored_once() -> None:
    def readers(y):
        return [y.sum(), y.sum(0), y.t() + 1, y * 2, y.amax(), y[:, 0] * 3]

    cheap = lowered(lambda x: readers(x * 2), X)
    assert all(n.reads == ("primals_1",) for n in computes(cheap))

    def expensive(x):
        y = x
        for _ in range(20):
            y = (y * 1.5 + 0.25).sin()
        return readers(y)

    stored = lowered(expensive, X)
    assert sum("sin" in str(n.loop.body) for n in computes(stored)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_table_is_read_where_it_lies(dtype: torch.dtype) -> None:
    i = torch.tensor([3, 0, 2, 3])
    table = torch.randn(5, 8).to(dtype)
    for f in (lambda w, i: F.embedding(i, w) + 1, lambda w, i: w[i] + 1, lambda w, i: w.index_select(0, i) + 1):
        assert len(computes(check(f, table, i))) == 1


def test_a_value_that_repeats_along_rows_is_not_computed_for_each_element() -> None:
    loops = check(lambda x: x * (x.sum(1, keepdim=True).exp() + 1).rsqrt(), X, tolerance=1e-6)
    assert [n.loop.body.op for n in computes(loops)][1:] == ["rsqrt", "mul"]


def test_a_chain_of_two_thousand_operators_takes_linear_work() -> None:
    def chain(n):
        def f(x):
            for _ in range(n):
                x = (x + 0.001).sin()
            return x

        return f

    few, many = opgraph(chain(250), X), opgraph(chain(1000), X)
    assert work(lower, many) < 5 * work(lower, few)
    assert all(len(list(_chain(c.loop.body))) < 250 for ops in (few, many) for c in computes(lower(ops)))
    check(chain(1000), X, tolerance=1e-5)


def test_doubling_does_not_explode() -> None:
    def f(x):
        for _ in range(300):
            x = (x + x) * 0.5
        return x

    check(f, X)


def test_outputs_alias_as_in_eager() -> None:
    check(lambda x: (x, x.t(), x[1], x.view(-1)), X)
    check(lambda x: (lambda y: (y, y.t(), y[1:], y * 1))(x + 1), X)
    check(lambda x: (lambda y: (y[1], y.t()))(x + 1), X)
    check(lambda x: (x.clone(), x.clone()), X)
    check(lambda x: (lambda y: (y, y))(x.exp()), X)
    check(lambda x: (x + 1).split(2), X)
    check(lambda x: (x * 2).expand(3, 4, 6), X)
    check(lambda x: (x.detach(), x.contiguous()), X)


def test_layouts_are_eager_s() -> None:
    y = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    check(lambda y: (y + 1, y.relu(), y.clone(), y.contiguous(), y.sum(1), y * y[:, :1]), y, tolerance=1e-6)
    check(lambda x: (x + 1, x * x), X.t())
    check(lambda x: x * 2, torch.randn(1, 6).expand(4, 6))


def test_written_inputs() -> None:
    def swap(x, y):
        t = x.clone()
        x.copy_(y)
        y.copy_(t)

    check(lambda x, y: swap(x, y), X, X + 1)
    check(lambda x: x.mul_(2).add_(1), X)
    check(lambda x: x.copy_(x.t().clone()), torch.randn(4, 4))
    check(lambda x: (x[1].add_(3), x * 2)[1], X)
    check(lambda x, y: (x.add_(y), y * 2, x.sum())[1:], X, X + 1, tolerance=1e-6)
    check(lambda x: x.t().mul_(2), X)


def test_a_write_back_stands_behind_every_reader() -> None:
    loops = lowered(lambda x, y: (x.add_(1), y.copy_(x * 2), y * 3)[2], X, X + 1)
    written = loops.written_inputs
    first = min(k for k, n in enumerate(loops.nodes) if set(n.writes) & set(written))
    assert all(set(n.writes) & set(written) for n in loops.nodes[first:])


def test_library_operands_are_views_of_memory() -> None:
    loops = check(lambda x, w: F.linear(x.relu(), w).t(), X, torch.randn(5, 6), native=False, tolerance=1e-5)
    assert calls(loops) == ["mm.default"] and len(computes(loops)) == 1
    (call,) = (n for n in loops.nodes if isinstance(n, Extern))
    assert call.args[1] == Ref("primals_2", (6, 5), (1, 6), 0) and call.library
    check(lambda x: x[:, 1:4] @ x[:3, 1:4].t(), X, native=False, tolerance=1e-5)


def test_several_results_and_unread_ones() -> None:
    loops = check(lambda x: x.topk(2).indices + 1, X, native=False)
    (call,) = (n for n in loops.nodes if isinstance(n, Extern))
    assert call.outputs[0] is None and call.outputs[1] is not None


@torch.library.custom_op("tensorplay_tests::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x * x * x


def test_several_results_are_returned_as_they_lie() -> None:
    """Also where another operator stands between theirs and the first that reads them."""
    assert len(computes(check(lambda x: (*x.sort(0), x * 2), X, native=False))) == 1
    assert len(computes(check(lambda x: (*torch.aminmax(x, dim=1), x * 2), X))) == 3
    g, x, w = torch.randn(2, 4, 5, 5), torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3)
    shape = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    backward = torch.ops.aten.convolution_backward.default
    found = check(lambda g, x, w: (*backward(g, x, w, None, *shape)[:2], g * 2), g, x, w, native=False)
    assert len(computes(found)) == 1 and len({r.buffer for r in found.outputs}) == 3


def test_an_operator_without_a_row_becomes_one_call_with_its_reason() -> None:
    loops = check(lambda x: torch.ops.tensorplay_tests.cube(x) * 2 + 1, X, native=False)
    (call,) = (n for n in loops.nodes if isinstance(n, Extern))
    assert not call.library and "no row" in call.reason and len(computes(loops)) == 1
    complex_ = lowered(lambda x: torch.complex(x, x).abs() * 2, X)
    assert [n.library for n in complex_.nodes if isinstance(n, Extern)] == [False, False]


LEFT_TO_TORCH = {  # arguments for which a row has no loops of its own
    "numbers that wrap": lambda x, u, m: (u + (-3), u * 300, u == -1, u < -1, u.masked_fill(m[0], -1), torch.full_like(u, -9)),
    "numbers that become bools": lambda x, u, m: (m.masked_fill(~m, 2), torch.full_like(m, 3)),
    "nextafter": lambda x, u, m: torch.nextafter(x.half(), -x.half()),
    "nothing": lambda x, u, m: (x[:0].logsumexp(0), x[:0].softmax(1), x[:, :0].log_softmax(1), x[:0].sum(0), x[:0].amax(1)),
    "no dimensions": lambda x, u, m: (m.any(()), x.all(()), x.sum(()), x.mean(()), x.amax(())),
    "fractions": lambda x, u, m: (torch.arange(0.5, 6, 1.5, dtype=torch.int64), torch.arange(-0.5, 6, 1.5, dtype=torch.int32)),
    "layer norm of nothing": lambda x, u, m: (F.layer_norm(x[:0], (6,)), F.layer_norm(x[:, :0], (0,)), F.rms_norm(x[:0], (6,))),
    "batch norm of nothing": lambda x, u, m: (F.batch_norm(x[:0], None, None, training=True), F.batch_norm(x[:0], x[0], x[1].exp())),
    "losses": lambda x, u, m: (
        F.binary_cross_entropy_with_logits(x, x.sigmoid(), pos_weight=x[0].exp()), F.nll_loss(x[:0], u[:0].long()), F.nll_loss(x[0], u[0].long())
    ),
    "moved without arithmetic": lambda x, u, m: x.to(torch.complex64).flip(0).roll(1, 1).repeat(2, 1),
    "indices": lambda x, u, m: (x[0, 0][None], x[[]], x[0, 0][...]),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_TO_TORCH)
def test_what_a_row_leaves_to_torch_is_a_library_call(name: str) -> None:
    found = check(LEFT_TO_TORCH[name], X, torch.tensor([0, 1, 255, 253, 7, 3], dtype=torch.uint8), X > 0, tolerance=1e-6, native=False)
    fallbacks = [n.target for n in found.nodes if isinstance(n, Extern) and not n.library]
    assert fallbacks == ([torch.ops.aten._to_copy.default] if "arithmetic" in name else [])



def test_a_shape_that_depends_on_data_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="depends on data"):
        lowered(lambda x: x[x > 0] * 2, X)


def test_constants_are_copied_out() -> None:
    check(lambda x: (torch.tensor([1.0, 2.0]), x + torch.tensor(2.0), torch.full((2,), 3), torch.arange(3)), X)


def test_creation() -> None:
    check(lambda x: (torch.arange(2, 20, 3), torch.arange(0.5, 3, 0.25), torch.arange(5, dtype=torch.float32), torch.eye(3, 4), torch.eye(2, dtype=torch.int64)), X)
    check(lambda x: (torch.zeros(2, 3), torch.ones_like(x), x.new_full((2,), 2.5), torch.full_like(x, 3), torch.zeros(3, dtype=torch.bool)), X)
    check(lambda x: (torch.linspace(0, 1, 7), torch.linspace(-3, 5, 4), torch.linspace(2, 2, 1)), X)


def test_origins_name_the_operators() -> None:
    loops = lowered(lambda x, w: (torch.relu(x + w) * 2).sum(-1), X, X)
    (node,) = computes(loops)
    assert [o.rsplit("_", 1)[0] for o in node.origins] == ["add", "relu", "mul", "sum"]


def test_a_concatenation_is_no_condition_in_a_reduction_along_it() -> None:
    from tensorplay.stax.codegen.target import Target
    from tensorplay.stax.schedule.schedule import schedule

    def kernels(f) -> int:
        return len(schedule(lowered(f, *[torch.randn(8, 64) for _ in range(4)]), Target()).kernels)

    assert kernels(lambda *xs: torch.cat(xs, -1).softmax(-1)) == 2
    assert kernels(lambda *xs: F.layer_norm(torch.cat([x * 2 for x in xs], -1), (256,))) == 2
    assert kernels(lambda *xs: torch.cat(xs, -1).sum(0)) == kernels(lambda *xs: torch.stack(xs).mean(0)) == 1
    assert kernels(lambda *xs: torch.stack(xs * 10).mean(0)) == 2


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("keepdim", [False, True])
def test_a_sum_over_a_row_with_one_term_is_that_term(first: int, keepdim: bool) -> None:
    def one_hot(i, x):
        places = torch.arange(first, first + 7)
        hit = torch.logical_and(i[:, None] == places, (i != 4)[:, None])
        return torch.where(hit, x[:, None], 0).sum(1, keepdim=keepdim)

    i = torch.tensor([0, 3, 4, 6, 9, -1, 10, 2**32 + 3])
    x = torch.tensor([0.5, -0.0, 1.0, torch.inf, torch.nan, -2.0, 3.0, 1e-40])
    for values in (x, torch.arange(8)):
        loops = check(one_hot, i, values)
        assert not any(isinstance(n.loop, Reduction) for n in computes(loops))


def test_a_sum_over_a_row_with_several_terms_is_a_loop() -> None:
    def several(i, x):
        places = torch.arange(7)
        by_row, other = i[:, None] == places, i[:, None] >= places
        return [
            torch.where(other, x[:, None], 0.0).sum(1),
            torch.where(by_row, x[:, None], 1.0).sum(1),
            torch.where(by_row, places * x[:, None], 0.0).sum(1),
            torch.where(i[:, None] == places % 3, x[:, None], 0.0).sum(1),
            torch.where(by_row, x[:, None], 0.0).amax(1),
            torch.where(by_row, x[:, None], 0.0).sum(0),
        ]

    loops = check(several, torch.tensor([0, 2, 4, 6]), torch.randn(4), tolerance=1e-6)
    assert sum(isinstance(n.loop, Reduction) for n in computes(loops)) == 6
