"""Real models with random weights: what `models.py` measures and `tests/models` checks.

Each entry makes (module in eval mode, args, kwargs). Sizes are those of the figures that we compare with
(6 layers, 384 wide, 2x128 tokens), or smaller where only coverage counts (`small=True`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

VOCABULARY = 8192


def tokens(rows: int = 2, columns: int = 128) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, columns))


def gpt2(small: bool) -> tuple[nn.Module, dict]:
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width, heads = (2, 64, 2) if small else (6, 384, 6)
    config = GPT2Config(n_layer=layers, n_embd=width, n_head=heads, vocab_size=VOCABULARY)
    return GPT2LMHeadModel(config), {"input_ids": tokens()}


def bert(small: bool) -> tuple[nn.Module, dict]:
    from transformers import BertConfig, BertModel

    layers, width, heads = (2, 64, 2) if small else (6, 384, 6)
    config = BertConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, intermediate_size=4 * width, vocab_size=VOCABULARY
    )
    return BertModel(config), {"input_ids": tokens()}


def llama(small: bool) -> tuple[nn.Module, dict]:
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, width, heads, groups = (2, 64, 4, 2) if small else (6, 384, 6, 2)
    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, num_key_value_heads=groups,
        intermediate_size=2 * width, vocab_size=VOCABULARY,
    )  # fmt: skip
    return LlamaForCausalLM(config), {"input_ids": tokens()}


def t5(small: bool) -> tuple[nn.Module, dict]:
    from transformers import T5Config, T5ForConditionalGeneration

    layers, width = (2, 64) if small else (4, 256)
    config = T5Config(num_layers=layers, d_model=width, d_kv=width // 4, d_ff=2 * width, num_heads=4, vocab_size=VOCABULARY)
    return T5ForConditionalGeneration(config), {"input_ids": tokens(), "decoder_input_ids": tokens(2, 16)}


def vit(small: bool) -> tuple[nn.Module, dict]:
    from transformers import ViTConfig, ViTModel

    layers, width, heads = (2, 64, 2) if small else (6, 384, 6)
    config = ViTConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * width, image_size=64, patch_size=8
    )
    return ViTModel(config), {"pixel_values": torch.randn(2, 3, 64, 64)}


def mixtral(small: bool) -> tuple[nn.Module, dict]:
    from transformers import MixtralConfig, MixtralForCausalLM

    layers, width, heads = (2, 64, 4) if small else (2, 256, 4)
    config = MixtralConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, num_key_value_heads=2, intermediate_size=2 * width,
        num_local_experts=4, num_experts_per_tok=2, vocab_size=VOCABULARY,
    )  # fmt: skip
    return MixtralForCausalLM(config), {"input_ids": tokens(2, 32)}


def whisper(small: bool) -> tuple[nn.Module, dict]:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    layers, width, heads = (2, 64, 2) if small else (4, 256, 4)
    config = WhisperConfig(
        d_model=width, encoder_layers=layers, encoder_attention_heads=heads, encoder_ffn_dim=4 * width, num_mel_bins=40, max_source_positions=100
    )
    return WhisperEncoder(config), {"input_features": torch.randn(2, 40, 200)}


def resnet(small: bool) -> tuple[nn.Module, dict]:
    from transformers import ResNetConfig, ResNetModel

    sizes = [16, 32] if small else [64, 128, 256, 512]
    config = ResNetConfig(depths=[2] * len(sizes), layer_type="basic", hidden_sizes=sizes, embedding_size=sizes[0])
    side = 64 if small else 112
    return ResNetModel(config), {"pixel_values": torch.randn(4, 3, side, side)}


class LSTMClassifier(nn.Module):
    """Embedding, two LSTM layers, the mean over time, a linear head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, input_ids: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(input_ids))
        return torch.log_softmax(self.head(torch.tanh(states.mean(1))), -1)


def lstm(small: bool) -> tuple[nn.Module, dict]:
    return LSTMClassifier(64 if small else 256), {"input_ids": tokens(4, 32)}


MODELS: dict[str, Callable[[bool], tuple[nn.Module, dict]]] = {
    "gpt2": gpt2, "bert": bert, "llama": llama, "t5": t5, "vit": vit, "mixtral": mixtral, "whisper": whisper,
    "resnet": resnet, "lstm": lstm,
}  # fmt: skip


def make(name: str, dtype: torch.dtype = torch.float32, small: bool = False, seed: int = 0) -> tuple[nn.Module, dict]:
    """The model in eval mode with its inputs, floating inputs and weights in `dtype`."""
    torch.manual_seed(seed)
    model, inputs = MODELS[name](small)
    cast = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    return model.eval().to(dtype), cast


def tensors(result: object) -> list[Tensor]:
    """Every tensor of a model's result, in order: outputs, caches, tuples."""
    found: list[Tensor] = []
    seen: set[int] = set()

    def walk(x: object) -> None:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, (list, tuple)):
            for y in x:
                walk(y)
        elif isinstance(x, dict):
            for y in x.values():
                walk(y)
        elif hasattr(x, "__dict__") and not isinstance(x, type) and id(x) not in seen:
            seen.add(id(x))
            for y in vars(x).values():
                walk(y)

    walk(result)
    return found
