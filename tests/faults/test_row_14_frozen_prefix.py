"""Row 14: frozen layers are recomputed and differentiated for nothing.

The reentrant variant works only if some input requires a gradient. So frameworks make
the output of a frozen embedding require one: then all frozen layers in front of the
first adapter keep their inputs, run again, and compute gradients that nobody reads.
A region in which nothing needs a gradient must be plain code.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

import membudget as mb
from tests.faults.implementations import (
    Checkpoint,
    are_equal,
    gradients,
    plain,
    torch_fails,
    torch_reentrant,
)

BLOCKS = 8


class Attention(nn.Module):
    """Attention that counts its forwards."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts
        self.projection = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        self.counts["attention"] += 1
        query, key, value = self.projection(x).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(query, key, value)


class Adapter(nn.Module):
    """A low-rank addition to what passes."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(8, 2, bias=False)
        self.up = nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.down(x))


class Block(nn.Module):
    """Attention, an adapter or nothing, and a feed-forward layer."""

    def __init__(self, counts: Counter[str], adapted: bool) -> None:
        super().__init__()
        self.counts = counts
        self.attention = Attention(counts).requires_grad_(False)
        self.adapter = Adapter() if adapted else nn.Identity()
        self.linear = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.counts["inputs that require grad"] += x.requires_grad
        x = x + self.attention(x)
        x = self.adapter(x)
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    """Eight frozen blocks behind a frozen embedding; the last one has an adapter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.counts: Counter[str] = Counter()
        self.embedding = nn.Embedding(10, 8).requires_grad_(False)
        self.blocks = nn.ModuleList(
            Block(self.counts, adapted=i == BLOCKS - 1) for i in range(BLOCKS)
        )

    def forward(self, tokens: Tensor, checkpoint: Checkpoint = plain) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x)
        return x


def step(model: Model, checkpoint: Checkpoint = plain) -> dict[str, Tensor | None]:
    model(torch.arange(10).reshape(2, 5), checkpoint).square().sum().backward()
    return gradients(model)


def test_row14_only_the_block_with_the_adapter_is_recomputed() -> None:
    model = Model()
    mb.apply(model, blocks=Block)
    step(model)

    assert model.counts["attention"] == BLOCKS + 1


def test_row14_gradients_behind_a_frozen_prefix_equal_plain() -> None:
    expected = step(Model())
    model = Model()
    mb.apply(model, blocks=Block)

    assert are_equal(step(model), expected)


def test_row14_no_input_is_made_to_require_grad() -> None:
    model = Model()
    mb.apply(model, blocks=Block)
    step(model)

    assert model.counts["inputs that require grad"] == 0


def test_row14_status_shows_the_frozen_blocks_as_skipped() -> None:
    model = Model()
    applied = mb.apply(model, blocks=Block)
    step(model)

    regions = applied.status().regions
    assert [region.skipped for region in regions] == [1] * 7 + [0]
    assert [region.forwards for region in regions] == [0] * 7 + [1]
    assert [region.recomputes for region in regions] == [0] * 7 + [1]


@torch_fails
def test_row14_torch_with_the_input_hook_recomputes_every_block() -> None:
    model = Model()
    # What frameworks install to make the reentrant variant train adapters.
    model.embedding.register_forward_hook(lambda _m, _i, out: out.requires_grad_())

    assert are_equal(step(model, torch_reentrant), step(Model()))
    assert model.counts["attention"] == 2 * BLOCKS
