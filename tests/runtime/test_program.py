"""The host code: results in the graph's own structure, aliasing, memory of a call, checks, threads (rows 7.09, 8.09)."""

import gc
import operator
import os
import resource
import threading
import weakref

import pytest
import torch
from torch import fx

from tensorplay import record
from tensorplay.errors import UnsupportedError
from tensorplay.stax.artifacts.build import build
from tensorplay.stax.codegen.target import Check, Source, Target
from tensorplay.stax.expr import add, const, load, make, mul, var
from tensorplay.stax.joint.opgraph import OpGraph
from tensorplay.stax.loops.nodes import Buffer, Compute, Extern, Loops, Pointwise, Ref
from tensorplay.stax.runtime import launch
from tensorplay.stax.runtime.program import Program
from tensorplay.stax.schedule.plan import Kernel, Memory, Plan

aten = torch.ops.aten
F32, CPU = torch.float32, torch.device("cpu")


def buffer(name, *size, stride=None, dtype=F32):
    if stride is None:
        stride = torch.empty(size, device="meta").stride()
    return Buffer(name, dtype, CPU, size, tuple(stride))


def double(src, out, rows, cols):
    """out = src * 2 over contiguous buffers, as a loop."""
    i, j = var("x0", rows), var("x1", cols)
    at = add(mul(i, cols), j)
    body = make("mul", (load(src, at, F32), const(2.0, F32)), F32)
    return Compute((buffer(out, rows, cols),), (at,), Pointwise((i, j), body))


def kernel(name, *nodes):
    return Kernel(name, nodes[0].vars, (), nodes)


def scale(name, src, out, n, factor=2.0, check=None):
    """The C++ of `double` by hand; `check` fails with this code when the first element is negative."""
    test = f"if (((const float *)p[{src}])[0] < 0) return {check};" if check else ""
    return (
        f'extern "C" int {name}(void *const *p, int threads) {{\n  {test}\n'
        f"  for (int i = 0; i < {n}; i++) ((float *)p[{out}])[i] = ((const float *)p[{src}])[i] * {factor}f;\n"
        "  return 0;\n}\n"
    )


def graph_of(fn):
    return fx.symbolic_trace(fn)


def op_graph(count, outputs=1):
    """An operator graph that only says how many inputs and outputs there are."""
    graph = fx.Graph()
    nodes = [graph.placeholder(f"primals_{k + 1}") for k in range(count)]
    graph.output(tuple(graph.call_function(aten.mul.Tensor, (nodes[0], 2.0)) for _ in range(outputs)))
    return OpGraph(fx.GraphModule({}, graph))


def program(fn, plan, texts, ops=None, checks=(), **how):
    source = Source("cpp", "".join(texts), tuple(f"segment_{k}" for k in range(len(texts))), {}, tuple(checks))
    graph = graph_of(fn)
    count = len(plan.loops.inputs)
    ops = ops or op_graph(count, len(plan.loops.outputs))
    return Program(graph, ops, plan.loops, plan, source, build(source, Target()), **how)


def one_kernel(fn, rows=4, cols=8, outputs=None, **kwargs):
    node = double("x", "buf0", rows, cols)
    out = Ref("buf0", (rows, cols), (cols, 1))
    loops = Loops((buffer("x", rows, cols),), (node,), (out,) if outputs is None else outputs)
    plan = Plan(loops, (kernel("double", node),), Memory(fresh=("buf0",)))
    return program(fn, plan, [scale("segment_0", 0, 1, rows * cols, **kwargs)], checks=(Check("negative", "mul"),))


X = torch.randn(4, 8).abs()


def test_flat_tuple():
    p = one_kernel(lambda x: (x * 2,))
    (out,) = p(X)
    assert torch.equal(out, X * 2)
    assert p(X)[0] is not out
    assert p(X)[0].data_ptr() != out.data_ptr()


def test_single_result():
    assert torch.equal(one_kernel(lambda x: x * 2)(X), X * 2)


def test_nested_result():
    ref = Ref("buf0", (4, 8), (8, 1))
    p = one_kernel(lambda x: {"a": [x * 2, None], "b": (3, x * 2)}, outputs=(ref, None, 3, ref))
    out = p(X)
    assert isinstance(out, dict) and out["a"][1] is None and out["b"][0] == 3
    assert torch.equal(out["a"][0], X * 2) and torch.equal(out["b"][1], X * 2)


def test_result_is_a_view_of_fresh_memory():
    p = one_kernel(lambda x: (x * 2, x), outputs=(Ref("buf0", (8, 4), (1, 8)), Ref("buf0", (8,), (1,), 8)))
    a, b = p(X)
    assert torch.equal(a, (X * 2).t()) and torch.equal(b, X[1] * 2)
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def test_every_level_gives_the_same():
    p = one_kernel(lambda x: (x * 2,))
    for level in ("graph", "ops", "loops", "plan", "kernels"):
        (out,) = p.run(level, (X,))
        assert torch.equal(out, X * 2), level
    with pytest.raises(ValueError, match="kernels"):
        p.run("none", (X,))


def test_input_returned_as_itself_or_as_a_view():
    graph = fx.Graph()
    x = graph.placeholder("primals_1")
    graph.output((x, graph.call_function(aten.detach.default, (x,)), graph.call_function(aten.t.default, (x,))))
    refs = (Ref("x", (4, 8), (8, 1)), Ref("x", (4, 8), (8, 1)), Ref("x", (8, 4), (1, 8)))
    plan = Plan(Loops((buffer("x", 4, 8),), (), refs), (), Memory())
    p = program(lambda x: (x, x.detach(), x.t()), plan, [], OpGraph(fx.GraphModule({}, graph)))
    base = torch.arange(40.0)
    x = base[8:].view(4, 8)  # the pointer of an input includes its storage offset
    same, detached, transposed = p(x)
    assert same is x
    assert detached is not x and detached._base is None and torch.equal(detached, x)
    assert torch.equal(transposed, x.t()) and transposed.data_ptr() == x.data_ptr()
    assert transposed._base is base
    transposed.add_(1)
    assert detached._version == x._version


def test_another_layout_is_refused():
    p = one_kernel(lambda x: (x * 2,))
    for bad in (X.t(), X.double(), X[:2], torch.empty(4, 16)[:, ::2]):
        with pytest.raises(TypeError, match="compiled for"):
            p(bad)
    thin = one_kernel(lambda x: (x * 2,), rows=1)
    x = torch.arange(16.0).as_strided((1, 8), (123, 1))
    assert torch.equal(thin(x)[0], x * 2)  # the stride of a dimension of size 1 addresses nothing


def test_failed_check_is_answered_by_eager():
    def fn(x):
        return (operator.mul(x, 3),)

    p = one_kernel(fn, check=1)
    with record.record() as events:
        assert torch.equal(p(-X)[0], -X * 3)
    assert [(e.kind, e.data["reason"]) for e in events] == [("retry", "negative")]

    def raises(x):
        return (torch.linalg.cholesky(x),)

    with pytest.raises(RuntimeError, match=r"linalg\.cholesky"):
        one_kernel(raises, check=1)(-X)


def written_input():
    i, j = var("x0", 4), var("x1", 8)
    at = add(mul(i, 8), j)
    body = make("mul", (load("x", at, F32), const(2.0, F32)), F32)
    node = Compute((buffer("x", 4, 8),), (at,), Pointwise((i, j), body))
    plan = Plan(Loops((buffer("x", 4, 8),), (node,), (Ref("x", (4, 8), (8, 1)),)), (kernel("double", node),), Memory())
    return program(lambda x: (x.mul_(2),), plan, [scale("segment_0", 0, 0, 32)])


def test_write_back_bumps_the_version():
    p, x = written_input(), X.clone()
    version = x._version
    (out,) = p(x)
    assert out is x and torch.equal(x, X * 2) and x._version > version
    with torch.inference_mode():
        x = X.clone()
        assert torch.equal(p(x)[0], X * 2)


def matmul_chain(owned, memory=None, **how):
    """(x * 2) @ w, doubled: an arena buffer read by the library through a view, its result read by a kernel."""
    first, last = double("x", "buf0", 4, 8), double("buf1", "buf2", 4, 4)
    w = Ref("w", (8, 4), (1, 8))
    mm = Extern((buffer("buf1", 4, 4),), aten.mm.default, (Ref("buf0", (4, 8), (8, 1)), w))
    loops = Loops((buffer("x", 4, 8), buffer("w", 4, 8)), (first, mm, last), (Ref("buf2", (4, 4), (4, 1)),))
    memory = memory or Memory(
        arena={"buf0": 64} if owned else {"buf0": 64, "buf1": 192},
        arena_bytes=256,
        fresh=("buf2",),
        owned=("buf1",) if owned else (),
    )
    plan = Plan(loops, (kernel("first", first), mm, kernel("last", last)), memory)
    assert plan.slots == ("x", "w", "buf0", "buf1", "buf2")
    texts = [scale("segment_0", 0, 2, 32), scale("segment_1", 3, 4, 16)]
    return program(lambda x, w: ((x * 2) @ w.t() * 2,), plan, texts, **how)


@pytest.mark.parametrize("owned", [True, False])
def test_library_call_between_kernels(owned):
    p = matmul_chain(owned)
    w = torch.randn(4, 8)
    expected = torch.mm(X * 2, w.t()) * 2
    for _ in range(3):
        assert torch.equal(p(X, w)[0], expected)
    assert len(p.arena.idle) == 1
    assert "del buf1" in p.host if owned else "out=buf1" in p.host


@pytest.mark.parametrize("owned", [True, False])
def test_library_calls_run_below_autograd_and_autocast(owned):
    p, w = matmul_chain(owned), torch.nn.Parameter(torch.randn(4, 8))
    expected = torch.mm(X * 2, w.detach().t()) * 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (out,) = p(X, w)
    assert torch.equal(out, expected) and not out.requires_grad
    with torch.inference_mode():
        (out,) = p(X, w)
    assert torch.equal(out, expected)
    (out,) = p(X, w)
    assert torch.equal(out, expected) and not out.is_inference()
    assert torch.is_grad_enabled() and (w * 1).requires_grad


def test_library_result_in_another_layout_is_laid_out_again():
    node = double("buf0", "buf1", 4, 8)
    copy = Extern((buffer("buf0", 4, 8),), aten.clone.default, (Ref("x", (4, 8), (1, 4)),))
    loops = Loops((buffer("x", 4, 8, stride=(1, 4)),), (copy, node), (Ref("buf1", (4, 8), (8, 1)),))
    plan = Plan(loops, (copy, kernel("double", node)), Memory(fresh=("buf1",), owned=("buf0",)))
    p = program(lambda x: (x.clone() * 2,), plan, [scale("segment_0", 1, 2, 32)])
    x = torch.randn(8, 4).t()
    assert torch.equal(p(x)[0], x * 2)


def test_several_results_of_one_operator():
    ref = Ref("x", (4, 8), (8, 1))
    sort = Extern((None, buffer("buf1", 4, 8, dtype=torch.int64)), aten.sort.default, (ref,), (("descending", True),))
    split = Extern((buffer("buf2", 4, 4, stride=(8, 1)), None), aten.split.Tensor, (ref, 4, 1))
    outputs = (Ref("buf1", (4, 8), (8, 1)), Ref("buf2", (4, 4), (8, 1)))
    plan = Plan(Loops((buffer("x", 4, 8),), (sort, split), outputs), (sort, split), Memory(owned=("buf1", "buf2")))
    p = program(lambda x: (x.argsort(), x), plan, [])
    indices, left = p(X)
    assert torch.equal(indices, X.sort(-1, descending=True).indices) and torch.equal(left, X[:, :4])


def test_special_arguments():
    ref = Ref("x", (4, 8), (8, 1))
    full = Extern((buffer("buf0", 4, 8),), aten.full_like.default, (ref, float("-inf")), (("dtype", F32),))
    clamp = Extern((buffer("buf1", 4, 8),), aten.clamp.default, (ref, None, float("nan")))
    outputs = (Ref("buf0", (4, 8), (8, 1)), Ref("buf1", (4, 8), (8, 1)), float("inf"), -0.0, "text", torch.float16)
    plan = Plan(Loops((buffer("x", 4, 8),), (full, clamp), outputs), (full, clamp), Memory(owned=("buf0", "buf1")))
    p = program(lambda x: (x, x, 1.0, -0.0, "text", torch.float16), plan, [])
    a, b, *rest = p(X)
    assert (a == -float("inf")).all() and torch.equal(b.isnan(), X.clamp(None, float("nan")).isnan())
    assert str(rest) == "[inf, -0.0, 'text', torch.float16]"


def test_constant():
    c = torch.randn(4, 8)
    node = double("c", "buf0", 4, 8)
    loops = Loops((buffer("x", 4, 8),), (node,), (Ref("buf0", (4, 8), (8, 1)), Ref("c", (4, 8), (8, 1))), {"c": c})
    plan = Plan(loops, (kernel("double", node),), Memory(fresh=("buf0",)))
    p = program(lambda x: (x, x), plan, [scale("segment_0", plan.slots.index("c"), plan.slots.index("buf0"), 32)])
    out, itself = p(X)
    assert torch.equal(out, c * 2) and itself is c


def test_strange_names():
    node = double("lease", "class", 4, 8)
    out = Ref("class", (4, 8), (8, 1))
    plan = Plan(Loops((buffer("lease", 4, 8),), (node,), (out,)), (kernel("k", node),), Memory(fresh=("class",)))
    p = program(lambda x: x * 2, plan, [scale("segment_0", 0, 1, 32)])
    assert torch.equal(p(X), X * 2)


@pytest.mark.parametrize("native", [True, False])
def test_concurrent_calls_share_no_memory(native, monkeypatch):
    if native and launch.launch_native is None:
        pytest.skip("the extension is not built")
    if not native:
        monkeypatch.setattr(launch, "launch_native", None)
        monkeypatch.setattr(launch, "launch", launch.launch_ctypes)
    p, w = matmul_chain(False), torch.randn(4, 8)
    wrong = []

    def work(seed):
        x = torch.full((4, 8), float(seed))
        expected = torch.mm(x * 2, w.t()) * 2
        for _ in range(200):
            if not torch.equal(p(x, w)[0], expected):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and len(p.arena.idle) == 1


def test_large_arena_is_not_kept():
    p, w = matmul_chain(False), torch.randn(4, 8)
    want = p(X, w)
    (lease,) = p.arena.idle
    p.arena.keep = 16
    for _ in range(3):
        got = p(X, w)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert p.arena.idle == [lease] and not lease.block.untyped_storage().nbytes()


def test_a_large_arena_is_free_behind_its_last_use():
    p, w = matmul_chain(True, keep=16), torch.randn(4, 8)
    for _ in range(3):
        assert torch.equal(p(X, w)[0], torch.mm(X * 2, w.t()) * 2)
    lines = [line.strip() for line in p.host.splitlines()]
    product, drop = (next(k for k, line in enumerate(lines) if text in line) for text in ("= aten_mm", "drop(lease)"))
    assert product < drop < next(k for k, line in enumerate(lines) if "segment_1" in line)
    (lease,) = p.arena.idle
    assert not lease.block.untyped_storage().nbytes() and "drop(lease)" not in matmul_chain(True).host


def test_intermediates_apart_die_behind_their_last_use_or_are_taken_over():
    memory = Memory(apart=("buf0", "buf1"), fresh=("buf2",), over={"buf2": "buf1"})
    p, w = matmul_chain(False, memory), torch.randn(4, 8)
    for _ in range(3):
        assert torch.equal(p(X, w)[0], torch.mm(X * 2, w.t()) * 2)
    assert "del buf0" in p.host and "buf2 = buf1\n" in p.host and p.host.count("empty_cpu(") == 2


def test_arguments_and_results_die_by_reference_count():
    p = matmul_chain(True)
    gc.collect()
    gc.disable()
    try:
        x, w = X.clone(), torch.randn(4, 8)
        seen = [weakref.ref(x), weakref.ref(w), weakref.ref(p(x, w)[0])]
        del x, w
        assert [r() for r in seen] == [None] * 3
        program_ref, artifact_ref = weakref.ref(p), weakref.ref(p.artifact)
        del p
        assert program_ref() is None
    finally:
        gc.enable()
    gc.collect()
    assert artifact_ref() is None


def test_a_failing_library_call_raises_its_own_error_and_harms_nothing():
    node = double("x", "buf0", 4, 4)
    factor = Extern(
        (buffer("buf1", 4, 4),), aten.linalg_cholesky.default, (Ref("buf0", (4, 4), (4, 1)),), library=False
    )
    loops = Loops((buffer("x", 4, 4),), (node, factor), (Ref("buf1", (4, 4), (4, 1)),))
    memory = Memory(arena={"buf0": 0}, arena_bytes=64, owned=("buf1",))
    p = program(lambda x: (x,), Plan(loops, (kernel("k", node), factor), memory), [scale("segment_0", 0, 1, 16)])
    good = torch.eye(4)
    for _ in range(2):
        with pytest.raises(torch.linalg.LinAlgError):
            p(-good)
        assert torch.equal(p(good)[0], torch.linalg.cholesky(good * 2))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_runs_serially():
    p, (reader, writer) = one_kernel(lambda x: (x * 2,)), os.pipe()
    assert launch.threads() == torch.get_num_threads()
    child = os.fork()
    if child == 0:
        os.write(writer, bytes((launch.threads(), torch.equal(p(X)[0], X * 2))))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 2) == bytes((1, 1))


def test_a_buffer_without_a_place_is_refused():
    node = double("x", "buf0", 4, 8)
    plan = Plan(Loops((buffer("x", 4, 8),), (node,), (Ref("buf0", (4, 8), (8, 1)),)), (kernel("k", node),), Memory())
    with pytest.raises(UnsupportedError, match="buf0"):
        program(lambda x: (x * 2,), plan, [scale("segment_0", 0, 1, 32)])


def test_many_library_calls_run_in_order_and_free_their_results():
    """A chain of library results: at most two of them are alive at a time."""
    nodes = []
    for k in range(40):
        source = Ref("x" if k == 0 else f"buf{k - 1}", (256, 256), (256, 1))
        nodes.append(Extern((buffer(f"buf{k}", 256, 256),), aten.neg.default, (source,)))
    loops = Loops((buffer("x", 256, 256),), tuple(nodes), (Ref("buf39", (256, 256), (256, 1)),))
    p = program(lambda x: (x,), Plan(loops, loops.nodes, Memory(owned=tuple(n.name for n in nodes))), [])
    x = torch.randn(256, 256)
    assert torch.equal(p(x)[0], x)
    assert p.host.count("\n            del buf") == 39


def test_long_tuples_are_wrapped_inside_their_brackets():
    names = [f"a_long_name_of_an_input_{k}" for k in range(17)]
    for count in range(1, 18):
        inputs = tuple(buffer(n, 2) for n in names[:count])
        refs = tuple(Ref(n, (2,), (1,)) for n in names[:count])
        plan = Plan(Loops(inputs, (), refs), (), Memory())
        source = Source("cpp", "", (), {})
        p = Program(None, None, plan.loops, plan, source, build(source, Target()))
        values = tuple(torch.randn(2) for _ in range(count))
        assert all(a is b for a, b in zip(p(*values), values, strict=True))
        assert max(map(len, p.host.splitlines())) <= 100


def test_calls_leak_nothing():
    p, w = matmul_chain(True), torch.randn(4, 8)
    for _ in range(100):
        p(X, w)
    gc.collect()
    before = len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(20_000):
        p(X, w)
    gc.collect()
    assert len(gc.get_objects()) - before[0] < 50
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before[1] < 2048  # kB
