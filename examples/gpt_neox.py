"""Hugging Face's GPT-NeoX from a configuration: regions on all layers, and on odd ones.

The weights are random, nothing is downloaded. `use_cache=False`, because a layer that
fills a cache does something else when it is run again.

    pip install "membudget[hf]"
    python examples/gpt_neox.py [--quick]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console

import membudget as mb
from terminal import human


def make_model(quick: bool) -> Any:
    """Return a small GPT-NeoX with dropout."""
    try:
        from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
    except ImportError as error:
        raise mb.MissingExtraError("transformers", "hf", "this example") from error
    width = 32 if quick else 256
    config = GPTNeoXConfig(
        vocab_size=512,
        hidden_size=width,
        num_hidden_layers=4 if quick else 8,
        num_attention_heads=4,
        intermediate_size=4 * width,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        use_cache=False,
    )
    torch.manual_seed(0)
    return GPTNeoXForCausalLM(config).train()


def main(arguments: Sequence[str] | None = None) -> int:
    """Audit both choices of layers; return 1 if a bit differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    quick = parser.parse_args(arguments).quick
    try:
        model = make_model(quick)
    except mb.MissingExtraError as error:
        print(error, file=sys.stderr)
        return 2
    tokens = torch.randint(512, (2, 16 if quick else 128))
    batch = {"input_ids": tokens, "labels": tokens}

    def step() -> None:
        model(**batch).loss.backward()
        model.zero_grad(set_to_none=True)

    console = Console()
    console.print(f"plain: peak {human(mb.peak(step).peak_bytes)}")
    layers = [f"gpt_neox.layers.{i}" for i in range(model.config.num_hidden_layers)]
    equal = True
    for name, chosen in (("all layers", layers), ("odd layers", layers[1::2])):
        applied = mb.apply(model, names=chosen)
        peak = mb.peak(step).peak_bytes
        status = applied.status()
        report = mb.audit(model, batch)
        applied.remove()
        equal &= report.equal
        console.print(f"{name}: peak {human(peak)}")
        console.print(str(status))
        console.print(str(report))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
