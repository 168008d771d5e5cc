"""What the extension remembers of dictionaries: a check decides what plain Python decides, however they change.

Stores by statements that CPython specializes, by every method of dict, by replacing dictionaries and objects.
"""

import random

import pytest

from tensorplay.native import native

pytestmark = pytest.mark.skipif(native is None, reason="the extension is not built")


class Module:
    """What the steps for a module need of one."""

    def __init__(self):
        self.training, self.p = True, 1.0
        self._parameters, self._buffers, self._modules = {"w": object(), "b": object()}, {}, {}
        self._forward_hooks, self._forward_pre_hooks = {}, {}


def names(m):
    held = m.__dict__
    return (*held, *held["_parameters"], *held["_buffers"], *held["_modules"])


def seen(m):
    return names(m), m.p, m.training


def dispatch(root):
    """A callable that returns the parameter w of the module in `root` where nothing else changed, else None."""

    class Own(native.Dispatch):
        def _call(self, args, kwargs):
            return None

    m = root["m"]
    steps = [
        ("constant", 0, -1, root), ("item", 1, 0, "m"), ("dict", 2, 1, None), ("module", 2, 1, Module), ("item", 3, 2, "_parameters"),
        ("absent", 2, -1, "w"), ("item", 4, 3, "w"), ("attribute", 5, 1, "p"), ("same", -1, 5, m.p), ("names", 2, -1, names(m)),
        ("item", 6, 2, "training"), ("is", -1, 6, m.training),
    ]  # fmt: skip
    own = Own()
    own.checks = (native.Check(native.probed(), (), (), tuple(steps), 7, (4,), False, lambda w: (w,), 0),)
    return own


def holds(root, key):
    m = root["m"]
    held = m.__dict__
    if type(m) is not Module or held["_forward_hooks"] or held["_forward_pre_hooks"] or "forward" in held or "w" in held:
        return False
    return seen(m) == key


def store_p(m, v):
    m.p = v


def store_training(m, v):
    m.training = v


def store_other(m):
    m.other = 1


def remove_other(m):
    if "other" in m.__dict__:
        del m.other


def change(root, r):
    m = root["m"]
    held, own = m.__dict__, m._parameters
    r.choice([
        lambda: store_p(m, r.choice([1.0, 1.0, 2.0])), lambda: store_training(m, r.choice([True, True, False])), lambda: store_other(m),
        lambda: remove_other(m), lambda: held.__setitem__("p", 1.0), lambda: held.update(p=r.choice([1.0, 3.0])), lambda: held.__ior__({"p": 1.0}),
        lambda: own.__setitem__("w", object()), lambda: own.update(w=object()), lambda: own.pop("b", None), lambda: own.setdefault("b", object()),
        lambda: m._buffers.__setitem__("x", 1), lambda: m._buffers.clear(), lambda: m._forward_hooks.__setitem__(1, 2), lambda: m._forward_hooks.clear(),
        lambda: setattr(m, "forward", 1), lambda: held.pop("forward", None), lambda: root.__setitem__("m", Module()), lambda: root.update(m=Module()),
        lambda: setattr(m, "__dict__", dict(held)), lambda: held.__setitem__("w", 1), lambda: held.pop("w", None), lambda: (held.__setitem__("z", 1), held.popitem()),
        lambda: setattr(m, "_parameters", {"w": object(), "b": object()}), lambda: held.update({k: held.pop(k) for k in list(held)}),
    ])()  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_a_check_decides_what_python_decides(seed):
    r, hits, misses = random.Random(seed), 0, 0
    for _ in range(20):
        root = {"m": Module()}
        own, key = dispatch(root), seen(root["m"])
        for _ in range(200):
            for _ in range(r.choice([0, 1, 1, 2, 20])):
                change(root, r)
            for _ in range(2):
                w = own()
                assert (w is not None) == holds(root, key)
                assert w is None or w is root["m"]._parameters["w"]
            hits, misses = hits + (w is not None), misses + (w is None)
            if w is None and r.random() < 0.3:
                root["m"] = Module()
    assert hits > 500 and misses > 500
