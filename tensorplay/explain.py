"""tp.explain(cf): every representation, decision, count and reason of a compiled function as one printable object.

In: anything that tp.compile returned.  Out: `Explanation`, whose attributes are the levels of table 1.2 and whose
text shows them from the call down to the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import fx

from .compiled import Compiled, Version, compiled_of

if TYPE_CHECKING:
    from .changes import Change


@dataclass(frozen=True)
class KernelReport:
    """One generated kernel: its source and what the byte model says of it (definition 1.1)."""

    name: str
    source: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    read_bytes: int
    write_bytes: int
    flops: int
    origins: tuple[str, ...]
    lines: tuple[str, ...]

    @staticmethod
    def of(together: tuple[Any, ...], texts: dict[str, str], lines: dict[str, str]) -> KernelReport:
        """The report of what runs as one: the loops of one launch."""
        name = together[0].name
        origins = tuple(dict.fromkeys(o for k in together for o in k.origins))
        return KernelReport(
            name, texts.get(name, ""), tuple(dict.fromkeys(r for k in together for r in k.reads)),
            tuple(w for k in together for w in k.writes), sum(k.read_bytes for k in together),
            sum(k.write_bytes for k in together), sum(k.flops for k in together), origins,
            tuple(dict.fromkeys(lines[o] for o in origins if lines.get(o))),
        )  # fmt: skip

    @property
    def model_bytes(self) -> int:
        return self.read_bytes + self.write_bytes

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in FLOP/byte."""
        return self.flops / self.model_bytes if self.model_bytes else 0.0

    def __str__(self) -> str:
        head = f"{self.name}: reads {', '.join(self.reads) or '-'}; writes {', '.join(self.writes)}; {self.model_bytes} bytes, {self.intensity:.2f} FLOP/byte"
        return f"{head}\n{self.source}"


@dataclass(frozen=True)
class CallReport:
    """One call of a library operator, or of an operator that has no row (a fallback)."""

    target: str
    library: bool
    reason: str
    line: str

    def __str__(self) -> str:
        where = f" at {self.line}" if self.line else ""
        return f"{self.target}{where}" + ("" if self.library else f": {self.reason}")


@dataclass(frozen=True)
class Fusion:
    """What the scheduler did not fuse, and why."""

    rejected: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Training:
    """What forward keeps for backward, what backward computes again, and how far backward is compiled (section 5)."""

    saved: tuple[Any, ...]
    saved_bytes: int
    default_bytes: int
    recomputed: tuple[str, ...]
    inputs: tuple[int, ...]
    forward_bytes: int
    backward_bytes: int
    forward_peak: int
    backward_peak: int
    backward: str

    @staticmethod
    def of(program: Any) -> Training:
        from .stax.schedule.peak import intermediates, peak

        parts = program.partition
        forward, backward = [p.plan for p in program.parts] or (None, None)
        consumed = {s.name for s in parts.saved}
        inner = [0 if plan is None else intermediates(plan) for plan in (forward, backward)]
        peaks = [0 if plan is None else peak(plan, given) for plan, given in ((forward, ()), (backward, consumed))]
        state = "compiled" if program.backwards else "not compiled yet: the first backward compiles it"
        return Training(
            parts.saved, parts.saved_bytes, parts.default_bytes, parts.recomputed, parts.kept, inner[0], inner[1],
            peaks[0], peaks[1], state,
        )  # fmt: skip

    def __str__(self) -> str:
        share = f", {self.saved_bytes / self.default_bytes:.0%} of saving all that backward reads" if self.default_bytes else ""
        return "\n".join(
            (
                f"saved {self.saved_bytes} bytes{share}; intermediates {self.forward_bytes} bytes forward, {self.backward_bytes} backward",
                f"most memory at one time, parameters and inputs apart: {self.forward_peak} bytes forward, {self.backward_peak} backward",
                *map(str, self.saved),
                f"recomputed: {', '.join(self.recomputed) or 'nothing'}",
                f"inputs read by backward: {', '.join(map(str, self.inputs)) or 'none'}",
                f"backward: {self.backward}",
            )
        )


@dataclass(frozen=True)
class Explanation:
    """The levels of the last version, and the counts of the whole compiled function."""

    name: str
    versions: list[Version]
    compilations: int
    graph: fx.GraphModule | None = None
    ops: Any = None
    loops: Any = None
    plan: Any = None
    host: str = ""
    kernels: list[KernelReport] = field(default_factory=list)
    externs: list[CallReport] = field(default_factory=list)
    fallbacks: list[Any] = field(default_factory=list)
    fusion: Fusion = field(default_factory=Fusion)
    model_bytes: int = 0
    lower_bound: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    log: tuple[str, ...] = ()
    counters: dict[str, int] = field(default_factory=dict)
    training: Training | None = None

    @cached_property
    def passes(self) -> list[Change]:
        """Table 4.3 for the last version: every transformation that changed it, made out on request."""
        from .changes import changes

        return changes(self.versions[-1]) if self.versions else []

    @property
    def library_calls(self) -> list[CallReport]:
        return [e for e in self.externs if e.library]

    def __str__(self) -> str:
        parts = [_title(f"{self.name}: {len(self.versions)} version(s), {self.compilations} compilation(s)")]
        for k, version in enumerate(self.versions):
            parts.append(f"version {k}: {version}")
        parts += [f"recompiled: {line}" for line in self.log]
        parts += [f"fallback: {f}" for f in self.fallbacks]
        if self.graph is not None:
            from .capture.show import show

            parts += [_title("captured graph"), show(self.graph)]
        if self.passes:
            parts += [_title("passes"), *map(str, self.passes)]
        if self.ops is not None:
            parts += [_title("operator graph"), str(self.ops)]
        if self.training is not None:
            parts += [_title("training"), str(self.training)]
        if self.loops is not None:
            parts += [_title("loops"), str(self.loops)]
        if self.plan is not None:
            parts += [_title("plan"), str(self.plan)]
            parts.append(f"model bytes {self.model_bytes}, lower bound {self.lower_bound}")
        if self.externs:
            parts += [_title("library calls"), *map(str, self.externs)]
        for kernel in self.kernels:
            parts += [_title("kernel"), str(kernel)]
        if self.host:
            parts += [_title("host code"), self.host]
        if self.seconds:
            parts += [_title("time"), ", ".join(f"{k} {v * 1e3:.1f} ms" for k, v in self.seconds.items())]
        return "\n".join(parts)


def _title(text: str) -> str:
    return f"\n---- {text} " + "-" * max(0, 90 - len(text))


def explain(cf: Any) -> Explanation:
    """Everything known about a compiled function or module; its last version in full (section 1.3)."""
    compiled: Compiled = compiled_of(cf)
    versions = compiled.live_versions()
    base = dict(
        name=compiled.name, versions=versions, compilations=compiled.compilations, log=tuple(compiled.log),
        counters=dict(compiled.counters),
    )  # fmt: skip
    if not versions:
        return Explanation(**base, fallbacks=list(compiled.fallbacks))
    version = versions[-1]
    program = version.program
    levels: dict[str, Any] = {"graph": version.captured.graph, "seconds": dict(version.seconds)}
    fallbacks: list[Any] = list(compiled.fallbacks)
    parts = [p for p in getattr(program, "parts", (program,)) if hasattr(p, "plan")]
    if parts:
        kernels, externs = [], []
        for part in parts:
            lines, texts = part.loops.lines, part.source.kernels
            kernels += [KernelReport.of(together, texts, lines) for together in part.plan.together]
            externs += [
                CallReport(str(e.target), e.library, e.reason, next((lines[o] for o in e.origins if lines.get(o)), ""))
                for e in part.plan.externs
            ]
        levels |= {
            "ops": program.ops, "loops": parts[0].loops, "plan": parts[0].plan, "host": program.host,
            "kernels": kernels, "externs": externs,
            "fusion": Fusion(tuple(r for p in parts for r in p.plan.refused)),
            "model_bytes": sum(k.model_bytes for k in kernels),
            "lower_bound": sum(p.plan.lower_bound for p in parts),
        }  # fmt: skip
        fallbacks += [e for e in externs if not e.library]
    if hasattr(program, "partition"):
        levels["training"] = Training.of(program)
    return Explanation(**base, **levels, fallbacks=fallbacks)
