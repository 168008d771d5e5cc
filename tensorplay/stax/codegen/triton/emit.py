"""A plan as one Triton module: the second printer.

In: a `Plan`.  Out: a `Source` of language 'triton': device functions, one function a kernel, and one entry a run of
kernels, `segment_k(p)`, where p[i] is the flat tensor of `Plan.slots[i]`.
Always: the text is plain Triton, read by people; arithmetic is not contracted, so that exact operators have eager's
bits; kernels with run-time indices are launched with their assertions on.
"""

from __future__ import annotations

from ...schedule.plan import Plan
from ..target import Source, Target
from .kernel import Text, emit_kernel
from .spell import FUNCTIONS, called


def emit(plan: Plan, target: Target) -> Source:
    """The module of a plan; UnsupportedError where a kernel holds what Triton text does not cover yet."""
    buffers = plan.loops.buffers
    texts = {k.name: emit_kernel(k, buffers) for k in plan.kernels if all(v.args[1] for v in k.dims)}
    slots = {name: i for i, name in enumerate(plan.slots)}
    entries, launches = [], []
    for number, segment in enumerate(s for s in plan.segments if isinstance(s, tuple)):
        entries.append(f"segment_{number}")
        lines = [launch(texts[k.name], slots) for k in segment if k.name in texts]
        launches.append("\n    ".join([f"def segment_{number}(p):", *(lines or ["pass"])]) + "\n")
    body = "\n\n".join([*(t.text for t in texts.values()), *launches])
    functions = []
    for name in FUNCTIONS:
        if called(body, [name]):
            functions.append(f"@triton.jit{FUNCTIONS[name]}\n")
    code = "\n\n".join([*functions, body])
    imports = ["import triton", "import triton.language as tl"]
    if called(code, ["libdevice"]):
        imports.append("from triton.language.extra import libdevice")
    text = "\n".join(imports) + "\n\n\n" + code
    return Source("triton", text, tuple(entries), {name: t.text for name, t in texts.items()})


def launch(t: Text, slots: dict[str, int]) -> str:
    pointers = ", ".join(f"p[{slots[b]}]" for b in t.slots)
    options = f"XBLOCK={t.xblock}, num_warps={t.warps}, enable_fp_fusion=False" + (", debug=True" if t.checked else "")
    return f"{t.name}[({t.grid},)]({pointers}, {options})"
