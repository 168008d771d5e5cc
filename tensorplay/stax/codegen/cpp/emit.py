"""From a plan to one C++ text for the whole graph.

In: a `Plan` and a `Target`.  Out: a `Source`: one function for each distinct kernel, one entry for each run of
kernels between library calls.
Always: kernels with the same text are one function; the text depends on nothing but plan and target.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

from ...loops.text import show_expr
from ...schedule.plan import Kernel, Plan
from ..target import Check, Source, Target
from .flags import flags
from .nest import Function, function_of, of_launch
from .pieces import Piece, pieces

WIDTH = 116


@dataclass
class Unit:
    """The functions of a text as they come into being; kernels with the same text are one."""

    names: dict[str, str] = field(default_factory=dict)  # parameters and body -> function name
    functions: list[str] = field(default_factory=list)
    kernels: dict[str, str] = field(default_factory=dict)  # name of the launch's first kernel -> text for people

    def named(self, f: Function, head: str) -> tuple[str, str]:
        """The name of a function, and its text under a comment of its own."""
        result = "int" if f.checks else "void"
        key = f"{result} {f.parameters} {re.sub(r' *//.*', '', f.body)}"  # comments name buffers
        new = key not in self.names
        name = self.names.setdefault(key, f"kernel_{len(self.names)}")
        text = f"{head}\nstatic {result} {name}{f.parameters} {{\n{f.body}\n}}\n"
        if new:
            self.functions.append(text)
        return name, text


def emit(plan: Plan, target: Target) -> Source:
    """The C++ source of all kernels of `plan`."""
    slots = {name: i for i, name in enumerate(plan.slots)}
    written = plan.loops.written_inputs
    unit = Unit()
    checks: list[Check] = []
    entries: list[str] = []
    texts: list[str] = []
    together = {kernels[0].name: kernels for kernels in plan.together}
    for segment in plan.segments:
        if not isinstance(segment, tuple):
            continue
        lines = []
        for first in segment:
            members = together.get(first.name, ())
            if not members:  # one of a launch
                continue
            parts = [p for k in (members if len(members) > 1 else (first,)) for p in pieces(k, target.vector_bytes // 4)]
            if len(parts) > 1:
                text, line = launch(parts, plan, target, unit, slots)
                unit.kernels[first.name] = text
                lines.append(line)
                continue
            functions_of = [function_of(first, target, written)]
            if functions_of[0].checks and not set(written).isdisjoint(first.writes):
                functions_of.insert(0, function_of(first, target, written, dry=True))
            for f in functions_of:
                name, unit.kernels[first.name] = unit.named(f, comment(first, plan))
                lines.append(call(name, f, slots, len(checks)))
            checks += [Check(message, origin) for message, origin in f.checks]
        entry = f"segment_{len(entries)}"
        entries.append(entry)
        body = "\n".join(f"  {line}" for line in lines)
        texts.append(f'extern "C" int {entry}(void *const *p, int threads) {{\n{body}\n  return 0;\n}}\n')
    text = "\n".join(['#include "stx.h"\n\nusing namespace stx;\n', *unit.functions, *texts])
    return Source("cpp", text, tuple(entries), unit.kernels, tuple(checks), flags(target))


def launch(members: list[Piece], plan: Plan, target: Target, unit: Unit, slots: dict[str, int]) -> tuple[str, str]:
    """Kernels, or pieces of kernels, that run as one parallel region: their text for people, and the statement that runs them."""
    functions, threads = of_launch([p.kernel for p in members], target, plan.loops.written_inputs)
    total = sum(f.parts for f in functions)
    lines: list[str] = []
    texts: dict[str, str] = {}
    low = 0
    for piece, f in zip(members, functions, strict=True):
        name, text = unit.named(f, comment(piece.kernel, plan))
        texts.setdefault(name, text)
        arguments = pointers(f, slots, piece.base)
        bounds = ["b", "e"]
        if f.flat:
            step, size = f.flat
            bounds = [f"b * {step}", f"upto(e * {step}, {size})" if size % step else f"e * {step}"]
        inner = f"{name}({', '.join([*arguments, *bounds])});"
        lines.append(f"    part(begin, end, {low}, {low + f.parts}, [&](i64 b, i64 e) INLINE {{ {inner} }});")
        low += f.parts
    line = "\n".join([f"parallel({threads}, {total}, [=](int, i64 begin, i64 end) INLINE {{", *lines, "  });"])
    return "\n".join([*texts.values(), f"// one launch: {len(members)} loops\n{line}"]), line


def pointers(f: Function, slots: dict[str, int], base: dict[str, int]) -> list[str]:
    """What a function takes for its buffers."""
    starts = [f" + {base[b]}".replace("+ -", "- ") if base.get(b) else "" for b in f.buffers]
    return [f"({t})p[{slots[b]}]{start}" for t, b, start in zip(f.types, f.buffers, starts, strict=True)]


def call(name: str, f: Function, slots: dict[str, int], base: int) -> str:
    arguments = pointers(f, slots, {})
    text = f"{name}({', '.join([*arguments, 'threads'])})"
    if f.checks:
        return f"if (int code = {text}) return {f'{base} + ' if base else ''}code;"
    return f"{text};"


def comment(kernel: Kernel, plan: Plan) -> str:
    """What the kernel computes, in the text of the loops, and where it comes from."""
    lines = []
    space = " x ".join(f"{v.name} < {v.args[1]}" for v in kernel.dims) or "one point"
    if kernel.rdims:
        space += "; over " + ", ".join(f"{v.name} < {v.args[1]}" for v in kernel.rdims)
    lines.append(f"{', '.join(kernel.origins) or kernel.name}: {space}")
    for node in kernel.nodes:
        kind = getattr(node.loop, "kind", "")
        for k, b in enumerate(node.outputs):
            body = show_expr(node.loop.body) if k == 0 else "..."
            lines.append(f"  {b.name} = {f'{kind}({body})' if kind else body}")
    where = dict.fromkeys(plan.loops.lines.get(o, "") for o in kernel.origins)
    lines += [f"  at {os.path.basename(line)}" for line in list(where)[:4] if line]
    out = []
    for line in lines[:24]:
        line = " ".join(line.split())
        out.append("// " + (line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."))
    return "\n".join(out)
