"""Each side condition of each rewrite has a program that comes out wrong without it."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from tensorplay.errors import TensorPlayError
from tensorplay.graph import composites, cse, dce, memory, normalize, passes
from tensorplay.graph.choices import Choices
from tensorplay.graph.passes import FRONT_END, run_passes

from .programs import captured, observed, same, traced

X = torch.tensor([[0.5, -1.0, 2.0], [0.0, 3.0, -0.25]])
TRAINING = Choices(training=True)


def through_view(x):
    y = x.exp()
    v = y[0]
    v.add_(1)
    return y * 2


def half_overflow(x):
    return torch.addcmul(x, x * 1000, x * 0.001, value=100)


def expanded(x):
    return (x[:, :1].expand(2, 3) * 1).view(-1).exp()


def written_after(x):
    y = x.exp()
    m = y * 1
    v = y[0]
    v.add_(1)
    return m.sin()


def twice(x):
    a, b = x + 1, x + 1
    v = a[0]
    v.mul_(2)
    return a.sum(), b.sum()


def in_place_composite(x):
    y = x.exp() - 2
    z = y.view(-1)
    F.selu(y, inplace=True)
    return z * 2


def wider(x):
    y = x.exp()
    return y.add_(x.double()).sin()


def set_then_read(x):
    y = x.exp()
    y.add_(1)
    return y


def write_input(x):
    x.add_(1)
    return x * 2


def input_written_twice(x):
    y = x.add_(1)
    m = y - 0
    y.mul_(2)
    return m * 3


PROGRAMS = {
    ("identity", "type"): (captured, lambda i: (i / 1).sum(), torch.arange(3)),
    ("identity", "shape and layout"): (captured, expanded, X),
    ("identity", "writes"): (captured, written_after, X),
    ("identity", "alias"): (captured, lambda x: x * 1, X),
    ("in place", "user"): (traced, set_then_read, X),
    ("in place", "input"): (captured, write_input, X),
    ("in place", "view"): (captured, through_view, X),
    ("in place", "result"): (captured, wider, X),
    ("cse", "writes"): (captured, twice, X),
    ("cse", "alias"): (captured, lambda x: (x + 1, x + 1), X),
    ("composite", "writes"): (captured, in_place_composite, X),
    ("composite", "type"): (captured, half_overflow, X.half()),
}
TABLES = {
    "identity": normalize.IDENTITY,
    "in place": normalize.IN_PLACE,
    "cse": cse.CONDITIONS,
    "composite": composites.CONDITIONS,
}
ELSEWHERE = {  # conditions whose programs need gradients, modes or missing samples, below
    ("identity", "sample"), ("identity", "gradient"), ("in place", "gradient"), ("in place", "mode"), ("composite", "sample"),
}  # fmt: skip


def test_every_condition_has_a_program():
    assert {(table, name) for table, names in TABLES.items() for name in names} == PROGRAMS.keys() | ELSEWHERE


@pytest.mark.parametrize("case", PROGRAMS, ids=": ".join)
def test_a_rewrite_without_its_condition_is_wrong(case, monkeypatch):
    make, f, x = PROGRAMS[case]
    graph = make(f, x)
    assert same(observed(run_passes(graph).graph, (x,)), observed(f, (x,)))
    monkeypatch.setitem(TABLES[case[0]], case[1], lambda *_: True)
    try:
        wrong = not same(observed(run_passes(graph).graph, (x,)), observed(f, (x,)))
    except Exception:
        wrong = True
    assert wrong


@pytest.mark.parametrize("table", ["identity", "composite"])
def test_nothing_is_known_without_a_sample(table, monkeypatch):
    f = {"identity": lambda x: (x * 1).exp(), "composite": lambda x: F.selu(x).exp()}[table]
    for missing in ("the argument", "all"):
        graph = traced(f, X)
        for node in graph.graph.nodes:
            if missing == "all" or node.op == "placeholder":
                node.meta.pop("spec")
        before = [n.format_node() for n in graph.graph.nodes]
        assert [n.format_node() for n in run_passes(graph).graph.graph.nodes] == before
        if missing == "the argument":
            with monkeypatch.context() as patch, pytest.raises((KeyError, AttributeError)):
                patch.setitem(TABLES[table], "sample", lambda *_: True)
                run_passes(graph)


def gradients(graph, x):
    x = x.clone().requires_grad_()
    try:
        out = graph(x)
        (out[0] if isinstance(out, tuple) else out).sum().backward()
    except RuntimeError as error:
        return str(error)[:60]
    return x.grad


def hidden(x):
    with torch.no_grad():
        m = x * 1
    return m * x


def overwritten(x):
    y = x.exp()
    y = y.add_(1)
    return y.sin()


@pytest.mark.parametrize("table, f", [("identity", hidden), ("in place", overwritten)])
def test_gradients_flow_as_in_eager(table, f, monkeypatch):
    x = torch.tensor([1.0, 2.0])
    graph = captured(f, x.clone().requires_grad_())
    want = gradients(f, x)

    def agrees():
        got = gradients(run_passes(graph, choices=TRAINING).graph, x)
        return got == want if isinstance(want, str) else torch.is_tensor(got) and torch.equal(got, want)

    assert agrees()
    monkeypatch.setitem(TABLES[table], "gradient", lambda *_: True)
    assert not agrees()


def test_in_place_operators_stay_under_autocast(monkeypatch):
    def f(x):
        y = x.exp()
        return y.pow_(2).sin()

    graph = captured(f, X)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert any(n.target == "pow_" for n in run_passes(graph).graph.graph.nodes)
        monkeypatch.setitem(normalize.IN_PLACE, "mode", lambda *_: True)
        assert not any(n.target == "pow_" for n in run_passes(graph).graph.graph.nodes)


def epoch(x):
    a = x.sum()
    x[0].add_(1)
    return a * 2, x.sum() * 3


KEYS = {
    "epoch": (epoch, X),
    "literal": (lambda i: ((i + 1).float() * 2, (i + 1.0) * 2), torch.arange(3)),
    "zeros": (lambda x: (1 / (x * 0.0), 1 / (x * -0.0)), torch.ones(2)),
    "mode": (lambda x: hidden(x) + x * 1 * x, X),
}


@pytest.mark.parametrize("name", KEYS)
def test_a_key_that_forgets_something_is_wrong(name, monkeypatch):
    f, x = KEYS[name]
    graph = captured(f, x)
    assert same(observed(run_passes(graph).graph, (x,)), observed(f, (x,)))
    if name == "epoch":
        monkeypatch.setattr("tensorplay.graph.memory.Memory.epoch", lambda *_: ())
    elif name == "mode":
        graph = captured(f, x.clone().requires_grad_())
        want = gradients(f, x)
        assert torch.equal(gradients(run_passes(graph, choices=TRAINING).graph, x), want)
        old = cse.key
        monkeypatch.setattr(cse, "key", lambda node, memory: old(node, memory)[:-1])
        assert not torch.equal(gradients(run_passes(graph, choices=TRAINING).graph, x), want)
        return
    else:
        monkeypatch.setattr(cse, "literal", lambda value: value if isinstance(value, tuple) else ())
    assert not same(observed(run_passes(graph).graph, (x,)), observed(f, (x,)))


def test_an_input_that_capture_ran_on_a_copy_of_is_one_storage():
    front = run_passes(captured(input_written_twice, X)).graph
    assert same(observed(front, (X,)), observed(input_written_twice, (X,)))


def written_composite(x):
    y = x.clamp(-0.5, 0.5)
    z = -(-y)  # noqa: B002
    v = y[0]
    v.relu_()
    y[1] = 3.0
    return z * 2


def test_a_chain_that_is_written_later_is_still_written():
    front = run_passes(captured(written_composite, X)).graph
    assert same(observed(front, (X,)), observed(written_composite, (X,)))


def test_random_operators_are_never_merged():
    def f(x):
        return F.dropout(x, 0.5, True) + F.dropout(x, 0.5, True), torch.rand_like(x) - torch.rand_like(x)

    x = torch.ones(100)
    front = run_passes(captured(f, x)).graph
    assert sum("dropout" in n.name for n in front.graph.nodes) == 2
    assert same(observed(front, (x,)), observed(f, (x,)))


def blind(*forgotten):
    """Facts without some of their fields."""
    return lambda node: replace(memory.facts(node), **dict.fromkeys(forgotten, False))


def unread_random(x):
    torch.rand(2)
    return x + torch.rand(3)


def unread_write(x):
    x[0].mul_(2)
    return x.shape[0]


EFFECTS = {  # pass: a program that comes out wrong where it forgets that nodes may do more than compute
    "cse": (cse, lambda x: F.dropout(x, 0.5, True) - F.dropout(x, 0.5, True)),
    "dce of a write": (dce, unread_write),
    "dce of a draw": (dce, unread_random),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_a_pass_that_forgets_effects_is_wrong(name, monkeypatch):
    which, f = EFFECTS[name]
    graph = captured(f, X)
    assert same(observed(run_passes(graph).graph, (X,)), observed(f, (X,)))
    monkeypatch.setattr(which, "facts", blind("effect"))
    assert not same(observed(run_passes(graph).graph, (X,)), observed(f, (X,)))


def test_placeholders_that_nothing_reads_stay(monkeypatch):
    front = run_passes(captured(lambda x, unused: x * 2, X, X)).graph
    assert [n.op for n in front.graph.nodes].count("placeholder") == 2


def test_a_measure_that_forgets_a_part_is_noticed(monkeypatch):
    """Each part of the measure of proposition 4.1 is what some pass lowers: without it the pass is refused."""
    programs = [lambda x: F.relu6(x) * 2, lambda x: x.exp().add_(1).sin(), lambda x: x.sin() + x.sin()]
    for position, f in enumerate(programs):
        graph = captured(f, X)
        assert run_passes(graph).steps
        with monkeypatch.context() as patch:
            whole = passes.measure
            patch.setattr(passes, "measure", lambda *a, k=position, whole=whole: [v for i, v in enumerate(whole(*a)) if i != k])
            with pytest.raises(TensorPlayError, match="without lowering its measure"):
                run_passes(graph)
    graph = traced(lambda x: 2 * x, X)
    assert run_passes(graph).steps
    monkeypatch.setattr(passes, "measure", lambda *a, whole=passes.measure: whole(*a)[:3])
    with pytest.raises(TensorPlayError, match="without lowering its measure"):
        run_passes(graph)


def test_the_passes_that_are_tested_are_the_front_end():
    assert [p.__name__ for p in FRONT_END] == ["normalize", "fold", "decompose", "cse", "dce", "mark_regions"]
