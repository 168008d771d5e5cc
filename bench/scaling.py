"""Compile time against program size: GPT-2 of 12 to 96 layers and chains of up to 2,000 operators.

    python -m bench.scaling [--layers 12 24 48 96] [--chain 250 500 1000 2000]

Each size compiles in a process of its own with an empty artifact folder. Times are CPU seconds of the process and of
the C++ compiler, which other programs on the machine disturb least; "per" divides the total by the size, so that a
linear compiler shows one number down the column. Stages are seconds of the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile

from .clock import machine, table

STAGES = ("capture", "key", "passes", "retrace", "lower", "schedule", "codegen", "build")

CHILD = """
import sys, time, json, resource, warnings
import torch
warnings.simplefilter("ignore")
import tensorplay as tp
kind, size = sys.argv[1], int(sys.argv[2])
if kind == "layers":
    from transformers import GPT2Config, GPT2LMHeadModel
    f = GPT2LMHeadModel(GPT2Config(n_layer=size, n_embd=64, n_head=4, vocab_size=512)).eval()
    kwargs = {"input_ids": torch.randint(0, 512, (2, 16))}
else:
    def f(x):
        for k in range(size // 4):
            x = torch.sin(x * 0.5) + torch.relu(x)
        return x
    kwargs = {"x": torch.randn(64, 64)}
with torch.no_grad():
    f(**kwargs)
    compiled = tp.compile(f, strict_native=True)
    own = time.process_time()
    compiled(**kwargs)
    own = time.process_time() - own
used = resource.getrusage(resource.RUSAGE_CHILDREN)
compiler = used.ru_utime + used.ru_stime
version = tp.explain(compiled).versions[0]
p = version.program
print(json.dumps({"own": own, "compiler": compiler, "stages": version.seconds, "kernels": len(p.plan.kernels),
                  "functions": p.source.text.count("\\nstatic "), "nodes": len(p.ops.module.graph.nodes)}))
"""


def child(kind: str, size: int) -> dict:
    """What one compilation in a process of its own cost."""
    with tempfile.TemporaryDirectory() as folder:
        env = dict(os.environ, TP_CACHE_DIR=folder)
        done = subprocess.run([sys.executable, "-c", CHILD, kind, str(size)], env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--layers", nargs="*", type=int, default=[12, 24, 48, 96])
    options.add_argument("--chain", nargs="*", type=int, default=[250, 500, 1000, 2000])
    chosen = options.parse_args()
    print(machine())
    for kind, sizes in (("layers", chosen.layers), ("chain", chosen.chain)):
        rows = []
        for size in sizes:
            r = child(kind, size)
            total = r["own"] + r["compiler"]
            rows.append([
                str(size), str(r["nodes"]), str(r["kernels"]), str(r["functions"]), f"{r['own']:.2f}", f"{r['compiler']:.2f}",
                f"{total / size * 1e3:.1f}", *(f"{r['stages'].get(stage, 0.0):.2f}" for stage in STAGES),
            ])  # fmt: skip
        print()
        print(table([kind, "nodes", "kernels", "functions", "own CPU s", "compiler CPU s", "ms per", *STAGES], rows), flush=True)


if __name__ == "__main__":
    main()
