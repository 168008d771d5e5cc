"""The object that tp.compile returns: finds or builds the version for a call and runs it (sections 2.4, 3).

In: a function, method or module, and settings.  Out: `Compiled`, called like the original.
Always: a call runs the version whose whole key equals the call's, or a new one, or the original function; versions
are read without a lock from a tuple that is replaced as a whole, and each key is built once, under one lock.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import nn
from torch.autograd import forward_ad as _forward_ad

from . import config, registry
from .collector import Rest
from .errors import FirstCallError, GraphCaptureError, RecompileLimitError, StrictNativeError, VerificationError
from .fallback import Fallback, Fallbacks, describe, line_of, split_line
from .graph.choices import Choices
from .key.aliasing import same_objects
from .key.ambient import ambient, foreign_mode
from .key.guards import GATES, Guard
from .key.signature import signature
from .key.version import Call, Version
from .limits import advice
from .native import Dispatch, build_later, native
from .record import emit
from .training import check_budget, hooks_aside, trains

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_C = torch._C


@dataclass(frozen=True)
class Settings:
    """How one function is compiled: the keyword arguments of tp.compile."""

    backend: str | registry.Backend = "stax"
    strict_native: bool = False
    fullgraph: bool = False
    dynamic: bool | None = None
    mode: str = "default"
    options: dict[str, Any] | None = None
    name: str | None = None
    recompile_limit: int | None = None
    verify: bool = False

    @property
    def strict(self) -> str:
        """The option that turns a fallback into an error, as the user wrote it; '' where none does."""
        return "strict_native=True" if self.strict_native else "fullgraph=True" if self.fullgraph else ""


def compile(
    model: Any = None, *, backend: str | registry.Backend = "stax", strict_native: bool = False, fullgraph: bool = False,
    dynamic: bool | None = None, mode: str = "default", options: dict[str, Any] | None = None, name: str | None = None,
    disable: bool = False, recompile_limit: int | None = None, verify: bool = False, memory_budget: float | None = None,
    in_place: bool = False,
) -> Any:  # fmt: skip
    """Compiles a function, method or module at its first call with each kind of arguments.

    model: what to compile; without it, the result is a decorator.
    backend: a name of `tp.list_backends()` or a callable `(graph_module, example_inputs, **options) -> callable`.
    strict_native, fullgraph: an error instead of eager execution where something cannot be compiled.
    options: passed to the back end, such as {"cpu_isa": "avx2"}; ours know `tensorplay.registry.OPTIONS`.
    recompile_limit: live versions of this function, beyond which other calls run eagerly (default 8).
    memory_budget: fraction of the bytes that the default partition saves for backward; the rest is computed again.
    verify: runs eager beside the compiled version and names the first level that differs.
    disable: returns `model` as it is.
    in_place: compiles the call of a module and returns the module itself, as `torch.nn.Module.compile` does; copies and
        pickles of it are not compiled.
    """
    if mode not in MODES:
        raise ValueError(f"no mode {mode!r}: there are {', '.join(MODES)}")
    if recompile_limit is not None and recompile_limit < 1:
        raise ValueError("recompile_limit is at least 1")
    options = dict(options or {})
    registry.check_options(registry.lookup(backend), options)
    if memory_budget is not None:
        options["memory_budget"] = memory_budget
    Choices.of(options)  # a wrong choice is an error here, not at the first call
    check_budget(options)
    settings = Settings(
        backend, strict_native, fullgraph, dynamic, mode, options or None, name, recompile_limit, verify
    )
    make = compiled_in_place if in_place else compiled
    if model is None:
        return lambda function: function if disable else make(function, settings)
    return model if disable else make(model, settings)


def compiled(model: Any, settings: Settings) -> Any:
    """The compiled form of a callable: a `Compiled`, or for a module a wrapper that behaves as the module itself."""
    from .wrap import original, wrap

    model = model.fn if isinstance(model, Compiled) else original(model)
    if isinstance(model, nn.Module):
        return wrap(model, Compiled(model, settings))
    if isinstance(model, type) or not callable(model):
        raise TypeError(f"tp.compile takes a function, method, module or callable object, not {model!r}")
    return Compiled(model, settings)


def compiled_in_place(model: Any, settings: Settings) -> nn.Module:
    """The module itself, whose call is compiled from now on, also where other code calls it."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"tp.compile(in_place=True) takes a module, not {model!r}")
    model._compiled_call_impl = Compiled(model._call_impl, replace(settings, name=settings.name or type(model).__name__))
    return model


def compiled_of(obj: Any) -> Compiled:
    """The `Compiled` behind anything that tp.compile returned."""
    found = obj.__func__ if isinstance(obj, MethodType) else getattr(type(obj), "_tp_compiled", None) and obj._tp_compiled
    found = obj if isinstance(obj, Compiled) else found or getattr(obj, "_compiled_call_impl", None)
    if not isinstance(found, Compiled):
        raise TypeError(f"not a result of tp.compile: {obj!r}")
    return found


class _Settle(Exception):
    """A back end refused a graph with numbers that vary: they become constants of the version."""


class _Raised(Exception):
    """The function raised while it was captured, or capture itself did; running it tells which."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass
class Miss:
    """Why no version served a call: the failing guards of each, in the order of the versions."""

    reasons: tuple[tuple[Guard, ...], ...] = ()
    guards: tuple[Guard, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.guards = tuple(g for failing in self.reasons for g in failing)


class Compiled(Dispatch):
    """A function with its compiled versions. Attributes are for `tp.explain` and `tp.testing`.

    A call tries the checks of the versions in C (the base), then `_call`, which compares the whole key.
    """

    def __init__(self, fn: Callable[..., Any], settings: Settings) -> None:
        if isinstance(fn, (FunctionType, MethodType)):
            functools.update_wrapper(cast(Any, self), fn)
        self.fn = fn
        self.settings = settings
        self.name = settings.name or str(getattr(fn, "__name__", type(fn).__name__))
        self.versions: tuple[Version, ...] = ()
        self.compilations = 0
        self.log: list[str] = []  # one line for each recompilation
        self.last_miss = Miss()
        self.counts: Counter[str] = Counter()
        self._fallbacks = Fallbacks(self.name, settings.strict)
        self._backend = registry.lookup(settings.backend)
        self._lock = threading.RLock()
        self._limit: Fallback | None = None
        self._varied = False  # whether numbers that calls compute have been seen to differ

    # ---- the call ----------------------------------------------------------------------------------------------

    def _call(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        if _C._len_torch_dispatch_stack() or _C._len_torch_function_stack() or _C._functorch.maybe_current_level() or _C._get_tracing_state() or _forward_ad._current_level >= 0:
            mode = foreign_mode()
            if mode:
                return self._beneath(mode, args, kwargs)
        sigma = signature(args, kwargs)
        now = ambient()
        for version in self.versions:
            if version.sigma == sigma and version.ambient == now:
                inputs = version.match(args, kwargs)
                if inputs is not None and (version.distinct or version.aliases == same_objects(args, kwargs, sigma)):
                    self.level3 += 1
                    version.served += 1
                    return self._run(version, inputs, args, kwargs)
        return self._miss(Call(sigma, same_objects(args, kwargs, sigma), now), args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def _find(self, call: Call, args: tuple, kwargs: dict[str, Any]) -> tuple[Version, tuple] | None:
        for version in self.versions:
            inputs = version.serves(call, args, kwargs)
            if inputs is not None:
                return version, inputs
        return None

    def _run(self, version: Version, inputs: tuple, args: tuple, kwargs: dict[str, Any]) -> Any:
        if version.fallback is not None:
            version.fallback.count += 1
        if version.captured is None:
            return self.fn(*args, **kwargs)
        if self.settings.verify:
            return self._verified(version, inputs, args, kwargs)
        return version.run(inputs, args, kwargs)

    def _eagerly(self, reason: str, line: str, error: type, args: tuple, kwargs: dict[str, Any]) -> Any:
        self._fallbacks.take(reason, line, error).count += 1
        return self.fn(*args, **kwargs)

    def _beneath(self, mode: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call that something watches operator by operator: our own capture inlines it, others need it eager."""
        if mode.startswith("tensorplay."):
            return self.fn(*args, **kwargs)
        return self._eagerly(f"called under {mode}, which sees each operator", line_of(self.fn), StrictNativeError, args, kwargs)

    def _keep(self, versions: tuple[Version, ...]) -> None:
        self.versions = versions
        self.checks = tuple(v.check for v in versions if v.check is not None)

    # ---- a miss ------------------------------------------------------------------------------------------------

    def _miss(self, call: Call, args: tuple, kwargs: dict[str, Any]) -> Any:
        self.counts["misses"] += 1
        if self._limit is not None and all([v.alive for v in self.versions]):  # nothing can be built: no lock is needed
            over = self._over_limit(call, args, kwargs)
            if over is not None:
                over.count += 1
                return self.fn(*args, **kwargs)
        error = None
        with self._lock:
            found = self._find(call, args, kwargs)  # another thread may have built it meanwhile
            if found is None:
                self._keep(tuple(v for v in self.versions if v.alive))
                try:
                    with hooks_aside(), Rest():
                        found = self._build(call, args, kwargs)
                except _Raised as raised:
                    error = raised.error
        if found is not None:
            return self._run(*found, args, kwargs)
        result = self.fn(*args, **kwargs)  # where the function itself raised, it raises again, with its effects
        if error is not None:
            self._fallbacks.take(f"capture failed: {describe(error)}", line_of(self.fn), GraphCaptureError, error).count += 1
        return result

    def _build(self, call: Call, args: tuple, kwargs: dict[str, Any]) -> tuple[Version, tuple] | None:
        """A new version for the call and the tensors that it reads; None where the call has to run eagerly."""
        over = self._over_limit(call, args, kwargs)
        if over is not None:
            over.count += 1
            return None
        missed = self._explain(call, args, kwargs)
        build_later()
        answers = None if native is None else native.probed()
        try:
            return self._built(call, args, kwargs, missed, answers, True)
        except _Settle:
            return self._built(call, args, kwargs, missed, answers, False)

    def _built(
        self, call: Call, args: tuple, kwargs: dict[str, Any], missed: Miss, answers: Any, numbers: bool
    ) -> tuple[Version, tuple] | None:
        from .replay import replay_of

        start = time.perf_counter()
        self._varied = self._varied or self._would_serve(missed)
        captured = self._capture(args, kwargs, numbers, self._varied)
        if isinstance(captured, Fallback):
            if captured.passing:
                captured.count += 1
                return None
            version: Version = Version(call, None, args, kwargs)
            version.fallback = captured
            version.prepare(self.fn, answers)
            self._note(missed)
            self._keep((*self.versions, version))
            return version, ()
        seconds = {"capture": time.perf_counter() - start}
        version = Version(call, captured, args, kwargs, replay_of(captured))
        seconds["key"] = time.perf_counter() - start - seconds["capture"]
        inputs = version.match(args, kwargs)
        if inputs is None:  # a key that does not hold for its own call would never be right
            self._fallbacks.take(self._unsettled(version, call, args, kwargs), line_of(self.fn), StrictNativeError).count += 1
            return None
        version.program, version.fallback = self._program(version, captured)
        if version.rewritten is not None:
            seconds["passes"] = version.rewritten.seconds
        version.seconds = seconds | dict(getattr(version.program, "seconds", {}))
        self.compilations += 1
        if not self.settings.verify:
            version.prepare(self.fn, answers)
        self._note(missed)
        self._keep((*self.versions, version))
        emit("compile", self.name, version=version)
        return version, inputs

    def _explain(self, call: Call, args: tuple, kwargs: dict[str, Any]) -> Miss:
        """For every version, the guards that the call fails."""
        if self.versions:
            self.last_miss = Miss(tuple(tuple(v.failing(call, args, kwargs)) for v in self.versions))
            return self.last_miss
        return Miss()

    def _note(self, missed: Miss) -> None:
        """Writes the recompile log; a call that raised while it was captured has no line."""
        if missed.reasons:
            line = f"recompiling {self.name!r}: " + "; ".join(g.condition for g in missed.guards)
            self.log.append(line)
            emit("recompile", self.name, line=line, reasons=missed.reasons)

    def _over_limit(self, call: Call, args: tuple, kwargs: dict[str, Any]) -> Fallback | None:
        versions = self.settings.recompile_limit or config.number("version_limit")
        compilations = max(config.number("compile_limit"), versions)
        if len(self.versions) < versions and self.compilations < compilations:
            return None
        if self._limit is None or self.settings.strict:
            self._note(self._explain(call, args, kwargs))
            what = f"{versions} versions" if len(self.versions) >= versions else f"{compilations} compilations"
            reason = f"the limit of {what} is reached: {advice(self.last_miss.reasons)}"
            self._limit = self._fallbacks.take(reason, line_of(self.fn), RecompileLimitError)
        return self._limit

    def _would_serve(self, missed: Miss) -> bool:
        """Whether a version would have served the call, had it kept the numbers symbolic that it took by value."""
        return any(
            v.captured is not None and v.captured.by_value and [g.condition for g in failing] == [GATES]
            for v, failing in zip(self.versions, missed.reasons)
        )

    def _capture(self, args: tuple, kwargs: dict[str, Any], numbers: bool, varied: bool) -> Any:
        """What capture found, or the fallback where it refused."""
        from .capture.tracer import capture

        try:
            return capture(self.fn, args, kwargs, numbers, varied)
        except GraphCaptureError as error:
            line, reason = split_line(describe(error))
            fallback = self._fallbacks.take(reason, line or line_of(self.fn), type(error), error)
            fallback.passing = isinstance(error, FirstCallError) and fallback.count < config.number("version_limit")
            return fallback
        except Exception as error:
            raise _Raised(error) from error

    def _program(self, version: Version, captured: Any) -> tuple[Any, Fallback | None]:
        """Compiled code for the captured graph, or the graph itself and the reason."""
        line = line_of(self.fn)
        reason = self._refusal(version, captured)
        if reason:
            return captured.graph.forward, self._fallbacks.take(reason, line, StrictNativeError)
        state = torch.get_rng_state()
        try:
            graph = self._front(version, captured)
            program: Any = self._backend(graph, list(captured.samples), **(self.settings.options or {}))
        except Exception as error:
            if captured.numbers:
                raise _Settle from error
            name = getattr(self._backend, "__name__", type(self._backend).__name__)
            where, reason = split_line(describe(error))
            reason = f"back end {name!r}: {reason}"
            return captured.graph.forward, self._fallbacks.take(reason, where or line, StrictNativeError, error)
        finally:
            torch.set_rng_state(state)
        for part in getattr(program, "parts", (program,)):
            for call in getattr(getattr(part, "plan", None), "externs", ()):
                if not call.library:  # this operator alone runs eagerly; the rest of the graph is compiled
                    lines = part.loops.lines
                    where = next((lines[o] for o in call.origins if lines.get(o)), line)
                    self._fallbacks.take(f"{call.target}: {call.reason}", where, StrictNativeError)
        return program, None

    def _front(self, version: Version, captured: Any) -> Any:
        """The graph that the back end gets: rewritten by the front-end passes (section 4)."""
        from .graph.passes import run_passes

        version.choices = Choices.of(self.settings.options, trains(captured.graph, captured.samples))
        version.rewritten = run_passes(captured.graph, choices=version.choices)
        return version.rewritten.graph

    def _refusal(self, version: Version, captured: Any) -> str:
        """Why this version must run on torch although its graph is known; '' where nothing speaks against compiling."""
        if version.overlaps:
            return "an argument that is written shares memory with another"
        if torch.is_anomaly_enabled() and trains(captured.graph, captured.samples):
            return "anomaly mode looks at the gradient of each operator"
        return ""

    def _unsettled(self, version: Version, call: Call, args: tuple, kwargs: dict[str, Any]) -> str:
        failing = version.failing(call, args, kwargs)
        return "what the function read changed while it was captured: " + "; ".join(map(str, failing[:3]))

    def _verified(self, version: Version, inputs: tuple, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs the captured graph beside the program on the same inputs and random numbers, and compares results and
        what was written; without writes also with the function itself."""
        captured = cast(Any, version.captured)
        if version.fallback is not None:
            return version.run(inputs, args, kwargs)
        from .verify import agree, bisect, copies

        effects = captured.written or captured.rebuild.writes
        given = copies(inputs) if captured.written else inputs
        before = copies(inputs) if captured.written else inputs
        state = torch.get_rng_state()
        expected = captured.graph(*given)
        torch.set_rng_state(state)
        flat = version.program(*inputs)
        result = captured.rebuild(flat, args, kwargs)
        drawn = torch.get_rng_state()
        if not agree((*flat, *inputs), (*expected, *given)):
            torch.set_rng_state(state)
            found = bisect(version.program, captured.graph, before, version.choices) if hasattr(version.program, "plan") else None
            where = found or "the program differs from the captured graph; every level alone agrees on these inputs"
            raise VerificationError(f"{self.name!r} differs from eager: {where}")
        if not effects:
            torch.set_rng_state(state)
            leaves = torch.utils._pytree.tree_leaves
            if not agree(tuple(leaves(result)), tuple(leaves(self.fn(*args, **kwargs)))):
                raise VerificationError(f"{self.name!r} differs from eager: level 'graph' (capture) differs first")
            torch.set_rng_state(drawn)
        return result

    # ---- what explain and testing read -------------------------------------------------------------------------

    def live_versions(self) -> list[Version]:
        """Versions that can still match: none of their weakly held key objects has died."""
        return [v for v in self.versions if v.alive and v.captured is not None]

    @property
    def reasons(self) -> tuple[Guard, ...]:
        """The failing guards of the last miss, version by version."""
        return self.last_miss.guards

    @property
    def fallbacks(self) -> list[Fallback]:
        return list(self._fallbacks.found.values())

    @property
    def counters(self) -> dict[str, int]:
        """Calls by how they were served."""
        return {
            "hits": sum(v.hits for v in self.versions), "level1": self.level1, "level2": self.level2, "level3": self.level3,
            "misses": self.counts["misses"],
            "eager calls": sum(f.count for f in self.fallbacks), "versions": len(self.live_versions()),
            "compilations": self.compilations,
        }  # fmt: skip

    def __repr__(self) -> str:
        return f"<compiled {self.name!r}: {len(self.live_versions())} versions>"

    def __reduce__(self) -> Any:
        """A global stays a reference to itself; anything else is compiled anew from its function and settings."""
        module, path = getattr(self.fn, "__module__", None), getattr(self.fn, "__qualname__", "")
        found: Any = sys.modules.get(module) if module else None
        for part in path.split("."):
            found = getattr(found, part, None)
        return path if found is self else (compiled, (self.fn, self.settings))
