"""Encoder transformers, and encoders with decoders."""

from __future__ import annotations

from typing import Any

import torch

from tests.field.case import Made, family
from tests.field.decoders import VOCABULARY, sized

WIDTHS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def masked_model(config: Any, batch: int = 4, length: int = 96) -> Made:
    """Return a masked language model; some sequences end early."""
    from transformers import AutoModelForMaskedLM

    def padded(other: bool) -> dict[str, Any]:
        made = sized(batch, length, other)
        ends = torch.randint(length // 2, length, (len(made["input_ids"]), 1))
        places = torch.arange(made["input_ids"].shape[1])
        return {**made, "attention_mask": (places < ends).long()}

    return Made(AutoModelForMaskedLM.from_config(config).train(), padded)


@family("encoder")
def bert() -> Made:
    from transformers import BertConfig

    return masked_model(BertConfig(**WIDTHS))


@family("encoder")
def albert_shared_layers() -> Made:
    from transformers import AlbertConfig

    return masked_model(
        AlbertConfig(
            **WIDTHS,
            embedding_size=32,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
        )
    )


@family("encoder")
def deberta_v2() -> Made:
    from transformers import DebertaV2Config

    return masked_model(
        DebertaV2Config(
            **WIDTHS,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            position_buckets=16,
        ),
        length=48,
    )


@family("encoder")
def modernbert() -> Made:
    from transformers import ModernBertConfig

    return masked_model(
        ModernBertConfig(
            **WIDTHS,
            local_attention=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            cls_token_id=1,
            sep_token_id=2,
            attention_dropout=0.1,
            mlp_dropout=0.1,
            embedding_dropout=0.1,
        )
    )


@family("encoder")
def longformer() -> Made:
    from transformers import LongformerConfig

    return masked_model(
        LongformerConfig(**{**WIDTHS, "num_hidden_layers": 2}, attention_window=32),
        batch=3,
    )


@family("encoder-decoder")
def t5() -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=96,
        d_kv=24,
        d_ff=256,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.1,
        decoder_start_token_id=0,
        use_cache=False,
    )
    model = T5ForConditionalGeneration(config).train()
    return Made(model, lambda other: sized(4, 64, other))


@family("encoder-decoder")
def bart_layer_drop() -> Made:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=VOCABULARY,
        d_model=96,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        encoder_layerdrop=0.2,
        decoder_layerdrop=0.2,
        max_position_embeddings=128,
        use_cache=False,
    )
    model = BartForConditionalGeneration(config).train()
    return Made(model, lambda other: sized(4, 64, other))
