"""Train a model plainly and under a budget; compare bits, and bytes with the budget."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import membudget as mb
from membudget.memory.counting import Counted
from tests.loops.models import Language

WORDS = 64


class Seen:
    """The most bytes that lived in a context, with all that lived before."""

    most_bytes = 0


def live_bytes() -> int:
    """Return the live bytes of the CPU, as a budget that starts now counts them."""
    counts = Counted(torch.device("cpu"))
    counts.start()
    try:
        return counts.live_bytes()
    finally:
        counts.stop()


@contextmanager
def counted() -> Iterator[Seen]:
    seen, counts = Seen(), Counted(torch.device("cpu"))
    gc.collect()
    counts.start()
    if not counts.is_exact:
        pytest.skip("without a C++ compiler the CPU's memory is not counted")
    counts.restart()
    try:
        yield seen
        seen.most_bytes = counts.peak_bytes()
    finally:
        counts.stop()


def tokens(length: int, seed: int = 0) -> Tensor:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randint(WORDS, (8, length), generator=drawn)


def train(
    model: nn.Module,
    lengths: list[int],
    *,
    accumulation: int = 1,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Train as people do: nothing of membudget is in it."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number, length in enumerate(lengths):
        ids = tokens(length, number)
        logits = model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), ids.roll(1, 1).flatten())
        (loss / accumulation).backward()
        del logits, loss
        if (number + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()


def outcome(
    around: Callable[[nn.Module], Any],
    lengths: list[int],
    make: Callable[[], nn.Module] = Language,
    **options: Any,
) -> tuple[list[Tensor], int, Any]:
    """Return weights and the random stream after a loop, its peak, and the context."""
    torch.manual_seed(0)
    model = make()
    with counted() as seen, around(model) as fitted:
        train(model, lengths, **options)
    states = [t.clone() for t in model.state_dict().values()]
    return [*states, torch.get_rng_state()], seen.most_bytes, fitted


def check_held(lengths: list[int], share: float, **options: Any) -> Any:
    """Run a loop plainly and under a share of its peak; compare bits and bytes."""
    plain, plain_bytes, _ = outcome(lambda _: nullcontext(), lengths, **options)
    limit = int(share * plain_bytes)
    budgeted, peak_bytes, fitted = outcome(
        lambda model: mb.budget(model, limit), lengths, **options
    )
    assert all(map(torch.equal, plain, budgeted))
    assert peak_bytes <= limit
    return fitted
