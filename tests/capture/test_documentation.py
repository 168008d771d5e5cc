"""docs/capture.md: every refusal that it shows happens, is warned about once, and leaves eager's result."""

import contextlib
import io
import linecache
import pathlib
import re
import warnings

import pytest
import torch

import tensorplay as tp
from tensorplay.errors import FallbackWarning, GraphCaptureError

TEXT = (pathlib.Path(__file__).parents[2] / "docs" / "capture.md").read_text()
CASES = re.findall(r"^### (.*?)\n\n```python\n(.*?)```", TEXT, re.S | re.M)


def function(title, source):
    """The example's `f`; its source lines can be found, as those of a file."""
    name = f"<{title}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    space = {}
    exec(compile(source, name, "exec"), space)
    return space["f"]


@pytest.mark.parametrize(("title", "source"), CASES, ids=[title for title, _ in CASES])
def test_refusal(title, source):
    f = tp.compile(function(title, source), backend="eager")
    want = function(title, source)
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("always")
        for _ in range(2):
            a, b = want(torch.ones(3)), f(torch.ones(3))
            assert callable(b) if callable(a) and not isinstance(a, torch.Tensor) else torch.equal(a, b)
    texts = [str(w.message) for w in caught if issubclass(w.category, FallbackWarning)]
    assert len(texts) == 1 and title in texts[0], texts
    strict = tp.compile(function(title, source), backend="eager", strict_native=True)
    written = io.StringIO()
    with pytest.raises(GraphCaptureError, match=re.escape(title)), contextlib.redirect_stdout(written):
        strict(torch.ones(3))
    assert not written.getvalue()


def test_every_refusal_is_shown():
    assert len(CASES) > 30 and len({title for title, _ in CASES}) == len(CASES)
