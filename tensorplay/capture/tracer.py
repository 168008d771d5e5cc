"""Capture: one execution of a function as a graph (section 3).

In: a function, method, callable or module, and the arguments of one call.  Out: `Captured`.
Always: the function runs on the caller's own tensors, which are never written: before the first write to one of
their storages the run is abandoned and starts again with that storage copied, and so for everything else that is
learned while running. Generators, Python objects, modes and patches are as before when `capture` returns or raises.
An exception of the function itself comes out unchanged. What the runs log and warn about is shown once, at the end.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ..errors import FirstCallError, GraphCaptureError
from ..source import sourced
from . import ambient
from .captured import Captured, Gate
from .effects import Snapshot
from .exchange import coordinator
from .execution import Execution
from .gates import Random, replay_graph
from .isolate import isolate
from .kinds import is_library_file
from .messages import Messages
from .numbers import RAISING, SWALLOWING, tells_types_apart
from .outcome import Outcome, outcome
from .patches import patched
from .reach import Reach, TooMuch
from .rebuild import Newborn, plan
from .recorder import Recorder
from .running import RUNNING
from .state import Seen, state, ties
from .values import Learned, Refused, Restart
from .writes import lasting

_LOCK = threading.RLock()
_RESTARTS = 200


def capture(fn: Any, args: tuple, kwargs: dict, numbers: bool = True, varied: bool = False) -> Captured:
    """Runs `fn(*args, **kwargs)` once and records it.

    numbers: whether what `item` reads may stay symbolic; varied: whether what it reads of results did differ between calls.
    """
    messages = Messages()
    try:
        with _LOCK:
            RUNNING.append((threading.get_ident(), None))
            try:
                return _capture(fn, args, kwargs, messages, numbers, varied)
            finally:
                RUNNING.pop()
    finally:
        messages.show()


def _capture(fn: Any, args: tuple, kwargs: dict, messages: Messages, numbers: bool, varied: bool) -> Captured:
    learned = Learned(numbers=numbers, varied=varied)
    first: _Settle | None = None  # a run whose Python effects, such as filling a cache, were left in place
    each_time: frozenset[str] | None = None  # what the run after it changed as well
    try:
        for _ in range(_RESTARTS):
            try:
                with _generators_kept():
                    return _once(fn, args, kwargs, Reach(fn, args, kwargs), learned, first, messages, each_time)
            except Restart:
                continue
            except _Settle as settle:
                first = settle.with_traceback(None)
                learned.numbers = numbers
            except _EachTime as again:
                assert first is not None
                first.snapshot.restore()  # type: ignore[union-attr]
                first, each_time = None, again.changes
                learned.numbers = numbers
        raise Refused("capture did not settle: the function takes another path on each run")
    except BaseException as error:
        if first is not None:
            first.snapshot.restore()
        if isinstance(error, (Exception, Refused)):
            if messages.unsettled:
                _listen(fn, args, kwargs, learned, messages)
            messages.drop_repeated()
        if isinstance(error, _OtherwiseNext):
            raise FirstCallError(str(error)) from None
        if isinstance(error, (Refused, TooMuch)):
            raise GraphCaptureError(str(error)) from error.__cause__
        raise


def _listen(fn: Any, args: tuple, kwargs: dict, learned: Learned, messages: Messages) -> None:
    """Runs the function again for its messages alone: what it does not repeat was of the first call, and would be lost."""
    for _ in range(_RESTARTS):
        try:
            with _generators_kept():
                _once(fn, args, kwargs, Reach(fn, args, kwargs), learned, _Settle(), messages)
        except Restart:
            continue
        except (Exception, Refused):
            pass
        return


class _Settle(BaseException):
    """The run changed Python objects, or logged; a second run tells whether it does so every time."""

    def __init__(self, snapshot: Snapshot | None = None, changes: str = "", outcome: Outcome | None = None) -> None:
        self.snapshot, self.changes, self.outcome = snapshot, changes, outcome


class _EachTime(BaseException):
    """The second run changed Python objects as well: the recipe of the result has to do so, from where the first began."""

    def __init__(self, changes: frozenset[str]) -> None:
        self.changes = changes


class _OtherwiseNext(Refused):
    """The run made state with which the same call does something else, as the first step of an optimizer does."""


def _once(
    fn: Any, args: tuple, kwargs: dict, reach: Reach, learned: Learned, first: _Settle | None, messages: Messages,
    each_time: frozenset[str] | None = None,
) -> Captured:  # fmt: skip
    gc.collect(1)  # programs that died since the last capture: while the collector rests, its own turn never comes
    before = ambient.ambient()
    messages.begin()
    snapshot = Snapshot(reach)
    recorder = Recorder(fn, args, kwargs, reach, learned)
    recorder.outermost = _once.__code__
    settings: list[tuple[Any, Any]] = []

    def began(frame: types.FrameType, new: bool) -> bool:
        if reason := coordinator(frame.f_globals.get("__name__", "")):
            recorder.refuse(reason)
        size = reach.size
        again = reach.add_frame(frame)
        if new or reach.size != size:
            reached()
        return again

    def named(name: str) -> None:
        size = reach.size
        reach.add_name(name)
        if reach.size != size:
            reached()

    def computed(frame: types.FrameType, members: bool) -> None:
        reach.any_name(frame, members)
        reached()

    def reached() -> None:
        snapshot.extend()
        if reach.hazards:
            seen = Seen(reach, execution.codes, execution.every, execution.names)
            for place, source, reason in reach.hazards:
                if seen.place(place):
                    recorder.refuse(f"may use {source}, {reason}: state that a graph does not repeat")

    execution = Execution(began, named, computed, lambda source, value: settings.append((source, value)), recorder.refuse)
    recorder.execution = execution
    RUNNING[-1] = (RUNNING[-1][0], recorder)
    keep_effects = False
    try:
        with Newborn() as newborn:
            with ExitStack() as stack:
                stack.enter_context(patched(recorder))
                stack.enter_context(messages.held(recorder.line))
                stack.enter_context(recorder.watch)
                stack.enter_context(recorder)
                stack.enter_context(execution.watch())
                if not execution.watching:
                    reach.unseen()
                    reached()
                try:
                    result = fn(*args, **kwargs)
                except (Restart, Refused):
                    raise
                except BaseException as error:
                    if recorder.pending is not None:  # the function caught and replaced what stopped it
                        raise recorder.pending from error
                    if recorder.number_owner:  # it may be about a number that is no float
                        learned.numbers = False
                        raise Restart() from error
                    raise
                if recorder.pending is not None:
                    raise recorder.pending
            if recorder.number_owner and _looks_closely(execution):
                learned.numbers = False
                raise Restart()
            changed, effects = snapshot.differences(), None
            if each_time is not None and changed:
                effects = lasting(snapshot, {name for name in changed if name not in each_time})
            rebuild, outputs, parts = plan(result, recorder, newborn, effects or ())
            recorder.finish(outputs, before)
            del result
        changes, logged = "; ".join(changed[:3]), messages.logged
        if (changes and effects is None) or logged:
            if changes and (each_time is not None or (first is not None and lasting(snapshot) is None)):
                recorder.refuse_at(f"changes Python objects that existed before the call: {changes}", fn)
            if first is not None and changes:
                raise _EachTime(frozenset(changed))
            if first is not None or each_time is not None:
                raise Refused(f"{logged}: logs at each call, which a graph does not repeat")
            if recorder.number_owner:  # what is left in place must hold plain numbers
                learned.numbers = False
                raise Restart()
            keep_effects = True
            raise _Settle(snapshot, changes or logged, outcome(parts, recorder))
        if first is not None and first.outcome is not None and not first.outcome.same(outcome(parts, recorder)):
            raise _OtherwiseNext(f"the first call makes state that the next one finds: {first.changes}")
        if effects:
            snapshot.restore()  # the key is about what the call finds
        seen = Seen(reach, execution.codes if execution.watching else None, execution.every, execution.names)
        rows = {**dict(state(reach, seen)), **dict(settings)}
        return _assemble(recorder, reach, rebuild, tuple(rows.items()), ties(reach, seen))
    finally:
        if not keep_effects:
            snapshot.restore()
        RUNNING[-1] = (RUNNING[-1][0], None)
        snapshot.rewind()
        ambient.restore(before)
        recorder.close()


def _looks_closely(execution: Execution) -> bool:
    """Whether code of the program may notice that a number is no float."""
    return not execution.watching or any(
        code is SWALLOWING.__code__ or (tells_types_apart(code) and not is_library_file(code.co_filename))
        for code in execution.codes
    )


def _assemble(recorder: Recorder, reach: Reach, rebuild: Any, rows: tuple, tied: tuple) -> Captured:
    graph, root = recorder.graph, recorder.root
    gates: tuple[Gate, ...] = ()
    replay = None
    if recorder.gates:  # before anything is removed from the graph (corollary 3.1)
        try:
            replay, gates = replay_graph(graph, root, recorder.gates, recorder.traits)
        except Random as error:
            raise Refused(f"{error.line}: a branch depends on random numbers") from None
    for node in reversed(list(graph.nodes)):
        number = "number" in node.meta and node.target not in RAISING
        if (number or node in recorder.python_valued) and not node.users:
            graph.erase_node(node)
    samples = list(recorder.samples)
    written = [k for k, key in enumerate(recorder.sample_keys) if key in recorder.learned.isolated]
    for k, copy in zip(written, isolate([samples[k] for k in written])):
        samples[k] = copy
    graph.lint()
    return Captured(
        sourced(root, graph, "Captured"),
        tuple(recorder.inputs),
        tuple(samples),
        rebuild,
        (*rows, *recorder.rows),
        gates,
        replay,
        tuple(written),
        any(trait.random for trait in recorder.traits.values()),
        tied,
        any("number" in node.meta for node in graph.nodes),
        recorder.by_value,
    )


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Puts every generator back; Python's and numpy's must not have been used at all."""
    ours = torch.random.default_generator.get_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    python = random.getstate()
    numpy = sys.modules.get("numpy.random")
    numbers = numpy.get_state(legacy=False) if numpy is not None else None
    try:
        yield
        if random.getstate() != python:
            raise Refused("the function draws from Python's random module")
        if numpy is not None and not _same_state(numpy.get_state(legacy=False), numbers):
            raise Refused("the function draws from numpy's random module")
    finally:
        torch.random.default_generator.set_state(ours)
        if devices:
            torch.cuda.set_rng_state_all(devices)
        random.setstate(python)
        if numpy is not None:
            numpy.set_state(numbers)


def _same_state(a: Any, b: Any) -> bool:
    return a["state"]["pos"] == b["state"]["pos"] and (a["state"]["key"] == b["state"]["key"]).all()

