"""Row 20: a key-value cache grows in the forward, and again in the recompute.

Attention that appends its keys to a list finds them there already when it is run
again. The recompute then attends to every key twice. Torch's reentrant variant halves
the gradient of the keys without an error; the other one names no list.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

import membudget as mb
from tests.faults.implementations import (
    Checkpoint,
    are_equal,
    gradients,
    ours,
    plain,
    torch_fails,
    torch_reentrant,
    torch_rerun,
)


class CachedAttention(nn.Module):
    """Attends to all the keys in a cache, after appending its own."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8)
        self.key = nn.Linear(8, 8)
        self.cache: list[Tensor] = []

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        cache = self.cache if cache is None else cache
        cache.append(self.key(x))
        keys = torch.cat(cache, 1)
        return (self.query(x) @ keys.mT).softmax(-1) @ keys


def step_with_list(checkpoint: Checkpoint) -> tuple[dict[str, Tensor | None], int]:
    """Hand a list in; return the gradients and the length of the list."""
    torch.manual_seed(0)
    attention = CachedAttention()
    cache: list[Tensor] = []
    x = torch.randn(2, 5, 8, requires_grad=True)
    checkpoint(attention, x, cache).square().sum().backward()
    return gradients(attention), len(cache)


def step_with_attribute(checkpoint: Checkpoint) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    attention = CachedAttention()
    x = torch.randn(2, 5, 8, requires_grad=True)
    checkpoint(attention, x).square().sum().backward()
    return gradients(attention)


def test_row20_list_that_is_handed_in_is_seen_again_as_it_was() -> None:
    expected = step_with_list(plain)

    assert expected[1] == 1
    assert are_equal(step_with_list(ours), expected)


def test_row20_cache_on_an_attribute_is_named_in_the_error() -> None:
    with pytest.raises(
        mb.RecomputeMismatchError, match=r"list '[\w.]*cache' grew from 0"
    ) as raised:
        step_with_attribute(ours)

    assert len(str(raised.value).splitlines()) < 40


@torch_fails
@pytest.mark.parametrize("step", [step_with_list, step_with_attribute])
def test_row20_torch_fails_and_names_no_list(step: Checkpoint) -> None:
    with pytest.raises(CheckpointError, match="different") as raised:
        step(torch_rerun)

    assert "grew" not in str(raised.value)
    assert "list" not in str(raised.value)


@torch_fails
def test_row20_torch_reentrant_computes_other_key_gradients_silently() -> None:
    found, expected = step_with_list(torch_reentrant)[0], step_with_list(plain)[0]

    assert not are_equal(found["key.weight"], expected["key.weight"])
