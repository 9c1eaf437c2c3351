"""From blocks to a plan in one call: what counts, what is refused, what stays."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.errors import BudgetError, OptionError, OptionTypeError
from membudget.pipeline import (
    PipelinePlan,
    PipelineSchedule,
    fit_pipeline,
    measure_blocks,
    split,
)
from tests.pipeline.models import WIDTH, Block, chain, loss_fn, run_step

pytestmark = pytest.mark.cpu_only("gloo, and bytes of the CPU")

ROWS, MICRO_BATCHES = 64, 8


def fitted(blocks: int = 8, budget: Any = "50%", **options: Any) -> PipelinePlan:
    given: dict[str, Any] = {"ranks": 2, "micro_batches": MICRO_BATCHES}
    x = torch.randn(ROWS, WIDTH)
    return fit_pipeline(chain(blocks), x, budget, **given | options)


def test_a_share_is_of_the_fullest_rank_of_balanced_stages() -> None:
    free, half = fitted(budget="100%"), fitted()
    most = max(free.plain.peak_bytes)
    assert free.budgets == (most, most)
    assert not any(free.recomputed)
    assert half.budgets[0] < most
    assert any(half.recomputed)
    assert all(map(int.__le__, half.simulation.peak_bytes, half.budgets))


def test_ranks_may_have_budgets_of_their_own() -> None:
    assert fitted(budget=["1GiB", 2**20]).budgets == (2**30, 2**20)


def test_the_whole_batch_counts_on_the_first_and_the_last_rank() -> None:
    target = torch.randn(2 * ROWS, WIDTH)[:ROWS]  # Part of a batch.
    one, more = (fitted(2, "1GiB", target=t, loss_fn=loss_of) for t in (None, target))
    first, last = map(
        int.__sub__, more.simulation.peak_bytes, one.simulation.peak_bytes
    )
    assert (first, last) == (0, MICRO_BATCHES * target.nbytes)


def loss_of(output: Tensor, target: Any) -> Tensor:
    return output.square().mean()


def test_the_loss_counts_as_part_of_the_last_block() -> None:
    x, labels = torch.randn(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.long)
    block = nn.Linear(WIDTH, 100)
    (plain,) = measure_blocks([block], x)
    (lossy,) = measure_blocks(
        [block], x, target=labels, loss_fn=nn.functional.cross_entropy
    )
    logits_bytes = ROWS * 100 * 4
    # What softmax returns, the loss and its number of labels, and what it divides by.
    assert 0 <= lossy.saved_bytes - plain.saved_bytes - logits_bytes <= 64


def test_measuring_leaves_the_blocks_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Block())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    before = [t.clone() for t in model.state_dict().values()]
    stream = torch.get_rng_state()
    x, adam = torch.zeros(ROWS, WIDTH), torch.optim.AdamW
    fit_pipeline(model, x, "1GiB", ranks=3, micro_batches=2, optimizer=adam)
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert torch.equal(stream, torch.get_rng_state())
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.full_like(parameter, 2.0))


def test_blocks_without_gradients_have_no_backward_pass() -> None:
    frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    blocks = [frozen, nn.Flatten(), nn.Linear(WIDTH, WIDTH)]
    plan = fit_pipeline(
        blocks, torch.randn(ROWS, WIDTH), "1GiB", ranks=3, micro_batches=2
    )
    assert plan.sizes == (1, 1, 1)


def test_a_budget_that_nothing_fits_names_the_least_that_something_does() -> None:
    with pytest.raises(BudgetError, match="no cut of the 8 blocks into 2") as error:
        fitted(budget=1000)
    least = error.value.least_bytes
    assert max(fitted(budget=least).simulation.peak_bytes) <= least


def test_the_plan_prints_balanced_stages_beside_its_own() -> None:
    text = str(fitted())
    assert "balanced" in text
    over = r"balanced stages that keep all, over the budget of ranks? 0.*: x0"
    assert re.search(over, text)
    assert "over" not in str(fitted(budget="100%"))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B"])
def test_ranks_that_are_there_take_the_plan_of_the_first(name: str) -> None:
    plan = fitted(ranks=None, schedule=name)
    schedule = PipelineSchedule(split(chain(8), plan), plan, loss_fn=loss_fn)
    assert schedule.order == plan.order
    plain = PipelineSchedule(
        split(chain(8), plan), plan, loss_fn=loss_fn, checkpoint="never"
    )
    assert plain.order.checkpoint == ("never",)
    assert all(map(torch.equal, run_step(schedule), run_step(plain)))
    (stage,) = schedule.stages
    assert stage.applied is not None
    regions = stage.applied.status().regions
    assert len(regions) == len(plan.recomputed[0])
    assert all(region.recomputes for region in regions)


@pytest.mark.usefixtures("alone")
def test_a_plan_for_other_ranks_is_refused() -> None:
    plan = fitted()
    with pytest.raises(OptionError, match="names 2 stages, and 1 ranks of 1 have 1"):
        split(chain(8), plan)
    stages = split(chain(8))
    with pytest.raises(OptionError, match="names 2 stages, and the pipeline has 1"):
        PipelineSchedule(stages, plan)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": None}, "torch.distributed is not initialised"),
        ({"budget": "0.4"}, "is probably a mistake"),
        ({"budget": "40% of activations"}, "bytes or a share of a rank's peak"),
        ({"budget": [2**30] * 3}, "names 3 ranks, and the order has 2"),
        ({"schedule": "ZBVZeroBubble"}, "ZBVZeroBubble does not exist for 2 ranks"),
        ({"ranks": 9}, "9 stages need at least as many blocks; the chain has 8"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        fitted(**options)


def test_blocks_that_pass_several_tensors_are_refused() -> None:
    with pytest.raises(OptionTypeError, match="block 0 returns a tuple"):
        measure_blocks([nn.LSTM(WIDTH, WIDTH)], torch.randn(ROWS, WIDTH))


@pytest.mark.usefixtures("alone")
def test_fit_and_budget_name_the_call_that_fits_a_pipeline() -> None:
    stages = split(chain(2))
    schedule = PipelineSchedule(stages, micro_batches=2, loss_fn=loss_fn)
    refusal = r"is part of a pipeline.*pipeline\.fit_pipeline"
    for given in (schedule, stages[0], stages):
        with pytest.raises(OptionError, match=refusal):
            mb.fit(given, torch.zeros(2, WIDTH), "1GiB")  # type: ignore[arg-type]
        with pytest.raises(OptionError, match=refusal):
            mb.budget(given, "1GiB")  # type: ignore[arg-type]
