"""The end of the line: a compiled graph that can be called, and every level that it came from.

In: all levels of one compilation.  Out: `Program`, a callable from the graph's inputs to its outputs in the graph's
own structure.
Always: every level can run on the same inputs (`run`), so a difference can be traced to the level that made it.
"""

from __future__ import annotations

import linecache
import operator
import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ... import record
from ...capture import ambient
from ...errors import CheckFailed, UnsupportedError
from ..artifacts.build import Artifact
from ..codegen.target import Source
from ..joint.opgraph import OpGraph
from ..loops.nodes import Loops
from ..schedule.plan import Plan
from .arena import KEEP, Arena
from .host import View, host

LEVELS = ("graph", "ops", "loops", "plan", "kernels")


class Program:
    """One compiled graph. The attributes are what `tp.explain` shows.

    A plan that stands alone (one kernel under verification) has neither graph nor operators; its results are flat.
    otherwise: answers for a failed check in place of the graph. consumes: `call` and `trusted` take one list of
    inputs, which they empty, so that each input can be freed behind its last use; a failed check is an error then.
    keep: bytes of intermediates that may stay allocated between calls. apart: the outputs that require no grad, though
    inputs that they view may.
    """

    def __init__(
        self,
        graph: fx.GraphModule | None,
        ops: OpGraph | None,
        loops: Loops,
        plan: Plan,
        source: Source,
        artifact: Artifact,
        seconds: dict[str, float] | None = None,
        otherwise: Callable[[CheckFailed, tuple], Any] | None = None,
        consumes: bool = False,
        keep: int = KEEP,
        apart: frozenset[int] = frozenset(),
    ) -> None:
        self.graph = graph
        self.ops = ops
        self.loops = loops
        self.plan = plan
        self.source = source
        self.artifact = artifact
        self.seconds = {} if seconds is None else seconds
        self.consumes = consumes
        answer = otherwise or retry(graph, source)
        made = host(plan, source, artifact, answer, structure(graph, loops), views(graph, ops, apart), consumes, keep)
        self.host: str = made.text
        self.arena: Arena = made.arena
        self.call: Callable[..., Any] = made.call
        self.trusted: Callable[..., Any] = made.trusted

    def __call__(self, *inputs: torch.Tensor) -> Any:
        return self.call(list(inputs)) if self.consumes else self.call(*inputs)

    def run(self, level: str, inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """The flat outputs of one level on the given inputs. Every level writes what the program writes."""
        match level:
            case "graph" if self.graph is not None:
                return tuple(pytree.tree_leaves(self.graph(*inputs), is_leaf=_is_none))
            case "ops" if self.ops is not None:
                with torch.no_grad():
                    return tuple(self.ops.module(*inputs))
            case "loops":
                from ..loops.interpret import interpret

                return tuple(interpret(self.loops, inputs))
            case "plan":
                from ..loops.interpret import interpret_plan

                return tuple(interpret_plan(self.plan, inputs))
            case "kernels":
                return tuple(pytree.tree_leaves(self(*inputs), is_leaf=_is_none))
        raise ValueError(f"level {level!r} is none of {', '.join(LEVELS)}")

    def __repr__(self) -> str:
        plan = self.plan
        return f"<Program: {len(plan.kernels)} kernels, {len(plan.externs)} library calls>"


def _is_none(x: Any) -> bool:
    return x is None


def retry(graph: fx.GraphModule | None, source: Source) -> Callable[[CheckFailed, tuple], Any]:
    """After a failed check: eager runs on the same inputs, so that it raises its own exception, or gives its answer."""

    def eager(failed: CheckFailed, inputs: tuple) -> Any:
        message, origin = failed.message, ""
        if failed.segment is not None and 0 < failed.code <= len(source.checks):
            check = source.checks[failed.code - 1]
            message, origin = check.message, check.origin
        if graph is None:
            raise RuntimeError(message)
        result = on_torch(graph, inputs)
        record.emit("retry", origin, reason=message)
        return result

    return eager


def on_torch(graph: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Any:
    """Eager's own answer, or eager's own exception with a note that names the user's line."""
    assert graph.code  # reading it makes a lazy module write its forward
    before = ambient.ambient()
    try:
        return graph.forward(*inputs)  # calling the module would print to stderr and drop the traceback
    except Exception as error:
        ambient.restore(before)  # the graph switches modes back at its end only
        line = raised_at(graph, error)
        if line:
            error.add_note(f"raised by the operation at {line}, in a function compiled by TensorPlay")
        raise


def raised_at(graph: fx.GraphModule, error: Exception) -> str:
    """The user's line of the node whose generated statement raised; '' where it is not known."""
    code = type(graph).forward.__code__
    lines = {n.name: n.meta.get("line", "") for n in graph.graph.nodes}
    for frame, number in traceback.walk_tb(error.__traceback__):
        if frame.f_code is code:
            name = re.match(r"\w+", linecache.getline(code.co_filename, number).strip())
            return lines.get(name[0], "") if name else ""
    return ""


def structure(graph: fx.GraphModule | None, loops: Loops) -> str | Callable[[list[Any]], Any]:
    """How the graph's result is built from flat outputs: 'tuple', 'single' or a function of the list."""
    if graph is None:
        return "tuple"
    (result,) = graph.graph.output_node().args
    if isinstance(result, fx.Node) and len(loops.outputs) == 1:
        return "single"
    leaves, spec = pytree.tree_flatten(result)
    if len(leaves) != len(loops.outputs):
        raise UnsupportedError(f"the graph has {len(leaves)} outputs, its loops have {len(loops.outputs)}")
    if isinstance(result, tuple) and not any(isinstance(x, (tuple, list, dict)) for x in result):
        return "tuple"
    return lambda outputs: pytree.tree_unflatten(outputs, spec)


# Calls that give a new tensor though the operator graph has nothing for them: what follows the tensor that they view.
FORMS = {"detach": ".detach()", "data": ".data", "alias": "", "getitem": ""}


def views(graph: fx.GraphModule | None, ops: OpGraph | None, apart: frozenset[int] = frozenset()) -> dict[int, View]:
    """The outputs that eager makes by a view: new tensors even where they equal an input or another output."""
    if ops is None or graph is None:
        return {}
    results: Any = ops.module.graph.output_node().args[0]
    leaves = pytree.tree_leaves(graph.graph.output_node().args[0])
    found = {}
    for position, (node, leaf) in enumerate(zip(results, leaves, strict=True)):
        target = getattr(node, "target", None)
        if target is operator.getitem:  # of the list that `split` and its like return
            target = node.args[0].target
        call = called(leaf) if isinstance(leaf, fx.Node) and leaf.op.startswith("call_") else ""
        form = FORMS.get(call, "")
        of = ".detach()" if position in apart and not form else ""
        if isinstance(target, torch._ops.OpOverload):
            returns = target._schema.returns
            if returns and returns[0].alias_info is not None and not returns[0].alias_info.is_write:
                found[position] = View(leaf.name, form, of)
                continue
        if call in FORMS and (call != "getitem" or node.op == "placeholder" or _everything(leaf.args[1])):
            found[position] = View(leaf.name, form, of)
    return found


def _everything(item: Any) -> bool:
    """Whether an item is the whole tensor, `x[...]`: others have operators of their own."""
    return item is Ellipsis or (isinstance(item, tuple) and all(i is Ellipsis for i in item))


def called(node: fx.Node) -> str:
    """The plain name of what a node calls, or of the attribute that it reads."""
    if node.target is getattr:
        return str(node.args[1])
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
