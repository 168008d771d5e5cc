"""What may run inside of a compiled function: transforms, custom functions, regions, modules, layouts; with gradients."""

import copy
import functools
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import tensorplay as tp
from tensorplay.testing import C

from .sequences import T, check

t = torch.ones(3)
n = -torch.ones(3)


def r(*values):
    return T(*values).requires_grad_()


class Sq(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a * a

    @staticmethod
    def backward(ctx, g):
        return 3 * g * ctx.saved_tensors[0]


class Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, k, b=None):
        ctx.k = k
        ctx.mark_non_differentiable()
        return a * k, a + 1

    @staticmethod
    def backward(ctx, g, h):
        return g * ctx.k + h, None, None


class SetupF(torch.autograd.Function):
    @staticmethod
    def forward(a):
        return a * a

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return 3 * g * ctx.saved_tensors[0]

    generate_vmap_rule = True


PROGRAMS = {
    "grad_fn": lambda x: torch.func.grad(lambda y: (y**3).sum())(x),
    "grad_val": lambda x: torch.func.grad_and_value(lambda y: (y**3).sum())(x),
    "vmap_fn": lambda x: torch.func.vmap(lambda row: row * row.sum())(x.expand(2, 3)),
    "vmap_closure": lambda x: torch.func.vmap(lambda row: row * x)(x.expand(2, 3)),
    "vmap_rand": lambda x: torch.func.vmap(lambda row: row + torch.rand(3), randomness="different")(x.expand(2, 3)),
    "jacrev_fn": lambda x: torch.func.jacrev(lambda y: y**2)(x),
    "jacfwd_fn": lambda x: torch.func.jacfwd(lambda y: y**2)(x),
    "hessian_fn": lambda x: torch.func.hessian(lambda y: (y**3).sum())(x),
    "jvp_fn": lambda x: torch.func.jvp(lambda y: y**2, (x,), (x,)),
    "vjp_fn": lambda x: torch.func.vjp(lambda y: y**2, x)[1](x),
    "vmap_grad": lambda x: torch.func.vmap(torch.func.grad(lambda y: (y**2).sum()))(x.expand(2, 3)),
    "vmap_gate": lambda x: torch.func.vmap(lambda y: y * 2 if y.shape[0] > 2 else y)(x.expand(2, 3)),
    "vmap_inplace": lambda x: torch.func.vmap(lambda y: y.clone().add_(1))(x.expand(2, 3)),
    "functional_call": lambda x: torch.func.functional_call(LIN, {"weight": LIN.weight * 2, "bias": LIN.bias}, (x,)),
    "functionalize": lambda x: torch.func.functionalize(lambda y: y.clone().add_(1))(x),
    "sq_apply": lambda x: Sq.apply(x) * 2,
    "two_apply": lambda x: Two.apply(x, 3.0),
    "setup_apply": lambda x: SetupF.apply(x),
    "autograd_grad": lambda x: inner_grad(x),
    "create_graph": lambda x: inner_grad2(x),
    "checkpoint_re": lambda x: torch.utils.checkpoint.checkpoint(lambda y: y.sin() * 2, x, use_reentrant=False),
    "checkpoint_rt": lambda x: torch.utils.checkpoint.checkpoint(lambda y: y.sin() * 2, x, use_reentrant=True),
    "checkpoint_drop": lambda x: torch.utils.checkpoint.checkpoint(lambda y: F.dropout(y, 0.5), x, use_reentrant=False),
    "backward_inside": lambda x: bwd_inside(x),
    "inference": lambda x: inf_region(x),
    "autocast_region": lambda x: ac_region(x),
    "no_grad_region": lambda x: ng_region(x),
    "enable_grad_region": lambda x: eg_region(x),
    "set_grad_fn": lambda x: sg_region(x),
    "out_arg": lambda x: torch.add(x, 1, out=torch.empty(3)),
    "out_global": lambda x: torch.mul(x, 2, out=OUTG).clone(),
    "param_inside": lambda x: nn.Parameter(x.detach() * 2),
    "linear_inside": lambda x: (torch.manual_seed(0), nn.Linear(3, 2)(x))[1],
    "param_use": lambda x: (nn.Parameter(torch.ones(3)) * x).detach(),
    "deepcopy": lambda x: copy.deepcopy(x) * 2,
    "deepcopy_mod": lambda x: copy.deepcopy(LIN)(x),
    "pickle_t": lambda x: pickle.loads(pickle.dumps(x)) * 2,
    "sparse_inside": lambda x: x.expand(3, 3).contiguous().to_sparse().to_dense() * 2,
    "sparse_out": lambda x: x.expand(3, 3).contiguous().to_sparse(),
    "sparse_mm": lambda x: torch.sparse.mm(SP, x[:, None]),
    "csr_mm": lambda x: CSR @ x,
    "quant_inside": lambda x: torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8).dequantize(),
    "nested_inside": lambda x: torch.nested.nested_tensor([x.detach(), x.detach()[:2]]).to_padded_tensor(0.0),
    "meta_inside": lambda x: torch.empty(3, device="meta").shape[0] * x,
    "complex_in": lambda x: torch.view_as_real(torch.complex(x, x) * 1j),
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "hook_tensor": lambda x: hook_t(x),
    "retain": lambda x: (lambda y: (y.retain_grad() if y.requires_grad else None, y * 2)[1])(x * 1),
    "module_hook": lambda x: HOOKED(x),
    "module_prehook": lambda x: PREHOOKED(x),
    "hook_added_inside": lambda x: hook_inside(x),
    "nested_compiled": lambda x: CINNER(x) * 2,
    "nested_compiled_mod": lambda x: CMOD(x) * 2,
    "scripted": lambda x: SCR(x) * 2,
    "traced_mod": lambda x: TRACED(x) * 2,
    "custom_op": lambda x: torch.ops.tptest.myop(x) * 2,
    "custom_op_direct": lambda x: MYOP(x) * 2,
    "custom_op_mut": lambda x: (lambda y: (MUT(y), y * 2)[1])(x.detach().clone()),
    "subclass_inside": lambda x: x.as_subclass(Sub) * 2,
    "weight_norm": lambda x: WN(x),
    "spectral": lambda x: SN(x),
    "bn_train": lambda x: BN(x.expand(4, 3) * torch.arange(4.0)[:, None]),
    "lstm": lambda x: LSTM(x.expand(2, 1, 3))[0],
    "mha": lambda x: MHA(x.expand(2, 1, 3), x.expand(2, 1, 3), x.expand(2, 1, 3))[0],
    "tel": lambda x: TEL(x.expand(2, 1, 3)),
    "scan_loop": lambda x: functools.reduce(lambda a, b: a * b + 1, [x] * 5),
    "is_compiling": lambda x: x * (2 if torch.compiler.is_compiling() else 3),
    "dynamo_disable": lambda x: DIS(x) * 2,
    "set_data": lambda x: (lambda y: (setattr(y, "data", torch.zeros(3)), y * 2)[1])(x.detach().clone()),
    "data_write": lambda x: (lambda y: (y.data.mul_(2), y * 2)[1])(x.detach().clone()),
    "resize": lambda x: x.detach().clone().resize_(2),
    "untyped": lambda x: x.untyped_storage().nbytes() * x,
    "stor_set": lambda x: (lambda y: (y.set_(torch.ones(3)), y)[1])(x.detach().clone()),
    "requires": lambda x: x.detach().clone().requires_grad_(),
    "inp_requires": lambda x: x.detach().requires_grad_() * 2,
    "seeded": lambda x: (torch.manual_seed(3), x + torch.rand(3))[1],
    "fork_rng": lambda x: fork(x),
    "gen_inside": lambda x: x + torch.rand(3, generator=torch.Generator().manual_seed(4)),
    "torch_cond": lambda x: torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y * 3, (x,)),
    "map_": lambda x: x.detach().clone().apply_(lambda v: v + 1),
    "einsum": lambda x: torch.einsum("i,j->ij", x, x),
    "sdpa": lambda x: F.scaled_dot_product_attention(x.expand(1, 2, 3), x.expand(1, 2, 3), x.expand(1, 2, 3)),
    "sdpa_ctx": lambda x: sdpa_ctx(x),
    "device_ctx": lambda x: dev_ctx(x),
    "default_dtype": lambda x: dd(x),
    "saved_hooks": lambda x: svh(x),
    "anomaly": lambda x: anom(x),
    "record_function": lambda x: recf(x),
    "warn": lambda x: (warnings.warn("hey", stacklevel=1), x * 2)[1],
    "type_checks": lambda x: (
        x * (isinstance(x, torch.Tensor) + (type(x) is torch.Tensor) + isinstance(x, nn.Parameter))
    ),
    "finfo": lambda x: x + torch.finfo(x.dtype).eps + torch.iinfo(torch.int8).max,
    "broadcast": lambda x: torch.broadcast_tensors(x, x[:, None])[0],
    "meshgrid": lambda x: torch.meshgrid(x, x, indexing="ij"),
    "vander": lambda x: torch.vander(x),
    "cdist": lambda x: torch.cdist(x[None], x[None]),
    "rnn_cell": lambda x: RC(x[None]),
    "embedding": lambda x: F.embedding(x.long().abs() % 3, torch.eye(3)),
}
LIN = nn.Linear(3, 3)
OUTG = torch.empty(3)
with torch.no_grad():
    LIN.weight.copy_(torch.eye(3))
    LIN.bias.zero_()
SP = torch.eye(3).to_sparse()
CSR = torch.eye(3).to_sparse_csr()


def inner_grad(x):
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        return torch.autograd.grad((y**3).sum(), y)[0]


def inner_grad2(x):
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        g = torch.autograd.grad((y**3).sum(), y, create_graph=True)[0]
        return torch.autograd.grad(g.sum(), y)[0]


def bwd_inside(x):
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        (y**3).sum().backward()
        return y.grad * 2


def inf_region(x):
    with torch.inference_mode():
        y = x * 2
    return y.clone() + 1


def ac_region(x):
    with torch.autocast("cpu", torch.bfloat16):
        y = x[None] @ x[:, None]
    return y


def ng_region(x):
    with torch.no_grad():
        y = x * 2
    return y + x


def eg_region(x):
    with torch.enable_grad():
        y = x * 2
    return y + x


def sg_region(x):
    torch.set_grad_enabled(False)
    y = x * 2
    torch.set_grad_enabled(True)
    return y


def hook_t(x):
    y = x * 2
    if y.requires_grad:
        y.register_hook(lambda g: g * 5)
    return y * 3


HOOKED = nn.Linear(3, 3)
HOOKED.load_state_dict(LIN.state_dict())
HOOKED.register_forward_hook(lambda m, i, o: o * 3)
PREHOOKED = nn.Linear(3, 3)
PREHOOKED.load_state_dict(LIN.state_dict())
PREHOOKED.register_forward_pre_hook(lambda m, i: (i[0] * 3,))


def hook_inside(x):
    h = LIN.register_forward_hook(lambda m, i, o: o * 7)
    try:
        return LIN(x)
    finally:
        h.remove()


CINNER = tp.compile(lambda x: x * 3 if x.sum() > 0 else x, backend="eager")
CMOD = tp.compile(nn.ReLU(), backend="eager")


@torch.jit.script
def SCR(x):
    return x * 3


TRACED = torch.jit.trace(nn.ReLU(), torch.ones(3))


@torch.library.custom_op("tptest::myop", mutates_args=())
def MYOP(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.detach().numpy() * 3)


@torch.library.custom_op("tptest::mut", mutates_args=("x",))
def MUT(x: torch.Tensor) -> None:
    x.mul_(3)


class Sub(torch.Tensor):
    pass


torch.manual_seed(0)
WN = weight_norm(nn.Linear(3, 3))
SN = spectral_norm(nn.Linear(3, 3))
BN = nn.BatchNorm1d(3)
LSTM = nn.LSTM(3, 3)
MHA = nn.MultiheadAttention(3, 1)
TEL = nn.TransformerEncoderLayer(3, 1, 4).eval()
RC = nn.RNNCell(3, 3)
DIS = torch.compiler.disable(lambda x: x * 5)


def fork(x):
    with torch.random.fork_rng():
        y = torch.rand(3)
    return x + y + torch.rand(3)


def sdpa_ctx(x):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(x.expand(1, 2, 3), x.expand(1, 2, 3), x.expand(1, 2, 3))


def dev_ctx(x):
    with torch.device("cpu"):
        return x + torch.ones(3)


def dd(x):
    torch.set_default_dtype(torch.float64)
    try:
        return torch.ones(3) * 2
    finally:
        torch.set_default_dtype(torch.float32)


def svh(x):
    with torch.autograd.graph.saved_tensors_hooks(lambda a: a * 2, lambda a: a):
        return (x**2).sum()


def anom(x):
    with torch.autograd.set_detect_anomaly(True):
        return x * 2


def recf(x):
    with torch.autograd.profiler.record_function("z"):
        return x * 2


def step(f, x):
    x = x.detach().clone().requires_grad_(x.requires_grad)
    out = f(x)
    if x.requires_grad:
        outs = [
            o
            for o in torch.utils._pytree.tree_leaves(out)
            if isinstance(o, torch.Tensor) and o.requires_grad and o.layout is torch.strided
        ]
        if outs:
            s = sum((o.abs() if o.is_complex() else o).sum() for o in outs)
            s.backward()
        return out, x.grad
    return out


def make(f):
    BN.reset_running_stats()
    OUTG.zero_()
    inputs = [(T(1, 2, 3),), (T(-1, 2, -3),), (r(1, 2, 3),), (r(-1, 2, -3),)]
    return f, inputs, lambda: (OUTG.clone(), BN.running_mean.clone(), len(LIN._forward_hooks))


@pytest.mark.parametrize("name", PROGRAMS)
def test_inside(name):
    check(lambda: make(PROGRAMS[name]), step=step)
    assert torch._C._len_torch_function_stack() == 0 and torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._functorch.maybe_current_level() is None


def test_whether_a_value_has_a_history():
    def f(x):
        y, (a, b) = x * 2, x.split(2)
        assert a.grad_fn is b.grad_fn
        same = y.grad_fn is y.grad_fn and y.grad_fn == y.grad_fn and y.grad_fn != a.grad_fn
        return y + 1 if y.grad_fn is not None and same else y.sum()

    x = T(1, 2, 3, 4)
    cf = tp.compile(f, strict_native=True, backend="eager")
    for call in (x, r(1, 2, 3, 4), x, r(1, 2, 3, 4)):
        got = cf(call)
        assert torch.equal(got, f(call)) and got.requires_grad == call.requires_grad
    assert C(cf) == 2


HISTORIES = {
    "type": lambda y: y * len(type(y.grad_fn).__name__), "text": lambda y: y * len(str(y.grad_fn)), "name": lambda y: y * len(y.grad_fn.name()),
    "class": lambda y: y + isinstance(y.grad_fn, torch.autograd.graph.Node), "formatted": lambda y: y * len(f"{y.grad_fn}"),
    "returned": lambda y: y.grad_fn, "returned in a list": lambda y: [y, y.grad_fn], "inputs": lambda y: y * len(y.grad_fn.next_functions),
    "text of its type": lambda y: y * len(str(type(y.grad_fn))), "attribute": lambda y: y + hasattr(y.grad_fn, "saved_tensors"),
    "metadata": lambda y: y.grad_fn.metadata.update(a=1) or y, "hook": lambda y: y.grad_fn.register_hook(lambda *g: None) and y,
}  # fmt: skip


@pytest.mark.parametrize("name", HISTORIES)
def test_nothing_else_of_a_history_is_known(name):
    def f(x):
        return HISTORIES[name](x * 2)

    x = r(1, 2, 3)
    with pytest.raises(tp.GraphCaptureError, match="grad_fn reads the history"):
        tp.compile(f, strict_native=True, backend="eager")(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert str(type(tp.compile(f, backend="eager")(x))) == str(type(f(x)))
