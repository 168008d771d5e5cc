"""Programs for two gloo processes. Each returns what it computed eagerly, what compiled, and what tp.compile gave.

    python -m tests.distributed.programs RANK STORE REPORT

runs all of them and writes the report, JSON: for each program the two results, the reasons of fallbacks, or the error.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import tensorplay as tp
from tensorplay.compiled import compiled_of

Result = tuple[Any, Any, list[Any]]
PROGRAMS: dict[str, Callable[[int], Result]] = {}
KEPT: list[Any] = []  # FSDP tells parameters apart by identity, for ever


def program(f: Callable[[int], Result]) -> Callable[[int], Result]:
    PROGRAMS[f.__name__] = f
    return f


def network() -> nn.Sequential:
    torch.manual_seed(0)
    # a bias before the normalization has no gradient but rounding, which AdamW would magnify
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    KEPT.extend(model.parameters())
    return model


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x)


def losses(rank: int, model: nn.Module, call: Any = None, apart: Any = None, more: Any = list) -> list[float]:
    """Three steps of AdamW, every process with inputs of its own. apart: a context in which gradients are only summed."""
    optimizer, found = torch.optim.AdamW(model.parameters(), 0.01), []
    for k in range(3):
        optimizer.zero_grad()
        for context in (apart, nullcontext) if apart else (nullcontext,):
            with context():
                x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * k + rank))
                loss = (call or model)(x).pow(2).mean()
                loss.backward()
        optimizer.step()
        found.append(loss.item())
    return [*found, *[t.double().sum().item() for t in more()]]


@program
def wrapped_compiled_module(rank):
    eager, model = DDP(network()), network()
    compiled = tp.compile(model, strict_native=True)
    wrapper = DDP(compiled)
    return losses(rank, eager, more=eager.buffers), losses(rank, wrapper, more=wrapper.buffers), [compiled]


@program
def compiled_wrapper(rank):
    wrapper = DDP(network())
    compiled = tp.compile(wrapper)
    return losses(rank, DDP(network())), losses(rank, wrapper, compiled), [compiled]


@program
def unused_parameters(rank):
    compiled = tp.compile(Unused(), strict_native=True)
    eager, wrapper = (DDP(m, find_unused_parameters=True) for m in (Unused(), compiled))
    return losses(rank, eager), losses(rank, wrapper), [compiled]


@program
def accumulation_without_synchronization(rank):
    compiled = tp.compile(network(), strict_native=True)
    eager, wrapper = DDP(network()), DDP(compiled)
    return losses(rank, eager, apart=eager.no_sync), losses(rank, wrapper, apart=wrapper.no_sync), [compiled]


def sharded(prepare: Callable[[nn.Sequential], Any] = lambda m: None) -> nn.Sequential:
    model = network()
    prepare(model)
    for k in (0, 3):
        fully_shard(model[k])
    fully_shard(model)
    return model


@program
def sharded_layers_compiled_under_their_hooks(rank):
    model, made = sharded(), []
    for layer in model:
        layer.forward = tp.compile(layer.forward, strict_native=True)
        made.append(layer.forward)
    return losses(rank, sharded()), losses(rank, model), made


@program
def sharded_in_low_precision_with_evaluation_between(rank):
    found, made = [], []
    for compiled in (False, True):
        model, policy = network(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model[1] = nn.LayerNorm(8)
        KEPT.extend(model.parameters())
        for k in (0, 3):
            fully_shard(model[k], mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        for layer in model if compiled else ():
            layer.forward = tp.compile(layer.forward, strict_native=True)
            made.append(layer.forward)
        seen = losses(rank, model)
        with torch.no_grad():
            seen.append(model.eval()(torch.ones(4, 6) * rank).sum().item())
        found.append([*seen, *losses(rank, model.train())])
    return found[0], found[1], made


@program
def buckets_and_a_static_graph(rank):
    want, got, made = [], [], []
    for options in ({"gradient_as_bucket_view": True}, {"static_graph": True}):
        made.append(tp.compile(network(), strict_native=True))
        want += losses(rank, DDP(network(), **options))
        got += losses(rank, DDP(made[-1], **options))
    return want, got, made


@program
def compiled_sharded_module(rank):
    model = sharded()
    compiled = tp.compile(model)
    return losses(rank, sharded()), losses(rank, model, compiled), [compiled]


@program
def sharded_compiled_layers(rank):
    made = []

    def prepare(model: nn.Sequential) -> None:
        for k in (0, 3):
            model[k] = tp.compile(model[k])
            made.append(model[k])

    return losses(rank, sharded()), losses(rank, sharded(prepare)), made


def both(f: Callable[..., Any], *inputs: torch.Tensor, strict: bool = True, backward: bool = False) -> Result:
    """Two calls of f with changing inputs; what they return, what they leave in their inputs, gradients."""
    compiled, found = tp.compile(f, strict_native=strict), []
    for g in (f, compiled):
        seen: list[Any] = []
        for scale in (1.0, 3.0):
            given = [(t * scale).requires_grad_(backward) for t in inputs]
            out = g(*given)
            if backward:
                out.sum().backward()
            seen += [t.tolist() for t in (out, *given, *(t.grad for t in given if backward))]
        found.append(seen)
    return found[0], found[1], [compiled]


@program
def functional_all_reduce(rank):
    return both(lambda x: fc.all_reduce(x * 2, "sum", dist.group.WORLD) + 1, torch.ones(4) * (rank + 1))


@program
def functional_gather_and_scatter(rank):
    def f(x):
        whole = fc.all_gather_tensor(x * 2, 0, dist.group.WORLD)
        return whole.sum() + fc.reduce_scatter_tensor(whole * whole, "sum", 0, dist.group.WORLD)

    return both(f, torch.ones(4) * (rank + 1))


@program
def gradients_of_collectives(rank):
    return both(lambda x: fc.all_reduce(x * x, "sum", dist.group.WORLD) * (rank + 1), torch.ones(4), backward=True)


@program
def gradients_of_gathering(rank):
    return both(lambda x: fc.all_gather_tensor(x * 2, 0, dist.group.WORLD) ** 2, torch.arange(4.0) * (rank + 1), backward=True)


@program
def groups_lists_and_small_tensors(rank):
    group = dist.new_group([0, 1])

    def f(x):
        y, number = x[:0] * 2, x[0] * 2
        dist.all_reduce(y, group=group)
        dist.all_reduce(number, dist.ReduceOp.PRODUCT)
        a, b = fc.all_reduce_coalesced([x, x * 2], "max", group)
        swapped = fc.all_to_all_single(x * 1, None, None, group)
        return y.sum() + number + a + b + swapped

    return both(f, torch.arange(1.0, 5.0) * (rank + 1))


@program
def all_reduce_of_a_value(rank):
    def f(x):
        y = x * 2
        dist.all_reduce(y)
        dist.all_reduce(y, dist.ReduceOp.MAX)
        return y + 1

    return both(f, torch.arange(4.0) * (rank + 1))


@program
def all_reduce_of_an_input(rank):
    def f(x):
        dist.all_reduce(x)
        return x + 1

    return both(f, torch.arange(4.0) * (rank + 1))


@program
def all_gather_and_broadcast(rank):
    def f(x):
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x * 2)
        whole = x.new_empty(2 * x.shape[0])
        dist.all_gather_into_tensor(whole, x)
        half = torch.empty_like(x)
        dist.reduce_scatter_tensor(half, whole * (rank + 1))
        dist.broadcast(x, 1)
        return torch.stack(parts).sum(0) + whole.sum() + half + x

    return both(f, torch.arange(4.0) + rank)


@program
def asynchronous_all_reduce(rank):
    def f(x):
        work = dist.all_reduce(x, async_op=True)
        y = torch.ones(4) * 2
        work.wait()
        return x + y

    return both(f, torch.arange(4.0) * (rank + 1))


@program
def one_process_compiles(rank):
    """Where a capture exchanged anything, the processes would get out of step."""

    def f(x):
        y = x * 2
        dist.all_reduce(y)
        return y + fc.all_reduce(x, "sum", dist.group.WORLD)

    compiled = tp.compile(f, strict_native=True)
    inputs = [torch.ones(3 + k) * (rank + 1) for k in range(2)]  # a second shape: a second capture
    want, got = [f(x).tolist() for x in inputs], [(compiled if rank else f)(x).tolist() for x in inputs]
    return want, got, [compiled]


@program
def branch_on_what_arrived(rank):
    def f(x):
        y = x * 2
        dist.all_reduce(y)
        return y + 1 if y.sum() > 20 else y - 1

    return both(f, torch.ones(4) * (rank + 1), strict=False)


@program
def barrier(rank):
    def f(x):
        dist.barrier()
        return x + dist.get_rank() + dist.get_world_size()

    return both(f, torch.ones(4), strict=False)


@program
def distributed_tensors(rank):
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [Shard(0)])

    def f(x, w):
        return (w * 2 + 1).sum().full_tensor() * x.sum()

    compiled, found = tp.compile(f), []
    for g in (f, compiled):
        w = weight.detach().requires_grad_()
        out = g(torch.ones(3), w)
        out.backward()
        found.append([out.item(), w.grad.full_tensor().tolist()])
    return found[0], found[1], [compiled]


def run(rank: int, store: str) -> dict[str, Any]:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=30))
    report = {}
    for name, f in PROGRAMS.items():
        try:
            want, got, made = f(rank)
            report[name] = {"want": want, "got": got, "reasons": [x.reason for m in made for x in compiled_of(m).fallbacks]}
        except Exception:
            report[name] = {"error": traceback.format_exc()}
    dist.destroy_process_group()
    return report


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    rank, store, path = sys.argv[1:]
    with open(path, "w") as file:
        json.dump(run(int(rank), store), file)
