# ruff: noqa: UP031  (formatting with % reads the tensor)
"""Every way from data to Python: recorded as a gate or refused, never taken for constant."""

import math
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from .sequences import T, check

t, n = torch.ones(3), -torch.ones(3)

GATES = {
    "and": (lambda x: x if (x.sum() > 0 and x[0] > 0) else x * 2, [t, n, t]),
    "or": (lambda x: x if (x.sum() > 0 or x[0] > 0) else x * 2, [t, n, t]),
    "not": (lambda x: x if not x.sum() > 0 else x * 2, [t, n, t]),
    "max": (lambda x: max(x[0], x[1] * 2) * x, [T(1, 2, 3), T(9, 1, 2), n]),
    "min_key": (lambda x: min([x[0], x[1]], key=lambda v: v.item()) * x, [T(1, 2, 3), T(9, 1, 2)]),
    "sorted": (lambda x: sorted([x[0], x[1], x[2]])[0] * x, [T(1, 2, 3), T(9, 1, 2), T(3, 2, 1)]),
    "range": (lambda x: sum(x for _ in range(x[0].int())), [T(1, 2, 3), T(3, 1, 2)]),
    "math": (lambda x: x * math.sqrt(x.abs().sum()), [t, n * 3]),
    "item": (lambda x: x * x.sum().item(), [t, n * 3]),
    "tolist": (lambda x: x * sum(x.tolist()), [t, n * 3]),
    "fmt": (lambda x: x * len(f"{x.sum()}"), [t, n * 300]),
    "fmt2": (lambda x: x * len(f"{x.sum():.2f}"), [t, n * 300]),
    "str": (lambda x: x * len(str(x)), [t, n * 300]),
    "repr": (lambda x: x * len(repr(x)), [t, n * 300]),
    "pct": (lambda x: x * len("%.2f" % x.sum()), [t, n * 300]),
    "in": (lambda x: x if x[0] in [1.0, 2.0] else x * 2, [t, n]),
    "in_t": (lambda x: x if 1.0 in x else x * 2, [t, n]),
    "equal": (lambda x: x if torch.equal(x, torch.ones(3)) else x * 2, [t, n]),
    "allclose": (lambda x: x if torch.allclose(x, torch.ones(3)) else x * 2, [t, n]),
    "mask": (lambda x: x[x > 0], [T(1, -2, 3), T(1, 2, 3), n]),
    "mask_sum": (lambda x: x[x > 0].sum() / x[x > 0].shape[0], [T(1, -2, 3), T(1, 2, 3), T(-1, 2, -3)]),
    "nonzero": (lambda x: x.nonzero().float() * 2, [T(1, 0, 3), T(1, 2, 3)]),
    "nonzero_tuple": (lambda x: x.nonzero(as_tuple=True)[0] * 2, [T(1, 0, 3), T(1, 2, 3)]),
    "where1": (lambda x: torch.where(x > 0)[0] * 2, [T(1, 0, 3), T(1, 2, 3)]),
    "unique": (lambda x: torch.unique(x), [T(1, 1, 3), T(1, 2, 3)]),
    "unique_inv": (lambda x: torch.unique(x, return_inverse=True, return_counts=True), [T(1, 1, 3), T(1, 2, 3)]),
    "unpack": (lambda x: (lambda a, b, c: a * b + c)(*x), [t, n]),
    "unpack_list": (lambda x: (lambda a, b, c: torch.tensor(a * b + c))(*x.tolist()), [T(1, 2, 3), n]),
    "bincount": (lambda x: torch.bincount(x.int().abs()), [T(1, 1, 3), T(1, 2, 5)]),
    "repeat_interleave": (lambda x: torch.repeat_interleave(x, x.long().abs()), [T(1, 1, 3), T(1, 2, 5)]),
    "masked_select": (lambda x: torch.masked_select(x, x > 0) * 2, [T(1, 1, 3), T(1, -2, 5)]),
    "slice_t": (lambda x: x[: x[0].int()] * 2, [T(1, 1, 3), T(2, -2, 5)]),
    "getitem": (lambda x: [x, x * 2, x * 3][x[0].int()], [T(1, 1, 3), T(2, -2, 5)]),
    "divmod": (lambda x: x * divmod(x[0], 2)[1], [T(1, 1, 3), T(2, -2, 5)]),
    "round": (lambda x: x * round(x[0].item()), [T(1.2, 1, 3), T(2.7, -2, 5)]),
    "round_t": (lambda x: x * round(x)[0], [T(1.2, 1, 3), T(2.7, -2, 5)]),
    "complex": (lambda x: x * complex(x[0]).real, [T(1.2, 1, 3), T(2.7, -2, 5)]),
    "pow": (lambda x: x ** x[0].item(), [T(1.0, 1, 3), T(2.0, 2, 5)]),
    "dictkey": (lambda x: {1.0: x, 2.0: x * 2}[x[0].item()], [T(1, 1, 3), T(2, -2, 5)]),
    "hash_eq": (lambda x: x * (x[0] == 1), [T(1, 1, 3), T(2, -2, 5)]),
    "any_py": (lambda x: x if any(x > 0) else x * 2, [t, n]),
    "all_py": (lambda x: x if all(v > 0 for v in x) else x * 2, [t, n]),
    "filter": (lambda x: sum(filter(lambda v: v > 0, x), torch.zeros(())), [t, T(1, -2, 3)]),
    "zip_enum": (lambda x: sum(i * v for i, v in enumerate(x)), [t, n]),
    "bisect": (lambda x: x * __import__("bisect").bisect([0.0, 1.5], x[0]), [t, T(2, 2, 2)]),
    "operator_index": (lambda x: x * operator.index(x[0].int()), [t, T(2, 2, 2)]),
    "tensor_of_items": (lambda x: torch.tensor([x[0].item(), 2.0]) * 2, [t, T(2, 2, 2)]),
    "tensor_of_tensors": (lambda x: torch.tensor([x[0], 2.0]) * 2, [t, T(2, 2, 2)]),
    "as_tensor": (lambda x: torch.as_tensor([x[0], x[1]]) * 2, [t, T(2, 2, 2)]),
    "new_tensor": (lambda x: x.new_tensor([x[0], x[1]]) * 2, [t, T(2, 2, 2)]),
    "full": (lambda x: torch.full((2,), x[0]) * 2, [t, T(2, 2, 2)]),
    "full_item": (lambda x: torch.full((2,), x[0].item()) * 2, [t, T(2, 2, 2)]),
    "arange": (lambda x: torch.arange(x[0]) * 2, [t, T(2, 2, 2)]),
    "linspace": (lambda x: torch.linspace(0, x[0], 3) * 2, [t, T(2, 2, 2)]),
    "zeros": (lambda x: torch.zeros(x[0].int()) + 2, [t, T(2, 2, 2)]),
    "clamp_t": (lambda x: x.clamp(max=x[0]), [t, T(2, 3, 2)]),
    "split": (lambda x: x.split([x[0].int(), 3 - x[0].int()])[0], [t, T(2, 3, 2)]),
    "view": (lambda x: x.view(x[0].int(), -1), [t, T(3, 3, 2)]),
    "narrow": (lambda x: x.narrow(0, 0, x[0].int()), [t, T(3, 3, 2)]),
    "topk": (lambda x: x.topk(x[0].int())[0], [t, T(3, 3, 2)]),
    "roll": (lambda x: x.roll(int(x[0])), [T(1, 2, 3), T(2, 3, 1)]),
    "isnan": (lambda x: x * 2 if torch.isnan(x).any() else x, [t, T(math.nan, 1, 2)]),
    "isin": (lambda x: x * 2 if torch.isin(x, torch.ones(3)).all() else x, [t, n]),
    "ternary_none": (lambda x: x * 2 if (x > 0).any() is not None else x, [t, n]),
    "index_put_mask": (lambda x: (lambda y: (y.__setitem__(y > 0, 0.5), y)[1])(x.clone()), [t, n]),
    "cond_assign": (lambda x: (lambda y: (y.__setitem__(y.argmax(), 7.0), y)[1])(x.clone()), [T(1, 2, 3), T(3, 2, 1)]),
    "one_hot": (lambda x: F.one_hot(x.long()), [T(1, 2, 3), T(0, 2, 1)]),
    "gnll": (lambda x: F.gaussian_nll_loss(x, x, x.abs()), [t, n]),
    "embbag": (lambda x: F.embedding_bag(x.long(), torch.eye(4), torch.tensor([0, 2])), [T(1, 2, 3), T(0, 2, 1)]),
    "ctc": (
        lambda x: F.ctc_loss(x.expand(4, 1, 3).log_softmax(-1), torch.tensor([[1]]), (4,), (1,)),
        [T(1, 2, 3), T(0, 2, 1)],
    ),
    "dist": (lambda x: torch.distributions.Normal(x, x.abs() + 1).log_prob(x), [T(1, 2, 3), T(0, 2, 1)]),
    "cat": (lambda x: torch.distributions.Categorical(logits=x).entropy(), [T(1, 2, 3), T(0, 2, 1)]),
    "lstm_pack": (
        lambda x: nn.utils.rnn.pack_padded_sequence(x[:, None, None], x[:1].long().abs() + 1)[0],
        [T(1, 2, 3), T(0, 2, 1)],
    ),
    "pad_seq": (lambda x: nn.utils.rnn.pad_sequence([x, x[:2]]), [T(1, 2, 3), T(0, 2, 1)]),
    "histc": (lambda x: torch.histc(x, 3), [T(1, 2, 3), T(0, 2, 1)]),
    "multinomial": (lambda x: torch.multinomial(x.abs() + 1, 2), [T(1, 2, 3), T(0, 2, 1)]),
    "len_dyn": (lambda x: x * len(x[x > 0]), [T(1, 2, 3), T(0, 2, 1)]),
    "numel_dyn": (lambda x: x * x[x > 0].numel(), [T(1, 2, 3), T(0, 2, 1)]),
    "size_dyn": (lambda x: x * x[x > 0].size(0), [T(1, 2, 3), T(0, 2, 1)]),
    "iter_dyn": (lambda x: sum(v for v in x[x > 0]), [T(1, 2, 3), T(0, 2, 1)]),
    "map_int": (lambda x: torch.zeros(*map(int, x)), [T(1, 2, 3), T(0, 2, 1)]),
    "bool_call": (lambda x: x * bool(x[0]), [T(1, 2, 3), T(0, 2, 1)]),
    "assert": (lambda x: (_ for _ in ()).throw(ValueError("q")) if x[0] < 0 else x, [t, n, t]),
    "storage_offset": (lambda x: x * x.storage_offset(), [torch.ones(5)[1:4], torch.ones(5)[2:5]]),
    "is_contig": (
        lambda x: x * 2 if x.is_contiguous() else x,
        [torch.ones(3, 3), torch.ones(3, 3).t(), torch.arange(9.0).view(3, 3).t()],
    ),
    "version": (lambda x: x * x._version, [t, n]),
    "dataptr": (lambda x: x * (x.data_ptr() % 2), [t, n]),
    "id": (lambda x: x * (id(x) % 2 + 1) * 0, [t, n]),
    "grad_fn": (
        lambda x: x * 2 if x.grad_fn is None else x,
        [t, t.clone().requires_grad_(), t.clone().requires_grad_() * 1],
    ),
    "is_leaf": (lambda x: x * 2 if x.is_leaf else x, [t, t.clone().requires_grad_(), t.clone().requires_grad_() * 1]),
}


@pytest.mark.parametrize("name", GATES)
def test_gate(name):
    f, inputs = GATES[name]
    check(lambda: (f, [(x,) for x in (*inputs, *inputs)]))
