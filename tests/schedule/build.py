"""Loops written by hand: a small builder, so that schedules are tested without lowering."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tensorplay.stax.codegen.target import Target
from tensorplay.stax.expr import Expr, const, load, loads, make, var
from tensorplay.stax.loops.interpret import interpret, interpret_plan
from tensorplay.stax.loops.nodes import Buffer, Compute, Extern, Loops, Pointwise, Reduction, Ref, Scan, row_major
from tensorplay.stax.schedule.plan import Plan
from tensorplay.stax.schedule.schedule import schedule
from tensorplay.stax.schedule.verify import verify_plan

F32 = torch.float32
CPU = torch.device("cpu")
TARGET = Target()


def op(name: str, *xs: Expr | float) -> Expr:
    """An atom; Python numbers are float32 literals."""
    dtype = next(x.dtype for x in xs if isinstance(x, Expr))
    return make(name, tuple(x if isinstance(x, Expr) else const(x, dtype) for x in xs), dtype)


class Builder:
    """Collects nodes; every method returns the buffer that it defines."""

    def __init__(self) -> None:
        self.inputs: list[Buffer] = []
        self.nodes: list[Compute | Extern] = []

    def buffer(self, name: str, size: tuple[int, ...], stride: tuple[int, ...] | None, dtype=F32) -> Buffer:
        return Buffer(name, dtype, CPU, tuple(size), tuple(stride) if stride is not None else row_major(size))

    def input(self, *size: int, stride: tuple[int, ...] | None = None, dtype=F32) -> Buffer:
        self.inputs.append(self.buffer(f"arg{len(self.inputs)}", size, stride, dtype))
        return self.inputs[-1]

    def fresh(self) -> str:
        return f"buf{len(self.nodes)}"

    def pointwise(
        self,
        size: tuple[int, ...],
        body: Callable[..., Expr],
        stride: tuple[int, ...] | None = None,
        into: Buffer | None = None,
    ) -> Buffer:
        variables = tuple(var(f"i{k}", n) for k, n in enumerate(size))
        value = body(*variables)
        out = into or self.buffer(self.fresh(), size, stride, value.dtype)
        self.nodes.append(Compute((out,), (out.at(variables),), Pointwise(variables, value)))
        return out

    def reduction(self, kind: str, size: tuple[int, ...], rsize: tuple[int, ...], body: Callable[..., Expr]):
        variables = tuple(var(f"i{k}", n) for k, n in enumerate(size))
        rvars = tuple(var(f"r{k}", n) for k, n in enumerate(rsize))
        value = body(*variables, *rvars)
        dtypes = {"argmax": (torch.int64,), "argmin": (torch.int64,), "welford": (value.dtype,) * 2}.get(kind)
        outs = tuple(
            self.buffer(self.fresh() + "_" * k, size, None, d) for k, d in enumerate(dtypes or (value.dtype,))
        )
        self.nodes.append(Compute(outs, tuple(o.at(variables) for o in outs), Reduction(kind, variables, rvars, value)))
        return outs if len(outs) > 1 else outs[0]

    def scan(self, kind: str, size: tuple[int, ...], axis: int, body: Callable[..., Expr]) -> Buffer:
        variables = tuple(var(f"i{k}", n) for k, n in enumerate(size))
        out = self.buffer(self.fresh(), size, None)
        self.nodes.append(Compute((out,), (out.at(variables),), Scan(kind, variables, axis, body(*variables))))
        return out

    def mm(self, a: Buffer, b: Buffer) -> Buffer:
        out = self.buffer(self.fresh(), (a.size[0], b.size[1]), None)
        refs = tuple(Ref(x.name, x.size, x.stride) for x in (a, b))
        self.nodes.append(Extern((out,), torch.ops.aten.mm.default, refs))
        return out

    def loops(self, *outputs: Buffer) -> Loops:
        return Loops(
            tuple(self.inputs), tuple(self.nodes), tuple(Ref(b.name, b.size, b.stride) for b in outputs)
        )

    def plan(self, *outputs: Buffer, target: Target = TARGET, **how: Any) -> Plan:
        """The schedule, after it was found to compute what the loops compute."""
        loops = self.loops(*outputs)
        plan = schedule(loops, target, **how)
        check(verify_plan(plan))
        same(loops, plan)
        return plan


def at(buffer: Buffer, *point: Expr) -> Expr:
    return load(buffer.name, buffer.at(point), buffer.dtype)


def samples(loops: Loops) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    out = []
    for b in loops.inputs:
        t = torch.empty_strided(b.size, b.stride, dtype=b.dtype)
        flat = t.as_strided((b.span,), (1,))
        flat.copy_(torch.randint(-8, 9, (b.span,), generator=generator) / 4)
        out.append(t)
    return out


def same(loops: Loops, plan: Plan) -> None:
    """Both levels give the same bits on small dyadic numbers, and write the same inputs."""
    first, second = samples(loops), samples(loops)
    for want, got in zip(interpret(loops, first), interpret_plan(plan, second), strict=True):
        assert torch.equal(want.nan_to_num(7), got.nan_to_num(7))
    for want, got in zip(first, second, strict=True):
        assert torch.equal(want, got)


def check(plan: Plan) -> None:
    """What the docstrings of `Kernel` and `Memory` promise."""
    buffers = plan.loops.buffers
    for k in plan.kernels:
        full = k.dims + k.rdims
        stores: dict[str, tuple[Expr, bool]] = {}
        assert [v.name for v in full] == [f"x{i}" for i in range(len(k.dims))] + [f"r{i}" for i in range(len(k.rdims))]
        for node in k.nodes:
            if isinstance(node.loop, Reduction):
                assert node.loop.vars == k.dims and node.loop.rvars == k.rdims and k.rdims
            elif isinstance(node.loop, Scan):
                assert k.nodes == (node,) and node.vars == k.dims and not k.rdims
            else:
                assert node.vars in (full, k.dims)
            assert not node.loop.body.free - {*node.vars, *node.rvars}
            for e in (e for e in loads(node.loop.body, *node.at) if e.name in stores):
                offset, made_full = stores[e.name]
                assert e.args[1] is offset and (node.vars == full or node.rvars or not made_full)
            for b, offset in zip(node.outputs, node.at, strict=True):
                if b.name not in plan.loops.written_inputs:
                    stores[b.name] = (offset, node.vars == full and bool(k.rdims))
    lifetimes: dict[str, list[int]] = {}
    for i, step in enumerate(plan.steps):
        for name in (*step.reads, *step.writes):
            lifetimes.setdefault(name, []).append(i)
    place = plan.memory.arena
    for a in place:
        assert place[a] % 64 == 0 and place[a] + buffers[a].nbytes <= plan.memory.arena_bytes
        for b in place:
            if a < b and place[a] < place[b] + buffers[b].nbytes and place[b] < place[a] + buffers[a].nbytes:
                early, late = sorted((a, b), key=lambda n: lifetimes[n][0])
                assert lifetimes[early][-1] <= lifetimes[late][0]
                if lifetimes[early][-1] == lifetimes[late][0]:
                    assert not isinstance(plan.steps[lifetimes[late][0]], Extern) and place[a] == place[b]
    inputs = {b.name for b in plan.loops.inputs} | set(plan.loops.constants)
    covered = {*place, *plan.memory.fresh, *plan.memory.owned, *plan.memory.apart} | inputs
    assert set(plan.slots) <= covered
