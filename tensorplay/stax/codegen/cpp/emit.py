"""From a plan to one C++ text for the whole graph.

In: a `Plan` and a `Target`.  Out: a `Source`: one function for each distinct kernel, one entry for each run of
kernels between library calls.
Always: kernels with the same text are one function; the text depends on nothing but plan and target.
"""

from __future__ import annotations

import re

from ...loops.text import show_expr
from ...schedule.plan import Kernel, Plan
from ..target import Check, Source, Target
from .flags import flags
from .nest import Function, function_of

WIDTH = 116


def emit(plan: Plan, target: Target) -> Source:
    """The C++ source of all kernels of `plan`."""
    slots = {name: i for i, name in enumerate(plan.slots)}
    written = plan.loops.written_inputs
    names: dict[str, str] = {}  # parameters and body -> function name
    functions: list[str] = []
    kernels: dict[str, str] = {}
    checks: list[Check] = []
    entries: list[str] = []
    texts: list[str] = []
    for segment in plan.segments:
        if not isinstance(segment, tuple):
            continue
        lines = []
        for kernel in segment:
            functions_of = [function_of(kernel, target, written)]
            if functions_of[0].checks and not set(written).isdisjoint(kernel.writes):
                functions_of.insert(0, function_of(kernel, target, written, dry=True))
            for f in functions_of:
                result = "int" if f.checks else "void"
                key = f"{result} {f.parameters} {re.sub(r' *//.*', '', f.body)}"  # comments name buffers
                new = key not in names
                name = names.setdefault(key, f"kernel_{len(names)}")
                text = f"{comment(kernel, plan)}\nstatic {result} {name}{f.parameters} {{\n{f.body}\n}}\n"
                if new:
                    functions.append(text)
                kernels[kernel.name] = text
                lines.append(call(name, f, slots, len(checks)))
            checks += [Check(message, origin) for message, origin in f.checks]
        entry = f"segment_{len(entries)}"
        entries.append(entry)
        body = "\n".join(f"  {line}" for line in lines)
        texts.append(f'extern "C" int {entry}(void *const *p, int threads) {{\n{body}\n  return 0;\n}}\n')
    text = "\n".join(['#include "stx.h"\n\nusing namespace stx;\n', *functions, *texts])
    return Source("cpp", text, tuple(entries), kernels, tuple(checks), flags(target))


def call(name: str, f: Function, slots: dict[str, int], base: int) -> str:
    arguments = [f"({t})p[{slots[b]}]" for t, b in zip(f.types, f.buffers, strict=True)]
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
    lines += [f"  at {line}" for line in list(where)[:4] if line]
    out = []
    for line in lines[:24]:
        line = " ".join(line.split())
        out.append("// " + (line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."))
    return "\n".join(out)
