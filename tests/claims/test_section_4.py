"""Section 4: the graph passes, decomposition and functionalization; examples 4.1 to 4.4 node for node."""

import functools

import pytest
import torch
from torch.nn import functional as F

import tensorplay as tp
from tensorplay.capture import tracer
from tensorplay.capture.tracer import capture
from tensorplay.graph.dce import dce
from tensorplay.graph.passes import FRONT_END, ROUNDS, run_passes
from tensorplay.graph.regions import regions
from tensorplay.key.signature import entry
from tensorplay.replay import replay_of
from tensorplay.testing import CAP, FRONT, OPG, RUN, K, N, eq, near, targets

from ..graph.programs import captured, traced


def nodes(graph):
    """Each node that computes, with its operator's bare name and its arguments as text."""
    listed = zip(graph.graph.nodes, targets(graph), strict=True)
    return [(n.name, t, str(n.args)) for n, t in listed if n.op not in ("placeholder", "output", "get_attr")]


def test_example_4_1():
    before = traced(lambda x: (2 * x + 0).exp(), torch.randn(4))
    after = run_passes(before).graph
    assert nodes(before) == [("mul", "mul", "(2, x)"), ("add", "add", "(mul, 0)"), ("exp", "exp", "(add,)")]
    assert nodes(after) == [("mul", "mul", "(x, 2)"), ("exp", "exp", "(mul,)")]


def s(x):
    y = x * 3
    return F.selu(y) + F.selu(y * 1) * 2


def test_example_4_2_passes_and_rounds():
    front = run_passes(traced(s, torch.randn(4)))
    assert [(step.round, step.name) for step in front.steps] == [
        (1, "NormalizeOperators"), (1, "DecomposePass"), (1, "CSEPass"), (1, "PointwiseFusionHint"), (2, "NormalizeOperators"),
    ]  # fmt: skip
    assert front.rounds == 3
    assert str(front).splitlines()[0] == "[round 1] NormalizeOperators: mul_1 = mul * 1 is mul"
    assert str(front).splitlines()[-1] == "[round 3] no change"
    assert len(front.steps[0].notes) == 1 and len(front.steps[4].notes) == 2


def test_example_4_2_chain():
    first_round = run_passes(traced(s, torch.randn(4)), texts=True).steps[1].after
    chain = [
        "%exp : [num_users=1] = call_method[target=exp](args = (%mul,), kwargs = {})",
        "%sub : [num_users=1] = call_function[target=operator.sub](args = (%exp, 1), kwargs = {})",
        "%mul_3 : [num_users=1] = call_function[target=operator.mul](args = (1.6732632423543772, %sub), kwargs = {})",
        "%gt : [num_users=1] = call_function[target=operator.gt](args = (%mul, 0), kwargs = {})",
        "%where : [num_users=1] = call_function[target=torch.where](args = (%gt, %mul, %mul_3), kwargs = {})",
        "%mul_4 : [num_users=1] = call_function[target=operator.mul](args = (1.0507009873554805, %where), kwargs = {})",
        "%exp_1 : [num_users=1] = call_method[target=exp](args = (%mul,), kwargs = {})",
    ]
    lines = [line.strip() for line in first_round.splitlines()]
    start = lines.index(chain[0])
    assert lines[start : start + len(chain)] == chain


def test_example_4_2_result():
    cf = tp.compile(s, strict_native=True)
    x = torch.tensor([-100.0, -3.0, -1e-8, 0.0, -0.0, 3.0, 100.0])
    assert near(cf(x), s(x), 1e-5)
    assert targets(FRONT(cf)) == ["x", "mul", "exp", "sub", "mul", "gt", "where", "mul", "mul", "add", "output"]
    last = list(FRONT(cf).graph.nodes)[7]
    assert len(last.users) == 2 and len(K(cf)) == 1


def test_example_4_2_keeps_the_digits_that_its_chain_loses():
    """exp(x) - 1 of the chain is computed as expm1(x); the same, written by the user, has eager's digits."""
    x = torch.tensor([-1e-8, -1e-12, -1e-30, -1e-40, -0.0, 0.0, 1e-8, -1.0, -88.0, -100.0, 100.0, 3e38, torch.inf, -torch.inf, torch.nan])
    cf = tp.compile(lambda x: F.selu(x * 3), strict_native=True)
    got, want = cf(x), F.selu(x * 3)
    assert targets(FRONT(cf)) == ["x", "mul", "exp", "sub", "mul", "gt", "where", "mul", "output"]
    assert "expm1" in targets(OPG(cf)) and "exp" not in targets(OPG(cf))
    finite = want.isfinite()
    assert ((got - want).abs() <= 4e-7 * want.abs() + 1e-45)[finite].all() and eq(got[~finite], want[~finite])
    assert eq(got.signbit(), want.signbit())
    own = tp.compile(lambda x: torch.where(x > 0, x, x.exp() - 1), strict_native=True)
    assert own(torch.tensor([-1e-9])).item() == 0
    both = tp.compile(lambda x: (F.selu(x) * 2, x.exp() - 1), strict_native=True)
    assert both(torch.tensor([-1e-9]))[1].item() == 0


def test_proposition_4_1_a_pass_that_never_ends_is_refused():
    def turn(graph, choices):
        node = next(n for n in graph.nodes if n.op == "call_function")
        node.args = node.args[::-1]
        return ["turned"]

    with pytest.raises(tp.errors.TensorPlayError, match="without lowering its measure"):
        run_passes(captured(lambda x, y: x + y, torch.randn(2), torch.randn(2)), (turn,))


def test_proposition_4_1_the_limit_of_rounds_is_loud():
    def erase_one(graph, choices):
        dead = [n for n in graph.nodes if n.op == "call_function" and not n.users]
        if dead:
            graph.erase_node(dead[0])
        return ["erased"] if dead else []

    graph = captured(lambda x: max([x + k for k in range(40)], key=id), torch.randn(2))
    with pytest.raises(tp.errors.TensorPlayError, match=f"no fixed point in {ROUNDS} rounds"):
        run_passes(graph, (erase_one,))


def test_the_captured_graph_stays_as_it_was_captured():
    cf = tp.compile(s, strict_native=True)
    cf(torch.randn(4))
    assert targets(CAP(cf)) == ["x", "mul", "selu", "mul", "selu", "mul", "add", "output"]


def test_section_4_3_only_scalars_are_folded():
    import operator

    def fold_me(x):
        return torch.ones(1000) * 2 + x

    graph = captured(fold_me, torch.ones(1000))
    add = next(n for n in graph.graph.nodes if n.name == "add")
    with graph.graph.inserting_before(add):
        product = graph.graph.call_function(operator.mul, (2, 3))
        item = graph.graph.call_function(operator.getitem, ((product, 5), 0))
        by_zero = graph.graph.call_function(operator.truediv, (1, 0))
        graph.graph.call_function(operator.add, (add.args[0], by_zero))
    add.args = (add.args[0], item)
    front = run_passes(graph).graph
    assert "getitem" not in targets(front) and targets(front).count("ones") == 1
    last = next(n for n in front.graph.nodes if n.name == "add")
    assert last.args[1] == 6 and type(last.args[1]) is int
    assert "truediv" in targets(front)  # left to raise where it raised


def test_section_4_5_value_numbering():
    front = lambda f, *a: targets(run_passes(captured(f, *a)).graph)  # noqa: E731
    x, y = torch.randn(3), torch.randn(3)
    assert front(lambda x: x.sin() + x.sin(), x).count("sin") == 1
    assert front(lambda x, y: (x + y) * (y + x), x, y).count("add") == 2
    assert front(lambda x: F.dropout(x, 0.5, True) + F.dropout(x, 0.5, True), x).count("dropout") == 2


def test_section_4_2_broadcasting_is_no_identity():
    x = torch.randn(4)
    for f in (lambda x: (x + torch.zeros(4, 1)).exp(), lambda x: (x + torch.zeros(())).exp(), lambda x: (x * torch.ones(1, 1)).exp()):
        cf = tp.compile(f, strict_native=True)
        assert near(cf(x), f(x), 1e-6) and len(targets(FRONT(cf))) == len(targets(CAP(cf)))


def written_view(x):
    y = x[0]
    y += 1
    return x * 1


def written_input(x):
    x += 1
    return x


def read_twice(x):
    a = x.sum()
    x.add_(1)
    b = x.sum()
    return a, b


def written_element(x):
    x[0] = 5
    return x * 2


def shown_in_another_alias(x):
    a, b = x[0], x.t()[:, 0]
    a.add_(1)
    return b


@pytest.mark.parametrize("program", [written_view, written_input, read_twice, written_element, shown_in_another_alias])
def test_writes_are_neither_dropped_nor_moved(program):
    cf = tp.compile(program, strict_native=True)
    for _ in range(2):
        x, y = torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3)
        got, want = cf(x), program(y)
        assert eq(got, want) and eq(x, y)
        results = [(got, x), (want, y)]
        assert len({isinstance(r, torch.Tensor) and r.untyped_storage()._cdata == t.untyped_storage()._cdata for r, t in results}) == 1


@pytest.mark.parametrize("program", [lambda x: x.expand(3, 4).add_(1), lambda x: torch.add(x.expand(3, 4), 1, out=x.expand(3, 4))])
def test_writes_to_expanded_memory_raise_as_in_eager(program):
    with pytest.raises(RuntimeError) as eager:
        program(torch.ones(4))
    cf = tp.compile(program)
    for _ in range(2):
        with pytest.raises(RuntimeError) as ours:
            cf(torch.ones(4))
        assert str(ours.value) == str(eager.value)


def test_section_4_5_literals_are_compared_by_type_and_bits():
    def count(f, x):
        return len([t for t in targets(run_passes(captured(f, x)).graph) if t == "mul"])

    x = torch.ones(2)
    nan, other = float("nan"), float("nan")
    assert count(lambda x: (x * nan).exp() + (x * other).exp(), x) == 1
    assert count(lambda x: (x * 2).exp() + (x * 2.0).exp(), x) == 2
    assert count(lambda x: (x * 0.0).exp() + (x * -0.0).exp(), x) == 2
    assert count(lambda x: (x * True).exp() + (x * 1.5).exp() + (x * True).exp(), x) == 2


def test_section_4_8_an_operator_without_rule_or_row_runs_through_torch():
    cf = tp.compile(lambda x: torch.linalg.svd((x * 2).relu() + 1)[1] * 3)
    x = torch.randn(4, 4)
    assert near(cf(x), torch.linalg.svd((x * 2).relu() + 1)[1] * 3, 1e-5)
    about = tp.explain(cf)
    assert len(about.externs) == 1 and "svd" in str(about.externs[0].target) and len(K(cf)) >= 1


def test_section_4_6_placeholders_and_effects_stay():
    def f(x, unused):
        x.exp()
        x.add_(1)
        torch._assert(True, "")
        return x * 2

    front = run_passes(captured(f, torch.ones(2), torch.ones(2))).graph
    names = targets(front)
    assert names[0] == "x" and "exp" not in names and "add_" in names


def gated(x):
    if x.sum() > 0:
        return x * 2
    return x - 1


def test_corollary_3_1_gates_are_cut_out_before_dead_code_goes(monkeypatch):
    cf = tp.compile(gated, strict_native=True)
    assert eq(cf(torch.ones(2)), gated(torch.ones(2))) and eq(cf(-torch.ones(2)), gated(-torch.ones(2)))
    assert N(cf) == 2 and targets(FRONT(cf)) == ["x", "sub", "output"]


def test_corollary_3_1_afterwards_there_is_nothing_left_to_replay(monkeypatch):
    from tensorplay.capture import tracer

    found = []

    def late(graph, root, taken, traits):
        from tensorplay.graph.choices import Choices
        from tensorplay.graph.memory import settle

        settle(graph)
        dce(graph, Choices())
        found.append([gate.node._erased for gate in taken])
        return replay_graph(graph, root, taken, traits)

    replay_graph = tracer.replay_graph
    monkeypatch.setattr(tracer, "replay_graph", late)
    cf = tp.compile(gated)
    with pytest.warns(tp.errors.FallbackWarning):
        cf(torch.ones(2))
    assert found == [[True]] and N(cf) == 0


def test_section_4_7_regions_of_example_1_1():
    f = lambda x, w: (torch.relu(x + w) * 2).sum(-1)  # noqa: E731
    graph = run_passes(captured(f, torch.randn(3, 4), torch.randn(3, 4)))
    assert [row[1:] for row in regions(graph.graph.graph)] == [("pointwise", 0)] * 3 + [(None, None)]
    assert run_passes(graph.graph).rounds <= 2


def test_section_4_7_components_ignore_the_direction_of_edges():
    def f(x):
        a, b = x.exp(), x.sum()
        return a.sin() + a.cos(), b.tanh() * 2, (x @ x).relu()

    rows = regions(run_passes(captured(f, torch.randn(3, 3))).graph.graph)
    assert {name: number for name, kind, number in rows if kind} == {
        "exp": 0, "sin": 0, "cos": 0, "add": 0, "tanh": 1, "mul": 1, "relu": 2,
    }  # fmt: skip


def test_example_4_3():
    x, w, b = torch.randn(4, 8), torch.randn(8), torch.randn(8)
    norm = tp.compile(lambda x, w, b: F.layer_norm(x, (8,), w, b), strict_native=True)
    norm(x, w, b)
    assert nodes(OPG(norm)) == [
        ("native_layer_norm", "native_layer_norm", "(primals_1, [8], primals_2, primals_3, 1e-05)"),
        ("getitem", "getitem", "(native_layer_norm, 0)"),
    ]
    loss = tp.compile(F.mse_loss, strict_native=True)
    loss(x, x + 1)
    assert nodes(OPG(loss)) == [
        ("sub", "sub", "(primals_1, primals_2)"), ("mul", "mul", "(sub, sub)"), ("mean", "mean", "(mul,)"),
    ]  # fmt: skip
    assert len(K(loss)) == 1


def f(x, y):
    x.mul_(2)
    y[0].add_(1)
    return x + y


def test_example_4_4():
    cf = tp.compile(f, strict_native=True)
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    a, b = x.clone(), y.clone()
    assert eq(cf(x, y), f(a, b)) and eq(x, a) and eq(y, b)
    assert [(t, a) for _, t, a in nodes(OPG(cf))] == [
        ("mul", "(primals_1, 2)"), ("select", "(primals_2, 0, 0)"), ("add", "(select, 1)"),
        ("select_scatter", "(primals_2, add, 0, 0)"), ("add", "(mul, select_scatter)"),
        ("copy_", "(primals_1, mul)"), ("copy_", "(primals_2, select_scatter)"),
    ]  # fmt: skip
    assert [str(n) for n in OPG(cf).graph.output_node().args[0]] == ["add_1"]


def test_example_4_4_needs_no_extra_buffer():
    cf = tp.compile(f, strict_native=True)
    cf(torch.randn(3, 4), torch.randn(3, 4))
    memory = tp.explain(cf).plan.memory
    assert memory.arena_bytes == 0
    assert len(memory.fresh) == 1  # the result; x and y are written where they are
    assert len(K(cf)) == 1 and tp.explain(cf).model_bytes == tp.explain(cf).lower_bound == 5 * 48  # each once


def test_section_4_8_base_operators_are_not_split():
    cf = tp.compile(lambda x: torch.var_mean(x, 1), strict_native=True)
    x = torch.rand(3, 100003) + 1000
    variance, mean = cf(x)
    exact = torch.var_mean(x.double(), 1)
    assert ((variance.double() - exact[0]).abs() / exact[0]).max() < 1e-5 and ((mean.double() - exact[1]).abs() / exact[1]).max() < 1e-5
    assert len(K(cf)) == 1 and K(cf)[0].read_bytes == x.nbytes


def test_every_level_agrees_on_what_the_front_end_made():
    cf = tp.compile(s, strict_native=True)
    x = torch.randn(5)
    want = cf(x)
    for level in ("ops", "loops", "plan", "kernels"):
        assert near(RUN(cf, level, x), want, 1e-6)
    assert near(FRONT(cf)(x)[0], want, 1e-6)


def test_table_4_3_passes_of_this_program_in_order():
    cf = tp.compile(f, strict_native=True)
    cf(torch.randn(3, 4), torch.randn(3, 4))
    found = tp.explain(cf).passes
    assert [p.stage for p in found] == sorted(p.stage for p in found) and {p.stage for p in found} == {"A", "B", "C"}
    names = [p.name for p in found]
    assert names.index("Functionalize") > names.index("PointwiseFusionHint") and all(p.before != p.after for p in found)
    assert "copy_" in next(p for p in found if p.name == "Functionalize").after


def test_the_front_end_is_the_chapter_s_order():
    assert [p.__name__ for p in FRONT_END] == ["normalize", "fold", "decompose", "cse", "dce", "mark_regions"]


# ---- corollary 3.1: gates are extracted before dead-code elimination -----------------------------------------------


def _branches_on_a_write(x):
    y = x.clone()
    y.view(-1).add_(1)  # of which only the gate knows
    return x * 2 if y.sum() > 0 else x - 1


def _held(captured):
    """Whether the replay graph gives, on the inputs of the capture, the outcomes that the capture saw."""
    return replay_of(captured)(captured.samples) == tuple(entry(gate.value) for gate in captured.gates)


def test_gates_extracted_after_dead_code_elimination_are_wrong(monkeypatch):
    x = torch.full((3,), -0.5)
    assert _held(capture(_branches_on_a_write, (x,), {}))
    extract = tracer.replay_graph

    def late(graph, root, taken, traits, keep):
        gates = {gate.node for gate in taken} if keep else set()
        for node in reversed(graph.nodes):
            if not node.users and node.op not in ("placeholder", "output") and node not in gates:
                graph.erase_node(node)
        return extract(graph, root, taken, traits)

    monkeypatch.setattr(tracer, "replay_graph", functools.partial(late, keep=False))
    with pytest.raises(KeyError):  # the gates themselves are dead
        capture(_branches_on_a_write, (x,), {})
    monkeypatch.setattr(tracer, "replay_graph", functools.partial(late, keep=True))
    assert not _held(capture(_branches_on_a_write, (x,), {}))  # and so is the write
