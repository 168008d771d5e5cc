"""Errors of compiled code are eager's own, name the user's line and print nothing (promises P4, P5)."""

import inspect

import pytest
import torch

import tensorplay as tp


def divides(a, b, i):
    c = a + 1
    d = c // b
    return d[i]


def line(offset):
    return f"test_errors.py:{inspect.getsourcelines(divides)[1] + offset}"


@pytest.mark.parametrize("kind, offset", [("division", 2), ("index", 3)])
def test_a_failed_check_raises_eagers_error_with_the_users_line(kind, offset, capfd):
    cf = tp.compile(divides, strict_native=True)
    a, b, i = torch.arange(5), torch.ones(5, dtype=torch.int64), torch.tensor([1, 2])
    cf(a, b, i)
    b, i = (b * 0, i) if kind == "division" else (b, i + 4)
    with pytest.raises(Exception) as want:
        divides(a, b, i)
    with pytest.raises(type(want.value)) as got:
        cf(a, b, i)
    assert str(got.value) == str(want.value)
    assert any(line(offset) in note for note in got.value.__notes__)
    assert capfd.readouterr() == ("", "")
