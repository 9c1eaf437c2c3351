"""A schedule of one rank: what it runs, refuses and reports."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import membudget as mb
from membudget.errors import CheckpointError, OptionError
from membudget.pipeline import (
    PipelineSchedule,
    measured_costs,
    simulate_pipeline,
    split,
)
from tests.pipeline.models import Block, chain, loss_fn, run_step

pytestmark = [pytest.mark.cpu_only("gloo"), pytest.mark.usefixtures("alone")]

ENGINES = pytest.mark.parametrize("engine", ["rerun", "replay"])


def scheduled(
    name: str = "1F1B",
    blocks: int = 2,
    micro_batches: int = 4,
    *,
    verify: bool = True,
    **options: Any,
) -> PipelineSchedule:
    return PipelineSchedule(
        split(chain(blocks), name, verify=verify),
        name,
        micro_batches=micro_batches,
        loss_fn=loss_fn,
        **options,
    )


def by_hand(module: nn.Module) -> PipelineStage:
    return PipelineStage(module, 0, 1, torch.device("cpu"))


def test_a_schedule_equals_that_of_torch() -> None:
    stage = by_hand(nn.Sequential(*chain(2)))
    plain = Schedule1F1B(stage, 4, loss_fn)
    schedule = scheduled()
    x, target = torch.randn(8, 8), torch.randn(8, 8)
    for one in (plain, schedule):
        torch.manual_seed(3)
        one.step(x, target=target)

    for (name, p), (other, q) in zip(
        stage.submod.named_parameters(),
        schedule.stages[0].submod.named_parameters(),
        strict=True,
    ):
        assert name == other
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)


@ENGINES
def test_stages_made_by_hand_run_with_regions_of_theirs(engine: str) -> None:
    module = nn.Sequential(*chain(2))
    applied = mb.apply(module, blocks=Block, engine=engine)
    stage = by_hand(module)
    schedule = PipelineSchedule(stage, "1F1B", micro_batches=2, loss_fn=loss_fn)
    assert schedule.stages == (stage,)
    found, plain = run_step(schedule), run_step(scheduled("1F1B", 2, 2))
    assert all(map(torch.equal, found, plain))
    assert [region.recomputes >= 2 for region in applied.status().regions] == [True] * 2


def test_without_checkpointing_no_region_drops_anything() -> None:
    schedule = scheduled(checkpoint="never")
    run_step(schedule)
    (stage,) = schedule.stages
    assert stage.applied is not None
    before = stage.applied.status()
    run_step(schedule)
    assert stage.applied.status() == before


def test_events_are_those_of_the_last_step() -> None:
    schedule = scheduled("Interleaved1F1B")
    assert not schedule.events
    for _ in range(2):
        run_step(schedule)
        own = [a for a in schedule.order.ranks[0] if a.kind in ("forward", "backward")]
        assert [event.action for event in schedule.events] == own
        assert schedule.events[0].start_s == 0.0
        assert schedule.gathered_events() == schedule.events


def test_evaluation_computes_forwards_alone() -> None:
    schedule = scheduled()
    run_step(schedule)
    with torch.no_grad():
        schedule.eval(torch.randn(4, 8), target=torch.randn(4, 8))
    parameters = schedule.stages[0].submod.parameters()
    grads = [p.grad.clone() for p in parameters if p.grad is not None]
    run_step(schedule)
    assert len(grads) == len(list(schedule.stages[0].submod.parameters()))


def test_a_schedule_is_freed_without_garbage_collection() -> None:
    gc.collect()
    gc.disable()
    try:
        schedule = scheduled("Interleaved1F1B")
        run_step(schedule)
        reference = weakref.ref(schedule.stages[0].submod)
        del schedule
        assert reference() is None
    finally:
        gc.enable()


def test_bytes_are_counted_around_every_action() -> None:
    schedule = scheduled("Interleaved1F1B", meter=True, verify=False)
    for step in range(2):
        run_step(schedule, step, rows=64, return_outputs=False)
    assert [around.action for around in schedule.bytes] == [
        event.action for event in schedule.events
    ]
    forward = schedule.bytes[0]
    assert forward.before_bytes < forward.after_bytes < forward.peak_bytes
    costs = measured_costs(schedule)
    predicted = simulate_pipeline(schedule.order, costs).peak_bytes
    measured = max(around.peak_bytes for around in schedule.bytes)
    assert abs(predicted[0] - measured) <= 0.02 * measured


def test_losses_hold_no_graph_when_their_backward_pass_has_ended() -> None:
    schedule = scheduled(meter=True, micro_batches=16, verify=False)
    run_step(schedule, rows=64, return_outputs=False)
    starts = [a.before_bytes for a in schedule.bytes if a.action.kind == "forward"]
    assert starts[-1] - starts[2] == 4 * (len(starts) - 3)  # A number per micro-batch.


def test_inputs_of_regions_may_wait_on_the_host() -> None:
    plain = run_step(scheduled())
    stages = split(chain(2), offload=mb.offload("64KiB", window=0))
    schedule = PipelineSchedule(stages, micro_batches=4, loss_fn=loss_fn)
    assert all(map(torch.equal, run_step(schedule), plain))


def test_losses_hold_a_number_each_whatever_storage_they_came_in() -> None:
    schedule = scheduled(micro_batches=2, verify=False)
    schedule._loss_fn = nn.functional.mse_loss
    losses: list[Tensor] = []
    x = torch.randn(128, 8)
    schedule.step(x, target=x, losses=losses, return_outputs=False)
    assert [loss.untyped_storage().nbytes() for loss in losses] == [4, 4]


def test_costs_of_a_schedule_that_has_not_run_are_refused() -> None:
    with pytest.raises(OptionError, match="run a step of the schedule first"):
        measured_costs(scheduled())


class Reentrant(nn.Module):
    """A block under one of the two reentrant implementations."""

    def __init__(self, implementation: str) -> None:
        super().__init__()
        self.block = Block()
        self.checkpoint: Any = torch_checkpoint
        if implementation == "membudget":
            self.checkpoint = mb.checkpoint

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.checkpoint(self.block, x, use_reentrant=True)
        return y


IMPLEMENTATIONS = pytest.mark.parametrize("name", ["torch", "membudget"])


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_region_without_gradients_is_refused() -> None:
    stage = by_hand(Reentrant("torch"))
    schedule = PipelineSchedule(stage, "1F1B", micro_batches=2, loss_fn=loss_fn)
    with pytest.raises(
        CheckpointError, match=r"stage 0 has 6 trainable.*use_reentrant=True"
    ):
        run_step(schedule)


@IMPLEMENTATIONS
def test_a_reentrant_region_between_others_is_refused(name: str) -> None:
    stage = by_hand(nn.Sequential(nn.Linear(8, 8), Reentrant(name)))
    schedule = PipelineSchedule(stage, "1F1B", micro_batches=2, loss_fn=loss_fn)
    with pytest.raises(CheckpointError, match="stage 0 runs a reentrant region"):
        run_step(schedule)


def test_a_stage_that_is_to_drop_and_has_no_region_is_refused() -> None:
    schedule = PipelineSchedule(
        by_hand(Block()), "1F1B", micro_batches=2, loss_fn=loss_fn
    )
    with pytest.raises(OptionError, match="no region ran in its forward"):
        run_step(schedule)


def test_a_frozen_stage_needs_no_gradient() -> None:
    schedule = scheduled()
    for stage in schedule.stages:
        stage.submod.requires_grad_(False)
        stage.check_outputs([torch.ones(1)])


def test_stages_of_another_rank_are_refused() -> None:
    stage = split(chain(2), "Interleaved1F1B")[0]
    with pytest.raises(OptionError, match=r"puts the stages \[0, 1\] on rank 0 of 1"):
        PipelineSchedule(stage, "Interleaved1F1B", micro_batches=2)


def test_a_rank_without_stages_is_refused() -> None:
    with pytest.raises(OptionError, match="at least one stage; got none"):
        PipelineSchedule([], "1F1B", micro_batches=2)


def test_other_classes_of_stages_are_refused() -> None:
    class Other(PipelineStage):
        pass

    stage = Other(Block(), 0, 1, torch.device("cpu"))
    with pytest.raises(OptionError, match=r"PipelineStage, or comes.*; got Other"):
        PipelineSchedule(stage, "1F1B", micro_batches=2)


def test_a_stage_that_has_run_elsewhere_is_refused() -> None:
    stage = by_hand(Block())
    Schedule1F1B(stage, 2, loss_fn).step(torch.randn(2, 8), target=torch.randn(2, 8))
    with pytest.raises(OptionError, match="has run under another schedule"):
        PipelineSchedule(stage, "1F1B", micro_batches=2)


def test_a_step_after_one_that_failed_equals_the_first() -> None:
    plain = run_step(scheduled())
    schedule = scheduled()
    fails = [True]

    def failing(output: Tensor, target: Tensor) -> Tensor:
        if fails and schedule.stages[0].fwd_cache:
            fails.clear()
            raise ZeroDivisionError
        return loss_fn(output, target)

    run_step(schedule)
    schedule._loss_fn = failing
    with pytest.raises(ZeroDivisionError):
        run_step(schedule)
    schedule._internal_losses.clear()
    assert all(map(torch.equal, run_step(schedule), plain))
