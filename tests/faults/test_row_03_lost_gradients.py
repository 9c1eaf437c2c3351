"""Row 3: with the reentrant variant, gradients are lost without an error.

An `autograd.Function` around the region gives an output that requires a gradient only
if an input does. Behind a frozen embedding none does, so an adapter in the region gets
no gradient while the head after it trains on.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from tests.faults.implementations import (
    Checkpoint,
    are_equal,
    gradients,
    ours,
    plain,
    torch_fails,
    torch_reentrant,
)

Gradients = dict[str, Tensor | None]


class AdapterBehindFrozenEmbedding(nn.Module):
    """A frozen embedding, an adapter in a region, and a head that trains."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 8).requires_grad_(False)
        self.adapter = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, tokens: Tensor, checkpoint: Checkpoint) -> Tensor:
        return self.head(checkpoint(self.adapter, self.embedding(tokens)))


def step_behind_frozen_embedding(checkpoint: Checkpoint) -> Gradients:
    model = AdapterBehindFrozenEmbedding()
    model(torch.arange(10), checkpoint).sum().backward()
    return gradients(model)


def step_with_input_without_grad(checkpoint: Checkpoint) -> Gradients:
    torch.manual_seed(0)
    region = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    checkpoint(region, torch.randn(4, 8)).sum().backward()
    return gradients(region)


def test_row03_adapter_behind_frozen_embedding_gets_its_gradient() -> None:
    expected = step_behind_frozen_embedding(plain)

    assert expected["adapter.weight"] is not None
    assert expected["embedding.weight"] is None
    assert are_equal(step_behind_frozen_embedding(ours), expected)


def test_row03_parameters_train_although_no_input_requires_grad() -> None:
    expected = step_with_input_without_grad(plain)

    assert are_equal(step_with_input_without_grad(ours), expected)


def test_row03_reentrant_region_refuses_to_lose_gradients() -> None:
    def reentrant(function: Checkpoint, *args: Tensor) -> Tensor:
        return mb.checkpoint(function, *args, use_reentrant=True)

    with pytest.raises(mb.ReentrantLimitError, match="use_reentrant"):
        step_behind_frozen_embedding(reentrant)


@torch_fails
def test_row03_torch_trains_the_head_and_not_the_adapter() -> None:
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        lost = step_behind_frozen_embedding(torch_reentrant)

    assert lost["adapter.weight"] is None
    expected = step_behind_frozen_embedding(plain)
    assert are_equal(lost["head.weight"], expected["head.weight"])
