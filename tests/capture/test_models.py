"""Transformers models with random weights: the captured graph and the rebuilt output equal eager bit for bit."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tensorplay.capture import tracer  # noqa: E402
from tensorplay.capture.tracer import capture  # noqa: E402

V = {"vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def ids(n=16):
    return torch.randint(3, 500, (2, n))


def pixels(n=32):
    return torch.randn(2, 3, n, n)


def _gpt2():
    config = transformers.GPT2Config(n_layer=6, n_embd=64, n_head=2, **V)
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids()}


def _bert():
    config = transformers.BertConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=2, intermediate_size=64, **V)
    return transformers.BertModel(config), {"input_ids": ids(), "attention_mask": torch.ones(2, 16).long()}


def _llama():
    config = transformers.LlamaConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, **V)  # fmt: skip
    return transformers.LlamaForCausalLM(config), {"input_ids": ids()}


def _t5():
    config = transformers.T5Config(num_layers=2, d_model=64, d_kv=16, d_ff=64, num_heads=4, vocab_size=512)
    return transformers.T5ForConditionalGeneration(config), {"input_ids": ids(), "decoder_input_ids": ids(8)}


def _vit():
    config = transformers.ViTConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8)  # fmt: skip
    return transformers.ViTModel(config), {"pixel_values": pixels()}


def _mixtral():
    config = transformers.MixtralConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, num_local_experts=4, **V)  # fmt: skip
    return transformers.MixtralForCausalLM(config), {"input_ids": ids()}


def _whisper():
    config = transformers.WhisperConfig(d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=16, max_source_positions=32, decoder_start_token_id=1, **V)  # fmt: skip
    return transformers.WhisperModel(config).encoder, {"input_features": torch.randn(2, 16, 64)}


def _resnet():
    config = transformers.ResNetConfig(depths=[1, 1, 1, 1], layer_type="basic", hidden_sizes=[16, 16, 32, 32], embedding_size=16)
    return transformers.ResNetModel(config), {"pixel_values": pixels(64)}


def tensors(out):
    """The tensors of a model's output, caches included."""
    if isinstance(out, torch.Tensor):
        return [out]
    if isinstance(out, dict):
        return [t for v in out.values() for t in tensors(v)]
    if isinstance(out, (list, tuple)):
        return [t for v in out for t in tensors(v)]
    if hasattr(out, "self_attention_cache"):
        return tensors(out.self_attention_cache) + tensors(out.cross_attention_cache)
    return [t for layer in getattr(out, "layers", ()) for t in (layer.keys, layer.values)]


@pytest.mark.parametrize("make", [_gpt2, _bert, _llama, _t5, _vit, _mixtral, _whisper, _resnet])
def test_model(make):
    torch.manual_seed(0)
    model, kwargs = make()
    model.eval()
    with torch.no_grad():
        want = model(**kwargs)
        captured = capture(model, (), kwargs)
        inputs = [source.get((), kwargs) for source in captured.inputs]
        got = captured.rebuild(captured.graph(*inputs), (), kwargs)
        again = captured.rebuild(captured.graph(*inputs), (), kwargs)
    assert type(got) is type(want) and list(got) == list(want)
    a, b = tensors(want), tensors(got)
    assert len(a) == len(b) > 0 and all(map(torch.equal, a, b))
    if "past_key_values" in want:
        assert type(got.past_key_values) is type(want.past_key_values)
        assert got.past_key_values is not again.past_key_values
    assert not any(n.op == "call_module" for n in captured.graph.graph.nodes)


def test_capture_runs_the_model_once(monkeypatch):
    model, kwargs = _gpt2()
    model.eval()
    runs = []
    monkeypatch.setattr(tracer, "_once", lambda *args, once=tracer._once: runs.append(1) or once(*args))
    with torch.no_grad():
        capture(model, (), kwargs)
    assert len(runs) == 2
