"""An audit finds every random stream, and says which one was left elsewhere.

`torch.utils.checkpoint` restores torch's own streams only, so it serves as the fault.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from membudget.audit import audit
from tests import devices
from tests.audited import audit_torch, names


class DrawsFrom(nn.Module):
    """A layer that draws one number from a stream."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.weight * self.draw()).exp()


@pytest.mark.parametrize(
    ("stream", "draw"),
    [
        ("Python random", random.random),
        ("NumPy", lambda: np.random.random()),  # noqa: NPY002
    ],
)
def test_a_random_stream_that_is_not_restored_is_named(stream, draw):
    model = DrawsFrom(draw)

    theirs = audit_torch(model, torch.randn(5, 4))
    ours = audit(nn.Sequential(model), torch.randn(5, 4))

    assert names(theirs, "stream") == [stream]
    assert names(theirs, "gradient") == ["weight"]
    assert ours.equal


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (devices.generator(), lambda g: torch.rand((), generator=g).item()),
        (random.Random(0), lambda g: g.random()),
        (np.random.default_rng(0), lambda g: g.random()),
        (np.random.RandomState(0), lambda g: g.rand()),
    ],
    ids=["torch", "python", "numpy", "numpy-legacy"],
)
def test_a_private_generator_is_found_by_its_attribute(generator, draw):
    model: Any = DrawsFrom(partial(draw, generator))
    model.sources = {"mine": [generator]}

    report = audit_torch(model, torch.randn(5, 4))

    assert names(report, "stream") == ["sources['mine'][0]"]


def test_a_stream_says_which_run_drew_from_it():
    report = audit(
        plain=lambda: None, budgeted=lambda: torch.rand(1) * 0, modules=nn.Linear(1, 1)
    )

    details = {item.name: item.detail for item in report.differences}
    assert details[devices.stream_name()] == "budgeted drew from it, plain did not"


def test_a_source_without_a_state_is_not_a_stream():
    model: Any = nn.Sequential(nn.Linear(4, 4))
    model.source = random.SystemRandom()

    assert audit(model, torch.randn(5, 4)).equal
