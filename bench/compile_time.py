"""Time to the first result in fresh processes with empty caches, ours and torch.compile alternately.

    python -m bench.compile_time [--rounds 2] [--warm] [example gpt2 ...]

The clock starts after `import torch` (and the construction of the model) and stops when the first call returns.
With --warm each peer runs once more on the caches of its cold run. Modules are bytecode already, as where they are
installed: a first run of each peer, which does not count, writes it to a folder of this script.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile

from .clock import machine, table

CHILD = """
import sys, time, json, warnings
import torch
warnings.simplefilter("ignore")
peer, name = sys.argv[1], sys.argv[2]
if name == "example":
    f = lambda x, w: (torch.relu(x + w) * 2).sum(-1)
    call, kwargs = (torch.randn(64, 128), torch.randn(64, 128)), {}
else:
    from bench.zoo import make
    f, kwargs = make(name)
    call = ()
with torch.no_grad():
    start = time.perf_counter()
    if peer == "ours":
        import tensorplay as tp
        compiled = tp.compile(f, strict_native=True)
    elif peer == "inductor":
        compiled = torch.compile(f)
    else:
        compiled = f
    compiled(*call, **kwargs)
    seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds}))
"""


def child(peer: str, name: str, folder: str, bytecode: str) -> float:
    """Seconds to the first result in a process of its own, with its caches in `folder`."""
    env = dict(
        os.environ, TP_CACHE_DIR=f"{folder}/tp", TORCHINDUCTOR_CACHE_DIR=f"{folder}/inductor", TRITON_CACHE_DIR=f"{folder}/triton",
        PYTHONPYCACHEPREFIX=bytecode, PYTHONDONTWRITEBYTECODE="",
    )  # fmt: skip
    done = subprocess.run([sys.executable, "-c", CHILD, peer, name], env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout.strip().splitlines()[-1])["seconds"]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", default=["example", "gpt2"])
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--warm", action="store_true")
    options.add_argument("--peers", nargs="*", default=["eager", "ours", "inductor"])
    chosen = options.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as bytecode:
        for peer in chosen.peers:
            child(peer, "example", f"{bytecode}/first", bytecode)
        for name in chosen.names:
            cold: dict[str, list[float]] = {p: [] for p in chosen.peers}
            warm: dict[str, list[float]] = {p: [] for p in chosen.peers}
            for _ in range(chosen.rounds):
                for peer in chosen.peers:
                    with tempfile.TemporaryDirectory() as folder:
                        cold[peer].append(child(peer, name, folder, bytecode))
                        if chosen.warm:
                            warm[peer].append(child(peer, name, folder, bytecode))
            for kind, times in (("cold", cold), ("warm", warm)):
                if times[chosen.peers[0]]:
                    best = {p: min(v) for p, v in times.items()}
                    ratio = f"{best['inductor'] / best['ours']:.1f}" if {"inductor", "ours"} <= set(best) else ""
                    rows.append([name, kind, *(f"{best[p]:.2f}" for p in chosen.peers), ratio])
    print(machine())
    print(table(["program", "caches", *(f"{p} s" for p in chosen.peers), "Inductor/ours"], rows))


if __name__ == "__main__":
    main()
