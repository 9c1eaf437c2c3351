"""A micro-batch that is refused: what holds the bytes, inside of it and beside it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import membudget as mb
from tests.loop.training import tokens, train
from tests.loops.models import Language


def refusal(model: nn.Module, budget: int | str, length: int = 24) -> mb.BudgetError:
    with (
        pytest.raises(mb.BudgetError, match="for a micro-batch of 8x") as raised,
        mb.budget(model, budget),
    ):
        model(tokens(length))
    return raised.value


def bytes_of(error: mb.BudgetError) -> dict[str, int]:
    return {holder.kind: holder.bytes for holder in error.holders}


def test_what_lives_beside_a_micro_batch_is_part_of_its_peak():
    model = Language()
    static = sum(p.nbytes for p in model.parameters())
    error = refusal(model, 10_000)
    found = bytes_of(error)
    assert found["parameters"] == static
    inside = sum(found.values()) - error.before_bytes
    assert 0 < inside <= error.least_bytes - error.before_bytes
    assert "earlier gradients" not in found
    assert f"{static:,}  parameters and buffers: a smaller dtype" in str(error)


def test_gradients_of_earlier_micro_batches_are_told_from_those_of_this_one():
    model = Language()
    train(model, [24], accumulation=2)  # The optimizer does not step.
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    assert gradients
    error = refusal(model, 10_000)
    assert bytes_of(error)["earlier gradients"] == gradients
    # Those of this micro-batch are added to them as they are made.
    assert bytes_of(error).get("gradients", 0) < gradients // 2


def test_another_tensor_is_counted_beside_the_micro_batch():
    model = Language()
    average = torch.zeros(1 << 20)
    found = bytes_of(refusal(model, 10_000))
    assert max(found, key=lambda kind: found[kind]) == "other"
    assert found["other"] >= average.nbytes


def test_the_loss_that_is_assumed_of_an_unknown_loop_is_the_largest_holder():
    class Speaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(64, 8)
            self.body = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
            self.head = nn.Linear(8, 2048)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(self.embed(ids)).tanh())

    largest = refusal(Speaks(), 10_000).holders[0]
    assert largest.kind == "loss"
    assert largest.name == "the output of head and its loss, float32[192, 2048]"
    assert largest.bytes >= 4 * 8 * 24 * 2048 * 4


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_lines_add_up_to_the_bytes_that_are_asked_for(dropout):
    """Verification and random states are beside the tensors of the schedule."""

    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory = nn.LSTM(64, 64, 2, dropout=dropout)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.memory(torch.ones(*ids.shape, 64))[0]

    error = refusal(Remembers(), 10_000)
    assert sum(holder.bytes for holder in error.holders) == error.least_bytes
    assert f"{error.least_bytes:,} bytes in all" in str(error)


def test_a_warning_names_the_holders_too():
    model = Language()
    with (
        mb.budget(model, 10_000, on_exceed="warn"),
        pytest.warns(mb.BudgetWarning, match="parameters and buffers: a smaller dtype"),
    ):
        model(tokens(24)).sum().backward()


def test_a_share_of_which_nothing_fits_names_what_the_micro_batch_holds():
    error = refusal(Language(), "1%")
    assert sum(bytes_of(error).values()) > error.before_bytes
    assert {"layer", "parameters"} <= bytes_of(error).keys()
