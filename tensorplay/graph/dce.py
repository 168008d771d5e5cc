"""Dead code: the nodes that no output needs (section 4.6).

In: a settled graph.  Out: the graph without them; one note for each.
Always: placeholders stay, used or not, and so does what writes, draws random numbers or does something unknown.
Data gates need no output: their slice is cut out before this runs (corollary 3.1).
"""

from __future__ import annotations

from torch import fx

from .choices import Choices
from .memory import facts


def dce(graph: fx.Graph, choices: Choices) -> list[str]:
    notes = []
    for node in reversed(list(graph.nodes)):
        if node.users or node.op in ("placeholder", "output") or facts(node).effect:
            continue
        graph.erase_node(node)
        notes.append(f"{node} is used nowhere")
    return notes
