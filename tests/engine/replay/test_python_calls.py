"""What Python runs in a call on a route: the same, however much the call recomputes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.engine.replay.followed import KEEPS, input_of, replayed


def python_calls(run: Callable[[], Any]) -> Counter[str]:
    """Return how often Python calls each of its own functions."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            found[frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def layers(x: Tensor, count: int) -> Tensor:
    """Take views, writes, draws and what saves several tensors."""
    weight = torch.ones(8)
    for _ in range(count):
        h = F.layer_norm(x, (8,), weight).view(3, 2, 8).transpose(0, 1).reshape(6, 8)
        h = h.sin() * h.exp()
        if h.is_cpu:  # The draws of a device are recorded in Python.
            h = torch.dropout(h, 0.3, True)
        x = x + h.relu_()
    return x.sum()


def step(function: Callable[..., Tensor], count: int) -> Callable[[], None]:
    def run() -> None:
        function(input_of(0).requires_grad_(), count).backward()

    return run


@pytest.mark.parametrize("keep", [k for k in KEEPS if "stages" not in k])
@pytest.mark.parametrize("verify", [False, 0.01])
def test_rule11_python_runs_as_often_however_much_is_recomputed(keep, verify, trips):
    counts = []
    for count in (2, 9):
        region = replayed(layers, KEEPS[keep], verify=verify)
        for _ in range(16):  # The 16th call is sampled.
            step(region, count)()
        found = python_calls(step(region, count))
        counts.append(found - python_calls(step(layers, count)))
    assert trips[-1]
    assert not counts[1] - counts[0]  # The longer one takes nothing more.
    assert counts[0].total() < 60
