"""Training steps of real models, compiled, eager and through Inductor.

    python -m bench.training [--models gpt2,bert,...] [--full] [--dtype float32] [--steps 10] [--inductor]

A line for each model: largest relative difference of ten losses to eager's, bytes saved for backward (ours, the
default partition's, Inductor's), seconds of the first step, milliseconds of the fastest step.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings

import torch

import tensorplay as tp
from bench.zoo import make, tensors
from tensorplay.compiled import compiled_of

MODELS = ("gpt2", "bert", "llama", "t5", "vit", "resnet")
LABELLED = ("gpt2", "llama", "t5")


def model_of(name: str, dtype: torch.dtype, small: bool) -> tuple[torch.nn.Module, dict]:
    model, inputs = make(name, dtype, small=small)
    if name in LABELLED:
        inputs["labels"] = inputs.get("decoder_input_ids", inputs["input_ids"])
    return model.train(), inputs


def loss_of(result) -> torch.Tensor:
    loss = getattr(result, "loss", None)
    if loss is not None:
        return loss
    return sum(t.float().pow(2).mean() for t in tensors(result)[:2] if t.is_floating_point())


def step_through(model, call, inputs, steps: int) -> tuple[list[float], list[float]]:
    """Losses and seconds of AdamW steps, from the same seed each time."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(7)
    losses, seconds = [], []
    for _ in range(steps):
        start = time.perf_counter()
        loss = loss_of(call(**inputs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    return losses, seconds


def losses(name: str, compiled: bool, steps: int = 10) -> list[float]:
    """Ten losses of a small configuration; compiled strictly."""
    model, inputs = model_of(name, torch.float32, small=True)
    return step_through(model, tp.compile(model, strict_native=True) if compiled else model, inputs, steps)[0]


def saved_bytes(call, inputs) -> int:
    """Bytes of distinct memory that autograd holds behind a call, parameters and inputs apart."""
    held: dict[int, int] = {}
    model_memory = {t.untyped_storage().data_ptr() for t in (*call.parameters(), *call.buffers(), *tensors(inputs))}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in model_memory:
            held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = loss_of(call(**inputs))
        total = sum(held.values())
    del result
    return total


def measure(name: str, dtype: torch.dtype, small: bool, steps: int, inductor: bool) -> list[str]:
    model, inputs = model_of(name, dtype, small)
    ref = copy.deepcopy(model)
    cf = tp.compile(model)
    got, ours = step_through(model, cf, inputs, steps)
    want, eager = step_through(ref, ref, inputs, steps)
    program = compiled_of(cf).versions[-1].program
    parts = getattr(program, "partition", None)
    row = [name, f"{max(abs(a - b) / abs(b) for a, b in zip(got, want, strict=True)):.1e}"]
    row += [f"{parts.saved_bytes}", f"{parts.default_bytes}"] if parts is not None else ["on torch", ""]
    row += [f"{saved_bytes(ref, inputs)}"]
    times = [f"{ours[0]:.2f}", f"{1e3 * min(ours):.1f}", f"{1e3 * min(eager):.1f}"]
    if inductor:
        peer = copy.deepcopy(ref)
        compiled = torch.compile(peer)
        _, theirs = step_through(peer, compiled, inputs, steps)
        return [*row, f"{saved_bytes(compiled, inputs)}", *times, f"{theirs[0]:.2f}", f"{1e3 * min(theirs):.1f}"]
    return [*row, "", *times, "", ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--full", action="store_true", help="6 layers, 384 wide; else small configurations")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--inductor", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    heads = "model, loss, saved, default, eager saves, inductor saves, first s, step ms, eager ms, inductor first s, inductor ms"
    print("| " + heads.replace(", ", " | ") + " |")
    print("|---" * 11 + "|")
    for name in options.models.split(","):
        row = measure(name, getattr(torch, options.dtype), not options.full, options.steps, options.inductor)
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
