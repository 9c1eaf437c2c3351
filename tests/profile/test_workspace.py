"""Workspaces of kernels, measured or tried on zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from membudget.profile import profile
from membudget.profile.recorded_call import TensorSpec


class Of(nn.Module):
    """A function of a weight and of the batch."""

    def __init__(self, function: Callable[..., Any], *shape: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(*shape))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.w, x)


def workspaces(model: nn.Module, x: Tensor, fake: bool) -> dict[str, int]:
    """Return what operators need that need more than a number does."""
    graph = profile(model, x, fake=fake, device="h100").graph
    return {
        f"{i} {o.name}": o.workspace_bytes
        for i, o in enumerate(graph.operators)
        if o.workspace_bytes > 16
    }


CASES: list[Any] = [
    ("none", lambda w, x: (w * x).sin().sum(), torch.randn(64, 64)),
    (
        "a convolution",
        lambda w, x: F.conv2d(x, w[:8, :36].view(8, 4, 3, 3)).square(),
        torch.randn(2, 4, 9, 9),
    ),
    ("an expanded operand", lambda w, x: x @ w, torch.randn(64, 64)),
    ("two dtypes", lambda w, x: w + x, torch.randn(64, 64, dtype=torch.bfloat16)),
    (
        "bfloat16",
        lambda w, x: (x @ w.bfloat16()).square(),
        torch.randn(64, 64, dtype=torch.bfloat16),
    ),
    ("a sort", lambda w, x: (w * x).sort(-1)[0].square(), torch.randn(64, 64)),
    ("a softmax", lambda w, x: (w * x).softmax(0).square(), torch.randn(64, 64)),
    ("operands of two layouts", lambda w, x: (w.t() * x).square(), torch.randn(64, 64)),
]


@pytest.mark.cpu_only("kernels of the CPU alone are tried for their workspaces")
@pytest.mark.parametrize(("name", "function", "x"), CASES, ids=[c[0] for c in CASES])
def test_a_fake_profile_predicts_what_a_real_one_measures(name, function, x):
    model = Of(function, 64, 64)

    assert workspaces(model, x, fake=True) == workspaces(model, x, fake=False)


def test_a_note_counts_operators_that_are_too_large_to_be_tried():
    model = nn.Conv2d(64, 64, 3, device="meta")

    found = profile(model, torch.empty(64, 64, 128, 128, device="meta"), device="cpu")

    assert any("too large to be tried" in note for note in found.notes)


@pytest.mark.cpu_only("kernels of the CPU alone are tried for their workspaces")
def test_a_note_counts_operators_whose_zeros_did_not_fit(
    monkeypatch: pytest.MonkeyPatch,
):
    def short(spec: TensorSpec, memory: Tensor, start_bytes: int) -> Tensor:
        raise torch.OutOfMemoryError(f"no memory for {spec}")

    monkeypatch.setattr(TensorSpec, "within", short)
    found = profile(Of(lambda w, x: x @ w, 64, 64), torch.randn(64, 64), fake=True)

    assert "operators were too large to be tried" in found.notes[0]


@pytest.mark.cpu_only("kernels of the CPU alone are tried for their workspaces")
def test_a_note_counts_operators_that_failed_on_zeros():
    # Nothing can be drawn by probabilities that are all zero, so the kernel fails.
    model = Of(lambda w, x: w @ x + torch.multinomial(w.detach().abs(), 8), 8, 8)

    found = profile(model, torch.randn(8, 8), fake=True, device="cpu")

    assert any("1 operators were too large to be tried" in n for n in found.notes)
