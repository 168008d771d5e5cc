"""Section 3, capture: one test for each claim, named after it."""

import gc
import math
import operator
import warnings
import weakref

import pytest
import torch
from torch import nn

import tensorplay as tp
from tensorplay.capture.show import show
from tensorplay.capture.tracer import capture
from tensorplay.compiled import compiled_of
from tensorplay.errors import GraphCaptureError, StrictNativeError


def compiled(f, **options):
    return tp.compile(f, backend="eager", **options)


def versions(f):
    return len(compiled_of(f).live_versions())


def example(x, w):
    return (torch.relu(x + w) * 2).sum(-1)


def test_definition_3_1_the_graph_is_a_total_order_whose_source_equals_forward():
    x, w = torch.randn(4, 8), torch.randn(4, 8)
    graph = capture(example, (x, w), {}).graph
    nodes = list(graph.graph.nodes)
    position = {node: k for k, node in enumerate(nodes)}
    assert all(position[i] < position[n] for n in nodes for i in n.all_input_nodes)
    assert [n.op for n in nodes] == ["placeholder"] * 2 + ["call_function"] * 3 + ["call_method", "output"]
    assert nodes[2].target is operator.add
    space = dict(graph.graph.python_code("self").globals)
    exec(graph.code, space)
    assert torch.equal(space["forward"](graph, x, w)[0], example(x, w))


def test_no_node_keeps_a_tensor_alive_and_shapes_are_still_printed():
    x = torch.randn(4, 8)
    graph = capture(lambda a: torch.relu(a + 1), (x,), {}).graph
    held = weakref.ref(x)
    del x
    gc.collect()
    assert held() is None and "shape=(4, 8)" in show(graph)


SPELLINGS = (
    lambda x, y: x + y, lambda x, y: x - y, lambda x, y: x * y, lambda x, y: x / y, lambda x, y: x // y, lambda x, y: x % y,
    lambda x, y: x**y, lambda x, y: x @ y, lambda x, y: 2 + x, lambda x, y: 2 - x, lambda x, y: 2 * x, lambda x, y: 2 / x,
    lambda x, y: 2 // x, lambda x, y: 2 % x, lambda x, y: 2**x, lambda x, y: x < y, lambda x, y: x <= y, lambda x, y: x > y,
    lambda x, y: x >= y, lambda x, y: x == y, lambda x, y: x != y, lambda x, y: 2 < x, lambda x, y: -x, lambda x, y: +x,
    lambda x, y: abs(x), lambda x, y: x[0], lambda x, y: x[1:], lambda x, y: x[..., None], lambda x, y: x[[0, 1]],
    lambda x, y: x.T, lambda x, y: x.add(y), lambda x, y: torch.add(x, y), lambda x, y: torch.add(x, y, alpha=2),
    lambda x, y: torch.matmul(x, y), lambda x, y: x.sum(0), lambda x, y: torch.relu(x), lambda x, y: nn.functional.gelu(x),
    lambda x, y: torch.where(x > 0, x, y), lambda x, y: torch.cat([x, y]), lambda x, y: x.view(-1), lambda x, y: x.to(torch.float64),
    lambda x, y: x.clamp(0, 1), lambda x, y: torch.zeros_like(x), lambda x, y: x.masked_fill(x > 0, 1.0),
)  # fmt: skip


@pytest.mark.parametrize("k", range(len(SPELLINGS)))
def test_every_spelling_is_one_node_of_equal_value(k):
    f, x, y = SPELLINGS[k], torch.tensor([[1.0, -2.0], [3.0, 0.5]]), torch.tensor([[2.0, 2.0], [1.0, 3.0]])
    graph = capture(f, (x, y), {}).graph
    inner = 1 + (operator.gt in {n.target for n in graph.graph.nodes} and len(f.__code__.co_names) > 0)  # a condition first
    assert len([n for n in graph.graph.nodes if n.op.startswith("call")]) == inner
    assert torch.equal(graph(x, y)[0], f(x, y)) and graph(x, y)[0].dtype == f(x, y).dtype


def test_submodules_are_inlined_and_a_leaf_stays_one_call_module_node():
    x = torch.randn(2, 3)
    plain = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    assert not [n for n in capture(plain, (x,), {}).graph.graph.nodes if n.op == "call_module"]
    marked = nn.Sequential(tp.graph.leaf(nn.Linear(3, 3)), nn.ReLU())
    found = capture(marked, (x,), {})
    assert len([n for n in found.graph.graph.nodes if n.op == "call_module"]) == 1
    assert torch.equal(found.graph(*found.samples)[0], marked(x))


def test_an_operator_that_fails_on_the_sample_raises_inside_the_function():
    def f(x):
        try:
            return x @ torch.ones(5)
        except RuntimeError:
            return x * 2

    assert torch.equal(compiled(f)(torch.ones(3)), torch.full((3,), 2.0))
    with pytest.raises(RuntimeError, match="size"):
        compiled(lambda x: x + torch.ones(5))(torch.ones(3))


def test_example_3_1_only_the_side_that_was_taken_is_captured():
    def f(x):
        return x * 2 if x.sum() > 0 else x - 1

    g = compiled(f)
    assert torch.equal(g(torch.ones(3)), torch.full((3,), 2.0)) and torch.equal(g(-torch.ones(3)), torch.full((3,), -2.0))
    assert versions(g) == 2
    targets = [n.target for n in capture(f, (torch.ones(3),), {}).graph.graph.nodes]
    assert operator.mul in targets and operator.sub not in targets


def test_table_3_2_versions_grow_with_distinct_values_only():
    t = torch.tensor
    for f, inputs, count in (
        (lambda x: x if x[0] > 0 else -x, (t([1.0, 2]), t([3.0, 2]), t([-1.0, 2])), 2),
        (lambda x: x[: x[0].int()] * 1, (t([1.0, 2]), t([1.0, 5]), t([2.0, 2])), 2),
        (lambda x: x * int(x[0]), (t([1.0, 2]), t([1.5, 2]), t([2.0, 2])), 2),
        (lambda x: x * float(x[0]), (t([1.0, 2]), t([1.0, 3]), t([2.0, 2])), 2),
    ):
        g = compiled(f)
        for x in (*inputs, *inputs):
            assert torch.equal(g(x), f(x))
        assert versions(g) == count


def test_shape_reads_are_metadata_and_no_gates():
    found = capture(lambda x: x * (len(x) + x.shape[0] + x.ndim + (x.dtype == torch.float32)), (torch.ones(3),), {})
    assert not found.gates and found.replay is None


def test_the_shape_of_a_value_that_depends_on_data_is_a_gate():
    g = compiled(lambda x: x[x > 0].sum() / x[x > 0].shape[0])
    assert g(torch.tensor([1.0, 2, -1])) == 1.5 and g(torch.tensor([1.0, -2, -1])) == 1.0


def test_the_replay_graph_is_the_backward_slice_of_the_gates():
    def f(x):
        y = x * 5
        return y * 2 if x.sum() > 0 else y

    replay = capture(f, (torch.ones(3),), {}).replay
    assert [n.name for n in replay.graph.nodes if n.op not in ("placeholder", "output")] == ["sum_1", "gt"]


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_proposition_3_1_gates_belong_to_their_version_in_any_call_order(order):
    def f(x):
        if x[0] > 0:
            return x * 2
        return x * 3 if x[1] > 0 else x * 4

    g = compiled(f)
    inputs = (torch.tensor([1.0, 1]), torch.tensor([-1.0, 1]), torch.tensor([-1.0, -1]))
    for k in (*order, *order):
        assert torch.equal(g(inputs[k]), f(inputs[k]))
    assert versions(g) == 3


def test_a_gate_that_another_path_cannot_compute_counts_as_different():
    def f(x):
        if x.numel() > 3 and x[3] > 0:
            return x * 2
        return x

    g = compiled(f)
    for x in (torch.ones(5), torch.ones(2), -torch.ones(5), torch.ones(2)):
        assert torch.equal(g(x), f(x))


def test_example_3_3_a_gate_that_stays_a_tensor_needs_one_version():
    baked, kept = compiled(lambda x: x * int(x[0])), compiled(lambda x: x * tp.graph.gate(x[0]))
    for first in (2.0, 4.0):
        x = torch.tensor([first, 3.0])
        assert torch.equal(baked(x), x * first) and torch.equal(kept(x), x * first)
    assert versions(baked) == 2 and versions(kept) == 1


def test_a_comparison_of_a_gated_value_keys_its_truth_alone():
    def f(x):
        n = tp.graph.gate(x.sum())
        return x * n if n > 3 else x - n

    g = compiled(f)
    for value in (4.0, 5.0, 6.0, 1.0):
        assert torch.equal(g(torch.tensor([value])), f(torch.tensor([value])))
    assert versions(g) == 2


INDIRECT = {
    "and": lambda x: x if x[0] > 0 and x[1] > 0 else -x, "not": lambda x: x if not x[0] > 0 else -x,
    "min": lambda x: min(x[0], x[1]) * x, "sorted": lambda x: torch.stack(sorted(x)), "range": lambda x: x * len(range(x[0].int())),
    "math": lambda x: x * math.sqrt(abs(x[0])), "item": lambda x: x * x[0].item(), "tolist": lambda x: x * x.tolist()[1],
    "equal": lambda x: x if torch.equal(x, x.abs()) else -x, "format": lambda x: x * len(f"{x[0]:.0f}"),
    "iteration": lambda x: sum(v for v in x if v > 1), "str": lambda x: x * len(str(x)), "mask": lambda x: x[x > 1] * 2,
    "nonzero": lambda x: x * x.relu().nonzero().shape[0], "unique": lambda x: x.unique() * 2, "bool": lambda x: x * bool(x[0] > 1),
    "contains": lambda x: x * (1.0 in x), "index": lambda x: [x, x * 2, x * 3][x[0].long()], "numpy": lambda x: x * float(x.numpy()[0]),
}  # fmt: skip


@pytest.mark.parametrize("name", INDIRECT)
def test_every_way_from_data_to_python_is_a_gate_or_refused(name):
    f, g = INDIRECT[name], compiled(INDIRECT[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for values in ([1.0, 2.0], [2.0, 1.0], [2.0, 2.0], [1.0, -2.0], [1.0, 2.0]):
            x = torch.tensor(values)
            assert torch.equal(torch.as_tensor(g(x)), torch.as_tensor(f(x))), values


def test_extraction_of_the_replay_graph_comes_before_dead_code_elimination(monkeypatch):
    """With the order exchanged, the gate's nodes are gone and the branch is not seen any more."""
    from tensorplay.capture import tracer

    found, original = [], tracer.replay_graph

    def looked_at(graph, root, taken, traits):
        found.append([n.op for n in graph.nodes if n.target is operator.gt])
        return original(graph, root, taken, traits)

    monkeypatch.setattr(tracer, "replay_graph", looked_at)
    captured = capture(lambda x: x * 2 if x.sum() > 0 else x, (torch.ones(3),), {})
    assert found == [["call_function"]] and captured.replay is not None
    compiled_graph = [n.target for n in compiled_front(captured)]
    assert operator.gt not in compiled_graph and operator.mul in compiled_graph


def compiled_front(captured):
    from tensorplay.graph.passes import run_passes

    return run_passes(captured.graph).graph.graph.nodes


def test_cond_and_while_loop_are_branches_and_loops():
    before = torch.cond, torch._higher_order_ops.while_loop

    def f(x):
        y = torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,))
        return torch._higher_order_ops.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (torch.tensor(0), y))

    g = compiled(f, strict_native=True)
    assert torch.equal(g(torch.ones(3))[1], torch.full((3,), 16.0)) and torch.equal(g(-torch.ones(3))[1], torch.full((3,), -16.0))
    assert versions(g) == 2 and before == (torch.cond, torch._higher_order_ops.while_loop)


def test_an_explicit_int_of_a_gate_is_in_the_key():
    g = compiled(lambda x: x * int(tp.graph.gate(x.sum())))
    for x in (torch.ones(2), torch.ones(3)[:2] * 2):
        assert torch.equal(g(x), x * x.sum())


def test_capture_leaves_the_callers_tensors_buffers_and_graphs_alone():
    norm = nn.BatchNorm1d(3)
    x = torch.randn(8, 3, requires_grad=True)
    h = x * 1.0
    outer = (h * h).sum()
    version, statistics = h._version, norm.running_mean._version
    capture(norm, (h,), {})
    assert norm.num_batches_tracked == 0 and norm.running_mean._version == statistics and h._version == version
    outer.backward()


def test_random_numbers_and_the_generator_are_those_of_eager_also_on_the_compiling_call():
    f = nn.functional.dropout
    g = compiled(lambda x: f(x, 0.5))
    torch.manual_seed(0)
    want = [f(torch.ones(64), 0.5) for _ in range(2)]
    state = torch.get_rng_state()
    torch.manual_seed(0)
    assert all(torch.equal(w, g(torch.ones(64))) for w in want) and torch.equal(state, torch.get_rng_state())


def test_effects_happen_once_a_call_and_strict_mode_refuses_before_them():
    log = []

    def f(x):
        log.append(1)
        return x * 2

    g = compiled(f)
    with pytest.warns(tp.FallbackWarning, match=r"test_section_3\.py:\d+"):
        for _ in range(3):
            g(torch.ones(2))
    assert len(log) == 3
    with pytest.raises((GraphCaptureError, StrictNativeError)):
        compiled(f, strict_native=True)(torch.ones(2))
    assert len(log) == 3


def test_a_gate_after_a_write_sees_the_write_and_replay_writes_nothing():
    def f(x):
        x.add_(3)
        return x * 2 if x.sum() > 0 else x

    g = compiled(f)
    for _ in range(2):
        x = -torch.ones(2)
        assert torch.equal(g(x), torch.full((2,), 4.0)) and torch.equal(x, torch.full((2,), 2.0))


def test_a_gate_fed_by_random_numbers_never_desynchronizes():
    def f(x):
        return x * 2 if torch.rand(()) < 0.5 else x

    g = compiled(f)
    torch.manual_seed(1)
    want = [f(torch.ones(2)) for _ in range(6)]
    torch.manual_seed(1)
    with pytest.warns(tp.FallbackWarning, match="random"):
        assert all(torch.equal(w, g(torch.ones(2))) for w in want)


def test_errors_of_capture_carry_the_users_line():
    with pytest.raises(GraphCaptureError, match=r"test_section_3\.py:\d+: Tensor\.data_ptr"):
        capture(lambda x: x * x.data_ptr(), (torch.ones(2),), {})


def test_marks_a_disabled_function_is_one_node_and_is_compiling_is_true_only_while_tracing():
    @tp.disable
    def helper(x):
        return x * 2 if x.sum() > 0 else x * 3

    def f(x):
        return helper(x) + (1 if tp.is_compiling() else 2)

    graph = capture(f, (torch.ones(2),), {}).graph
    assert len([n for n in graph.graph.nodes if n.op == "call_function"]) == 2
    g = compiled(f)
    assert torch.equal(g(torch.ones(2)), torch.full((2,), 3.0)) and torch.equal(g(-torch.ones(2)), torch.full((2,), -2.0))
    assert not tp.is_compiling() and not tp.is_exporting()
    with tp.disable_capture():
        assert torch.equal(g(torch.ones(2)), torch.full((2,), 4.0))


def test_a_destination_is_written_at_every_call():
    out = torch.empty(3)
    g = compiled(lambda x: torch.mul(x, 2, out=out))
    for k in range(3):
        assert g(torch.full((3,), float(k))) is out and torch.equal(out, torch.full((3,), 2.0 * k))


def test_destinations_of_every_kind_are_written_on_cache_hits_by_kernels():
    out, product, total = torch.empty(3), torch.empty(1, 1), torch.empty(())

    @tp.compile(strict_native=True)
    def f(x, y):
        torch.add(x, y, out=out)
        torch.matmul(x[None], y[:, None], out=product)
        torch.sum(x, dim=0, out=total)
        return out * 1

    for k in range(4):
        x = torch.full((3,), float(k))
        assert torch.equal(f(x, x + 1), x + x + 1) and torch.equal(out, x + x + 1)
        assert product.item() == 3 * k * (k + 1) and total.item() == 3 * k
    assert versions(f) == 1


def test_module_compile_in_place():
    m = nn.Linear(3, 3)
    x = torch.randn(2, 3)
    want = m(x)
    assert tp.compile(m, in_place=True) is m and type(m) is nn.Linear
    torch.testing.assert_close(m(x), want)
    assert versions(m) == 1


def test_torch_func_transforms_are_captured_with_the_gates_inside():
    def f(x):
        return torch.func.grad(lambda y: (y**3).sum() if y.sum() > 0 else (y**2).sum())(x)

    g = compiled(f, strict_native=True)
    for x in (torch.ones(3), -torch.ones(3), torch.ones(3) * 2):
        assert torch.equal(g(x), f(x))
    assert versions(g) == 2


def test_the_function_that_vjp_returns_is_captured():
    def f(x):
        y, pullback = torch.func.vjp(torch.sin, x)
        return y, pullback(torch.ones_like(x))[0] * 2

    g = compiled(f, strict_native=True)
    for x in torch.randn(3, 4):
        assert all(map(torch.equal, g(x), f(x)))


def test_a_training_step_is_one_graph():
    w = torch.ones(3, requires_grad=True)

    def f(x):
        loss = (w * x).pow(2).sum()
        loss.backward()
        return loss.detach()

    g = compiled(f, strict_native=True)
    for k in range(1, 4):
        assert g(torch.ones(3)) == 3 and torch.equal(w.grad, torch.full((3,), 2.0 * k))


def test_a_custom_operator_is_one_node():
    @torch.library.custom_op("tpclaims::triple", mutates_args=())
    def triple(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() * 3)

    graph = capture(lambda x: triple(x) + 1, (torch.ones(2),), {}).graph
    assert len([n for n in graph.graph.nodes if n.op == "call_function"]) == 2  # the body is not recorded again
