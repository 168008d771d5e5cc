"""What a function logs and warns about: as often, and in the order, as in eager, also where only the first call does."""

import contextlib
import functools
import io
import itertools
import logging
import threading
import types
import warnings

import pytest
import torch

import tensorplay as tp
from tensorplay.compiled import compiled_of
from tensorplay.errors import FallbackWarning, GraphCaptureError

from .sequences import check

NUMBERS = itertools.count()
t = torch.ones(3)


class Kept(logging.Handler):
    """Keeps the text of every record, as it is when it is emitted."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(f"{record.levelname}: {record.getMessage()}")


def logger_of():
    """A logger of its own, its handler, and a method that logs a text once."""
    logger, handler = logging.getLogger(f"tests.capture.{next(NUMBERS)}"), Kept()
    logger.propagate = False
    logger.addHandler(handler)
    return logger, handler, functools.lru_cache(None)(logger.warning)


def once():
    _, handler, warning_once = logger_of()

    def f(x):
        warning_once("first")
        y = x * 2
        warning_once("second %s", 3)
        return y + 1

    return f, [(t,), (t,), (torch.ones(5),), (t,)], lambda: list(handler.texts)


def once_with_a_write_and_a_cache():
    logger, handler, warning_once = logger_of()
    cache = {}

    def f(x):
        warning_once("first")
        if "k" not in cache:
            cache["k"] = 2
            logger.info("fills")
            logger.warning("fills")
        x.add_(cache["k"])
        warning_once("second")
        return x * 2

    return f, [(torch.ones(3),), (torch.ones(3),)], lambda: list(handler.texts)


def flag():
    logger, handler, _ = logger_of()
    owner = types.SimpleNamespace(warned=False)

    def f(x):
        if not owner.warned:
            owner.warned = True
            logger.error("once")
        return x + 1

    return f, [(t,), (t,), lambda: setattr(owner, "warned", False), (t,), (t,)], lambda: (owner.warned, list(handler.texts))


def same_place_other_text():
    _, handler, warning_once = logger_of()

    def f(x):
        for k in range(3):
            warning_once(f"number {k}")
        return x * 2

    return f, [(t,), (t,)], lambda: list(handler.texts)


def each_call():
    logger, handler, warning_once = logger_of()
    calls = []

    def f(x):
        warning_once("once")
        logger.warning("each call")
        return x * 2

    return f, [(t,), (t,), lambda: calls.append(1), (t,)], lambda: list(handler.texts)


def warns_of_values(logger, handler):
    def f(x):
        logger.warning("sum %.1f of %s", x.sum().item(), x)
        return x * 2

    return f, [(t,), (t,), (-t,)], lambda: list(handler.texts)


def past_the_class():
    logger, handler, _ = logger_of()
    logger.handle = functools.partial(logging.Logger.handle, logger)
    return warns_of_values(logger, handler)


def each_call_with_another_text():
    logger, handler, _ = logger_of()
    return warns_of_values(logger, handler)


def refused_for_another_reason():
    _, handler, warning_once = logger_of()
    log = []

    def f(x):
        warning_once("once")
        log.append(1)
        print("prints")
        warning_once("later")
        return x * 2

    return f, [(t,), (t,)], lambda: (list(log), list(handler.texts))


def refused_with_a_flag():
    logger, handler, _ = logger_of()
    owner = types.SimpleNamespace(warned=False, calls=0)

    def f(x):
        if not owner.warned:
            owner.warned = True
            logger.error("once")
        owner.calls += 1
        return x + owner.calls

    return f, [(t,), (t,)], lambda: (owner.warned, list(handler.texts))


def raises():
    _, handler, warning_once = logger_of()

    def f(x):
        warning_once("once")
        if x.shape[0] == 5:
            warning_once("five")
            raise ValueError("five")
        return x * 2

    return f, [(torch.ones(5),), (t,), (torch.ones(5),)], lambda: list(handler.texts)


def level_changes():
    logger, handler, _ = logger_of()
    logger.setLevel(logging.WARNING)

    def f(x):
        logger.debug("detail")
        return x * 2

    steps = [(t,), (t,), lambda: logger.setLevel(logging.DEBUG), (t,), (t,), lambda: logger.setLevel(logging.INFO), (t,)]
    return f, steps, lambda: list(handler.texts)


def level_decides():
    logger, handler, _ = logger_of()
    logger.setLevel(logging.WARNING)

    def f(x):
        return x * 2 if logger.getEffectiveLevel() > logging.INFO else x * 3

    return f, [(t,), (t,), lambda: logger.setLevel(logging.DEBUG), (t,), (t,)], lambda: list(handler.texts)


def exceptions_and_structures():
    logger, handler, _ = logger_of()
    seen = set()

    def f(x):
        try:
            raise KeyError("k")
        except KeyError:
            if "k" not in seen:
                seen.add("k")
                logger.exception("failed with %(a)s", {"a": [1, 2]}, stacklevel=1)
        return x * 2

    return f, [(t,), (t,)], lambda: list(handler.texts)


CASES = (
    once, once_with_a_write_and_a_cache, flag, same_place_other_text, each_call, past_the_class,
    each_call_with_another_text, refused_for_another_reason, refused_with_a_flag, raises, level_changes, level_decides,
    exceptions_and_structures,
)  # fmt: skip
CAPTURED = (once, once_with_a_write_and_a_cache, flag, same_place_other_text, level_decides, exceptions_and_structures)


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_sequence(make):
    compiled = check(make)
    if make in CAPTURED:
        assert not compiled.fallbacks, compiled.fallbacks


def test_only_the_levels_that_are_asked_for_are_in_the_key():
    logger, _, _ = logger_of()
    logger.setLevel(logging.WARNING)

    def f(x):
        logger.debug("detail")
        return x * 2

    cf = tp.compile(f, backend="eager")
    cf(t)
    logger.setLevel(logging.ERROR)
    cf(t)
    assert len(compiled_of(cf).versions) == 1 and not compiled_of(cf).fallbacks
    logger.setLevel(logging.DEBUG)
    with pytest.warns(FallbackWarning, match="logs at each call"):
        cf(t)
    assert "isEnabledFor, 10" in str(compiled_of(cf).last_miss)


def test_logging_at_each_call_is_refused_with_its_line():
    f, _, look = each_call()
    with pytest.raises(GraphCaptureError, match=r"logs at each call.* at .*test_logging\.py:\d+"):
        tp.compile(f, backend="eager", strict_native=True)(t)
    assert look() == ["WARNING: once"]  # its cache is filled: no later call would show it


def test_the_record_is_emitted_after_the_capture_and_by_other_threads_at_once():
    logger, handler, warning_once = logger_of()
    during = []

    def elsewhere():
        logger.warning("other thread")
        during.append(list(handler.texts))

    @tp.assume_constant_result
    def run_elsewhere():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return 2

    run_elsewhere = functools.lru_cache(None)(run_elsewhere)

    def f(x):
        warning_once("own")
        return x * run_elsewhere()

    tp.compile(f, backend="eager", strict_native=True)(t)
    assert during == [["WARNING: other thread"]]
    assert handler.texts == ["WARNING: other thread", "WARNING: own"]


def test_a_handler_that_writes_to_a_stream():
    logger, stream = logging.Logger("tests.stream"), io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(asctime)s %(lineno)d %(message)s"))
    logger.addHandler(handler)
    warning_once = functools.lru_cache(None)(logger.warning)

    def f(x):
        warning_once("text")
        return x * 2

    cf = tp.compile(f, backend="eager", strict_native=True)
    cf(t), cf(t)
    assert stream.getvalue().count("\n") == 1 and f"{f.__code__.co_firstlineno + 1} text" in stream.getvalue()


def test_the_clock_of_the_function_itself_is_still_refused():
    import time

    _, handler, _ = logger_of()

    def f(x):
        return x * (time.time() > 0)

    def g(x):
        logging.StreamHandler(io.StringIO()).emit(logging.makeLogRecord({"msg": "direct"}))
        return x * 2

    def h(x):
        handler.handle(logging.makeLogRecord({"msg": "past the logger"}))
        return x * 2

    for each in (f, g, h):
        with pytest.raises(GraphCaptureError):
            tp.compile(each, backend="eager", strict_native=True)(t)
    assert not handler.texts


@pytest.mark.parametrize("action", ("default", "once", "ignore", "error", "always"))
@pytest.mark.parametrize("refused", (False, True))
def test_warnings_follow_the_filter(action, refused):
    def make():
        space = {"warnings": warnings, "x": 0}
        exec("def f(x):\n    warnings.warn('old', DeprecationWarning)\n    x = x * 2\n    effect()\n    return x", space)
        space["effect"] = (lambda log=[]: log.append(1)) if refused else (lambda: None)
        return space["f"]

    def shown(f):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(action)
            warnings.simplefilter("ignore", FallbackWarning)
            for _ in range(3):
                try:
                    f(t)
                except DeprecationWarning:
                    caught.append(None)
            return len(caught)

    want, got = shown(make()), shown(tp.compile(make(), backend="eager"))
    assert got == (1 if action == "always" and not refused else want)  # advice: once for each captured version


def test_warnings_that_the_function_collects_itself():
    def f(x):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.warn("inside", stacklevel=1)
        return x * len(caught)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cf = tp.compile(f, backend="eager", strict_native=True)
        assert torch.equal(cf(t), t) and torch.equal(cf(t), t)
    assert not caught


def test_everything_is_put_back():
    handle, show = logging.Logger.handle, warnings._showwarnmsg
    for make in (once, each_call, raises):
        f, steps, _ = make()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.suppress(ValueError):
                tp.compile(f, backend="eager")(*steps[0])
        assert logging.Logger.handle is handle and warnings._showwarnmsg is show
    f, steps, _ = once()
    cf = tp.compile(f, backend="eager")
    cf(t), cf(t)
    assert len(compiled_of(cf).versions) == 1
