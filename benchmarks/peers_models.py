"""The eight models that `peers` trains, in configurations that one core steps quickly.

Six are of transformers, from configurations, with random weights and the dropout that
the configuration has by default; in two, plain PyTorch, nothing of a library stands
between a block and its checkpoint. Every block has the structure of its original; only
widths, depths and lengths are small.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import models
import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # What imports torchvision stands in `tests.field`.

from tests.field.vision_operators import import_torchvision  # noqa: E402

Made = tuple[nn.Module, Any]

VOCABULARY = 1024
BATCH, LENGTH = 4, 128
# What most configurations of transformers call the same.
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
}
# A tokenizer's special tokens, which a small vocabulary would not have by default.
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Subject:
    """A model that is measured.

    Attributes:
        make: Makes it and its batch, from torch's global generator.
        chains: The names of the lists whose members are its blocks.
        switches: Whether it has the switch that models of transformers have.
    """

    make: Callable[[], Made]
    chains: tuple[str, ...]
    switches: bool = True

    def made(self) -> Made:
        """Make the model and its batch, the same each time."""
        if self.switches:
            import_torchvision()  # transformers takes it where it is installed.
        torch.manual_seed(0)
        return self.make()

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the blocks of a model, in the order of the forward."""
        chains = (model.get_submodule(chain) for chain in self.chains)
        return [block for chain in chains for block in chain.children()]


def _tokens(batch: int = BATCH, length: int = LENGTH) -> dict[str, Tensor]:
    tokens = torch.randint(3, VOCABULARY, (batch, length))
    return {"input_ids": tokens, "labels": tokens.clone()}


def _language_model(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    config.use_cache = False
    model: nn.Module = AutoModelForCausalLM.from_config(config).train()
    return model


def qwen3() -> Made:
    """Return Qwen3: grouped queries, norms of queries and keys."""
    from transformers import Qwen3Config

    config = Qwen3Config(
        **SIZES, **ENDS, intermediate_size=384, num_key_value_heads=2, head_dim=32
    )
    return _language_model(config), _tokens()


def llama_lora() -> Made:
    """Return a frozen Llama whose queries and values have adapters."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig

    config = LlamaConfig(**SIZES, **ENDS, intermediate_size=384, num_key_value_heads=2)
    adapters = LoraConfig(r=8, lora_dropout=0.05, target_modules=["q_proj", "v_proj"])
    model: nn.Module = get_peft_model(_language_model(config), adapters).train()
    return model, _tokens()


def gemma3() -> Made:
    """Return Gemma 3: four norms a block, and a window on all layers but the sixth."""
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig(
        **SIZES,
        **ENDS,
        intermediate_size=512,
        num_key_value_heads=1,
        head_dim=32,
        sliding_window=64,
    )
    return _language_model(config), _tokens()


def modernbert() -> Made:
    """Return ModernBERT: gated MLPs, two layers of three with a window, padding."""
    from transformers import AutoModelForMaskedLM, ModernBertConfig

    config = ModernBertConfig(
        **{**SIZES, **ENDS, "num_hidden_layers": 8},
        intermediate_size=192,
        local_attention=64,
        cls_token_id=1,
        sep_token_id=2,
    )
    ends = torch.randint(LENGTH // 2, LENGTH, (BATCH, 1))
    mask = (torch.arange(LENGTH) < ends).long()
    model: nn.Module = AutoModelForMaskedLM.from_config(config).train()
    return model, {**_tokens(), "attention_mask": mask}


def t5() -> Made:
    """Return T5: an encoder and a decoder of four blocks each, dropout 0.1."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=128,
        d_kv=32,
        d_ff=512,
        num_layers=4,
        num_heads=4,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config).train(), _tokens(length=96)


def vit() -> Made:
    """Return a vision transformer on 64 patches."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    config = ViTConfig(
        **sizes, intermediate_size=512, image_size=64, patch_size=8, num_labels=10
    )
    images, labels = torch.randn(8, 3, 64, 64), torch.randint(10, (8,))
    model: nn.Module = ViTForImageClassification(config).train()
    return model, {"pixel_values": images, "labels": labels}


def gpt() -> Made:
    """Return a GPT of four blocks of 256, dropout 0.1."""
    return models.gpt(blocks=4, width=256, heads=4, batch=4, length=128)


class Encoder(nn.Module):
    """Six layers of torch's own transformer encoder, which return a loss."""

    def __init__(self, width: int) -> None:
        """Create the layers, with four heads and dropout 0.1."""
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
            for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean square of what the last layer returns."""
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def encoder(width: int) -> Made:
    """Return an encoder of this width, and a batch of 4 sequences of 64."""
    return Encoder(width), (torch.randn(4, 64, width),)


SUBJECTS = {
    "Qwen3": Subject(qwen3, ("model.layers",)),
    "Llama, LoRA": Subject(llama_lora, ("base_model.model.model.layers",)),
    "Gemma 3": Subject(gemma3, ("model.layers",)),
    "ModernBERT": Subject(modernbert, ("model.layers",)),
    "T5": Subject(t5, ("encoder.block", "decoder.block")),
    "ViT": Subject(vit, ("vit.layers",)),
    "GPT, width 256": Subject(gpt, ("blocks",), switches=False),
    "ResNet, BatchNorm": Subject(models.resnet, ("blocks",), switches=False),
}

# Measured where they are named: layers of torch, which are small.
LAYERS = {
    f"encoder, width {width}": Subject(
        partial(encoder, width), ("layers",), switches=False
    )
    for width in (64, 128, 256)
}
