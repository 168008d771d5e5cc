"""A walk through the whole compiler: one function, level by level, each level printed and executed.

    python docs/walk.py

The function is example 1.1 with a softmax behind it, so that a row is reduced, read again and written. Every stage
is called by hand, exactly as `tensorplay/stax/pipeline.py` calls it, and every level is run on the same inputs.
"""

from __future__ import annotations

import torch

from tensorplay.capture.show import show
from tensorplay.capture.tracer import capture
from tensorplay.key.signature import signature
from tensorplay.stax.artifacts.build import build
from tensorplay.stax.codegen.cpp.emit import emit as emit_cpp
from tensorplay.stax.codegen.detect import detect
from tensorplay.stax.codegen.target import Target
from tensorplay.stax.codegen.triton.emit import emit as emit_triton
from tensorplay.stax.expr import add, floordiv, mod, mul, var
from tensorplay.stax.joint.retrace import retrace
from tensorplay.stax.loops.interpret import interpret, interpret_plan
from tensorplay.stax.loops.lower import lower
from tensorplay.stax.loops.read import read
from tensorplay.stax.loops.text import show as show_loops
from tensorplay.stax.loops.verify import verify
from tensorplay.stax.runtime.program import Program
from tensorplay.stax.schedule.schedule import schedule
from tensorplay.stax.schedule.text import show as show_plan
from tensorplay.testing import near


def f(x, w):
    return torch.softmax(torch.relu(x + w) * 2, -1)


def title(text: str) -> None:
    print(f"\n=== {text} " + "=" * max(0, 100 - len(text)))


def main() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(64, 128), torch.randn(64, 128)
    want = f(x, w)

    title("1. The call: what a compiled version is valid for (section 2)")
    # A version is reused exactly when its key is equal: metadata of tensors, values of scalars, state that was read.
    print(signature((x, w), {}))

    title("2. Capture: run the function once and record it (section 3)")
    captured = capture(f, (x, w), {})
    print(show(captured.graph))
    assert near(captured.graph(x, w)[0], want, 0.0)

    title("3. Operators: the same graph at the dispatcher, functional (section 4)")
    ops = retrace(captured.graph, captured.samples)
    print(ops)
    assert near(ops.module(x, w)[0], want, 0.0)

    title("4. Loops: a tensor is a function from index to value (section 6)")
    # softmax became a maximum, a sum and a quotient; everything pointwise was composed into their bodies.
    loops = verify(lower(ops))
    text = show_loops(loops)
    print(text)
    assert show_loops(read(text)) == text  # the text is Python, and says everything
    assert near(interpret(loops, [x, w])[0], want, 1e-6)

    title("   Index expressions keep a normal form, so equal places are one object")
    i, j = var("i", 64), var("j", 128)
    flat = add(mul(i, 128), j)
    print(floordiv(flat, 128), "|", mod(flat, 128), "|", floordiv(flat, 64), "|", mod(flat, 6))
    assert floordiv(flat, 128) is i and mod(flat, 128) is j

    title("5. Schedule: which loops share a kernel, in which memory (section 7)")
    target = detect()
    plan = schedule(loops, target)
    print(show_plan(plan))
    assert len(plan.kernels) == 1
    assert near(interpret_plan(plan, [x, w])[0], want, 1e-6)

    title(f"6. Code for this CPU: {target.isa} (section 8)")
    source = emit_cpp(plan, target)
    for kernel in source.kernels.values():
        print(kernel)

    title("   The same plan for a GPU (section 9)")
    cuda = Target(device="cuda")
    for kernel in emit_triton(schedule(loops, cuda), cuda).kernels.values():
        print(kernel)

    title("7. The artifact and the program")
    program = Program(captured.graph, ops, loops, plan, source, build(source, target), {})
    print(program.host)
    assert near(program(x, w)[0], want, 1e-6)
    print("every level gives eager's result")


if __name__ == "__main__":
    main()
