"""What always holds of loops, checked.

In: `Loops`.  Out: the same object, or an `IRError` that shows the node.  A pass that breaks a rule is found at the
pass, not in a kernel. The cost is linear in the distinct expression nodes.

Always: buffers are defined once and before use, by names that are Python identifiers; every expression has the
dtypes that its operator takes and gives; a body is free in nothing but its loop's variables; a read that always
happens stays within its buffer (one under `masked` or through `index` is checked when it runs); a store fills its
buffer, each element once; after an input is written nobody reads it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from keyword import iskeyword
from math import prod
from typing import Any

import torch

from ..dtypes import known
from ..expr import INDEX, Expr, parts, postorder
from ..ops.atoms import ATOMS
from .interpret import evaluate, shape
from .nodes import REDUCTIONS, SCANS, Buffer, Compute, Extern, Loops, Pointwise, Reduction, Ref, Scan
from .text import show_expr, show_node

ENUMERABLE = 1 << 22  # points up to which an index that ranges cannot decide is enumerated
HALF = frozenset({torch.float16, torch.bfloat16})
ARITY = {a.name: 1 + max(map(int, re.findall(r"\{(\d)\}", (a.cpp or "") + (a.triton or "")))) for a in ATOMS.values()}


class IRError(AssertionError):
    """A level of the compiler broke a rule of its representation: a defect of ours, never of the user's program."""


def verify(loops: Loops) -> Loops:
    """Returns `loops` if all its rules hold."""
    buffers = loops.buffers
    inputs = {b.name: b for b in loops.inputs}
    if len(inputs) != len(loops.inputs) or not inputs.keys().isdisjoint(loops.constants):
        raise IRError("two inputs or constants share a name")
    for b in buffers.values():
        need(b.name.isidentifier() and not iskeyword(b.name), f"{b.name!r} is no identifier")
        need(len(b.size) == len(b.stride) and min((*b.size, *b.stride), default=0) >= 0, f"{b} has no layout")
    defined = inputs.keys() | loops.constants.keys()
    written: set[str] = set()
    typed: set[Expr] = set()
    for node in loops.nodes:
        try:
            for name in node.reads:
                need(name in defined, f"{name} is read before it is defined")
                need(name not in written, f"{name} is read after it was written back")
            if isinstance(node, Extern):
                for ref in node.refs:
                    check_ref(ref, buffers)
            else:
                check_compute(node, buffers, typed)
            for out in node.outputs:
                if out is None:
                    continue
                if out.name in inputs:
                    need(isinstance(node, Compute) and out == inputs[out.name], f"{out.name} is an input of another layout")
                    need(out.name not in written, f"{out.name} is written back twice")
                    written.add(out.name)
                else:
                    need(out.name not in defined, f"{out.name} is defined twice")
                    defined.add(out.name)
        except IRError as error:
            raise IRError("\n".join((str(error), *show_node(node, buffers)))) from None
    for ref in loops.outputs:
        if isinstance(ref, Ref):
            need(ref.buffer in defined, f"output {ref.buffer} is not defined")
            check_ref(ref, buffers)
    return loops


def need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise IRError(otherwise)


def check_ref(ref: Ref, buffers: dict[str, Buffer]) -> None:
    view = Buffer(ref.buffer, torch.uint8, torch.device("cpu"), ref.size, ref.stride)
    inside = ref.offset >= 0 and ref.offset + view.span <= buffers[ref.buffer].span
    need(inside or view.span == 0, f"{ref} leaves its buffer")


def check_compute(node: Compute, buffers: dict[str, Buffer], typed: set[Expr]) -> None:
    loop, variables = node.loop, node.vars + node.rvars
    need(all(v.op == "var" for v in variables), "a loop variable is no variable")
    need(len({v.name for v in variables}) == len(variables), "two loop variables share a name")
    width, body = 1, loop.body.dtype
    if isinstance(loop, Reduction):
        need(loop.kind in REDUCTIONS, f"no reduction {loop.kind}")
        width = REDUCTIONS[loop.kind]
        need(loop.kind not in ("any", "all") or body == torch.bool, f"{loop.kind} of {body}")
        need(loop.kind != "welford" or body.is_floating_point, f"welford of {body}")
    elif isinstance(loop, Scan):
        need(loop.kind in SCANS and 0 <= loop.axis < len(loop.vars), f"no scan {loop.kind} along {loop.axis}")
        width = SCANS[loop.kind]
    else:
        need(isinstance(loop, Pointwise), f"{type(loop).__name__} is no loop")
    need(len(node.outputs) == len(node.at) == width, f"{len(node.outputs)} outputs, {len(node.at)} stores, not {width}")
    need(not loop.body.is_index, "the body is an index, not a value")
    need(all(x.is_index for x in node.at), "a store offset is no index")
    for n in postorder(loop.body, *node.at):
        if n not in typed:
            check_expr(n, buffers)
            typed.add(n)
    need(loop.body.free <= frozenset(variables), f"the body is free in {names(loop.body.free - set(variables))}")
    for b, at in zip(node.outputs, node.at, strict=True):
        need(at.free <= frozenset(loop.vars), f"the store to {b.name} is free in {names(at.free - set(loop.vars))}")
        check_store(b, at, loop.vars)
    if 0 not in shape(variables):
        for n in unconditional(loop.body):
            if n.op == "load":
                check_load(n, buffers[n.name].span, variables)


def names(variables: Iterable[Expr]) -> str:
    return ", ".join(sorted(v.name for v in variables))


def unconditional(root: Expr) -> Iterable[Expr]:
    """The nodes below the root that are evaluated at every point."""
    seen, stack = {root}, [root]
    while stack:
        node = stack.pop()
        yield node
        for c in (node.args[0], node.args[2]) if node.op == "masked" else node.children:
            if c not in seen:
                seen.add(c)
                stack.append(c)


def check_load(node: Expr, span: int, variables: Sequence[Expr]) -> None:
    at = node.args[1]
    if at.low >= 0 and at.high < span:
        return
    if span == 0 and any(n.op == "index" for n in postorder(at)):
        return  # its index is checked against a size of 0 when it runs
    exact = enumerate_index(at, [v for v in variables if v in at.free])
    inside = exact is not None and 0 <= int(exact.min()) and int(exact.max()) < span
    need(inside, f"{show_expr(node)} reads [{at.low}, {at.high}] of {span} elements")


def check_store(b: Buffer, at: Expr, variables: Sequence[Expr]) -> None:
    need(known(b.dtype), f"{b.name} holds {b.dtype}, which loops cannot store")
    points = prod(shape(variables))
    need(points == prod(b.size), f"{points} points do not fill {b.name}{list(b.size)}")
    if points and not separate(at, variables, b.span):
        exact = enumerate_index(at, variables)
        inside = exact is not None and 0 <= int(exact.min()) and int(exact.max()) < b.span
        once = inside and len(torch.unique(exact)) == points
        need(once, f"{b.name}[{show_expr(at)}] does not store each element once within {b.span}")


def separate(at: Expr, variables: Sequence[Expr], span: int) -> bool:
    """Whether strides alone show that every point has an offset of its own within the span."""
    constant, terms = parts(at)
    step = dict(terms)
    moving = sorted((step.pop(v, 0), v.args[1]) for v in variables if v.args[1] > 1)
    reach = 0
    for c, n in moving:
        if c <= reach:
            return False
        reach += c * (n - 1)
    return constant >= 0 and constant + reach < span and all(t.op == "var" for t in step)


def enumerate_index(at: Expr, variables: Sequence[Expr]) -> torch.Tensor | None:
    """All values of an index, where they are few enough and known before the program runs."""
    if prod(shape(variables)) > ENUMERABLE or any(n.op == "index" for n in postorder(at)):
        return None
    return evaluate(at, variables, {}, torch.device("cpu"))


# ---- expressions ---------------------------------------------------------------------------------------------------

INDICES = frozenset({"var", "integer", "affine", "floordiv", "mod", "index"})


def check_expr(n: Expr, buffers: dict[str, Buffer]) -> None:
    """The rules of one node, its operands' aside."""
    wrong = expr_fault(n, n.op, n.args, buffers)
    if wrong:
        raise IRError(f"{wrong}: {show_expr(n)}")


def expr_fault(n: Expr, op: str, args: tuple[Any, ...], buffers: dict[str, Buffer]) -> str | None:
    atom = ATOMS.get(op)
    if atom is not None:
        return atom_fault(n, atom, args)
    if (op in INDICES) != (n.dtype is INDEX):
        return f"{op} is of {n.dtype}"
    match op:
        case "var" | "integer":
            return None
        case "affine":
            return None if all(t.dtype is INDEX for t, _ in args[1]) else "a term is no index"
        case "floordiv" | "mod":
            return None if args[0].dtype is INDEX and args[1] > 0 else "not an index by a positive constant"
        case "index":
            whole = args[0].dtype is not INDEX and not args[0].dtype.is_floating_point and args[0].dtype != torch.bool
            return None if whole and args[1] >= 0 else "not an integer value below a size"
        case "const":
            kind = bool if n.dtype == torch.bool else float if n.dtype.is_floating_point else int
            return None if type(args[0]) is kind else f"a {n.dtype} literal is {type(args[0]).__name__}"
        case "load":
            if args[0] not in buffers:
                return f"no buffer {args[0]}"
            if buffers[args[0]].dtype != n.dtype:
                return f"{args[0]} holds {buffers[args[0]].dtype}, not {n.dtype}"
            return None if args[1].dtype is INDEX and known(n.dtype) else "not a known dtype at an index"
        case "value":
            return None if args[0].dtype is INDEX and n.dtype == torch.int64 else "not an index as int64"
        case "cast":
            if args[0].dtype is INDEX or not (known(args[0].dtype) and known(n.dtype)):
                return f"cast from {args[0].dtype} to {n.dtype}"
            return None
        case "masked":
            cond, x, other = args
            return None if cond.dtype == torch.bool and x.dtype == other.dtype == n.dtype else "operands of other dtypes"
    return f"no operator {op}"


def atom_fault(n: Expr, atom: Any, args: tuple[Any, ...]) -> str | None:
    if len(args) != ARITY[atom.name]:
        return f"{len(args)} operands, not {ARITY[atom.name]}"
    group = args
    if atom.name == "where":
        if args[0].dtype != torch.bool:
            return "the condition is not boolean"
        group = args[1:]
    dtype = group[0].dtype
    if atom.name in ("lshift", "rshift"):
        if group[1].dtype is INDEX or group[1].dtype.is_floating_point:
            return "the count is no integer"
    elif any(a.dtype != dtype for a in group):
        return f"operands of {[str(a.dtype) for a in group]}"
    if dtype is INDEX or not known(dtype) or dtype in HALF:
        return f"operands of {dtype}"
    kind = "b" if dtype == torch.bool else "f" if dtype.is_floating_point else "i"
    if kind not in atom.kinds:
        return f"operands of {dtype}"
    expected = torch.bool if atom.result == "bool" else dtype
    return None if n.dtype == expected else f"gives {expected}, not {n.dtype}"
