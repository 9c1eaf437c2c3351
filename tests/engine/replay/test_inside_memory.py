"""A region holds nothing of a gradient that its forward takes, once that is taken."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import membudget as mb
from membudget import policies
from membudget.engine.replay import verified
from tests.devices import is_cpu

ROWS = 500


def learning(x: Tensor, w: Tensor) -> Tensor:
    """Return the loss of layers whose weights a gradient changes as they run."""
    for _ in range(6):
        h, fast = x @ w, torch.eye(32).requires_grad_()
        error = (h.detach() @ fast).tanh() - x.detach()
        (gradient,) = torch.autograd.grad(error.pow(2).mean(), fast)
        x = x + (h @ (fast.detach() - 0.1 * gradient)).tanh()
    return x.pow(2).mean()


def peaks(verify: bool | float | str, steps: int) -> list[int]:
    torch.manual_seed(0)
    w = (torch.randn(32, 32) / 6).requires_grad_()
    xs = [torch.randn(ROWS, 32, requires_grad=True) for _ in range(steps)]
    keep = policies.operators("tanh", "sub")
    region = mb.checkpoint(engine="replay", keep=keep, verify=verify)(learning)
    found = []
    for x in xs:
        found.append(mb.peak(lambda x=x: region(x, w).backward()).peak_bytes)
        w.grad = None
    return found


@pytest.mark.skipif(not is_cpu(), reason="peaks of the CPU")
def test_every_call_takes_as_much_whether_or_not_it_has_left_a_route():
    verified.VERIFIED.clear()
    first, *others = peaks(False, 12)
    assert set(others) == {first}


@pytest.mark.skipif(not is_cpu(), reason="peaks of the CPU")
@pytest.mark.parametrize("verify", [0.01, "fingerprints"])
def test_a_call_that_is_verified_by_fingerprints_takes_no_more_than_others(verify):
    verified.VERIFIED.clear()
    first, *others = peaks(verify, 8)
    assert first <= min(others) + 64
