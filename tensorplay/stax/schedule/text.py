"""A plan as text: its kernels with their loops, its library calls, where memory lies, what was not fused and why.

In: a `Plan`.  Out: Python text with the plan's facts as comments, for people and for golden files.
"""

from __future__ import annotations

from ..loops.nodes import Buffer, Extern
from ..loops.text import declare, show_node
from .plan import Kernel, Launch, Plan


def show(plan: Plan) -> str:
    """The whole plan."""
    buffers = plan.loops.buffers
    moved = sum(k.model_bytes for k in plan.kernels)
    out = [
        f"# {count(len(plan.kernels), 'kernel')}, {count(len(plan.externs), 'library call')}; "
        f"kernels move {size(moved)}, the graph's lower bound is {size(plan.lower_bound)}"
    ]
    first = {launch.kernels[0]: launch for launch in plan.launches}
    for step in plan.steps:
        out.append("")
        out.extend(together(first.get(step.name)))
        out.extend(call(step, buffers) if isinstance(step, Extern) else kernel(step, buffers))
    memory = plan.memory
    if memory.arena:
        out += ["", f"# arena of {size(memory.arena_bytes)}"]
        for name, offset in sorted(memory.arena.items(), key=lambda item: (item[1], item[0])):
            out.append(f"#   {offset:>10,} .. {offset + buffers[name].nbytes:<10,} {name}")
    for title, names in (("returned", memory.fresh), ("allocated by library calls", memory.owned), ("apart", memory.apart)):
        if names:
            out += ["", f"# {title}: {', '.join(names)}"]
    if plan.refused:
        out += ["", "# not fused:"]
        out += [f"#   {r.first}, {r.second} ({size(r.saved_bytes)}): {r.reason}" for r in plan.refused]
    return "\n".join(out) + "\n"


def kernel(k: Kernel, buffers: dict[str, Buffer]) -> list[str]:
    """One kernel: its space and its costs, its local buffers, its loops."""
    space = " x ".join(f"{v.name} < {v.args[1]}" for v in k.dims) or "one point"
    reduced = "".join(f", {v.name} < {v.args[1]}" for v in k.rdims)
    out = [
        f"# {k.name}: {space}" + (f"; reduced{reduced[1:]}" if reduced else ""),
        f"#   reads {size(k.read_bytes)}, writes {size(k.write_bytes)}, {k.flops:,} flop",
    ]
    for node in k.nodes:
        for b in node.outputs:
            out.append(declare(b) + ("  # local" if b.name in k.local else ""))
        out.extend(show_node(node, buffers))
    return out


def together(launch: Launch | None) -> list[str]:
    """Which kernels start with this one, and why it did not start with those before."""
    out = []
    if launch is not None and len(launch.kernels) > 1:
        out.append(f"# {', '.join(launch.kernels)} are one launch")
    if launch is not None and launch.reason:
        out.append(f"# a launch of its own: {launch.reason}")
    return out


def call(node: Extern, buffers: dict[str, Buffer]) -> list[str]:
    return [*(declare(b) for b in node.outputs if b is not None), *show_node(node, buffers)]


def count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def size(n: int) -> str:
    return f"{n:,} B"
