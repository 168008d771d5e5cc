"""An output that eager makes by a view is a tensor object of its own, also where it equals an input."""

import torch

import tensorplay as tp


def test_a_view_of_everything_is_not_the_input():
    def f(x):
        return x.chunk(1)[0], x.split(3)[0], x.tensor_split(1)[0], x[...], x.view(3), x.detach(), x, x.contiguous(), x.to(x.dtype)

    x = torch.arange(3.0)
    got, want = tp.compile(f, strict_native=True)(x), f(x)
    assert [t is x for t in got] == [t is x for t in want]
    assert all(t.data_ptr() == x.data_ptr() for t in got)


def test_what_is_detached_inside_requires_no_grad_in_any_back_end():
    def f(x, y):
        y.mul_(x.detach())
        return y, x.detach(), x[...]

    for backend in ("eager", "aot_eager", "stax"):
        x, y = torch.arange(3.0, requires_grad=True), torch.ones(3)
        got = tp.compile(f, backend=backend)(x, y)
        assert [t.requires_grad for t in (*got, y)] == [False, False, True, False], backend
        assert got[0] is y and got[1] is not x
        assert y.tolist() == [0, 1, 2]
