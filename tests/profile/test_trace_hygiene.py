"""Nothing stays behind: no tensor, no cycle, no hook, no mode, no profiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from membudget._torch import dispatch_modes, is_profiling, top_saved_tensors_hooks
from membudget.profile import profile
from tests.garbage import cyclic_garbage, no_collector
from tests.situations import Block, Watched

FAKE = pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])


def unseen(watched: Watched) -> Block:
    """Return a block whose list of references a profile does not put back."""
    block = Block(watched)
    block.watched = lambda tensor: watched(tensor)  # type: ignore[assignment]
    return block


def fail(output: Any, batch: Any) -> Tensor:
    raise KeyError("mine")


def fail_in_backward(output: Tensor, batch: Any) -> Tensor:
    def hook(gradient: Tensor) -> Tensor:
        raise KeyError("mine")

    output.register_hook(hook)
    return output.sum()


@FAKE
@pytest.mark.parametrize("optimizer", [None, torch.optim.AdamW])
def test_nothing_that_a_step_made_is_alive_afterwards(fake, optimizer):
    watched = Watched()
    block, x = nn.Sequential(unseen(watched)), torch.randn(3, 4)
    profile(block, x, fake=fake, optimizer=optimizer)  # Fills what torch caches.
    watched.references.clear()

    with no_collector():
        profile(block, x, fake=fake, optimizer=optimizer)
        assert watched.references
        assert watched.alive() == 0
        assert cyclic_garbage() == []
    assert dispatch_modes() == ()
    assert top_saved_tensors_hooks() is None
    assert not is_profiling()


@FAKE
@pytest.mark.parametrize("loss", [fail, fail_in_backward])
def test_nothing_stays_behind_when_the_step_fails(fake, loss):
    watched = Watched()
    block, x = nn.Sequential(unseen(watched)), torch.randn(3, 4)
    profile(block, x, fake=fake)
    watched.references.clear()

    with no_collector():
        with pytest.raises(KeyError, match="mine"):
            profile(block, x, loss, fake=fake)
        left = watched.alive(), cyclic_garbage()
    assert left == (0, [])
    assert dispatch_modes() == ()
    assert top_saved_tensors_hooks() is None
    assert not is_profiling()
