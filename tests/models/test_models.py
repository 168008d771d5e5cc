"""Real models with random weights: strict compilation, eager's results, one version, library operators only."""

import warnings

import pytest
import torch

pytest.importorskip("transformers")

import tensorplay as tp
from bench.models import SLACK, elementwise, error, reference
from bench.zoo import MODELS, make, tensors
from tensorplay.testing import N

NATIVE = [name for name in MODELS if name != "lstm"]
# what may appear in a profile of a compiled model: library operators and what they call themselves
LIBRARY = {
    "mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "convolution", "_convolution", "conv2d", "conv1d", "mkldnn_convolution",
    "_scaled_dot_product_flash_attention_for_cpu", "max_pool2d_with_indices", "sort", "topk", "histc", "_grouped_mm", "searchsorted",
    "bucketize", "index_put", "index_put_", "scatter_add_", "_local_scalar_dense", "native_dropout",
}  # fmt: skip
BOOKKEEPING = {
    "empty", "empty_strided", "as_strided", "resize_", "as_strided_", "set_", "detach", "view", "reshape", "select", "slice",
    "transpose", "t", "permute", "expand", "unsqueeze", "squeeze", "contiguous", "clone", "copy_", "resolve_conj", "zero_", "fill_",
    "empty_like", "narrow", "_reshape_alias", "alias", "to", "item", "ones", "zeros", "is_nonzero", "full",
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", list(MODELS))
def test_model(name: str, dtype: torch.dtype) -> None:
    model, inputs = make(name, dtype, small=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", tp.FallbackWarning)
        want = model(**inputs)
        exact = reference(model, inputs)
        compiled = tp.compile(model, strict_native=True)
        for _ in range(2):
            got = compiled(**inputs)
            assert type(got) is type(want)
            assert [t.dtype for t in tensors(got)] == [t.dtype for t in tensors(want)]
            assert [t.stride() for t in tensors(got)] == [t.stride() for t in tensors(want)]
            bound = 2 * error(tensors(want), exact) + SLACK[dtype]
            assert error(tensors(got), exact) <= bound
        assert N(compiled) == 1
        about = tp.explain(compiled)
        assert not about.fallbacks
        if name in NATIVE:
            called = {k.removeprefix("aten::") for k in elementwise(lambda: compiled(**inputs))}
            assert called <= LIBRARY | BOOKKEEPING, sorted(called - LIBRARY - BOOKKEEPING)
