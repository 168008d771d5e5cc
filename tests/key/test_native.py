"""The extension decides what the whole key in Python decides: tensors, ambient state, sources, levels, results."""

import contextlib
import itertools
import os
import random
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

import tensorplay as tp
from tensorplay.compiled import compiled_of
from tensorplay.key.ambient import ambient, decided, foreign_mode
from tensorplay.key.signature import tensor_entry
from tensorplay.key.version import Call
from tensorplay.native import native
from tensorplay.testing import C, N, eq

pytestmark = pytest.mark.skipif(native is None, reason="the extension is not built")
ones = torch.ones


def comp(f=None, **k):
    k.setdefault("backend", "eager")
    return tp.compile(f, **k)


def tensors():
    """Tensors that differ in one thing each, some in nothing."""
    x = torch.randn(4, 4)
    c = torch.randn(4, 4, dtype=torch.complex64)
    with torch.inference_mode():
        inference = torch.randn(4, 4)
    strided = [
        x, x.clone(), x.t(), x[:3], x[0], x[:, :, None], torch.randn(4, 1).expand(4, 4), torch.randn(4, 8)[:, ::2], x[0, 0],
        torch.randn(1, 4), torch.randn(1, 4).as_strided((1, 4), (7, 1)), torch.randn(0, 4), torch.randn(4, 0), torch.zeros(()),
        x.clone().requires_grad_(), nn.Parameter(x), nn.Parameter(x.clone(), requires_grad=False), inference,
        c, c.conj(), c.imag, c.conj().imag, torch._neg_view(x), torch._neg_view(x).t(), c.t().conj(), torch.zeros(4, 4).to("meta"),
        torch.randn(4, 4).as_subclass(Sub), torch._efficientzerotensor((4, 4)), torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    ]  # fmt: skip
    dtypes = [getattr(torch, name) for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)]
    for dtype in dict.fromkeys(dtypes):
        with contextlib.suppress(RuntimeError, TypeError, NotImplementedError):
            strided.append(torch.zeros(4, 4, dtype=torch.float32).to(dtype))
    return [*strided, x.to_sparse(), x.to_sparse_csr(), torch.nested.nested_tensor([x, x[:2]])]


class Sub(torch.Tensor):
    pass


def test_fingerprints_are_equal_exactly_where_entries_are():
    kinds = tensors()
    prints = [native.fingerprint(t) for t in kinds]
    assert sum(p is not None for p in prints) > 35
    assert all(native.fingerprint(t) == p for t, p in zip(kinds, prints))
    for (a, p), (b, q) in itertools.combinations(zip(kinds, prints), 2):
        if p is not None and q is not None:
            assert (p == q) == (tensor_entry(a) == tensor_entry(b)), (a.dtype, a.stride(), b.dtype, b.stride())
    assert native.fingerprint(3) is None and native.fingerprint(None) is None
    known = [(t, p) for t, p in zip(kinds, prints) if p is not None]
    given, marks = [t for t, _ in known], tuple([p for _, p in known])
    assert native.alike(given, marks) and native.alike(tuple(given), marks)
    assert not native.alike(given[:-1], marks) and not native.alike([*given, given[0]], marks)
    for k, t in enumerate(kinds):
        assert native.alike([t], marks[:1]) == (prints[k] == marks[0])
    assert not native.alike([3], marks[:1]) and not native.alike(given[:1], (b"",))


def states():
    return [
        contextlib.nullcontext(), torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16),
        torch.autograd.detect_anomaly(check_nan=False), torch.device("meta"), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x), torch.autograd.forward_ad.dual_level(), Dtype(),
        torch.autograd.graph.save_on_cpu(), Deterministic(), Hooked(), torch.overrides.TorchFunctionMode(),
    ]  # fmt: skip


class Dtype(contextlib.ContextDecorator):
    def __enter__(self):
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *_):
        torch.set_default_dtype(torch.float32)


class Deterministic(contextlib.ContextDecorator):
    def __enter__(self):
        torch.use_deterministic_algorithms(True)

    def __exit__(self, *_):
        torch.use_deterministic_algorithms(False)


class Hooked(contextlib.ContextDecorator):
    def __enter__(self):
        self.hook = nn.modules.module.register_module_forward_hook(lambda *_: None)

    def __exit__(self, *_):
        self.hook.remove()


@pytest.mark.filterwarnings("ignore:Anomaly")
def test_probes_decide_the_ambient_state():
    seen = []
    for state in states():
        with state:
            seen.append((native.probed(), ambient(), foreign_mode()))
    decided_ones = [row for row in seen if decided(row[0])]
    # nothing, no_grad, inference, autocast, anomaly, device, attention, default dtype, deterministic, and hooks on saved
    # tensors, which see what a call saves and change nothing else
    assert len(decided_ones) == 11
    assert not any(mode for _, _, mode in decided_ones)
    for (p, a, _), (q, b, _) in itertools.product(decided_ones, seen):
        if p == q:
            assert a == b
        assert decided(q) or p != q
    plain = seen[0]
    unseen = [s for s, (_, a, mode) in zip(states()[1:], seen[1:]) if a == plain[1] and not mode]
    assert all(isinstance(s, torch.autograd.graph.saved_tensors_hooks) for s in unseen) and len(unseen) == 2


def served(cf, args):
    """Runs a call and says which version Python's key serves it by, and which the extension did."""
    known = cf.versions
    call = Call.of(args, {})
    python = [v.serves(call, args, {}) is not None for v in known]
    before = [v.check.hits if v.check is not None else None for v in known]
    result = cf(*args)
    after = [v.check.hits if v.check is not None else None for v in known]
    return result, python, [a if a is None else a - b for a, b in zip(after, before)]


def test_the_extension_serves_a_call_exactly_where_the_key_does():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    box, r = {"k": 1.0}, random.Random(0)
    config = type("Config", (), {"__slots__": ("p", "__weakref__")})()
    config.p = 1

    def f(x, y, s):
        z = net(x.float()) if x.dim() == 2 else x
        if y.sum() > 0:
            return z * box["k"] + (s if s is not None else 0) * config.p
        return z - y, x.shape[0]

    cf, hits, misses = comp(f, recompile_limit=1000), 0, 0
    for _ in range(400):
        box["k"] = r.choice([1.0, 1.0, 2.0])
        config.p = r.choice([1, 1, 2])
        net.train(r.random() < 0.7)
        x = r.choice([ones(2), ones(2).double(), ones(2, 2).t(), ones(2, 2)])
        args = (x, x if r.random() < 0.1 else r.choice([1, -1]) * ones(2), r.choice([0.0, -0.0, 1, None]))
        with torch.set_grad_enabled(r.random() < 0.5):
            known = len(cf.versions)
            result, python, mine = served(cf, args)
            assert eq(result, f(*args))
            assert sum(python) <= 1 and len(cf.versions) == known + (not any(python))
            for p, m in zip(python, mine):
                assert m in (None, int(p))
            hits += sum(m == 1 for m in mine)
            misses += not any(python)
    assert hits > 100 and misses > 20


def levels(cf):
    return tuple(compiled_of(cf).counters[k] for k in ("level1", "level2", "level3"))


def test_levels_of_algorithm_2_1():
    cf, x = comp(lambda x, y: x + y), ones(3)
    y = ones(3)
    cf(x, y)
    assert levels(cf) == (0, 0, 0)
    cf(x, y)  # the first hit compares the key, the next know its objects
    cf(x, y), cf(x, y)
    assert levels(cf) == (2, 0, 1)
    cf(ones(3), y)
    assert levels(cf) == (2, 0, 2)
    x.add_(1)
    assert eq(cf(x, y), x + 1) and levels(cf) == (2, 0, 3)
    assert eq(cf(y=y, x=x), x + 1) and levels(cf)[0] == 2  # keywords never take the first level
    gated = comp(lambda x: x * 2 if x.sum() > 0 else x)
    gated(x), gated(x), gated(x)
    assert levels(gated) == (0, 1, 1)
    x.data.mul_(-1)  # no version is counted, no object changes
    assert eq(gated(x), x) and N(gated) == 2


def test_an_object_that_changes_without_a_version():
    base = torch.randn(2, 2, dtype=torch.complex64)
    cf, x = comp(lambda x: x * 2), nn.Parameter(torch.randn(2, 3), requires_grad=False)
    changes = [
        lambda: setattr(x, "data", torch.randn(5)), lambda: setattr(x, "data", torch.randn(5).double()),
        lambda: setattr(x, "data", base.imag), lambda: setattr(x, "data", base.conj().imag), lambda: x.requires_grad_(),
        lambda: x.detach().t_(), lambda: setattr(x, "data", torch.randn(2, 2).t()), lambda: x.data.zero_(),
        lambda: torch.utils.swap_tensors(x, nn.Parameter(torch.randn(7), requires_grad=False)),
    ]  # fmt: skip
    for change in changes:
        cf(x), cf(x)
        change()
        for _ in range(2):
            got, want = cf(x), x * 2
            assert eq(got, want) and got.requires_grad == want.requires_grad and got.dtype == want.dtype
    assert C(cf) >= 6


def test_the_same_tensor_twice():
    def f(a, b):
        a = a.add_(1)
        return a + b

    cf = comp(f)
    assert eq(cf(ones(2), ones(2)), 3 * ones(2)) and eq(cf(ones(2), ones(2)), 3 * ones(2))
    t = ones(2)
    assert eq(cf(t, t), 4 * ones(2)) and eq(cf(t, t), 6 * ones(2)) and N(cf) == 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.scale = nn.Parameter(ones(2))
        self.register_buffer("shift", ones(2))
        self.p = 2.0
        self.parts = [1.0, 2.0]

    def forward(self, x):
        return self.inner(x) * self.scale + self.shift * self.p + self.parts[0] + (1 if self.training else 0)


def hook(m, args, out):
    return out + 1


MODULE_CHANGES = [
    lambda m: setattr(m, "scale", nn.Parameter(2 * ones(2))), lambda m: setattr(m, "shift", torch.zeros(2).double()),
    lambda m: m.eval(), lambda m: m.inner.eval(), lambda m: setattr(m, "p", 3.0), lambda m: setattr(m, "p", torch.tensor(4.0)),
    lambda m: m.parts.__setitem__(0, 5.0), lambda m: m.parts.insert(0, 7.0), lambda m: m.inner.register_forward_hook(hook),
    lambda m: m.register_forward_hook(hook), lambda m: m.inner.register_forward_pre_hook(lambda m, a: (a[0] * 2,)),
    lambda m: setattr(m.inner, "forward", lambda x: x * 9), lambda m: m.__dict__.update(scale=3 * ones(2)),
    lambda m: m.inner.__dict__.update(weight=torch.zeros(2, 2)), lambda m: setattr(m, "inner", nn.Identity()),
    lambda m: m._parameters.pop("scale") is None or setattr(m, "scale", 5.0), lambda m: setattr(m.inner, "__class__", Twice),
    lambda m: m.inner._parameters.update(bias=None), lambda m: m.double().float(), lambda m: m.requires_grad_(False),
    lambda m: m.inner.weight.data.mul_(2), lambda m: setattr(m.inner.weight, "data", torch.eye(2)),
    lambda m: nn.utils.parametrizations.weight_norm(m.inner), lambda m: nn.utils.parametrize.register_parametrization(m.inner, "weight", Symmetric()),
    lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}), lambda m: setattr(m, "extra", 1.0),
    lambda m: setattr(m.inner, "bias", m.scale),
]  # fmt: skip


class Twice(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class Symmetric(nn.Module):
    def forward(self, w):
        return w + w.T


@pytest.mark.parametrize("k", range(len(MODULE_CHANGES)))
@pytest.mark.filterwarnings("ignore::tensorplay.FallbackWarning")
def test_a_module_that_changes_between_calls(k):
    m, x = Net(), torch.randn(3, 2)
    cm = comp(m)
    with torch.no_grad():
        for _ in range(3):
            assert eq(cm(x), m(x))
        assert levels(cm)[0] >= 1
        MODULE_CHANGES[k](m)
        for _ in range(3):
            assert eq(cm(x), m(x))


def test_class_attributes_and_methods_replaced():
    class Local(nn.Module):
        factor = 2.0

        def forward(self, x):
            return self.more(x) * self.factor

        def more(self, x):
            return x + 1

    cm, x = comp(Local()), ones(2)
    assert eq(cm(x), 4 * x) and eq(cm(x), 4 * x)
    Local.factor = 3.0
    assert eq(cm(x), 6 * x) and eq(cm(x), 6 * x)
    Local.more = lambda self, x: x + 2
    assert eq(cm(x), 9 * x) and eq(cm(x), 9 * x)
    Local.forward = lambda self, x: x
    assert eq(cm(x), x)


class Upper:
    power = 2.0


class Settings(Upper):
    k = 1


class Changing(nn.Module):
    scale = 2.0

    def __init__(self):
        super().__init__()
        self.eps = 0.5
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        return x * self.scale + self.eps + Settings.k * Settings.power - 1.0 * self.inner.in_features


class Other(Changing):
    scale = 5.0


@pytest.mark.parametrize("seed", range(4))
def test_what_is_remembered_of_classes_and_modules_is_looked_up_again_when_they_change(seed):
    model, x, draw = Changing(), torch.ones(2), random.Random(seed)
    values = [1, 1.0, True, 2, 2.0, float("2"), 3.5, -0.0, 0.0]
    changes = [
        lambda v: setattr(Changing, "scale", v), lambda v: setattr(Other, "scale", v), lambda v: setattr(model, "eps", v),
        lambda v: setattr(Settings, "k", v), lambda v: setattr(Settings, "power", v), lambda v: setattr(Upper, "power", v),
        lambda v: "power" in Settings.__dict__ and delattr(Settings, "power"), lambda v: setattr(model, "scale", v),
        lambda v: model.__dict__.pop("scale", None), lambda v: setattr(Changing, "eps", property(lambda m: v, lambda m, new: None)),
        lambda v: "eps" in Changing.__dict__ and delattr(Changing, "eps"), lambda v: setattr(model.inner, "in_features", v),
        lambda v: setattr(model, "__class__", draw.choice([Changing, Other])), lambda v: model.__dict__.update(eps=v),
        lambda v: setattr(model, "inner", nn.Linear(draw.choice([2, 3]), 2)), lambda v: None,
    ]  # fmt: skip
    before = {cls: dict(cls.__dict__) for cls in (Upper, Settings, Changing, Other)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cf = tp.compile(model)
            for _ in range(150):
                draw.choice(changes)(draw.choice(values))
                for _ in range(draw.choice([1, 2, 3])):
                    got, want = cf(x), type(model).forward(model, x)
                    assert got.dtype == want.dtype and torch.equal(got, want) and torch.equal(got.signbit(), want.signbit())
        assert compiled_of(cf).versions
    finally:
        for cls, held in before.items():
            for name in ("power", "k", "scale", "eps"):
                if name in held:
                    setattr(cls, name, held[name])
                elif name in cls.__dict__:
                    delattr(cls, name)


class Moody:
    """A descriptor that gives itself to its class until it gives something else."""

    value: Any = None

    def __get__(self, owner, cls):
        return self if Moody.value is None else Moody.value

    def __float__(self):
        return 3.0


class Watched(nn.Module):
    switch = False
    mood = Moody()

    def __init__(self):
        super().__init__()
        self.__dict__["eps"] = 0.5

    @property
    def eps(self):
        return self.__dict__["eps"] if not Watched.switch else 7.0

    def forward(self, x):
        return x * self.eps + float(Watched.mood)


def test_descriptors_answer_at_each_call():
    model, x = Watched(), torch.ones(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cf = tp.compile(model)
        try:
            for switch, mood in ((False, None), (True, None), (False, None), (False, 4.0), (True, 5.0), (False, None)):
                Watched.switch, Moody.value = switch, mood
                for _ in range(3):
                    assert torch.equal(cf(x), model.forward(x))
        finally:
            Watched.switch, Moody.value = False, None


def test_results_of_every_structure():
    x = ones(2)
    for f in (
        lambda x: x + 1, lambda x: (x + 1,), lambda x: (x + 1, x * 2), lambda x: (x * 2, x + 1, x * 2), lambda x: [x + 1],
        lambda x: {"a": x + 1}, lambda x: (x, x + 1), lambda x: None, lambda x: (x + 1, 3), lambda x: ((x + 1,), x * 3), lambda x: x,
    ):  # fmt: skip
        cf = comp(f)
        for _ in range(3):
            got, want = cf(x), f(x)
            assert type(got) is type(want) and eq(tree_flatten(got)[0], tree_flatten(want)[0])
            assert (got is x) == (want is x)


def test_exceptions_of_a_program_come_out_on_a_hit():
    def back_end(graph, samples):
        def run(*inputs):
            if inputs[0][0] > 5:
                raise KeyError("late")
            return graph(*inputs)

        return run

    cf = comp(lambda x: x + 1, backend=back_end)
    assert eq(cf(ones(2)), 2 * ones(2)) and eq(cf(ones(2)), 2 * ones(2))
    with pytest.raises(KeyError, match="late"):
        cf(9 * ones(2))
    assert eq(cf(ones(2)), 2 * ones(2))


def test_a_program_of_one_entry_has_no_host_code():
    def f(x, w):
        return (torch.relu(x + w) * 2).sum(-1)

    cf = tp.compile(f, strict_native=True)
    x, w = torch.randn(8, 4), torch.randn(8, 4)
    with torch.no_grad():
        for _ in range(3):
            assert torch.allclose(cf(x, w), f(x, w), atol=1e-5)
        with torch.inference_mode():
            assert cf(x, w).is_inference() and cf(x, w).is_inference()
        program = tp.explain(cf).versions[0].program
        assert type(program.trusted) is native.Launch
        assert all(torch.equal(a, b) for a, b in zip(program.trusted(x, w), program(x, w)))
        with pytest.raises(TypeError, match="takes 2 inputs, not 1"):
            program.trusted(x)
        with pytest.raises(TypeError, match="compiled for"):
            program(x[:4], w)


def test_a_failed_check_raises_eagers_exception_on_a_hit():
    table = torch.randn(5, 3)

    def f(i):
        return table[i] + 1

    cf, good, bad = tp.compile(f), torch.tensor([0, 4, -1]), torch.tensor([0, 5, -1])
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(cf(good), f(good))
            with pytest.raises(IndexError):
                cf(bad)


def test_wrong_steps_are_refused():
    answers = native.probed()
    for bad in ((("unknown", 0, -1, None),), (("constant", 7, -1, None),), ((1, 2),)):
        with pytest.raises((ValueError, TypeError)):
            native.Check(answers, (), (), bad, 1, (), False, print, 0)
    with pytest.raises(TypeError):
        comp(lambda x: x).checks = (1,)
    with pytest.raises((ValueError, TypeError)):
        native.Launch(1, 1, (), (5,), (), (), None, None, None, None, None, None)


def test_without_the_extension_everything_is_the_same():
    tests = Path(__file__).parents[1]
    chosen = "example_3_2 or grad_mode or module_flags or aliasing or weakly or events or levels or hits_exactly or limit"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", chosen, str(tests / "test_compiled.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tests.parent, env=os.environ | {"TP_NATIVE": "0"})
    assert done.returncode == 0, done.stdout[-2000:]


def test_built_into_the_cache_folder_for_a_later_process(tmp_path):
    program = "import tensorplay.native as n; n._found = lambda: None; n.native = None; n.build_later(); import threading; " \
        "[t.join() for t in threading.enumerate() if t.name == 'tensorplay-native']; print(n.built().exists())"  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(tp.__file__).parents[1], env=os.environ | {"TP_CACHE_DIR": str(tmp_path)}
    )
    assert done.stdout.strip() == "True", done.stderr
