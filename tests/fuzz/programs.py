"""Random programs against eager: branches, in-place writes, views, closures, scalars, module flags, call orders.

A program is the text of a function f(x, y, k), written for any number of rows and columns; `x` and `y` are matrices.
Variables have a *kind*: m (rows, columns), t (columns, rows), r (rows, 1), c (columns,), s (0-d).
"""

from __future__ import annotations

import enum
import functools
import random
import types
from dataclasses import dataclass
from typing import Any

import torch

UNARY = ("torch.relu({})", "torch.tanh({})", "{}.abs()", "-{}", "torch.sin({})", "torch.sigmoid({})", "{}.clamp(-2, 2)", "{} * 0.5",
         "1 - {}", "torch.nn.functional.gelu({}.clamp(-50, 50))", "{}.floor()", "torch.where({0} > 0, {0}, -1.0)", "{}.abs().sqrt()", "2 * {}",
         "{}.to(torch.float64).to(torch.float32)", "torch.nn.functional.silu({})", "{0}.masked_fill({0} > 1, 0.25)")  # fmt: skip
BINARY = ("{} + {}", "{} * {}", "{} - {}", "torch.maximum({}, {})", "torch.where({0} > {1}, {0}, {1})", "torch.minimum({}, {})",
          "{} + {} * 0.25", "torch.atan2({}, {})")  # fmt: skip
SCALAR = ("{} + k", "{} * k", "k - {}", "{} * scale", "{} + bias", "{} * state.p", "{}.clamp_min(k)", "{} + table[1]", "{} + offset['a']")
INPLACE = ("{}.add_({})", "{}.mul_({})", "{}.copy_({})", "{}.sub_({}, alpha=0.5)")
WRITES = ("{}.relu_()", "{}[0] = 1.5", "{}[..., :1] += 1", "{}.mul_(0.5)", "{}.clamp_(-3, 3)", "{}[0].neg_()", "{}.add_(k)", "{}[..., ::2].mul_(2)")
REDUCTIONS = {  # text, kinds it takes -> kind it gives
    "{}.sum(-1, keepdim=True)": {"m": "r"}, "{}.mean(0)": {"m": "c"}, "{}.amax(-1, keepdim=True)": {"m": "r"}, "{}.sum()": dict.fromkeys("mtrcs", "s"),
    "{}.mean()": dict.fromkeys("mtrc", "s"), "torch.softmax({}, -1)": {"m": "m", "t": "t", "c": "c"}, "{}.amin(0)": {"m": "c"}, "{}.cumsum(-1)": {"m": "m", "c": "c"},
    "torch.nn.functional.layer_norm({0}, ({0}.shape[-1],))": {"m": "m", "t": "t"}, "{}.argmax(-1, keepdim=True).float()": {"m": "r"},
    "{}.var(-1, keepdim=True, correction=0)": {"m": "r"}, "({} > 0).sum(-1, keepdim=True).float()": {"m": "r"}, "{}.logsumexp(0)": {"m": "c"},
}  # fmt: skip
VIEWS = {
    "{}.t()": {"m": "t", "t": "m"}, "{}[0]": {"m": "c", "c": "s"}, "{}[:, :1]": {"m": "r"}, "{}.unsqueeze(0).squeeze(0)": dict.fromkeys("mtrc", "="),
    "{0}.reshape(-1).view({0}.shape)": {"m": "m", "c": "c"}, "{}.flip(-1)": {"m": "m", "c": "c"}, "{}.contiguous()": dict.fromkeys("mtrcs", "="),
    "torch.cat([{0}, {0}], -1)[..., :{0}.shape[-1]]": {"m": "m", "c": "c"}, "{}.clone()": dict.fromkeys("mtrcs", "="), "{}.roll(1, -1)": {"m": "m", "c": "c"},
    "torch.stack([{0}, {0}])[1]": dict.fromkeys("mtrc", "="), "{}.detach()": dict.fromkeys("mtrcs", "="),
}  # fmt: skip
# several statements from two matrices {a} and {b} to a third, {r}
BLOCKS = (
    "{r} = torch.empty_like({a})\ntorch.add({a}, {b}, out={r})",
    "{r} = {a}.clone()\n{r}[torch.tensor([0])] = {b}[:1]",
    "{r} = {a}.clone()\n{r}[{r} > 0.5] = 0.5",
    "def inner(t, other={a}):\n    return t * 2 + other\n{r} = inner({b})",
    "def inner():\n    return {a} * 2 - {b}\n{r} = inner()",
    "def early(t):\n    if t.sum() > 0:\n        return t * 2\n    return t - 1\n{r} = early({a})",
    "box = Box({a}, [{b}])\n{r} = box.first + box.rest[0]",
    "{r} = helper({a}, other={b}, factor=k)",
    "{r} = helper(*[{a}], **{{'other': {b}}})",
    "{r} = {a}\nfor i in range(2 + int(k > 1)):\n    {r} = {r} * 0.5 + i",
    "{r}, steps = {a}, 0\nwhile {r}.abs().max() > 1 and steps < 3:\n    {r} = {r} * 0.5\n    steps += 1",
    "try:\n    {r} = {a} @ {b}\nexcept RuntimeError:\n    {r} = {a} + 1",
    "try:\n    if {a}.sum() > 1:\n        raise KeyError\n    {r} = {b} * 2\nexcept KeyError:\n    {r} = {a} * 3",
    "parts = {{'p': {a}, 'q': [{b}]}}\nparts['p'] = parts['p'] + 1\n{r} = parts['p'] + parts['q'][0]",
    "rows = [row * 2 for row in {a}]\n{r} = torch.stack(rows)",
    "{r} = state({a})",
    "{r} = torch.nn.functional.dropout({a}, 0.5, training=False) + store[1:].sum()",
    "with torch.no_grad():\n    {r} = {a} * 2",
    "{r} = sum(t for t in ({a}, {b}))",
    "{r} = functools.reduce(lambda p, q: p * q, [{a}, {b}, {a}])",
    "{r} = max([{a}, {b}], key=lambda t: t.sum().item())",
    "{r} = torch.func.vmap(lambda row: row * 2 + 1)({a})",
    "{r} = torch.func.grad(lambda t: (t * {b}).sum())({a})",
    "{r} = {a}.masked_scatter({a} > 0, {b}.contiguous())",
    "{r} = {a} * mode.factor if mode is Mode.LOUD else {a} - 1",
    "{r} = {a} * getattr(settings, 'gain', 1.5)",
)  # fmt: skip
CONDITIONS = ("{}.sum() > 0", "{}.max() > 1", "({} > 0).all()", "k > 1", "state.training", "flag", "{}.mean().item() > 0.1", "len({}.shape) > 1", "{}.shape[0] > 3")


class State(torch.nn.Module):
    """Module state that programs read."""

    def __init__(self) -> None:
        super().__init__()
        self.p = 1.5
        self.register_buffer("shift", torch.tensor(0.5))

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        return t * self.p + self.shift if self.training else t - self.shift


@dataclass
class Box:
    """An object that programs make."""

    first: torch.Tensor
    rest: list[torch.Tensor]


class Mode(enum.Enum):
    """A constant that programs compare by identity."""

    QUIET = 1
    LOUD = 2

    @property
    def factor(self) -> float:
        return 0.5 * self.value


def helper(t: torch.Tensor, *, other: torch.Tensor, factor: Any = 2) -> torch.Tensor:
    return t * factor + other


@dataclass
class Program:
    """One program: its text, its function, and the names in its globals that calls may change."""

    text: str
    space: dict[str, Any]

    @property
    def function(self) -> Any:
        return self.space["f"]


class Writer:
    """Writes one random program."""

    def __init__(self, rng: random.Random, writes: bool = True) -> None:
        self.rng, self.writes = rng, writes
        self.kinds = {"x": "m", "y": "m"}
        self.count = 0

    def pick(self, kinds: str = "mtrcs") -> str | None:
        names = [n for n, k in self.kinds.items() if k in kinds]
        return self.rng.choice(names[-6:]) if names else None

    def new(self, kind: str) -> str:
        self.count += 1
        name = f"v{self.count}"
        self.kinds[name] = kind
        return name

    def statement(self, pad: str, depth: int) -> list[str]:
        roll = self.rng.random()
        a = self.pick()
        kind = self.kinds[a]
        if roll < 0.22:
            return [f"{pad}{self.new(kind)} = {self.rng.choice(UNARY).format(a)}"]
        if roll < 0.42:
            b = self.pick(kind if kind in "st" else "mrcs" if kind == "m" else kind + "s")
            return [f"{pad}{self.new(kind)} = {self.rng.choice(BINARY).format(a, b)}"]
        if roll < 0.52:
            return [f"{pad}{self.new(kind)} = {self.rng.choice(SCALAR).format(a)}"]
        if roll < 0.66:
            return self.table(pad, REDUCTIONS)
        if roll < 0.76:
            return self.table(pad, VIEWS)
        if roll < 0.82:
            return self.block(pad)
        if roll < 0.90 and self.writes:
            target = self.pick("mc")
            if self.rng.random() < 0.5:
                same = self.pick(self.kinds[target])
                return [f"{pad}{self.rng.choice(INPLACE).format(target, same)}"]
            return [f"{pad}{self.rng.choice(WRITES).format(target)}"]
        if depth < 2:
            return self.branch(pad, depth)
        return []

    def block(self, pad: str) -> list[str]:
        a, b = self.pick("m"), self.pick("m")
        text = self.rng.choice(BLOCKS).format(a=a, b=b, r=f"v{self.count + 1}")
        self.new("m")
        return [pad + line for line in text.split("\n")]

    def table(self, pad: str, rows: dict[str, dict[str, str]]) -> list[str]:
        text, kinds = self.rng.choice(list(rows.items()))
        a = self.pick("".join(kinds))
        if a is None:
            return []
        kind = kinds[self.kinds[a]]
        return [f"{pad}{self.new(self.kinds[a] if kind == '=' else kind)} = {text.format(a)}"]

    def branch(self, pad: str, depth: int) -> list[str]:
        lines = [f"{pad}if {self.rng.choice(CONDITIONS).format(self.pick('mtr'))}:"]
        before = dict(self.kinds)
        results = []
        for word in ("", "else"):
            if word:
                lines.append(f"{pad}else:")
            self.kinds = dict(before)
            for _ in range(self.rng.randint(1, 3)):
                lines += self.statement(pad + "    ", depth + 1)
            results.append(self.pick("m"))
            lines.append(f"{pad}    chosen = {results[-1]}")
        self.kinds = before
        lines.append(f"{pad}{self.new('m')} = chosen + 0")
        return lines

    def program(self, length: int) -> Program:
        lines = ["def f(x, y, k):"]
        for _ in range(length):
            lines += self.statement("    ", 0)
        names = [n for n in self.kinds if n not in "xy"] or ["x"]
        chosen = self.rng.sample(names, min(len(names), self.rng.randint(1, 3)))
        if self.rng.random() < 0.15:
            chosen.append("x")
        lines.append(f"    return {', '.join(chosen)}")
        text = "\n".join(lines)
        space = {
            "torch": torch, "scale": torch.tensor(1.25), "bias": 0.5, "state": State(), "flag": True, "table": [1.0, 2.0],
            "offset": {"a": torch.tensor(0.75)}, "functools": functools, "Box": Box, "Mode": Mode, "mode": Mode.QUIET, "helper": helper,
            "store": torch.tensor([0.5, 0.25, -0.5]), "settings": types.SimpleNamespace(),
        }  # fmt: skip
        import linecache

        name = f"<program {hash(text) & 0xFFFFFFFF:08x}>"
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        exec(compile(text, name, "exec"), space)
        return Program(text, space)


def matrix(rng: random.Random, rows: int, columns: int, huge: float = 3e38) -> torch.Tensor:
    """A matrix in one of several layouts, with special values now and then."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    layout = rng.choice(["plain", "plain", "t", "slice", "step"])
    if layout == "t":
        m = torch.randn(columns, rows, generator=generator).t()
    elif layout == "slice":
        m = torch.randn(rows + 2, columns + 3, generator=generator)[1 : rows + 1, 2 : columns + 2]
    elif layout == "step":
        m = torch.randn(rows, 2 * columns, generator=generator)[:, ::2]
    else:
        m = torch.randn(rows, columns, generator=generator)
    if rng.random() < 0.3:
        for special in (0.0, -0.0, 1e-40, float("inf"), float("-inf"), float("nan"), huge):
            if rng.random() < 0.4 and m.numel():
                m[rng.randrange(rows), rng.randrange(columns)] = special
    return m


def change(rng: random.Random, program: Program) -> None:
    """Changes something outside the arguments, as a user's program would between two calls."""
    space = program.space
    match rng.randrange(12):
        case 0:
            space["bias"] = rng.choice([0.5, -1.0, 0.0, -0.0])
        case 1:
            space["state"].p = rng.choice([1.5, 2.0])
        case 2:
            space["state"].train(rng.random() < 0.5)
        case 3:
            space["flag"] = rng.random() < 0.5
        case 4:
            space["scale"].mul_(-1)
        case 5:
            space["scale"] = torch.tensor(rng.choice([1.25, 3.0]))
        case 6:
            space["table"][1] = rng.choice([2.0, 4.0])
        case 7:
            space["offset"]["a"].add_(1)
        case 8:
            space["mode"] = rng.choice(list(Mode))
        case 9:
            space["settings"].gain = rng.choice([0.5, 2.0])
        case 10:
            space["store"].neg_()


def call(function: Any, x: torch.Tensor, y: torch.Tensor, k: Any) -> tuple:
    """('value', outputs, aliasing) or ('error', type)."""
    try:
        out = function(x, y, k)
    except Exception as failure:
        return ("error", type(failure).__name__, str(failure).splitlines()[0] if str(failure) else "")
    outputs = out if isinstance(out, tuple) else (out,)
    memory = [t.untyped_storage().data_ptr() for t in (*outputs, x, y)]
    return ("value", outputs, tuple(memory.index(m) for m in memory), tuple(t.stride() for t in outputs))


def copies(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies that keep layout and overlap."""
    from tensorplay.verify import copies

    return tuple(copies([x, y]))


def check(seed: int, compile_with: Any, calls: int = 6, writes: bool = True) -> str | None:
    """None, or what differs from eager for the program of this seed."""
    from tensorplay.testing import near

    rng = random.Random(seed)
    program = Writer(rng, writes).program(rng.randint(2, 10))
    huge = 1e3 if "layer_norm" in program.text or ".var(" in program.text else 3e38  # a variance overflows in its own way
    exact = "atan2" in program.text  # tells 0 and -0 apart, of which x + 0 makes one
    compiled = compile_with(program.function, options={"numerics": "strict" if exact else "default"})
    sizes = [(3, 4), (5, 2), (3, 4), (4, 4), (1, 1)]
    history = []
    for number in range(calls):
        if number and rng.random() < 0.4:
            change(rng, program)
        x = matrix(rng, *rng.choice(sizes[: 2 + number]), huge)
        y = x if rng.random() < 0.1 else matrix(rng, *x.shape, huge)
        if rng.random() < 0.05:
            y = x.t().contiguous().t() if rng.random() < 0.5 else x[:]
        k = rng.choice([1, 1.0, 2, True, 0.0, -0.0, 3])
        x1, y1 = copies(x, y)
        x2, y2 = copies(x, y)
        want = call(program.function, x1, y1, k)
        got = call(compiled, x2, y2, k)
        history.append((tuple(x.shape), x.stride(), k))
        same = want[0] == got[0] and (want[1] == got[1] if want[0] == "error" else near(got[1], want[1], 2e-4) and got[2:] == want[2:])
        if not same or not near((x2, y2), (x1, y1), 2e-4):
            return f"seed {seed}, call {number} {history}:\n{program.text}\nwant {want}\ngot {got}\ninputs after {x1}{y1} and {x2}{y2}"
    return None
