"""A storage that is saved, written to, and saved again holds two contents."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import membudget as mb


@pytest.mark.parametrize("window", [0, 1 << 20])
def test_a_write_that_only_a_later_step_does_is_seen(window: int):
    def slope(around: Any, writes: bool) -> torch.Tensor:
        p = torch.linspace(1, 2, 64).requires_grad_()
        x = torch.linspace(-1, 1, 64)
        with around:
            # Saves `x`, which is then copied; no gradient is asked for through this.
            unused = (p * x).exp()
            if writes:
                x += 1
            loss = (p * x).sum()
            del x
        loss.backward()
        assert p.grad is not None
        assert not unused.isnan().any()
        return p.grad

    off = mb.offload("1MiB", window=window, smallest=1)
    for writes in (False, False, True, True):
        assert torch.equal(slope(off, writes), slope(nullcontext(), writes))
