"""Row 5: the recompute reads what was changed since the forward.

Plain autograd compares the version of each tensor it saved and raises. A region saves
its inputs in its own way; torch guards the positional ones alone, and the gradient of
everything else is silently that of the new values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from tests.faults.implementations import (
    Checkpoint,
    ours,
    plain,
    torch_fails,
    torch_rerun,
)

# A way runs the region `x * w`, changes `w`, and returns the output.
Way = Callable[[Checkpoint, Tensor], Tensor]


def positional(checkpoint: Checkpoint, x: Tensor) -> Tensor:
    w = torch.full((4,), 2.0)
    y = checkpoint(lambda x, w: x * w, x, w)
    w.add_(5)
    return y


def keyword(checkpoint: Checkpoint, x: Tensor) -> Tensor:
    w = torch.full((4,), 2.0)
    y = checkpoint(lambda x, scale: x * scale, x, scale=w)
    w.add_(5)
    return y


def in_list(checkpoint: Checkpoint, x: Tensor) -> Tensor:
    w = torch.full((4,), 2.0)
    y = checkpoint(lambda x, ws: x * ws[0], x, [w])
    w.add_(5)
    return y


def closed_over(checkpoint: Checkpoint, x: Tensor) -> Tensor:
    factor = torch.full((4,), 2.0)
    y = checkpoint(lambda x: x * factor, x)
    factor.add_(5)
    return y


def in_partial(checkpoint: Checkpoint, x: Tensor) -> Tensor:
    # So the layers of model libraries hand masks and positions over.
    w = torch.full((4,), 2.0)
    y = checkpoint(partial(lambda x, scale: x * scale, scale=w), x)
    w.add_(5)
    return y


class Scale(nn.Module):
    """Multiplies by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def parameter(checkpoint: Checkpoint, x: Tensor) -> Tensor:
    scale = Scale()
    y = checkpoint(scale, x)
    with torch.no_grad():
        scale.weight.add_(5)
    return y


def new_data(checkpoint: Checkpoint, x: Tensor) -> Tensor:
    scale = Scale()
    y = checkpoint(scale, x)
    scale.weight.data = torch.full((4,), 7.0)
    return y


# Each way, and how the error names what was changed.
WAYS: dict[Way, str] = {
    positional: r"argument 1\b",
    keyword: r"argument 'scale'",
    in_list: r"argument 1\[0\]",
    closed_over: r"\bfactor\b",
    in_partial: r"\bscale\b",
    parameter: r"\bweight\b",
    new_data: r"\bweight\b",
}


def input_gradient(checkpoint: Checkpoint, way: Way) -> Tensor:
    x = torch.ones(4, requires_grad=True)
    way(checkpoint, x).sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize(
    ("way", "name"), WAYS.items(), ids=[way.__name__ for way in WAYS]
)
def test_row05_change_since_the_forward_raises_with_the_name(
    way: Way, name: str
) -> None:
    with pytest.raises(mb.ChangedSinceForwardError, match=name) as raised:
        input_gradient(ours, way)

    assert len(raised.value.names) == 1


@pytest.mark.parametrize("way", [way for way in WAYS if way is not new_data])
def test_row05_plain_autograd_refuses_the_same_change(way: Way) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        input_gradient(plain, way)


@torch_fails
def test_row05_torch_refuses_a_changed_positional_tensor() -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        input_gradient(torch_rerun, positional)


@torch_fails
@pytest.mark.parametrize("way", [way for way in WAYS if way is not positional])
def test_row05_torch_silently_computes_with_the_new_values(way: Way) -> None:
    assert torch.equal(input_gradient(torch_rerun, way), torch.full((4,), 7.0))
