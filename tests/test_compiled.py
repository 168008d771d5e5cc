"""The call path: versions, guards, log, limits, fallback, strictness, methods, threads, lifetime."""

import copy
import gc
import math
import pickle
import random
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn

import tensorplay as tp
from tensorplay.capture.tracer import capture
from tensorplay.compiled import compiled_of
from tensorplay.key.version import Call
from tensorplay.record import record
from tensorplay.testing import CAP, LOG, REASONS, C, K, N, eq, targets

ones = torch.ones
GATES = "control-flow gate outcomes match the traced branch"


def comp(f=None, **k):
    k.setdefault("backend", "eager")
    return tp.compile(f, **k)


def test_example_3_2_versions_and_log():
    def f(x):
        if x.sum() > 0:
            return x * 2
        return x - 1

    cf = comp(f)
    results = [cf(ones(4, 8)), cf(-2 * ones(4, 8)), cf(ones(6, 8))]
    assert [r[0, 0].item() for r in results] == [2.0, -3.0, 2.0] and N(cf) == 3
    assert LOG(cf) == [
        f"recompiling 'f': {GATES}",
        f"recompiling 'f': inputs[0][0][2][0] == 4; inputs[0][0][2][0] == 4; {GATES}",
    ]
    first = REASONS(cf)[0]
    assert (first.path, first.expected, first.actual) == ("inputs[0][0][2][0]", 4, 6)
    assert [len(failing) for failing in cf.last_miss.reasons] == [1, 2]


def test_example_2_1_a_scalar_is_specialized_by_value_and_a_tensor_is_not():
    cf = comp(lambda x, k: x * k)
    assert eq(cf(ones(2), 3), 3 * ones(2)) and eq(cf(ones(2), 4), 4 * ones(2)) and N(cf) == 2
    cf = comp(lambda x, k: x * k)
    assert eq(cf(ones(2), torch.tensor(3.0)), 3 * ones(2)) and eq(cf(ones(2), torch.tensor(4.0)), 4 * ones(2)) and N(cf) == 1


def test_one_one_point_zero_and_true_are_three_versions():
    def f(x, k):
        return x * k

    cf, x = comp(f), torch.arange(3)
    assert [cf(x, k).dtype for k in (1, 1.0, True)] == [f(x, k).dtype for k in (1, 1.0, True)] and N(cf) == 3


def test_float_edge_cases():
    cf = comp(lambda x, k: 1 / (x * k))
    assert cf(ones(1), 0.0) == math.inf and cf(ones(1), -0.0) == -math.inf
    cf(ones(1), math.nan), cf(ones(1), math.nan)
    assert C(cf) == 3


def test_grad_mode_is_in_the_key_and_read_at_every_call():
    cf, w = comp(lambda x: x * 2), ones(2, requires_grad=True)
    for _ in range(3):
        assert cf(w).requires_grad
        with torch.no_grad():
            assert not cf(w).requires_grad
    assert C(cf) == 2
    assert [g.path for g in REASONS(cf)] == ["grad mode"]


def test_autocast_default_dtype_and_inference_mode():
    def f(a, b):
        return a @ b + torch.ones(1)

    cf, a, b = comp(f), torch.randn(3, 3), torch.randn(3, 3)
    for _ in range(2):
        assert eq(cf(a, b), f(a, b))
        with torch.autocast("cpu", torch.bfloat16):
            assert cf(a, b).dtype == f(a, b).dtype
        torch.set_default_dtype(torch.float64)
        try:
            assert cf(a.double(), b.double()).dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        with torch.inference_mode():
            assert cf(a, b).is_inference()
    assert C(cf) == 4


def test_exactly_the_differing_component_is_named():
    cf = comp(lambda x: x + 1)
    cf(ones(2)), cf(ones(2).double())
    assert [g.condition for g in REASONS(cf)] == ["inputs[0][0][3] == torch.float32"]


scale = ones(4)
factor = 2


def test_lifted_tensors_are_read_at_every_call():
    global scale
    scale = ones(4)
    cf, x = comp(lambda x: x * scale), ones(4)
    cf(x)
    scale.mul_(2)
    assert eq(cf(x), 2 * ones(4)) and C(cf) == 1
    scale = 3 * ones(4)
    assert eq(cf(x), 3 * ones(4)) and C(cf) == 1
    scale = 3 * ones(1)
    assert eq(cf(x), 3 * ones(4)) and C(cf) == 2


def test_python_state_is_in_the_key_and_named():
    global factor
    factor = 2
    cf, x = comp(lambda x: x * factor), ones(2)
    assert eq(cf(x), 2 * ones(2))
    factor = 5
    assert eq(cf(x), 5 * ones(2)) and N(cf) == 2
    assert "factor" in REASONS(cf)[0].path and (REASONS(cf)[0].expected, REASONS(cf)[0].actual) == (2, 5)


def test_module_flags_submodules_and_hooks():
    class Inner(nn.Module):
        def forward(self, x):
            return x + 1

    class Other(nn.Module):
        def forward(self, x):
            return x - 1

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.p = Inner(), 3.0

        def forward(self, x):
            return self.inner(x) * self.p if self.training else x + self.p

    net = Net()
    cm = comp(net)
    assert cm(ones(1)).item() == 6.0
    net.inner = Other()
    assert cm(ones(1)).item() == 0.0
    handle = net.inner.register_forward_hook(lambda m, a, out: out + 10)
    assert cm(ones(1)).item() == 30.0
    handle.remove()
    assert cm(ones(1)).item() == 0.0
    cm.eval()
    cm.p = 7.0
    assert cm(ones(1)).item() == 8.0


def test_tied_weights_stay_tied_only_while_they_are():
    a = nn.Linear(2, 2, bias=False)
    b = nn.Linear(2, 2, bias=False)
    b.weight = a.weight
    net = nn.Sequential(a, b)
    cm, x = comp(net), torch.randn(1, 2)
    with torch.no_grad():
        assert eq(cm(x), net(x))
        b.weight = nn.Parameter(torch.randn(2, 2))
        assert eq(cm(x), net.forward(x)) and N(cm) == 2


def test_two_places_that_hold_one_object_are_watched():
    class Box:
        pass

    box, items = Box(), [ones(2)] * 2
    box.a = box.b = ones(2)
    for f, args, untie in [
        (lambda x: x + box.a * box.b, (ones(2),), lambda: setattr(box, "b", 3 * ones(2))),
        (lambda x: x + items[0] * items[1], (ones(2),), lambda: items.__setitem__(1, 3 * ones(2))),
        (lambda x, o: x + o.a * o.c, (ones(2), box), lambda: setattr(box, "c", 3 * ones(2))),
    ]:
        box.c = box.a
        cf = comp(f)
        assert eq(cf(*args), f(*args))
        untie()
        assert eq(cf(*args), f(*args)) and eq(cf(*args), 4 * ones(2))


def test_storage_offsets_count_where_they_are_numbers():
    base = torch.arange(20.0)
    for f in (lambda x: x * x.storage_offset(), lambda x: torch.as_strided(x, (2,), (1,), 3) * 1):
        cf = comp(f, backend="aot_eager")
        for k in (1, 2, 3):
            assert eq(cf(base[k : k + 2]), f(base[k : k + 2]))
        assert N(cf) == 3
    cf = comp(lambda x: x * 2)
    cf(base[1:3]), cf(base[2:4])
    assert N(cf) == 1


def test_explaining_a_miss_writes_nothing():
    def f(x):
        y = x.float()  # a copy for one version, the argument itself for the other
        y.add_(1)
        return y * 2 if y.sum() > 0 else y

    cf = comp(f)
    assert eq(cf(ones(2).double()), 4 * ones(2))
    x = ones(2)
    assert eq(cf(x), 4 * ones(2)) and eq(x, 2 * ones(2)) and N(cf) == 2


def test_an_argument_that_is_also_a_closure_variable():
    w = ones(2)
    cf = comp(lambda x: x + w)
    assert eq(cf(w), 2 * ones(2)) and eq(cf(3 * ones(2)), 4 * ones(2))
    cf = comp(lambda x: x + w)
    assert eq(cf(3 * ones(2)), 4 * ones(2)) and eq(cf(w), 2 * ones(2))


def test_aliasing_of_arguments():
    def f(a, b):
        a.add_(1)
        return a + b

    cf = comp(f)
    assert eq(cf(ones(2), ones(2)), 3 * ones(2))
    t = ones(2)
    assert eq(cf(t, t), 4 * ones(2)) and N(cf) == 2
    a, b = ones(2), ones(2)
    assert eq(cf(a, b), 3 * ones(2)) and eq(a, 2 * ones(2)) and N(cf) == 2


def test_partly_overlapping_writes_run_eagerly():
    def f(a, b):
        a.add_(1)
        return a + b

    base, other = torch.arange(6.0), torch.arange(6.0)
    cf = comp(f)
    with pytest.warns(tp.FallbackWarning, match="shares memory"):
        assert eq(cf(base[:4], base[2:]), f(other[:4], other[2:])) and eq(base, other)
    assert eq(cf(base[:4], torch.ones(4)), f(other[:4], torch.ones(4))) and eq(base, other)
    with pytest.raises(tp.StrictNativeError, match="shares memory"):
        comp(f, strict_native=True)(base[:4], base[2:])
    assert eq(base, other)


def test_a_reused_id_never_hits_and_a_dead_version_is_dropped():
    class Cfg:
        def __init__(self, p):
            self.p = p

    cf = comp(lambda x, c: x * c.p)
    for p in range(1, 20):
        c = Cfg(float(p))
        assert eq(cf(ones(1), c), p * ones(1))
        del c
        gc.collect()
    assert N(cf) == 0 and C(cf) == 19 and not cf.fallbacks


def test_an_argument_object_whose_attribute_changes():
    class Cfg:
        p = 1.0

    cf, c = comp(lambda x, c: x * c.p), Cfg()
    assert eq(cf(ones(1), c), ones(1))
    c.p = 2.0
    assert eq(cf(ones(1), c), 2 * ones(1))


# ---- limits ------------------------------------------------------------------------------------------------------


def test_version_limit_keeps_the_versions_and_runs_eagerly_with_one_warning():
    cf = comp(lambda x: x + 1)
    for n in range(1, 9):
        cf(ones(n))
    with pytest.warns(tp.FallbackWarning, match=r"limit of 8 versions.*inputs\[0\]\[0\]\[2\]\[0\] varies") as caught:
        for n in (9, 10, 11):
            assert eq(cf(ones(n)), 2 * ones(n))
    assert len(caught) == 1 and N(cf) == 8 and C(cf) == 8 and cf.fallbacks[0].count == 3
    cf(ones(3))
    assert C(cf) == 8
    strict = comp(lambda x: x + 1, strict_native=True, recompile_limit=1)
    strict(ones(1))
    for _ in range(2):
        with pytest.raises(tp.RecompileLimitError, match="strict_native"):
            strict(ones(2))
    assert eq(strict(ones(1)), 2 * ones(1))


@pytest.mark.parametrize(
    "f, calls, remedy",
    [
        (lambda x, k: x * k, [(ones(1), k) for k in range(9)], "0-dim tensor"),
        (lambda xs, y, k: xs[0] * k + y, [([ones(1)], ones(1), k / 8) for k in range(9)], "0-dim tensor"),
        (lambda x: x * float(x.sum()), [(ones(1) * k,) for k in range(9)], r"tp\.graph\.gate"),
    ],
)
def test_the_limit_names_the_remedy(f, calls, remedy):
    cf = comp(f)
    with pytest.warns(tp.FallbackWarning, match=remedy):
        for args in calls:
            cf(*args)


def test_compile_limit(monkeypatch):
    monkeypatch.setenv("TP_COMPILE_LIMIT", "3")
    monkeypatch.setenv("TP_VERSION_LIMIT", "3")

    class Key:
        pass

    cf = comp(lambda x, key: x + 1)
    with pytest.warns(tp.FallbackWarning, match="limit of 3 compilations"):
        for _ in range(5):
            cf(ones(1), Key())
            gc.collect()
    assert C(cf) == 3


# ---- fallback and strictness ----------------------------------------------------------------------------------------


def test_a_back_end_failure_runs_the_captured_graph_with_one_warning():
    def broken(graph, inputs):
        raise NotImplementedError("no lowering for this")

    cf = comp(lambda x: x + 1, backend=broken)
    with pytest.warns(tp.FallbackWarning, match="NotImplementedError: no lowering for this") as caught:
        assert eq(cf(ones(2)), 2 * ones(2)) and eq(cf(ones(2)), 2 * ones(2)) and eq(cf(ones(3)), 2 * ones(3))
    assert len(caught) == 1 and cf.fallbacks[0].count == 3 and N(cf) == 2
    for option in ("strict_native", "fullgraph"):
        with pytest.raises(tp.StrictNativeError, match=option):
            comp(lambda x: x + 1, backend=broken, **{option: True})(ones(2))


def test_a_capture_failure_runs_the_function_with_one_warning_that_names_the_line():
    calls = []

    def f(x):
        calls.append(1)
        return x + 1

    cf = comp(f)
    with pytest.warns(tp.FallbackWarning, match=r"test_compiled\.py:\d+") as caught:
        for _ in range(3):
            assert eq(cf(ones(2)), 2 * ones(2))
    assert len(calls) == 3 and len(caught) == 1 and cf.fallbacks[0].count == 3 and N(cf) == 0
    with pytest.raises(tp.GraphCaptureError, match="strict_native"):
        comp(f, strict_native=True)(ones(2))
    assert len(calls) == 3


def test_exceptions_of_the_function_come_out_unchanged_with_their_effects():
    class Mine(Exception):
        pass

    def f(x):
        x.add_(1)
        if x.shape[0] == 3:
            raise Mine("three")
        return x * 2

    for strict in (False, True):
        cf = comp(f, strict_native=strict)
        for _ in range(2):
            x = ones(3)
            with pytest.raises(Mine, match="three") as caught:
                cf(x)
            assert eq(x, 2 * ones(3)) and caught.value.__context__ is None
        with pytest.raises(RuntimeError, match=r"must match|size"):
            comp(lambda a, b: a + b, strict_native=strict)(ones(2), ones(3))
        assert not cf.fallbacks and N(cf) == 0


def test_training_compiles_and_so_does_differentiation_inside():
    cf, w = comp(lambda x: (x * x).sum(), backend="stax", strict_native=True), ones(3, requires_grad=True)
    cf(w).backward()
    assert eq(w.grad, 2 * ones(3)) and N(cf) == 1

    def inner(x):
        return torch.autograd.grad((x * x).sum(), x)[0]

    cf = comp(inner, backend="stax", strict_native=True)
    assert eq(cf(w), 2 * ones(3)) and N(cf) == 1 and K(cf)


def test_modes_and_transforms_see_every_operator():
    cf = comp(lambda x: x.sin().sum())
    x = torch.randn(3)
    with pytest.warns(tp.FallbackWarning, match=r"torch\.func"):
        assert torch.allclose(torch.func.grad(cf)(x), x.cos())
    with torch.device("cpu"):
        cf(x)
    assert N(cf) == 1


def test_a_compiled_function_inside_another_is_inlined():
    inner = comp(lambda x: x.relu())
    outer = comp(lambda x: inner(x + 1) * 2)
    assert eq(outer(ones(2)), 4 * ones(2))
    assert targets(CAP(outer)) == ["x", "add", "relu", "mul", "output"] and C(inner) == 0


def test_verify_names_the_level_that_differs(tmp_path, monkeypatch):
    monkeypatch.setenv("TP_CACHE_DIR", str(tmp_path))

    def f(x):
        return x.exp() + 1

    cf = tp.compile(f, verify=True, strict_native=True)
    assert torch.allclose(cf(ones(3)), f(ones(3)))

    def wrong(graph, inputs):
        return lambda *tensors: tuple(t + 1 for t in graph(*tensors))

    with pytest.raises(tp.VerificationError, match="differs from"):
        comp(f, backend=wrong, verify=True)(ones(3))


def test_verify_catches_a_wrong_capture(monkeypatch):
    def other(x):
        return x * 3

    monkeypatch.setattr("tensorplay.capture.tracer.capture", lambda fn, args, kwargs, *_: capture(other, args, kwargs))
    with pytest.raises(tp.VerificationError, match=r"level 'graph' \(capture\)"):
        comp(lambda x: x * 2, verify=True)(ones(1))


def test_back_ends_receive_the_graph_once_for_each_specialization_and_their_callable_runs():
    seen, ran = [], []

    def backend(graph, example_inputs, **options):
        seen.append((targets(graph), len(example_inputs), options))

        def run(*inputs):
            ran.append(len(inputs))
            return graph(*inputs)

        return run

    def f(x):
        if x.sum() > 0:
            return x * 2
        return x - 1

    cf = tp.compile(f, backend=backend, options={"level": 3})
    for x in (ones(2), ones(2), -ones(2)):
        assert eq(cf(x), f(x))
    assert [options for *_, options in seen] == [{"level": 3}] * 2 and len(ran) == 3
    assert seen[0][0][-2:] == ["mul", "output"] and seen[1][0][-2:] == ["sub", "output"]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "stax"])
def test_every_back_end_gives_the_same_from_the_same_capture(backend, tmp_path, monkeypatch):
    monkeypatch.setenv("TP_CACHE_DIR", str(tmp_path))

    def f(x, w):
        return (torch.relu(x + w) * 2).sum(-1)

    cf = tp.compile(f, backend=backend, strict_native=True)
    x, w = torch.randn(6, 8), torch.randn(6, 8)
    assert torch.allclose(cf(x, w), f(x, w), atol=1e-5)
    assert targets(CAP(cf)) == ["x", "w", "add", "relu", "mul", "sum", "output"]


def test_a_graph_of_another_front_end_goes_through_the_contract():
    graph = torch.fx.symbolic_trace(lambda x: torch.relu(x) + 1)
    cf = comp(graph, backend="aot_eager")
    assert eq(cf(ones(2)), 2 * ones(2))


# ---- forms of callables ------------------------------------------------------------------------------------------


def test_arguments_by_position_and_by_keyword():
    def f(x, s=2, *, b=1):
        return x * s + b

    cf = comp(f)
    for args, kwargs in [((ones(2),), {}), ((ones(2), 3), {}), ((ones(2),), {"s": 3}), ((), {"x": ones(2), "b": 5})]:
        assert eq(cf(*args, **kwargs), f(*args, **kwargs))
        assert eq(cf(*args, **kwargs), f(*args, **kwargs))
    with pytest.raises(TypeError, match="missing 1 required"):
        cf()
    nested = comp(lambda d, *rest, **named: d["a"] + rest[0][1] + named["z"])
    assert eq(nested({"a": ones(1)}, [0, ones(1)], z=ones(1)), 3 * ones(1))


def test_decorators_methods_and_callable_objects():
    @comp
    def plain(x):
        """Doc."""
        return x + 1

    @tp.compile(backend="eager", name="named")
    def named(x):
        return x + 1

    class Thing:
        def __init__(self, p):
            self.p = p

        @tp.compile(backend="eager")
        def method(self, x):
            return x * self.p

        def other(self, x):
            return x + self.p

        def __call__(self, x):
            return x - self.p

    assert plain.__doc__ == "Doc." and plain.__name__ == "plain" and eq(plain(ones(1)), 2 * ones(1))
    assert compiled_of(named).name == "named" and eq(named(ones(1)), 2 * ones(1))
    a, b = Thing(2.0), Thing(3.0)
    assert eq(a.method(ones(1)), 2 * ones(1)) and eq(b.method(ones(1)), 3 * ones(1)) and C(a.method) == 2
    assert eq(comp(a.other)(ones(1)), 3 * ones(1)) and eq(comp(a)(ones(1)), -ones(1))
    a.p = 5.0
    assert eq(a.method(ones(1)), 5 * ones(1))


@comp
def decorated(x):
    return x + 1


def undecorated(x):
    return x + 2


def test_pickle_and_copy():
    assert pickle.loads(pickle.dumps(decorated)) is decorated and copy.deepcopy(decorated) is decorated
    cf = comp(undecorated, name="two")
    for other in (pickle.loads(pickle.dumps(cf)), copy.deepcopy(cf)):
        assert other is not cf and other.fn is undecorated and other.settings == cf.settings
        assert eq(other(ones(1)), 3 * ones(1))


def test_events_are_recorded():
    cf = comp(lambda x: x + 1)
    with record() as events:
        cf(ones(1)), cf(ones(2))
    assert [e.kind for e in events] == ["compile", "recompile", "compile"]


def test_explain_and_counters():
    cf = comp(lambda x: x + 1)
    cf(ones(1)), cf(ones(1)), cf(ones(2))
    assert cf.counters["hits"] == 1 and cf.counters["misses"] == 2
    assert "2 version(s)" in str(tp.explain(cf)) and "recompiling" in str(tp.explain(cf))


# ---- the key as a whole --------------------------------------------------------------------------------------------


def test_a_call_hits_exactly_where_all_guards_hold():
    """Corollary 2.1 on random pairs of calls, closures, states and modes."""
    box = {"k": 1.0}

    def f(x, y, s):
        if y.sum() > 0:
            return x * box["k"] + s
        return x - y

    r = random.Random(0)
    cf = comp(f, recompile_limit=1000)
    same = 0
    for _ in range(300):
        box["k"] = r.choice([1.0, 2.0])
        x, y = r.choice([ones(2), ones(2).double(), ones(2, 2).t()]), r.choice([1, -1]) * ones(2)
        args = (x, x if r.random() < 0.2 else y, r.choice([0.0, -0.0, 1, True]))
        with torch.set_grad_enabled(r.random() < 0.5):
            known = cf.versions
            call = Call.of(args, {})
            hits = [v.serves(call, args, {}) is not None for v in known]
            assert hits == [not v.failing(call, args, {}) for v in known]
            assert sum(hits) <= 1
            assert eq(cf(*args), f(*args))
            assert len(cf.versions) == len(known) + (not any(hits))
            same += any(hits)
    assert same > 100


def test_threads_compile_each_shape_once():
    cf = comp(lambda x: x * 2 + 1, recompile_limit=64)
    errors = []

    def work(seed):
        r = random.Random(seed)
        try:
            for _ in range(300):
                x = torch.randn(r.randrange(1, 17))
                assert eq(cf(x), x * 2 + 1)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    [t.start() for t in threads], [t.join() for t in threads]
    assert not errors and C(cf) == N(cf) == 16


def test_nothing_keeps_arguments_outputs_or_the_compiled_object_alive():
    cf, x = comp(lambda x: x + 1), ones(5)
    y = cf(x)
    watch = [weakref.ref(x), weakref.ref(y)]
    del x, y
    gc.collect()
    assert [w() for w in watch] == [None, None]
    x = ones(5)
    y = cf(x)
    watch = [weakref.ref(x), weakref.ref(y)]
    del x, y
    assert [w() for w in watch] == [None, None]  # on a hit by reference count alone
    net = nn.Linear(2, 2)
    cm = comp(net)
    with torch.no_grad():
        cm(ones(1, 2)), cm(ones(3, 2))
    watch = [weakref.ref(net), weakref.ref(net.weight), weakref.ref(compiled_of(cm))]
    del net, cm
    gc.collect()
    assert [w() for w in watch] == [None, None, None]


def test_the_same_random_numbers_as_eager():
    def f(x):
        return nn.functional.dropout(x, 0.5, True) + torch.rand_like(x)

    cf, x = comp(f), ones(100)
    torch.manual_seed(0)
    expected, state = [f(x), f(x)], torch.get_rng_state()
    torch.manual_seed(0)
    assert eq([cf(x), cf(x)], expected) and eq(torch.get_rng_state(), state)


def test_no_warning_in_ordinary_use():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cf = comp(lambda x: x.relu() + 1)
        cf(ones(2)), cf(ones(2))


def test_an_option_that_no_back_end_of_ours_knows_is_an_error_at_once():
    with pytest.raises(ValueError, match="no option 'memory_buget': there are cpu_isa, "):
        tp.compile(lambda x: x, options={"memory_buget": 0.5})
