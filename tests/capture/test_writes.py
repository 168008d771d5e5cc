"""Functions that leave values in objects which existed before the call: modules that keep activations, averages, states."""

import pytest
import torch
from torch import nn

import tensorplay as tp
from tensorplay.compiled import compiled_of

from .sequences import CASES, T, case, check

XS = [(T(1, 2, 3),), (T(-1, 2, -3),), (T(1, 2, 3),)]
CAPTURED, NATIVE = {}, {}  # without a fallback; through kernels as well


def captured(f):
    CAPTURED[f.__name__] = f
    return case(f)


def native(f):
    NATIVE[f.__name__] = f
    return captured(f)


class Module(nn.Module):
    """A module whose forward is a function of the module and the input."""

    def __init__(self, forward, **attributes):
        super().__init__()
        self.body = forward
        for name, value in attributes.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x):
        return self.body(self, x)


@native
def an_activation_and_a_counter_tensor():
    def forward(m, x):
        m.n += 1
        m.last = x * 2
        return m.last + m.n

    m = Module(forward, n=torch.zeros(()), last=None)
    return m, XS, lambda: (m.n.clone(), m.last.clone())


@native
def a_moving_average_in_a_buffer():
    def forward(m, x):
        m.average = m.average * 0.9 + x * 0.1
        return x - m.average

    m = Module(forward, average=torch.zeros(3))
    return m, XS, lambda: (m.average.clone(), list(m._buffers), list(m.__dict__))


@captured
def an_attribute_that_the_first_call_makes():
    def forward(m, x):
        m.aux = x.sum()
        return x * 2

    m = Module(forward)
    return m, [*XS, (T(1, 2),)], lambda: (m.aux.clone(), list(m.__dict__)[-1])


@captured
def what_is_kept_is_what_is_returned():
    def forward(m, x):
        y = x * 2
        m.last, m.pair = y, (y, x)
        return y

    m, xs = Module(forward), [T(1, 2), T(3, 4)]
    return m, [(xs[0],), (xs[1],), (xs[0],)], lambda: (m.pair[0] is m.last, m.pair[1] is xs[0], m.pair[1] is xs[1], m.last)


@case
def a_counter():
    def forward(m, x):
        m.n += 1
        m.last = x * m.n
        return m.last

    m = Module(forward, n=0)
    return m, XS, lambda: (m.n, m.last)


@captured
def a_flag_that_the_first_call_sets():
    def forward(m, x):
        if not m.ready:
            m.scale = x.abs().max()
            m.ready = True
        m.last = x / m.scale
        return m.last

    m = Module(forward, ready=False)
    return m, [*XS, lambda: setattr(m, "ready", False), *XS], lambda: (m.ready, m.scale, m.last)


@native
def a_state_that_is_reset():
    torch.manual_seed(0)

    def forward(m, x):
        m.h = m.cell(x, m.h)
        return m.h

    m, x = Module(forward, cell=nn.GRUCell(3, 4), h=None), torch.randn(2, 3)
    return m, [(x,), (x * 2,), (x,), lambda: setattr(m, "h", None), (x,), (x,)], lambda: m.h.detach()


@captured
def elements_of_lists_and_dictionaries():
    held, named = [torch.zeros(3), 1], {"h": None}

    def f(x):
        held[0] = held[0] + x
        named["h"] = x if named["h"] is None else named["h"] * 0.5 + x
        return held[0] * named["h"]

    return f, XS, lambda: (list(held), dict(named))


TOTAL = torch.zeros(3)


@captured
def globals_and_variables_of_closures():
    global TOTAL
    TOTAL, h = torch.zeros(3), torch.zeros(3)

    def f(x):
        nonlocal h
        global TOTAL
        h, TOTAL = h * 0.5 + x, TOTAL + x
        return h.sum() + TOTAL

    return f, XS, lambda: (h, TOTAL)


class Holder:
    def __init__(self, h):
        self.h = h


@captured
def attributes_of_an_argument():
    def f(x, c):
        c.h = c.h + x
        c.more = [c.h, {"a": x * 2}]
        return c.h * 2

    c, d = Holder(torch.zeros(3)), Holder(torch.ones(3))
    return f, [(T(1, 2, 3), o) for o in (c, c, d, c)], lambda: (c.h, getattr(c, "more", None), d.h)


@captured
def two_values_that_change_places():
    def forward(m, x):
        m.a, m.b = m.b, m.a + x
        return m.a - m.b

    m = Module(forward, a=torch.zeros(3), b=torch.ones(3))
    return m, XS, lambda: (m.a, m.b)


@captured
def a_parameter_that_is_replaced():
    def forward(m, x):
        with torch.no_grad():
            m.w = nn.Parameter(m.w * 0.9)
        return m.w * x

    m = Module(forward, w=nn.Parameter(torch.ones(3)))
    return m, XS, lambda: (m.w.detach().clone(), type(m.w).__name__, m.w.requires_grad)


@captured
def norms_that_set_an_attribute_of_their_module():
    torch.manual_seed(0)
    m = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(3, 3)), torch.nn.utils.spectral_norm(nn.Linear(3, 3)))
    return m, [*XS, m.eval, *XS], lambda: [b.clone() for b in m.buffers()] + [m[0].weight.detach(), m[1].weight.detach()]


@captured
def an_attribute_that_comes_and_goes():
    def forward(m, x):
        m.a = x
        del m.a
        m.b = x * 2
        return m.b

    m = Module(forward)
    return m, XS, lambda: m.b


@native
def a_kept_value_that_is_written_later():
    def forward(m, x):
        y = x * 2
        m.last, m.part = y, y[:2]
        y.add_(1)
        return y

    m = Module(forward)
    return m, [*XS, lambda: m.part.mul_(100), *XS], lambda: (m.last.clone(), m.part.clone())


@captured
def an_effect_before_a_raise():
    def forward(m, x):
        m.last = x * 2
        if x.sum() < 0:
            raise ValueError("negative")
        return m.last

    m = Module(forward)
    return m, XS, lambda: m.last


@captured
def activations_in_a_dictionary_of_a_hook():
    acts = {}
    m = nn.Linear(3, 3)
    m.register_forward_hook(lambda m, a, o: acts.__setitem__("o", o.detach()))
    return m, XS, lambda: dict(acts)


@native
def a_loss_on_the_side_that_is_differentiated_later():
    torch.manual_seed(0)

    def forward(m, x):
        h = m.inner(x)
        m.aux = (h**2).mean()
        return h.tanh()

    m = Module(forward, inner=nn.Linear(3, 3), aux=None)
    steps = [(T(1, 2, 3),), lambda: m.aux.backward(), (T(1, 2, 3),), lambda: (m.aux * 2).backward()]
    return m, steps, lambda: (m.aux.detach(), m.inner.weight.grad)


@native
def a_state_that_is_written_in_place_and_copied():
    def forward(m, x):
        m.h.mul_(0.5).add_(x)
        m.before = m.h.clone()
        return m.h * 2

    m = Module(forward, h=torch.zeros(3))
    return m, XS, lambda: (m.h.clone(), m.before)


@captured
def a_branch_on_what_is_kept():
    def forward(m, x):
        m.h = m.h + x
        return x * 2 if m.h.sum() > 0 else x

    m = Module(forward, h=torch.zeros(3))
    return m, XS, lambda: m.h


@captured
def one_module_twice_in_a_call():
    def forward(m, x):
        m.h = m.h + x
        return m.h * 2

    m = Module(forward, h=torch.zeros(3))
    return (lambda x: m(x) + m(x * 2)), XS, lambda: m.h


@captured
def two_names_for_one_object():
    def f(x, a, b):
        a.h = x * 2
        return b.h + 1

    a, b = Holder(torch.zeros(3)), Holder(torch.ones(3))
    return f, [(T(1, 2, 3), *pair) for pair in ((a, b), (a, a), (b, a), (a, b))], lambda: (a.h, b.h)


@captured
def results_in_containers_of_the_caller():
    def f(x, out, both):
        out["y"] = x * 2
        out["z"] = out["y"] + 1
        both[0] = out["z"]
        both[1] = both[0]

    d, e, both = {"y": None, "z": None}, {"y": None, "z": None}, [None, None]
    return f, [(T(1, 2), d, both), (T(1, 2), d, both), (T(3, 4), e, both)], lambda: (dict(d), dict(e), both[0] is both[1])


@case
def a_list_that_grows():
    log = []

    def f(x):
        log.append(x.sum())
        return x * 2

    return f, XS, lambda: list(log)


@case
def a_cache_that_grows():
    def forward(m, x):
        m.k = torch.cat([m.k, x[None]])
        return m.k.sum(0)

    m = Module(forward, k=torch.zeros(0, 3))
    return m, XS, lambda: m.k


@case
def slots_and_classes():
    class Slotted:
        __slots__ = ("h",)
        k = torch.zeros(3)

    c = Slotted()
    c.h = torch.zeros(3)

    def f(x):
        c.h = c.h + x
        Slotted.k = Slotted.k + x
        return c.h * Slotted.k

    return f, XS, lambda: (c.h, Slotted.k)


@pytest.mark.parametrize("name", CASES[__name__])
def test_writes(name):
    found = check(CASES[__name__][name])
    assert name not in CAPTURED or not found.fallbacks, found.fallbacks


@pytest.mark.parametrize("name", NATIVE)
def test_writes_through_kernels(name):
    assert not check(NATIVE[name], backend="stax", tolerance=1e-5).fallbacks


def test_strict_mode_takes_what_can_be_repeated_and_the_versions_settle():
    m = Module(lambda m, x: setattr(m, "last", x * 2) or m.last + 1, last=None)
    c = tp.compile(m, backend="eager", strict_native=True)
    for k in range(6):
        x = torch.full((3,), float(k))
        assert torch.equal(c(x), x * 2 + 1) and torch.equal(m.last, x * 2)
    assert len(compiled_of(c).live_versions()) == 2


def test_verify_does_not_repeat_what_is_kept():
    m = Module(lambda m, x: setattr(m, "average", m.average * 0.5 + x) or x * 2, average=torch.zeros(2))
    c = tp.compile(m, verify=True)
    for _ in range(3):
        c(torch.ones(2))
    assert torch.equal(m.average, torch.full((2,), 1.75))
