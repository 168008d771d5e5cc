"""The host code of a program: straight-line Python that allocates, launches, calls the library and returns.

In: the plan, the artifact, the structure of the result.  Out: `Host`: a function of the graph's inputs, which checks
them first, the same without the check, and its source. A host that consumes takes its inputs as one list, which it
empties, and lets go of each input behind its last use.
Always: the function is generated once and is text that a person can read; library operators run below autograd and
autocast, since the operator graph was recorded there; what the caller gets is made under the caller's own modes.
"""

from __future__ import annotations

import keyword
import math
import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckFailed, UnsupportedError
from ...source import code_of
from ..artifacts.build import Artifact
from ..codegen.target import Source
from ..joint.mutate import random
from ..loops.nodes import Extern, Ref
from ..ops.numbers import NUMBERS
from ..schedule.memory import OUT_VARIANTS
from ..schedule.peak import last_use
from ..schedule.plan import Kernel, Plan
from . import launch
from .arena import KEEP, Arena
from .direct import direct
from .layout import checker, settle
from .pages import LARGE, empty_large

_KEY = torch._C.DispatchKey
_SET = torch._C.DispatchKeySet
BELOW = (
    _SET(_KEY.AutogradFunctionality) | _SET(_KEY.AutogradOther) | _SET(_KEY.ADInplaceOrView) | _SET(_KEY.AutocastCPU)
)
below = torch._C._ExcludeDispatchKeyGuard


@dataclass(frozen=True)
class View:
    """A tensor on the memory of another: which node makes it, by what beside its layout ('.detach()', '.data'), of what."""

    node: str
    form: str = ""
    of: str = ""


@dataclass(frozen=True)
class Host:
    """The compiled host code and its text; `trusted` is for inputs whose metadata a key has compared already."""

    call: Callable[..., Any]
    trusted: Callable[..., Any]
    text: str
    arena: Arena


def group(items: Iterable[str]) -> str:
    """A tuple as Python writes it."""
    items = list(items)
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


# Views that library operators take, and views that are returned, are made under different modes.
TAKEN, RETURNED = View("", ""), View("returned", "")


def wrap(text: str, indent: str) -> list[str]:
    """A long tuple on several lines; what follows its bracket stays with it."""
    whole = text.replace(") = ", ")\0=\0")
    lines = textwrap.wrap(whole, 100, initial_indent=indent, subsequent_indent=indent + "    ", break_long_words=False)
    return [line.replace("\0", " ") for line in lines]


class Writer:
    """Collects lines; knows which names a line needs though its text does not show them (pointers in the table)."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str, frozenset[str]]] = []
        self.depth = 1

    def line(self, text: str, needed: Iterable[str] = ()) -> None:
        self.lines.append((self.depth, text, frozenset(needed)))

    def text(self, heads: list[str], temporary: frozenset[str]) -> str:
        """The function; each temporary name is deleted behind its last use."""
        last: dict[str, int] = {}
        for i, (_, text, needed) in enumerate(self.lines):
            for name in temporary.intersection(re.findall(r"\w+", text)) | (needed & temporary):
                last[name] = i
        dead: dict[int, list[str]] = {}
        for name in sorted(last):
            dead.setdefault(last[name], []).append(name)
        out = list(heads)
        for i, (depth, text, _) in enumerate(self.lines):
            indent = "    " * depth
            out += wrap(text, indent) if text.startswith(("(", "return (")) else [indent + text]
            if i in dead and i + 1 < len(self.lines):
                out.append(indent + "del " + ", ".join(dead[i]))
        return "\n".join(out) + "\n"


class Emit:
    """The state of writing one host function."""

    def __init__(self, plan: Plan, source: Source, artifact: Artifact, aliases: dict[int, View]) -> None:
        self.plan = plan
        self.source = source
        self.artifact = artifact
        self.aliases = aliases
        self.buffers = plan.loops.buffers
        self.space: dict[str, Any] = {}  # what the text refers to, by name
        self.taken: set[str] = set()
        self.names: dict[str, str] = {}
        self.writer = Writer()
        self.views: dict[Ref, str] = {}  # of planned buffers, made once a lease
        self.derived: dict[tuple[Ref, View], str] = {}  # of others, made once a call
        self.temporary: list[str] = []
        self.allocated: set[str] = set()
        self.filled: set[str] = set(plan.memory.arena) | set(plan.loops.constants)
        self.fresh = frozenset((*plan.memory.fresh, *plan.memory.apart))
        self.owned = frozenset(plan.memory.owned)
        self.placed = self.filled | {b.name for b in plan.loops.inputs} | self.fresh | self.owned
        self.slots = {name: slot for slot, name in enumerate(plan.slots)}
        self.constants: dict[int, str] = {}
        self.devices: dict[torch.device, torch.device] = {}
        for name in self.buffers:
            self.names[name] = self.identifier(name)
        self.temporary += [self.names[name] for name in plan.memory.apart]

    # ---- names and values ----------------------------------------------------------------------------------------

    def identifier(self, wish: str) -> str:
        """A new identifier that looks like `wish`."""
        plain = re.sub(r"\W", "_", wish)
        if not plain or plain[0].isdigit() or keyword.iskeyword(plain) or plain in RESERVED:
            plain = "_" + plain
        name, k = plain, 1
        while name in self.taken:
            name, k = f"{plain}_{k}", k + 1
        self.taken.add(name)
        return name

    def bind(self, wish: str, value: Any) -> str:
        """The name of an object that the host code refers to."""
        found = self.constants.get(id(value))
        if found is None:
            found = self.identifier(wish)
            self.space[found] = value
            self.constants[id(value)] = found
        return found

    def literal(self, value: Any) -> str:
        """An argument or a result as text."""
        if isinstance(value, Ref):
            return f"{self.view(replace(value, number=False), TAKEN)}.item()" if value.number else self.view(value, TAKEN)
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        if type(value) is float:
            return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
        if isinstance(value, (list, tuple)):
            inner = [self.literal(v) for v in value]
            if isinstance(value, tuple):
                return group(inner)
            return "[" + ", ".join(inner) + "]"
        if isinstance(value, torch.dtype):
            return self.bind(str(value).removeprefix("torch."), value)
        if isinstance(value, torch.device):
            value = self.devices.setdefault(value, value)  # equal devices are many objects
            return self.bind(str(value), value)
        return self.bind(f"{type(value).__name__}_{len(self.constants)}".lower(), value)

    def whole(self, ref: Ref) -> bool:
        """Whether a view is its whole buffer in the buffer's own layout."""
        b = self.buffers[ref.buffer]
        return ref.offset == 0 and ref.size == b.size and ref.stride == b.stride

    def view(self, ref: Ref, made: View) -> str:
        """The name of the tensor that a view is; `made` tells apart what must be different tensors."""
        name = self.names[ref.buffer]
        if ref.buffer in self.plan.memory.arena:
            found = self.views.get(ref)
            if found is None:
                found = self.views[ref] = name if self.whole(ref) else self.identifier(f"{name}_view")
            return found
        self.ready(ref.buffer)
        if self.whole(ref) and made in (TAKEN, RETURNED):
            return name
        found = self.derived.get((ref, made))
        if found is None:
            found = self.derived[ref, made] = self.identifier(f"{name}_view")
            self.writer.line(f"{found} = {self.taken_view(name, ref) if made is TAKEN else self.viewed(name, ref, made)}")
            self.temporary.append(found)
        return found

    def viewed(self, name: str, ref: Ref, made: View) -> str:
        """A view that is returned."""
        if self.whole(ref) and made.form:
            return f"{name}{made.form}"
        offset = f"{name}.storage_offset()" + (f" + {ref.offset}" if ref.offset else "")
        return f"{name}{made.of}.as_strided({ref.size}, {ref.stride}, {offset}){made.form}"

    def taken_view(self, name: str, ref: Ref) -> str:
        """A view that only a library operator sees."""
        b = self.buffers[ref.buffer]
        if len(b.size) == 2 and not ref.offset and (ref.size, ref.stride) == (b.size[::-1], b.stride[::-1]):
            return f"{name}.t()"
        if b.device.type == "cpu":
            return f"view_cpu({name}, {ref.size}, {ref.stride}, {ref.offset})"
        return self.viewed(name, ref, TAKEN)

    def ready(self, name: str) -> None:
        """Allocates a buffer that does not live in the arena, just before its first use, or takes over a dying one."""
        if name in self.fresh and name not in self.allocated:
            self.allocated.add(name)
            b = self.buffers[name]
            if name in self.plan.memory.over:
                self.writer.line(f"{self.names[name]} = {self.names[self.plan.memory.over[name]]}")
                return
            text = f"{b.size}, {b.stride}, {self.literal(b.dtype)}"
            if b.device.type == "cpu":
                text = f"{'empty_large' if b.nbytes > LARGE else 'empty_cpu'}({text})"
            else:
                text = f"empty_strided({b.size}, {b.stride}, dtype={self.literal(b.dtype)}, device={self.literal(b.device)})"
            self.writer.line(f"{self.names[name]} = {text}")

    # ---- steps -----------------------------------------------------------------------------------------------------

    def comment(self, text: str, origins: tuple[str, ...]) -> None:
        """One line that says what the next statement computes, for which lines of the user."""
        lines = dict.fromkeys(Path(line).name for o in origins if (line := self.plan.loops.lines.get(o)))
        self.writer.line("# " + " ".join(f"{text}  {', '.join(lines)}".split()))

    def segment(self, number: int, kernels: tuple[Kernel, ...], guarded: bool) -> None:
        used = dict.fromkeys(name for k in kernels for name in (*k.reads, *k.writes) if name in self.slots)
        for name in used:
            if name not in self.placed:
                raise UnsupportedError(f"memory plan: {name} has no place")
            self.ready(name)
        fill = [name for name in used if name not in self.filled]
        self.filled.update(fill)
        entry = self.bind(self.source.entries[number], launch.entry_of(self.artifact, self.source.entries[number]))
        slots = self.literal(tuple(self.slots[name] for name in fill))
        arguments = "".join(f", {self.names[name]}" for name in fill)
        for k in kernels:
            self.comment(k.name, k.origins)
        self.writer.line(
            f"code = launch({entry}, table, workers, {slots}{arguments})", (self.names[name] for name in used)
        )
        self.writer.line("if code:")
        refused = f"CheckFailed({number}, code)"
        self.writer.line(f"    raise {refused}" if guarded else f"    return eager({refused}, inputs)")

    def extern(self, step: Extern) -> None:
        arguments = [self.literal(a) for a in step.args]
        arguments += [f"{k}={self.literal(v)}" for k, v in step.kwargs]
        if any(b is not None and b.name not in self.owned for b in step.outputs):
            self.extern_out(step, arguments)
            return
        operator = self.operator(step.target)
        call = f"{operator}({', '.join(arguments)})"
        results = ["_" if b is None else self.names[b.name] for b in step.outputs]
        returns = step.target._schema.returns
        self.comment(str(step.target) if step.library else f"{step.target}, fallback: {step.reason}", step.origins)
        if not any(step.outputs):
            self.writer.line(call)
        elif len(returns) == 1 and str(returns[0].type) == "Tensor":
            self.writer.line(f"{results[0]} = {call}")
        else:
            rest = () if len(returns) == len(results) > 1 else ("*_",)
            self.writer.line(f"{', '.join((*results, *rest))} = {call}")
        for b, name in zip(step.outputs, results, strict=True):
            if b is not None:
                self.temporary.append(name)
                self.writer.line(f"if {name}.shape != {b.size} or {name}.stride() != {b.stride}:")
                self.writer.line(f"    {name} = settle({name}, {b.size}, {b.stride})")

    def extern_out(self, step: Extern, arguments: list[str]) -> None:
        """A library operator that writes into memory of ours."""
        variant = OUT_VARIANTS.get(step.target)
        placed = [b for b in step.outputs if b is not None and b.name not in self.owned]
        if variant is None or len(placed) < len(step.outputs):
            raise UnsupportedError(f"memory plan: {step.target} cannot write into {step.name}")
        outs = [a.name for a in variant._schema.arguments if a.is_out]
        for out, b in zip(outs, placed, strict=True):
            arguments.append(f"{out}={self.view(Ref(b.name, b.size, b.stride), TAKEN)}")
        self.comment(str(step.target), step.origins)
        self.writer.line(f"{self.operator(variant)}({', '.join(arguments)})")

    def operator(self, target: torch._ops.OpOverload) -> str:
        call: Any = torch.enable_grad()(target) if target in SAVES_IN_GRAD_MODE else PRODUCTS.get(target, target._op)
        return self.bind(re.sub(r"\W", "_", str(target)), call)

    def result(self, position: int, value: Any) -> str:
        if not isinstance(value, Ref) or value.number:
            return self.literal(value)
        if value.buffer in self.plan.memory.arena:
            raise UnsupportedError(f"memory plan: {value.buffer} is returned and cannot live in the arena")
        return self.view(value, self.aliases.get(position, RETURNED))


# Matrix products by torch's own functions, which read their arguments in half the time of an overload's `_op`.
PRODUCTS = {
    overload: getattr(torch._C._VariableFunctions, name)
    for name in ("mm", "bmm", "addmm", "baddbmm")
    for overload in (getattr(torch.ops.aten, name).default, getattr(torch.ops.aten, name).out)
}
SAVES_IN_GRAD_MODE = {torch.ops.aten.mkldnn_rnn_layer.default}  # elsewhere they give nothing for their backward
RESERVED = frozenset(
    ("launch", "threads", "workers", "table", "inputs", "lease", "take", "give", "drop", "code", "eager", "settle",
     "empty_strided", "empty_cpu", "empty_large", "view_cpu", "below", "keys", "increment_version", "CheckFailed", "failed", "call", "rebuild", "float",
     "state", "drawn", "undraw")
)  # fmt: skip


def host(
    plan: Plan,
    source: Source,
    artifact: Artifact,
    eager: Callable[[CheckFailed, tuple], Any],
    shape: str | Callable[[list[Any]], Any] = "tuple",
    aliases: dict[int, View] | None = None,
    consumes: bool = False,
    keep: int = KEEP,
) -> Host:
    """Writes and compiles the host code.

    eager: answers for a failed check, given the inputs. shape: 'tuple' (flat), 'single', or a function that builds
    the graph's result from the flat list. aliases: the results that eager makes by a view, by position. consumes: the
    inputs come as one list, and die behind their last use. keep: see `Arena`.
    """
    emit = Emit(plan, source, artifact, aliases or {})
    writer = emit.writer
    names = emit.names
    if plan.loops.inputs:
        writer.line(f"{group(names[b.name] for b in plan.loops.inputs)} = inputs")
    if consumes:
        writer.line("inputs.clear()")
        emit.temporary += [names[b.name] for b in plan.loops.inputs]
    guarded = bool(plan.externs)
    drawing = any(random(step.target) for step in plan.externs) and (bool(source.checks) or any(step.target is NUMBERS for step in plan.externs))
    if drawing:
        writer.line("state = drawn()")
    writer.line("lease = take()")
    writer.line("table = lease.table")
    unpack = len(writer.lines)
    writer.line("workers = threads()")
    if guarded:
        writer.line("try:")
        writer.line("    with below(keys):")
        writer.depth += 2
    number, segments = 0, plan.segments
    last = last_use(plan) if plan.memory.arena_bytes > keep else len(segments)
    for k, step in enumerate(segments):
        if isinstance(step, Extern):
            emit.extern(step)
        else:
            emit.segment(number, step, guarded)
            number += 1
        if k == last:
            writer.line("drop(lease)")
    if number != len(source.entries):
        raise UnsupportedError(f"{len(source.entries)} entries for {number} runs of kernels")
    if guarded:
        writer.depth -= 2
        writer.line("except CheckFailed as failed:")
        if drawing:
            writer.line("    undraw(state)")
        writer.line("    return eager(failed, inputs)")
    writer.line("give(lease)")
    written = [names[name] for name in plan.loops.written_inputs]
    if written:
        writer.line(f"increment_version([{', '.join(written)}])")
    results = [emit.result(k, value) for k, value in enumerate(plan.loops.outputs)]
    if shape == "tuple":
        writer.line(f"return {group(results)}")
    elif shape == "single":
        writer.line(f"return {results[0]}")
    else:
        writer.line(f"return rebuild([{', '.join(results)}])")
    if emit.views:
        writer.lines.insert(unpack, (1, f"{group(emit.views.values())} = lease.views", frozenset()))
    arena = Arena(plan, tuple(emit.views), keep)
    heads = ["def call(inputs):" if consumes else "def call(*inputs):", f'    """{summary(plan)}"""']
    text = writer.text(heads, frozenset(emit.temporary).difference(results))
    space = emit.space
    space |= {names[name]: tensor for name, tensor in plan.loops.constants.items()}
    space |= {
        "launch": launch.launch, "threads": launch.threads, "take": arena.take, "give": arena.give, "drop": arena.drop,
        "eager": eager, "settle": settle, "empty_strided": torch.empty_strided, "empty_cpu": launch.empty_cpu,
        "empty_large": empty_large, "view_cpu": launch.view_cpu, "below": below, "keys": BELOW, "increment_version": torch.autograd.graph.increment_version,
        "CheckFailed": CheckFailed, "rebuild": shape, "drawn": torch.get_rng_state, "undraw": torch.set_rng_state,
    }  # fmt: skip
    exec(code_of(text, "<stax host code>"), space)
    trusted = space.pop("call")  # popped, so that function and namespace form no cycle
    check = checker(plan)
    if consumes:

        def consume(inputs: list[torch.Tensor]) -> Any:
            check(inputs)
            return trusted(inputs)

        return Host(consume, trusted, text, arena)
    if shape == "tuple":
        trusted = direct(plan, source, artifact, arena, eager, emit.aliases) or trusted

    def call(*inputs: torch.Tensor) -> Any:
        check(inputs)
        return trusted(*inputs)

    return Host(call, trusted, text, arena)


def summary(plan: Plan) -> str:
    memory = plan.memory
    return (
        f"{len(plan.kernels)} kernels, {len(plan.externs)} library calls, {memory.arena_bytes} bytes of arena, "
        f"{len(memory.fresh)} results allocated here."
    )
