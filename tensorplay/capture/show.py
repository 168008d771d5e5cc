"""The captured graph as text, in the form of listing 3.1.

In: a graph module with meta['spec'].  Out: a string.
"""

from __future__ import annotations

from torch import fx

from ..stax.loops.nodes import Spec


def show(module: fx.GraphModule) -> str:
    """One line a node, with the shape of its value where it has one."""
    lines = ["graph("]
    for node in module.graph.nodes:
        if node.op == "output":
            values = node.args[0] if isinstance(node.args[0], (list, tuple)) else (node.args[0],)
            lines.append(f"    return {', '.join(map(str, values))}")
            continue
        text = node.format_node() or ""
        spec = node.meta.get("spec")
        if isinstance(spec, Spec) and node.op != "placeholder":
            name, colon, rest = text.partition(" :")
            text = f"{name} shape={spec.size}{colon}{rest}"
        reason = node.meta.get("reason", "")
        lines.append(f"    {text}{'  # ' if reason else ''}{reason}")
    return "\n".join([*lines, ")"])
