"""Row 10: the recompute of a mixture of experts routes tokens elsewhere.

A router that balances its load adds a bias to the scores and updates it in the
forward. The recompute reads the updated bias, sends tokens to other experts, and either
fails or, in torch's reentrant variant, trains the wrong experts.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from tests.faults.implementations import (
    Checkpoint,
    are_equal,
    buffers,
    gradients,
    ours,
    plain,
    torch_fails,
    torch_reentrant,
    torch_rerun,
)

SEEDS = range(50)
EXPERTS = 4


class MixtureOfExperts(nn.Module):
    """Routes each token to one of four experts, and balances the load by a bias."""

    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(EXPERTS))
        self.register_buffer("bias", torch.zeros(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        choice = (scores + self.bias).argmax(-1)
        self.balance(choice)
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().squeeze(-1)
            part = torch.tanh(expert(x[rows])) * scores[rows, number, None]
            output = output.index_add(0, rows, part)
        return output

    @torch.no_grad()
    def balance(self, choice: Tensor) -> None:
        load = torch.bincount(choice, minlength=EXPERTS).float()
        self.bias.add_(load.mean() - load, alpha=0.05)


def step(
    checkpoint: Checkpoint, seed: int
) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
    torch.manual_seed(seed)
    model = MixtureOfExperts()
    x = torch.randn(32, 8, requires_grad=True)
    checkpoint(model, x).square().sum().backward()
    return gradients(model), buffers(model)


def test_row10_recompute_routes_as_the_forward_did() -> None:
    for seed in SEEDS:
        assert are_equal(step(ours, seed), step(plain, seed)), f"seed {seed}"


@torch_fails
def test_row10_torch_fails_for_every_seed() -> None:
    for seed in SEEDS:
        with pytest.raises(CheckpointError, match="different metadata"):
            step(torch_rerun, seed)


@torch_fails
def test_row10_torch_reentrant_trains_other_experts_silently() -> None:
    for seed in SEEDS:
        found, expected = step(torch_reentrant, seed)[0], step(plain, seed)[0]

        assert not are_equal(found, expected), f"seed {seed}"
