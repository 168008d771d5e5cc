"""Generated text becomes code without a trace in the heap that the caller's tensors live in."""

import ctypes
import subprocess
import sys

import pytest
import torch

import tensorplay as tp
from tensorplay.source import LONG, code_of


def test_code_and_errors_are_those_of_compile():
    for count in (3, LONG):
        text = "x = 0\n" + "x += 1\n" * count
        space = {}
        exec(code_of(text, "<text>"), space)
        assert space["x"] == count and code_of(text, "<text>") == compile(text, "<text>", "exec", dont_inherit=True)
        with pytest.raises(SyntaxError, match="<text>"):
            code_of(text + "x +=", "<text>")


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "stax"])
def test_an_operator_that_raises_prints_nothing(backend, capsys):
    for verify in (False, True):
        f = tp.compile(lambda x, i: (x * 2)[i] + 1, backend=backend, verify=verify)
        f(torch.ones(4), torch.tensor([0, 3]))
        with pytest.raises(IndexError):
            f(torch.ones(4), torch.tensor([0, 9]))
    assert capsys.readouterr() == ("", "")


def test_text_becomes_code_while_the_interpreter_ends():
    script = f"import atexit\nfrom tensorplay.source import code_of\natexit.register(lambda: exec(code_of('x = 1\\n' * {LONG} + 'print(x)', '<text>')))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n", done.stderr


SCRIPT = """
import ctypes
from tensorplay.source import code_of

end = ctypes.CDLL(None).sbrk
end.restype = ctypes.c_void_p
code_of("pass\\n" * 10000, "<first>")
text = "\\n".join(f"def f{k}(a, b):\\n    return a + b * {k} if a[{k}] else {{'x': (a, b)}}" for k in range(2000))
before = end(0)
kept = CALL(text, "<text>"CALLED)
print(end(0) - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "sbrk"), reason="a system without a heap of this kind")
def test_a_long_text_is_parsed_in_another_heap():
    def growth(call, called):
        script = SCRIPT.replace("CALLED", called).replace("CALL", call)
        return int(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)

    assert growth("code_of", "") < 1 << 20 < 4 << 20 < growth("compile", ', "exec"')
