"""The meaning of loops: runs them with torch, slowly and obviously.

In: `Loops` (or a `Plan`) and the input tensors.  Out: the flat outputs, new tensors except where a `Ref` names an
input: those are views of the caller's own tensor, as in eager.
Always: a body is evaluated over its whole iteration space at once, one torch call a node, memoized by the node.
A read outside its buffer and a division of integers by zero are not errors where they happen but *faults* that
travel with the value, as NaN does, and are raised when a faulty element is stored; `masked` drops the faults of the
elements that it does not take. Inputs are written last, after everything that could fail.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..expr import Expr, parts, postorder
from ..ops.atoms import ATOMS
from .nodes import Buffer, Compute, Extern, Loops, Pointwise, Ref, Scan

Seen = Callable[[str, torch.Tensor], None]
Memory = dict[str, torch.Tensor]  # buffer -> its elements from pointer to span, as one flat tensor
Pair = tuple[torch.Tensor, torch.Tensor | None]  # a value and its faults: 0, or 1 + a position in FAULTS
FAULTS = ((IndexError, "index out of range"), (RuntimeError, "ZeroDivisionError"))  # as eager raises them
DIVISIONS = frozenset({"div_floor", "div_trunc", "remainder", "fmod"})


def interpret(loops: Loops, inputs: Sequence[torch.Tensor], seen: Seen | None = None) -> list[Any]:
    """The flat outputs of `loops`; `seen(name, value)` is called with every buffer as it is defined."""
    with torch.no_grad():
        memory, pending = enter(loops, inputs), []
        for node in loops.nodes:
            if isinstance(node, Extern):
                run_extern(node, memory)
            else:
                results = run_compute(node, memory)
                for buffer, at, result in zip(node.outputs, node.at, results, strict=True):
                    if buffer.name in memory:
                        pending.append((buffer, at, node.vars, result.clone()))
                    else:
                        memory[buffer.name] = allocate(buffer)
                        store(memory[buffer.name], at, node.vars, result)
            if seen is not None:
                show_to(seen, node, memory)
        return leave(loops, inputs, memory, pending)


def interpret_plan(plan: Any, inputs: Sequence[torch.Tensor], seen: Seen | None = None) -> list[Any]:
    """As `interpret`, kernel by kernel in the planned memory, so that a wrong plan gives a wrong result.

    A kernel reads the memory as it was before it, and its own results as they are; it then stores those that are
    not local.
    """
    loops, place, buffers = plan.loops, plan.memory, plan.loops.buffers
    with torch.no_grad():
        memory, pending = enter(loops, inputs), []
        written = frozenset(loops.written_inputs)
        devices = {buffers[name].device for name in place.arena}
        arenas = {d: torch.full((place.arena_bytes,), 0xFF, dtype=torch.uint8, device=d) for d in devices}
        for name, offset in place.arena.items():
            buffer = buffers[name]
            memory[name] = arenas[buffer.device][offset : offset + buffer.nbytes].view(buffer.dtype)
        for step in plan.steps:
            if isinstance(step, Extern):
                run_extern(step, memory)
                if seen is not None:
                    show_to(seen, step, memory)
                continue
            inside, outside = dict(memory), []
            for node in step.nodes:
                results = run_compute(node, inside)
                for buffer, at, result in zip(node.outputs, node.at, results, strict=True):
                    if buffer.name not in written:
                        inside[buffer.name] = allocate(buffer)
                        store(inside[buffer.name], at, node.vars, result)
                    if buffer.name not in step.local:
                        outside.append((buffer, at, node.vars, result.clone()))
                if seen is not None:
                    show_to(seen, node, inside)
            for buffer, at, variables, result in outside:
                if buffer.name in written:
                    pending.append((buffer, at, variables, result))
                    continue
                if buffer.name not in memory:
                    memory[buffer.name] = memory[place.over[buffer.name]] if buffer.name in place.over else allocate(buffer)
                store(memory[buffer.name], at, variables, result)
        return leave(loops, inputs, memory, pending)


# ---- memory --------------------------------------------------------------------------------------------------------


def allocate(buffer: Buffer) -> torch.Tensor:
    return torch.empty_strided(buffer.size, buffer.stride, dtype=buffer.dtype, device=buffer.device).as_strided(
        (buffer.span,), (1,)
    )


def flat(t: torch.Tensor, span: int) -> torch.Tensor:
    return t.detach().as_strided((span,), (1,), t.storage_offset())


def at_ref(memory: Memory, ref: Ref) -> torch.Tensor:
    t = memory[ref.buffer]
    return t.as_strided(ref.size, ref.stride, t.storage_offset() + ref.offset)


def enter(loops: Loops, inputs: Sequence[torch.Tensor]) -> Memory:
    memory = {b.name: flat(t, b.span) for b, t in zip(loops.inputs, inputs, strict=True)}
    return memory | {name: flat(t, span(t)) for name, t in loops.constants.items()}


def span(t: torch.Tensor) -> int:
    return Buffer("", t.dtype, t.device, tuple(t.shape), tuple(t.stride())).span


def leave(loops: Loops, inputs: Sequence[torch.Tensor], memory: Memory, pending: list[tuple]) -> list[Any]:
    for buffer, at, variables, result in pending:
        store(memory[buffer.name], at, variables, result)
    own = {b.name: t for b, t in zip(loops.inputs, inputs, strict=True)} | loops.constants
    outputs = []
    for out in loops.outputs:
        if not isinstance(out, Ref):
            outputs.append(out)
        elif out.buffer in own:
            t = own[out.buffer]
            whole = out.size == tuple(t.shape) and out.stride == tuple(t.stride()) and out.offset == 0
            outputs.append(t if whole else t.as_strided(out.size, out.stride, t.storage_offset() + out.offset))
        else:
            outputs.append(refer(out, memory))
    return outputs


def show_to(seen: Seen, node: Compute | Extern, memory: Memory) -> None:
    for b in node.outputs:
        if b is not None and b.name in memory:
            seen(b.name, at_ref(memory, Ref(b.name, b.size, b.stride)))


# ---- nodes ---------------------------------------------------------------------------------------------------------


def run_extern(node: Extern, memory: Memory) -> None:
    """Calls the operator; its results are taken over, or copied where the plan or the declared layout asks for it."""
    results = node.target(*refer(node.args, memory), **{k: refer(v, memory) for k, v in node.kwargs})
    results = results if isinstance(results, (tuple, list)) else (results,)
    for buffer, result in zip(node.outputs, results, strict=False):
        if buffer is None:
            continue
        if tuple(result.shape) != buffer.size or result.dtype != buffer.dtype:
            raise RuntimeError(f"{node.target} gave {result.dtype}{list(result.shape)}, not {buffer}")
        same = all(n == 1 or a == b for n, a, b in zip(buffer.size, result.stride(), buffer.stride, strict=True))
        if same and buffer.name not in memory:
            memory[buffer.name] = flat(result, buffer.span)
        else:
            if buffer.name not in memory:
                memory[buffer.name] = allocate(buffer)
            at_ref(memory, Ref(buffer.name, buffer.size, buffer.stride)).copy_(result)


def refer(x: Any, memory: Memory) -> Any:
    if isinstance(x, Ref):
        return at_ref(memory, x).item() if x.number else at_ref(memory, x)
    if isinstance(x, (tuple, list)):
        return type(x)(refer(y, memory) for y in x)
    return x


def run_compute(node: Compute, memory: Memory) -> list[torch.Tensor]:
    """The results of one loop, each of the size of its variables and the dtype of its buffer."""
    loop, sizes = node.loop, shape(node.vars)
    device = node.outputs[0].device
    body = evaluate(loop.body, node.vars + node.rvars, memory, device)
    if isinstance(loop, Pointwise):
        results = [body]
    elif isinstance(loop, Scan):
        results = scan(loop.kind, body, loop.axis)
    else:
        results = reduce(loop.kind, body.reshape(*sizes, math.prod(shape(node.rvars))))
    return [r.expand(sizes).to(b.dtype) for r, b in zip(results, node.outputs, strict=True)]


def shape(variables: Iterable[Expr]) -> tuple[int, ...]:
    return tuple(v.args[1] for v in variables)


def reduce(kind: str, x: torch.Tensor) -> list[torch.Tensor]:
    """`kind` along the last dimension; an empty one gives the identity."""
    if x.shape[-1] == 0:
        identity = {"prod": 1, "all": True, "amax": lowest(x.dtype), "amin": highest(x.dtype)}
        dtypes = [x.dtype] * 2 if kind == "welford" else RESULTS.get(kind, [x.dtype, torch.int64])
        width = 2 if kind in ("welford", "max_index", "min_index") else 1
        return [x.new_full(x.shape[:-1], identity.get(kind, 0), dtype=d) for d in dtypes[:width]]
    match kind:
        case "sum":
            return [x.sum(-1, dtype=x.dtype)]
        case "prod":
            return [x.prod(-1, dtype=x.dtype)]
        case "amax":
            return [x.amax(-1)]
        case "amin":
            return [x.amin(-1)]
        case "any":
            return [x.any(-1)]
        case "all":
            return [x.all(-1)]
        case "argmax" | "argmin" | "max_index" | "min_index":
            order = x.to(torch.uint8) if x.dtype == torch.bool else x
            first = order.argmax(-1) if "max" in kind else order.argmin(-1)
            return [first] if kind.startswith("arg") else [x.gather(-1, first.unsqueeze(-1)).squeeze(-1), first]
        case "welford":
            wide = x.double()
            mean = wide.mean(-1)
            return [mean.to(x.dtype), (wide - mean.unsqueeze(-1)).square().sum(-1).to(x.dtype)]
    raise KeyError(kind)


RESULTS = {"argmax": [torch.int64], "argmin": [torch.int64], "any": [torch.bool], "all": [torch.bool]}


def lowest(dtype: torch.dtype) -> Any:
    return -math.inf if dtype.is_floating_point else False if dtype == torch.bool else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> Any:
    return math.inf if dtype.is_floating_point else True if dtype == torch.bool else torch.iinfo(dtype).max


def scan(kind: str, x: torch.Tensor, axis: int) -> list[torch.Tensor]:
    match kind:
        case "sum":
            return [x.cumsum(axis, dtype=x.dtype)]
        case "prod":
            return [x.cumprod(axis, dtype=x.dtype)]
        case "logaddexp":
            return [x.logcumsumexp(axis)]
        case "max_index":
            return list(x.cummax(axis))
        case "min_index":
            return list(x.cummin(axis))
    raise KeyError(kind)


# ---- expressions ---------------------------------------------------------------------------------------------------


def evaluate(root: Expr, variables: Sequence[Expr], memory: Memory, device: torch.device) -> torch.Tensor:
    """`root` at every point of the space of `variables`; raises the first fault that reaches it."""
    space = shape(variables)
    values: dict[Expr, Pair] = {}
    for k, v in enumerate(variables):
        sizes = [1] * len(space)
        sizes[k] = space[k]
        values[v] = torch.arange(space[k], device=device).view(sizes), None
    order = list(postorder(root))
    left = Counter(c for n in order for c in n.children)
    for node in order:
        if node.op != "var":
            values[node] = step(node, values, memory, variables, device)
            for c in node.children:
                left[c] -= 1
                if not left[c] and c.op != "var":
                    del values[c]
    result, fault = values[root]
    if fault is not None and 0 not in space and (code := int(fault.max())):
        error, message = FAULTS[code - 1]
        raise error(message)
    return result.expand(space)


def step(
    node: Expr, values: dict[Expr, Pair], memory: Memory, variables: Sequence[Expr], device: torch.device
) -> Pair:
    """One node, from the values of its operands."""
    args = node.args
    match node.op:
        case "integer":
            return torch.tensor(args[0], device=device), None
        case "affine":
            total, fault = torch.tensor(args[0], device=device), None
            for term, c in args[1]:
                total, fault = total + c * values[term][0], worst(fault, values[term][1])
            return total, fault
        case "floordiv":
            return values[args[0]][0].div(args[1], rounding_mode="floor"), values[args[0]][1]
        case "mod":
            return values[args[0]][0].remainder(args[1]), values[args[0]][1]
        case "index":
            x, fault = values[args[0]]
            return within(x.to(torch.int64), args[1], fault)
        case "const":
            return torch.tensor(args[0], dtype=node.dtype, device=device), None
        case "load":
            return read(memory[args[0]], args[1], values[args[1]], variables)
        case "value":
            return values[args[0]]
        case "cast":
            return values[args[0]][0].to(node.dtype), values[args[0]][1]
        case "masked":
            (cond, f), (x, g), (other, h) = (values[a] for a in args)
            return torch.where(cond, x, other), worst(f, h, None if g is None else torch.where(cond, g, 0))
    operands, fault = [values[a][0] for a in args], worst(*(values[a][1] for a in args))
    if node.op in DIVISIONS and not node.dtype.is_floating_point:
        zero = operands[1] == 0
        fault = worst(fault, zero.to(torch.uint8) * 2)
        operands[1] = torch.where(zero, 1, operands[1])
    result = ATOMS[node.op].reference(*operands)
    if result.dtype != node.dtype:
        raise TypeError(f"{node.op} gave {result.dtype}, not {node.dtype}")
    return result, fault


def worst(*faults: torch.Tensor | None) -> torch.Tensor | None:
    total = None
    for f in faults:
        total = f if total is None else total if f is None else torch.maximum(total, f)
    return total


def within(x: torch.Tensor, size: int, fault: torch.Tensor | None) -> Pair:
    """`x` clamped to [0, size), with a fault where it was outside."""
    outside = (x < 0) | (x >= size)
    if bool(outside.any()):
        return x.clamp(0, max(size - 1, 0)), worst(fault, outside.to(torch.uint8))
    return x, fault


def read(block: torch.Tensor, at: Expr, offset: Pair, variables: Sequence[Expr]) -> Pair:
    """The elements of a block at the offsets `at`; a strided view where they are affine and inside."""
    steps = strides(at, variables)
    if steps is not None and at.low >= 0 and at.high < len(block):
        sizes = [v.args[1] if s else 1 for v, s in zip(variables, steps, strict=True)]
        return block.as_strided(sizes, steps, block.storage_offset() + parts(at)[0]), None
    at_most, fault = within(offset[0], len(block), offset[1])
    if not len(block):
        return block.new_zeros(at_most.shape), fault
    return block[at_most], fault


def strides(at: Expr, variables: Sequence[Expr]) -> list[int] | None:
    """Non-negative coefficients of the variables where `at` is affine in them alone."""
    terms = dict(parts(at)[1])
    steps = [terms.pop(v, 0) for v in variables]
    return None if terms or any(s < 0 for s in steps) else steps


def store(block: torch.Tensor, at: Expr, variables: Sequence[Expr], result: torch.Tensor) -> None:
    """Writes `result`, one element a point of `variables`, at the offsets `at`."""
    if result.numel() == 0:
        return
    steps = strides(at, variables)
    if steps is not None and all(s or v.args[1] == 1 for v, s in zip(variables, steps, strict=True)):
        block.as_strided(result.shape, steps, block.storage_offset() + parts(at)[0]).copy_(result)
    else:
        block[evaluate(at, variables, {}, result.device).reshape(-1)] = result.reshape(-1)
