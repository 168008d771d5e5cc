"""Section 2: the specialization key, guards, dispatch, lifting. One test a claim (rows 2.01 to 2.27)."""

import gc
import itertools
import warnings

import pytest
import torch
from torch import nn

import tensorplay as tp
from tensorplay.testing import LOG, REASONS, C, N, eq

ones = torch.ones


def comp(f=None, **k):
    k.setdefault("backend", "eager")
    return tp.compile(f, **k)


def counters(cf):
    return tp.explain(cf).counters


def test_2_01_the_key_has_four_parts():
    """sigma, gamma_s (what shapes were read as numbers), gamma_g (outcomes of gates), rho (the ambient state)."""
    cf = comp(lambda x: x * x.shape[0] if x.sum() > 0 else x)
    cf(ones(2))
    (version,) = tp.explain(cf).versions
    assert version.sigma[0][0][0] == "tensor" and version.ambient[0] is True
    assert [g.value for g in version.gates] == [True]


class Plain:
    """An object that is compared by type, identity and attributes."""

    def __init__(self, k):
        self.k = k


def test_2_02_ten_variations_of_an_argument_and_the_number_of_versions_after_each():
    def f(x, o):
        return x.cos(), type(o).__name__

    cf, x, plain = comp(f, recompile_limit=20), torch.randn(2, 2), Plain(1)
    calls = [
        (x, None, 1), (x.clone(), None, 1), (torch.randn(2, 3), None, 2), (x.double(), None, 3), (x.clone().requires_grad_(), None, 4), (x.t(), None, 5),
        (nn.Parameter(x), None, 6), (x, "text", 7), (x, [1, {"a": 2.0}], 8), (x, [1, {"a": 2.5}], 9), (x, [1, {"a": 2.5}], 9), (x, plain, 10), (x, Plain(1), 11),
        (x, plain, 11),
    ]  # fmt: skip
    keep = [o for _, o, _ in calls]  # an object that dies takes its version along
    for t, o, versions in calls:
        got, want = cf(t, o), f(t, o)
        assert eq(got, want) and got[0].requires_grad == want[0].requires_grad and N(cf) == versions
    for (t, o, _), _ in itertools.product(calls, range(2)):
        assert eq(cf(t, o), f(t, o))
    assert N(cf) == C(cf) == 11 and keep
    plain.k = 2
    assert eq(cf(x, plain), f(x, plain)) and C(cf) == 12


def test_2_03_a_scalar_is_specialized_and_a_0_dim_tensor_is_not():
    cf = comp(lambda x, k: x * k)
    cf(ones(2), 3), cf(ones(2), 4)
    assert N(cf) == 2
    cf(ones(2), torch.tensor(3.0))
    assert eq(cf(ones(2), torch.tensor(4.0)), 4 * ones(2)) and N(cf) == 3


def test_2_04_type_is_part_of_the_scalar_key():
    def f(x, k):
        return x * k

    cf, x = comp(f), torch.arange(3)
    for _ in range(3):
        for k in (1, 1.0, True):
            assert cf(x, k).dtype == f(x, k).dtype
    assert N(cf) == 3


def test_2_05_strides_are_compared():
    cf = comp(lambda x: x.cos() - 1, dynamic=False)
    layouts = [torch.randn(4, 4), torch.randn(4, 4).t(), torch.randn(4, 1).expand(4, 4), torch.randn(4, 8)[:, ::2]]
    for t in layouts * 3:
        assert eq(cf(t), t.cos() - 1)
    assert N(cf) == 4


def test_2_07_what_stands_for_an_argument_while_tracing_has_its_layout():
    base, seen = torch.arange(40.0).view(8, 5), []

    def f(x):
        seen[:] = [x.stride(), x.storage_offset(), x.shape]
        return x + 1

    t = base[3:].t()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tp.FallbackWarning)  # the list is an effect
        assert eq(comp(f)(t), t + 1)
    assert seen == [t.stride(), t.storage_offset(), t.shape] == [(1, 5), 15, (5, 5)]

    def shows(x):
        return x + 1, x.stride(), x.storage_offset()

    cf = comp(shows, strict_native=True)
    for t in (base[3:].t(), base[2:].t()[:, :5], base[:5].clone()):
        assert eq(cf(t)[0], t + 1) and cf(t)[1:] == (t.stride(), t.storage_offset())


def test_2_08_sizes_that_were_read_are_exact_parts_of_the_key():
    f = lambda x: x * x.shape[0] + len(x)  # noqa: E731
    cf = comp(f, dynamic=True)  # the back end has no symbolic capture
    for n in (3, 4, 3, 4):
        assert eq(cf(ones(n)), f(ones(n)))
    assert N(cf) == C(cf) == 2
    nested = comp(lambda p: p["a"][0] * p["a"][0].shape[0])
    for n in (3, 4, 3):
        assert eq(nested({"a": [ones(n)]}), n * ones(n))
    assert N(nested) == 2


def test_2_09_the_key_is_discovered_by_the_trace_in_every_order():
    def nest(x):
        if x.sum() > 0:
            return x * 2 if x.max() > 10 else x * 3
        return x - 1

    inputs = [-ones(3), ones(3), 20 * ones(3)]
    for order in itertools.permutations(range(3)):
        cf = comp(nest)
        for k in order * 3:
            assert eq(cf(inputs[k].clone()), nest(inputs[k])) and eq(cf(inputs[k]), nest(inputs[k]))
        assert N(cf) == 3


def test_2_10_grad_mode_is_read_on_every_level():
    cf, w = comp(lambda x: x * 2), ones(2, requires_grad=True)
    for _ in range(4):
        assert cf(w).requires_grad and cf(w).requires_grad
        with torch.no_grad():
            assert not cf(w).requires_grad and not cf(w).requires_grad
    assert N(cf) == C(cf) == 2


def test_2_11_all_guards_hold_exactly_where_the_keys_are_equal():
    from tensorplay.key.version import Call

    state = {"k": 1.0}

    def f(x, y, s=None):
        return x * state["k"] + y + (0 if s is None else s)

    cf = comp(f, recompile_limit=100)
    draws = [(a, b, s, k, grad) for a, b in ((ones(2), ones(2)), (ones(3), ones(1)), (ones(2).double(), ones(2))) for s in (None, 1, 1.0, 0.0, -0.0)
             for k in (1.0, 2.0) for grad in (True, False)]  # fmt: skip
    for a, b, s, k, grad in draws:
        state["k"] = k
        with torch.set_grad_enabled(grad):
            assert eq(cf(a, b, s), f(a, b, s))
    assert N(cf) == len(draws) == 60
    for j, (a, b, s, k, grad) in enumerate(draws):
        state["k"] = k
        with torch.set_grad_enabled(grad):
            call = Call.of((a, b, s), {})
            holding = [not v.failing(call, (a, b, s), {}) for v in cf.versions]
            assert holding == [v.serves(call, (a, b, s), {}) is not None for v in cf.versions] == [i == j for i in range(len(draws))]


def test_2_12_a_miss_names_exactly_the_differing_components():
    cf = comp(lambda x, k: x * k)
    cf(ones(2), 1)
    with torch.no_grad():
        cf(ones(2), 1)
    assert [g.path for g in REASONS(cf)] == ["grad mode"]
    cf(ones(2).double(), 1)
    assert cf.last_miss.reasons[0][0].condition == "inputs[0][0][3] == torch.float32"
    assert len(LOG(cf)) == 2


def test_2_13_a_guard_has_path_condition_expected_and_actual():
    cf = comp(lambda x: x + 1)
    cf(ones(4, 8)), cf(ones(6, 8))
    guard = REASONS(cf)[0]
    assert (guard.path, guard.expected, guard.actual) == ("inputs[0][0][2][0]", 4, 6) and guard.condition == "inputs[0][0][2][0] == 4"


def test_2_14_three_levels():
    cf, x = comp(lambda x: x + 1), ones(3)
    for _ in range(5):
        cf(x)
    for _ in range(5):
        cf(ones(3))
    found = counters(cf)
    assert found["misses"] == 1 and found["hits"] == 9
    if tp.native.native is not None:
        assert found["level1"] >= 3 and found["level3"] >= 5


@pytest.mark.parametrize("write", [lambda x: x.data.mul_(-1), lambda x: x.numpy().__setitem__(slice(None), -5.0)])
def test_2_15_gates_are_replayed_on_every_level(write):
    def f(t):
        return t * 2 if t.sum() > 0 else t - 1

    cf, x = comp(f), ones(3)
    for _ in range(3):
        assert eq(cf(x), f(x))
    write(x)
    for _ in range(3):
        assert eq(cf(x), f(x))


def test_2_16_metadata_that_changes_without_a_version():
    cf, x = comp(lambda t: t.sum(0)), ones(2, 3)
    cf(x), cf(x)
    x.data = ones(5, 4)
    assert tuple(cf(x).shape) == (4,) and N(cf) == 2
    cf, x = comp(lambda t: t * 2), ones(3)
    cf(x), cf(x)
    x.requires_grad_()
    assert cf(x).requires_grad and N(cf) == 2


def test_2_17_an_in_place_change_is_seen_and_compiles_nothing():
    cf, x = comp(lambda x: x + 1), ones(2)
    cf(x), cf(x)
    x.add_(1)
    assert eq(cf(x), 3 * ones(2)) and C(cf) == 1


def test_2_18_the_ninth_shape_runs_eagerly_with_one_warning():
    cf = comp(lambda x: x * 2, dynamic=False)
    for n in range(1, 9):
        cf(ones(n))
    with pytest.warns(tp.FallbackWarning, match=r"inputs\[0\]\[0\]\[2\]\[0\] varies"):
        assert eq(cf(ones(9)), 2 * ones(9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert eq(cf(ones(10)), 2 * ones(10)) and eq(cf(ones(1)), 2 * ones(1))
    assert N(cf) == 8 and counters(cf)["eager calls"] == 2
    strict = comp(lambda x: x * 2, dynamic=False, strict_native=True)
    for n in range(1, 9):
        strict(ones(n))
    with pytest.raises(tp.RecompileLimitError):
        strict(ones(9))


def test_2_19_the_limit_suggests_a_remedy():
    cf = comp(lambda x, k: x * k)
    with pytest.warns(tp.FallbackWarning, match="pass the number as a 0-dim tensor"):
        for k in range(9):
            cf(ones(1), k)


scale = ones(4)


def test_2_20_lifted_tensors_are_read_at_every_call():
    global scale
    scale = ones(4)
    cf, x = comp(lambda x: x * scale), ones(4)
    cf(x), cf(x)
    scale.mul_(2)
    assert eq(cf(x), 2 * ones(4)) and C(cf) == 1
    scale = 3 * ones(4)
    assert eq(cf(x), 3 * ones(4)) and eq(cf(x), 3 * ones(4)) and C(cf) == 1
    scale = 3 * ones(1)
    assert eq(cf(x), 3 * ones(4)) and C(cf) == 2


def test_2_21_gradients_reach_lifted_parameters_also_new_ones():
    lin = nn.Linear(4, 2)
    cf, x = comp(lambda x: lin(x).relu().sum()), torch.randn(3, 4)
    for _ in range(3):
        lin.weight.grad = None
        cf(x).backward()
        assert eq(lin.weight.grad, torch.autograd.grad(lin(x).relu().sum(), lin.weight)[0])
    lin.weight = nn.Parameter(torch.randn(2, 4))
    cf(x).backward()
    assert lin.weight.grad is not None and C(cf) == 1


factor = 2


def test_2_22_other_state_is_in_the_key_and_named():
    global factor
    factor = 2
    cf, x = comp(lambda x: x * factor), ones(2)
    cf(x), cf(x)
    factor = 5
    assert eq(cf(x), 5 * ones(2)) and N(cf) == 2 and "factor" in REASONS(cf)[0].path


def test_2_23_two_arguments_that_share_storage():
    def f(a, b):
        a.add_(1)
        return a + b

    cf, t = comp(f), ones(2)
    assert eq(cf(ones(2), ones(2)), 3 * ones(2)) and eq(cf(t, t), 4 * ones(2)) and N(cf) == 2


def test_2_24_a_reused_id_never_hits():
    class Config:
        def __init__(self, p):
            self.p = p

    cf = comp(lambda x, c: x * c.p)
    for p in range(1, 30):
        c = Config(float(p))
        assert eq(cf(ones(1), c), p * ones(1))
        del c
        gc.collect()
    assert N(cf) <= 1


def test_2_25_zero_signs_and_nan():
    cf = comp(lambda x, k: 1 / (x * k))
    for _ in range(3):
        assert cf(ones(1), 0.0) == torch.inf and cf(ones(1), -0.0) == -torch.inf and cf(ones(1), float("nan")).isnan()
    assert C(cf) == 3


def test_2_26_autocast_is_in_the_key():
    cf, a = comp(lambda a: a @ a), torch.randn(3, 3)
    for _ in range(3):
        assert cf(a).dtype is torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert cf(a).dtype is torch.bfloat16
    assert N(cf) == 2


def test_2_26_forward_mode_tangents_are_never_lost():
    cf, x = comp(lambda x: x * x), torch.tensor([3.0])
    cf(x), cf(x)
    with torch.autograd.forward_ad.dual_level(), pytest.warns(tp.FallbackWarning, match="forward-mode"):
        dual = torch.autograd.forward_ad.make_dual(x, torch.tensor([1.0]))
        assert torch.autograd.forward_ad.unpack_dual(cf(dual)).tangent == 6.0


def test_2_27_however_arguments_are_given():
    def f(x, s=2, *, b=1):
        return x * s + b

    cf, x = comp(f), ones(2)
    for _ in range(2):
        assert eq(cf(x), f(x)) and eq(cf(x, 3), f(x, 3)) and eq(cf(x, s=3, b=2), f(x, s=3, b=2)) and eq(cf(x=x), f(x))
