"""Translation validation: which level, pass and node first differs from eager (row 12.05).

In: a program of the stax back end and the inputs of a call.  Out: a `Finding`, or None where every level agrees.
Always: the caller's inputs are not touched; every level runs on copies that keep size, stride and overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .stax.loops.interpret import interpret, interpret_plan
from .stax.loops.nodes import Loops, Ref
from .stax.schedule.plan import Kernel, Memory, Plan
from .testing import near

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
LEVELS = ("graph", "ops", "loops", "plan", "kernels")


@dataclass(frozen=True)
class Finding:
    """The first difference: the level that is wrong, the pass that made it, the node or kernel, the user's line."""

    level: str
    made_by: str
    node: str
    line: str
    difference: str

    def __str__(self) -> str:
        where = f" ({self.line})" if self.line else ""
        return f"level '{self.level}' differs first, after {self.made_by}, at {self.node}{where}: {self.difference}"


def agree(got: Any, want: Any) -> bool:
    """Equal, or for floats within the bound of the dtype."""
    if isinstance(want, (tuple, list)):
        return len(got) == len(want) and all(map(agree, got, want))
    if type(got) is float and type(want) is float:  # read from a tensor of any dtype
        return near(torch.tensor(got), torch.tensor(want), TOLERANCE[torch.float32])
    if not isinstance(want, Tensor):
        return got is want or got == want or (got != got and want != want)
    return isinstance(got, Tensor) and near(got, want, TOLERANCE.get(want.dtype, 0.0))


def difference(got: Tensor, want: Tensor) -> str:
    """One line on how two values differ."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype}{list(got.shape)} instead of {want.dtype}{list(want.shape)}"
    worst = (got.double() - want.double()).abs().nan_to_num(torch.inf)
    where = tuple(int(i) for i in torch.unravel_index(worst.argmax(), worst.shape)) if worst.dim() else ()
    return f"{got[where].item()!r} instead of {want[where].item()!r} at {list(where)}"


def copies(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Copies of whole storages, so that inputs that share memory still do; of leaves that train, such leaves."""
    storages: dict[int, Tensor] = {}
    out = []
    for t in inputs:
        key = t.untyped_storage().data_ptr()
        if key not in storages:
            storages[key] = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage()).clone()
        copy = torch.empty(0, dtype=t.dtype, device=t.device)
        copy.set_(storages[key].untyped_storage(), t.storage_offset(), t.shape, t.stride())
        out.append(copy.requires_grad_(t.requires_grad and t.is_leaf))
    return out


def bisect(program: Any, graph: fx.GraphModule, inputs: Sequence[Tensor], choices: Any = None) -> Finding | None:
    """Runs every level on copies of the inputs and names the first that differs from the captured graph on torch.

    Results and written inputs count; every level draws the same random numbers. choices: those of the front end.
    """
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        run = Runs(inputs, torch.get_rng_state())
        want = run(graph)
        if (found := _front(program, graph, want, run, choices)) is not None:
            return found
        if (found := _ops(program, want, run)) is not None:
            return found
        truth = run.nodes(program.ops.module)
        lines = program.loops.lines
        origin = {b.name: n.origins[-1] for n in program.loops.nodes if n.origins for b in n.outputs if b is not None}
        values: dict[str, Tensor] = {}
        wrong: list[tuple[str, Tensor, Tensor]] = []

        def seen(name: str, value: Tensor) -> None:
            values[name] = value.clone()
            target = truth.get(origin.get(name, ""))
            same_meta = isinstance(target, Tensor) and target.shape == value.shape and target.dtype == value.dtype
            if same_meta and not agree(value, target):
                wrong.append((name, value.clone(), target))

        got = run(lambda *given: interpret(program.loops, given, seen))
        if not agree(got, want):
            name, value, target = wrong[0] if wrong else ("the outputs", *_first(got, want))
            return Finding("loops", "lowering", name, lines.get(origin.get(name, ""), ""), difference(value, target))
        wrong.clear()

        def planned(name: str, value: Tensor) -> None:
            if name in values and values[name].shape == value.shape and not agree(value, values[name]):
                wrong.append((name, value.clone(), values[name]))

        got = run(lambda *given: interpret_plan(program.plan, given, planned))
        if not agree(got, want):
            name, value, target = wrong[0] if wrong else ("the outputs", *_first(got, want))
            return Finding("plan", "scheduling", name, lines.get(origin.get(name, ""), ""), difference(value, target))
        got = run(lambda *given: program.run("kernels", given))
        if agree(got, want):
            return None
        given = dict(zip((b.name for b in program.loops.inputs), copies(inputs), strict=True))
        for kernel in program.plan.kernels:
            differs = _kernel(kernel, program.plan, given | program.loops.constants | values)
            if differs is not None:
                return Finding(
                    "kernels",
                    "code generation",
                    kernel.name,
                    next((lines[o] for o in kernel.origins if lines.get(o)), ""),
                    differs,
                )
        return Finding(
            "kernels", "the run time (memory, order of calls)", "the outputs", "", difference(*_first(got, want))
        )


def _flat(x: Any) -> list[Any]:
    return list(x) if isinstance(x, (tuple, list)) else [x]


def _first(got: Iterable[Any], want: Iterable[Any]) -> tuple[Tensor, Tensor]:
    return next((g, w) for g, w in zip(got, want, strict=True) if isinstance(w, Tensor) and not agree(g, w))


@dataclass(frozen=True)
class Runs:
    """The same inputs and the same random numbers for every level."""

    inputs: Sequence[Tensor]
    random: Tensor

    def __call__(self, level: Callable[..., Any]) -> list[Any]:
        """The results of one level, and behind them the inputs as it left them."""
        torch.set_rng_state(self.random)
        given = copies(self.inputs)
        results = [torch.tensor(x) if type(x) in (int, float) else x for x in _flat(level(*given))]
        return [*results, *given]

    def nodes(self, module: fx.GraphModule) -> dict[str, Any]:
        """The value of every node of a graph."""

        class Keep(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                value = super().run_node(n)
                kept[n.name] = value.clone() if isinstance(value, Tensor) else value
                return value

        kept: dict[str, Any] = {}
        torch.set_rng_state(self.random)
        Keep(module).run(*copies(self.inputs))
        return kept


def _front(program: Any, graph: fx.GraphModule, want: list[Any], run: Runs, choices: Any) -> Finding | None:
    """A front-end pass that changed the meaning: the first one with which the passes before it no longer agree."""
    from .graph.passes import FRONT_END, NAMES, run_passes

    if program.graph is None or agree(got := run(program.graph), want):
        return None
    passes = [FRONT_END[: k + 1] for k in range(len(FRONT_END))]
    wrong = next((p for p in passes if not agree(run(run_passes(graph, p, choices).graph), want)), FRONT_END)
    before, after = run.nodes(graph), run.nodes(program.graph)
    nodes = [n for n in program.graph.graph.nodes if isinstance(before.get(n.name), Tensor)]
    node = next((n for n in nodes if not agree(after[n.name], before[n.name])), None)
    return Finding(
        "graph",
        NAMES.get(wrong[-1], wrong[-1].__name__),
        str(node or "the outputs"),
        node.meta.get("line", "") if node is not None else "",
        difference(after[node.name], before[node.name]) if node is not None else difference(*_first(got, want)),
    )


def _ops(program: Any, want: list[Any], run: Runs) -> Finding | None:
    got = run(lambda *given: program.run("ops", given))
    if agree(got, want):
        return None
    k = next(i for i, (g, w) in enumerate(zip(got, want, strict=True)) if not agree(g, w))
    results = program.ops.module.graph.output_node().args[0]
    node = results[k] if k < len(results) else None  # behind the results stand the written inputs
    return Finding(
        "ops",
        "retrace, decomposition or functionalization",
        "the inputs as they were left" if node is None else str(node),
        node.meta.get("line", "") if isinstance(node, fx.Node) else "",
        difference(got[k], want[k]),
    )


def _kernel(kernel: Kernel, plan: Plan, values: dict[str, Tensor]) -> str | None:
    """How one kernel, run natively and alone on right inputs, differs from its interpretation; None if it does not."""
    from .stax.artifacts.build import build
    from .stax.codegen.cpp.emit import emit
    from .stax.codegen.detect import detect
    from .stax.runtime.program import Program

    buffers = plan.loops.buffers
    inputs = tuple(
        buffers[name]
        for name in dict.fromkeys((*kernel.reads, *(w for w in kernel.writes if w in plan.loops.written_inputs)))
    )
    outputs = tuple(Ref(w, buffers[w].size, buffers[w].stride) for w in kernel.writes)
    loops = Loops(inputs, kernel.nodes, outputs, {}, plan.loops.lines)
    fresh = tuple(w for w in kernel.writes if w not in {b.name for b in inputs})
    alone = Plan(loops, (kernel,), Memory(fresh=fresh))
    target = detect()
    source = emit(alone, target)
    program = Program(None, None, loops, alone, source, build(source, target), {})
    args = [values[b.name] for b in inputs]
    got, want = program.run("kernels", copies(args)), interpret_plan(alone, copies(args))
    return None if agree(_flat(got), want) else difference(*_first(got, want))
