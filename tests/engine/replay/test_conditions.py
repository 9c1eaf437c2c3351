"""What a replay restores of its forward, and leaves again, whatever fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.replay.followed import input_of, replayed
from tests.settings import kept


class FailsAgain(TorchDispatchMode):
    """A mode that a replay cannot enter, or cannot leave."""

    def __init__(self, fails: str) -> None:
        super().__init__()
        self.fails = fails
        self.times = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Any:
        self.times += 1
        if self.times > 1 and self.fails == "entering":
            raise ValueError("entering failed")
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self.times > 1 and self.fails == "leaving":
            raise ValueError("leaving failed")


@pytest.mark.parametrize("fails", ["entering", "leaving"])
def test_a_replay_that_fails_around_its_operators_leaves_the_users_settings(fails):
    region = replayed(lambda x: (x * 2).sin().exp())
    x = input_of(0).requires_grad_()
    with FailsAgain(fails):
        loss = region(x).sum()
    with kept():
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.raises(ValueError, match=f"{fails} failed"):
            loss.backward()
        assert torch.are_deterministic_algorithms_enabled()
