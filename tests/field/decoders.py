"""Decoder transformers, with experts or without, and LoRA on a frozen base."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.field.case import Made, family, tokens

VOCABULARY = 256


def language_model(config: Any, batch: int = 4, length: int = 96) -> Made:
    """Return a causal language model of a configuration."""
    from transformers import AutoModelForCausalLM

    config.use_cache = False
    model = AutoModelForCausalLM.from_config(config).train()
    return Made(model, lambda other: sized(batch, length, other))


def sized(batch: int, length: int, other: bool) -> dict[str, Any]:
    """Return tokens; another shape has fewer sequences, of another length."""
    if other:
        return tokens(VOCABULARY, batch - 1, length * 3 // 4)
    return tokens(VOCABULARY, batch, length)


def sizes(**changed: Any) -> dict[str, Any]:
    """Return what configurations of most transformers take, with some of it changed."""
    small = {
        "vocab_size": VOCABULARY,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "attention_dropout": 0.1,
    }
    return small | changed


@family("decoder")
def gpt2() -> Made:
    from transformers import GPT2Config

    return language_model(
        GPT2Config(vocab_size=VOCABULARY, n_embd=96, n_layer=3, n_head=4)
    )


@family("decoder")
def gpt_neox() -> Made:
    from transformers import GPTNeoXConfig

    return language_model(
        GPTNeoXConfig(**sizes(intermediate_size=384), hidden_dropout=0.1)
    )


def llama_config(**changed: Any) -> Any:
    """Return a small Llama's configuration."""
    from transformers import LlamaConfig

    return LlamaConfig(**sizes(), num_key_value_heads=2, **changed)


@family("decoder")
def llama() -> Made:
    return language_model(llama_config())


@family("decoder")
def llama_eager_attention() -> Made:
    return language_model(llama_config(attn_implementation="eager"))


@family("decoder")
def qwen3() -> Made:
    from transformers import Qwen3Config

    return language_model(Qwen3Config(**sizes(), num_key_value_heads=2, head_dim=24))


@family("decoder")
def gemma3() -> Made:
    from transformers import Gemma3TextConfig

    return language_model(
        Gemma3TextConfig(
            **sizes(), num_key_value_heads=1, head_dim=24, sliding_window=32
        )
    )


@family("decoder")
def opt_layer_drop() -> Made:
    from transformers import OPTConfig

    return language_model(
        OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=96,
            ffn_dim=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            word_embed_proj_dim=96,
            layerdrop=0.3,
        )
    )


@family("decoder")
def bloom() -> Made:
    from transformers import BloomConfig

    return language_model(
        BloomConfig(
            vocab_size=VOCABULARY,
            hidden_size=96,
            n_layer=3,
            n_head=4,
            hidden_dropout=0.1,
            attention_dropout=0.1,
        )
    )


@family("mixture of experts")
def mixtral() -> Made:
    from transformers import MixtralConfig

    return language_model(
        MixtralConfig(
            **sizes(hidden_size=64, intermediate_size=128, num_hidden_layers=2),
            num_key_value_heads=2,
            num_local_experts=4,
            output_router_logits=True,
        )
    )


@family("mixture of experts")
def qwen2_moe() -> Made:
    from transformers import Qwen2MoeConfig

    return language_model(
        Qwen2MoeConfig(
            **sizes(hidden_size=64, intermediate_size=128, num_hidden_layers=2),
            moe_intermediate_size=64,
            shared_expert_intermediate_size=128,
            num_key_value_heads=2,
            num_experts=4,
            num_experts_per_tok=2,
        )
    )


@family("adapters")
def llama_lora() -> Made:
    from peft import LoraConfig, get_peft_model

    plain = language_model(llama_config())
    config = LoraConfig(
        r=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"]
    )
    model: nn.Module = get_peft_model(plain.model, config).train()
    return Made(model, plain.batch)
