"""The models whose predicted peak is held against the meter's.

All are built from configurations, with random weights: language, vision, speech and
state-space models from transformers, and plain PyTorch ones with BatchNorm or an LSTM.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # What imports torchvision stands in `tests.field`.

from tests.field.vision_operators import import_torchvision  # noqa: E402

with suppress(ModuleNotFoundError):
    import_torchvision()  # transformers takes it where it is installed.

Made = tuple[nn.Module, dict[str, Any]]
Maker = Callable[[int], Made]

VOCABULARY = 1000


def _tokens(batch: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length))


def _causal(model: nn.Module, batch: int, length: int = 64) -> Made:
    tokens = _tokens(batch, length)
    return model.train(), {"input_ids": tokens, "labels": tokens, "use_cache": False}


def gpt2(batch: int) -> Made:
    """Return GPT-2 with attention written out."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=128, n_embd=128, n_layer=4, n_head=4
    )
    config._attn_implementation = "eager"
    return _causal(GPT2LMHeadModel(config), batch)


def gpt_neox(batch: int) -> Made:
    """Return GPT-NeoX with fused attention."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
    )
    return _causal(GPTNeoXForCausalLM(config), batch)


def llama(batch: int) -> Made:
    """Return Llama with grouped queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return _causal(LlamaForCausalLM(config), batch)


def mixtral(batch: int) -> Made:
    """Return Mixtral: experts that a router chooses, multiplied in one batch."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    # The other forms ask who was chosen, or multiply in bfloat16 alone when fake.
    config._experts_implementation = "batched_mm"
    return _causal(MixtralForCausalLM(config), batch)


def bert(batch: int) -> Made:
    """Return BERT with its masked-language head."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
    )
    tokens = _tokens(batch, 64)
    return BertForMaskedLM(config).train(), {"input_ids": tokens, "labels": tokens}


def t5(batch: int) -> Made:
    """Return T5: an encoder and a decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=128,
        d_kv=32,
        d_ff=512,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    tokens = _tokens(batch, 48)
    inputs = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    return T5ForConditionalGeneration(config).train(), inputs


def vit(batch: int) -> Made:
    """Return a vision transformer."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        image_size=64,
        patch_size=8,
        num_labels=10,
    )
    inputs = {
        "pixel_values": torch.randn(batch, 3, 64, 64),
        "labels": torch.randint(10, (batch,)),
    }
    return ViTForImageClassification(config).train(), inputs


def whisper(batch: int) -> Made:
    """Return Whisper: convolutions over a spectrogram, an encoder and a decoder."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        max_source_positions=100,
        max_target_positions=64,
        num_mel_bins=40,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    inputs = {
        "input_features": torch.randn(batch, 40, 200),
        "labels": _tokens(batch, 32),
        "use_cache": False,
    }
    return WhisperForConditionalGeneration(config).train(), inputs


def mamba2(batch: int) -> Made:
    """Return Mamba-2, in the form that needs no kernels of its own."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_heads=4,
        head_dim=32,
        state_size=16,
        n_groups=1,
        chunk_size=32,
        num_hidden_layers=2,
    )
    return _causal(Mamba2ForCausalLM(config), batch)


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x), inplace=True)


class _Classifier(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.body(x), labels)


def _pictures(batch: int, size: int) -> dict[str, Any]:
    return {
        "x": torch.randn(batch, 3, size, size),
        "labels": torch.randint(10, (batch,)),
    }


def resnet(batch: int) -> Made:
    """Return a residual network with BatchNorm and ReLU in place."""
    body = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        *(_Block(32) for _ in range(6)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    return _Classifier(body).train(), _pictures(batch, 32)


def _double(inner: int, outer: int) -> nn.Sequential:
    layers = []
    for before in (inner, outer):
        layers += [nn.Conv2d(before, outer, 3, padding=1), nn.BatchNorm2d(outer)]
        layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList((_double(3, 16), _double(16, 32), _double(32, 64)))
        self.up = nn.ModuleList((_double(96, 32), _double(48, 16)))
        self.head = nn.Conv2d(16, 10, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        skips = []
        for index, stage in enumerate(self.down):
            x = stage(x if index == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        x = skips.pop()
        for stage in self.up:
            x = F.interpolate(x, scale_factor=2, mode="bilinear")
            x = stage(torch.cat([x, skips.pop()], 1))
        return F.cross_entropy(self.head(x).mean((2, 3)), labels)


def unet(batch: int) -> Made:
    """Return a U-Net with BatchNorm: long skips."""
    return _UNet().train(), _pictures(batch, 32)


class _Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 64)
        self.lstm = nn.LSTM(64, 128, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(128, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embed(tokens))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


def lstm(batch: int) -> Made:
    """Return an LSTM of two layers."""
    return _Tagger().train(), {"tokens": _tokens(batch, 32)}


MODELS: dict[str, Maker] = {
    "GPT-2": gpt2,
    "GPT-NeoX": gpt_neox,
    "Llama": llama,
    "Mixtral": mixtral,
    "BERT": bert,
    "T5": t5,
    "ViT": vit,
    "Whisper": whisper,
    "Mamba-2": mamba2,
    "ResNet": resnet,
    "U-Net": unet,
    "LSTM": lstm,
}
