"""State-space models, speech, and models of several kinds of input."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.field.case import Made, family, tokens
from tests.field.decoders import VOCABULARY, language_model


@family("state space")
def mamba() -> Made:
    from transformers import MambaConfig

    config = MambaConfig(
        vocab_size=VOCABULARY, hidden_size=48, num_hidden_layers=2, state_size=8
    )
    return language_model(config, batch=2, length=32)


@family("state space")
def mamba2() -> Made:
    from transformers import Mamba2Config

    config = Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=16,
        state_size=16,
        n_groups=1,
        chunk_size=32,
    )
    return language_model(config, batch=2, length=64)


@family("state space")
def falcon_h1() -> Made:
    from transformers import FalconH1Config

    config = FalconH1Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_d_ssm=64,
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_chunk_size=32,
        attention_dropout=0.1,
    )
    return language_model(config, batch=2, length=64)


@family("speech")
def whisper() -> Made:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=16,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        max_source_positions=100,
        max_target_positions=64,
        encoder_layerdrop=0.2,
        decoder_layerdrop=0.2,
        dropout=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
    )

    def batch(other: bool) -> dict[str, Tensor]:
        size, length = (3, 40) if other else (4, 48)
        sound = torch.randn(size, 16, 200)
        labels = torch.randint(3, VOCABULARY, (size, length))
        return {"input_features": sound, "labels": labels}

    return Made(WhisperForConditionalGeneration(config).train(), batch)


def sounds(other: bool) -> dict[str, Tensor]:
    """Return waves and what was said in them."""
    size, length = (2, 4800) if other else (3, 6400)
    labels = torch.randint(3, 32, (size, 5))
    return {"input_values": torch.randn(size, length), "labels": labels}


HEARING: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "conv_dim": (32, 32, 32),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 2, 2),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "layerdrop": 0.2,
    "mask_time_prob": 0.2,
    "mask_time_length": 4,
    "ctc_loss_reduction": "mean",
}


@family("speech")
def wav2vec2_layer_drop() -> Made:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    return Made(Wav2Vec2ForCTC(Wav2Vec2Config(**HEARING)).train(), sounds)


@family("speech")
def hubert_layer_drop() -> Made:
    from transformers import HubertConfig, HubertForCTC

    return Made(HubertForCTC(HubertConfig(**HEARING)).train(), sounds)


class Conformer(nn.Module):
    """Convolution and attention over a spectrogram, by torch's own layers."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv1d(16, width, 3, stride=2, padding=1), nn.BatchNorm1d(width)
        )
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, batch_first=True)
            for _ in range(3)
        )
        self.depthwise = nn.ModuleList(
            nn.Conv1d(width, width, 7, padding=3, groups=width) for _ in range(3)
        )
        self.head = nn.Linear(width, 32)

    def forward(self, sound: Tensor, labels: Tensor) -> Tensor:
        x = F.silu(self.front(sound)).transpose(1, 2)
        for layer, depthwise in zip(self.layers, self.depthwise, strict=True):
            x = layer(x)
            x = x + F.silu(depthwise(x.transpose(1, 2))).transpose(1, 2)
        scores = self.head(x).log_softmax(-1).transpose(0, 1)
        size = len(labels)
        ends = torch.full((size,), scores.shape[0]), torch.full((size,), 8)
        return F.ctc_loss(scores, labels, *ends)


@family("speech")
def conformer() -> Made:
    def batch(other: bool) -> tuple[Tensor, Tensor]:
        size, length = (3, 160) if other else (4, 192)
        return torch.randn(size, 16, length), torch.randint(1, 32, (size, 8))

    return Made(Conformer(), batch)


@family("multimodal")
def clip() -> Made:
    from transformers import CLIPConfig, CLIPModel

    half = {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "attention_dropout": 0.1,
    }
    config = CLIPConfig(
        text_config={**half, "vocab_size": VOCABULARY, "eos_token_id": 2},
        vision_config={**half, "image_size": 48, "patch_size": 8},
        projection_dim=32,
    )

    def batch(other: bool) -> dict[str, Any]:
        size, length = (6, 20) if other else (8, 32)
        ids = tokens(VOCABULARY, size, length)["input_ids"]
        images = torch.randn(size, 3, 48, 48)
        return {"input_ids": ids, "pixel_values": images, "return_loss": True}

    return Made(CLIPModel(config).train(), batch)


@family("multimodal")
def llava() -> Made:
    from transformers import (
        CLIPVisionConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    from tests.field.decoders import llama_config

    sight = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
    )
    config = LlavaConfig(
        vision_config=sight,
        text_config=llama_config(use_cache=False),
        image_token_index=1,
        vision_feature_select_strategy="default",
        vision_feature_layer=-2,
    )

    def batch(other: bool) -> dict[str, Tensor]:
        size, length = (2, 40) if other else (3, 64)
        ids = torch.randint(3, VOCABULARY, (size, length))
        ids[:, 1:17] = 1  # One for each patch of the image.
        images = torch.randn(size, 3, 32, 32)
        return {"input_ids": ids, "labels": ids.clone(), "pixel_values": images}

    return Made(LlavaForConditionalGeneration(config).train(), batch)
