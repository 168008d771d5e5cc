"""What the package imports: few modules at start, folders only from their left, no peers, no print."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "tensorplay"
FILES = sorted(PACKAGE.rglob("*.py"))
HEAVY = ("sympy", "torch._dynamo", "torch._inductor", "networkx")
PEERS = ("torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd", "torch._functorch.partitioners", "sympy", "networkx")

# The order of the data. A folder imports from what stands left of it.
ORDER = ("base", "key", "capture", "graph", "ops", "joint", "loops", "schedule", "codegen", "artifacts", "runtime", "line", "top")  # fmt: skip
RANK = {layer: k for k, layer in enumerate(ORDER)}
BASE = {"_native", "native", "errors", "config", "record", "version", "training", "collector", "collectives", "source", "stax.expr", "stax.rewrite", "stax.dtypes", "stax"}
LINE = {"stax.pipeline"}
LAUNCHERS = {"stax.codegen.triton.launch"}  # part of the run time, kept beside its printer
# What crosses an arrow: files that only declare. Every folder may name them, and they import nothing but each other.
DECLARED = {"loops.nodes", "codegen.target", "capture.captured", "joint.opgraph", "schedule.plan", "key.sources"}

PROGRAM = """
import json, sys
import torch
import tensorplay as tp
def f(x, w):
    return (torch.relu(x + w) * 2).sum(-1)
x = torch.randn(64, 128)
with torch.no_grad():
    out = tp.compile(f, strict_native=True)(x, x)
assert torch.allclose(out, f(x, x))
print(json.dumps(sorted(sys.modules)))
"""


def test_first_call_loads_no_heavy_module():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout.splitlines()[-1])
    found = [m for m in loaded if any(m == h or m.startswith(h + ".") for h in HEAVY)]
    assert not found


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def walk(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those of `__str__` and `__repr__`: a level may find its printer to the right of it."""
    pending = [tree]
    while pending:
        node = pending.pop()
        yield node
        if not (isinstance(node, ast.FunctionDef) and node.name in ("__str__", "__repr__")):
            pending.extend(ast.iter_child_nodes(node))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file imports, as an absolute name, with its line."""
    own = ["tensorplay", *path.relative_to(PACKAGE).parent.parts]
    for node in walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = own[: len(own) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = PACKAGE.parent / (module + "." + alias.name).replace(".", "/")
                submodule = inner.is_dir() or inner.with_suffix(".py").exists()
                yield f"{module}.{alias.name}" if submodule else module, node.lineno


def layer(module: str) -> str:
    """The layer of a module of ours, named without `tensorplay.`."""
    if module in BASE:
        return "base"
    if module in LINE:
        return "line"
    if module in LAUNCHERS:
        return "runtime"
    first, *rest = module.split(".")
    folder = rest[0] if first == "stax" and rest else first
    return folder if folder in RANK else "top"


def declared(module: str) -> bool:
    return module.removeprefix("stax.") in DECLARED


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_folder_imports_only_what_stands_left_of_it(path):
    own = name_of(path)
    wrong = []
    for module, line in imports(path):
        if module.startswith("tensorplay."):
            other = module.removeprefix("tensorplay.")
            if declared(own) and layer(other) != "base" and not declared(other) and layer(other) != layer(own):
                wrong.append(f"line {line}: {own} only declares, and imports {other}")
            elif RANK[layer(other)] > RANK[layer(own)] and not declared(other):
                wrong.append(f"line {line}: {own} imports {other}, which stands right of it")
    assert not wrong


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_peer_is_imported(path):
    if name_of(path) == "registry":  # adapters import their peer in the function that calls it
        pytest.skip("adapters")
    wrong = [(m, line) for m, line in imports(path) if any(m == p or m.startswith(p + ".") for p in PEERS)]
    assert not wrong


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_package_prints_nothing(path):
    if name_of(path) == "cli":
        pytest.skip("the command line")
    calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    assert not [c.lineno for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"]
