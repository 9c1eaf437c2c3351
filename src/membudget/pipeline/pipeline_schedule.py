"""A pipeline schedule whose stages recompute while they wait for a gradient.

It runs the order of `pipeline_order` on torch's runtime. What it adds to that:

* A recompute fills the handles that autograd holds in place of saved tensors, so that
  the backward pass, whole or in two parts, takes each tensor from there.
* Where a schedule takes backward passes apart, the step is one execution group:
  recomputed tensors stay until autograd frees their node, and nothing is recomputed
  again for the weights.
* Receive buffers live from the receive to their use, and of the sends of one stage and
  direction at most two are under way. Memory does not grow with the micro-batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from membudget._torch_pipelining import OrderRuntime, posted
from membudget.engine.groups import execution_group
from membudget.errors import OptionError
from membudget.pipeline.event_log import ActionBytes, EventLog, LoggedReceive
from membudget.pipeline.orders import pipeline_order
from membudget.pipeline.recomputing_stage import RecomputingStage
from membudget.planner.pipeline_bytes import MOST_SENDS
from membudget.planner.pipeline_order import CheckpointMode, PipelineOrder
from membudget.planner.pipeline_plan import PipelinePlan
from membudget.planner.pipeline_simulation import PipelineEvent


class PipelineSchedule(OrderRuntime):
    """Trains the stages of a pipeline, micro-batch by micro-batch.

    Loss, gradients, buffers and random streams equal those of the same schedule without
    checkpointing, bit for bit. `step` and `eval` are those of torch's schedules.

    Attributes:
        order: What every rank does in a step.
        group: The ranks of the pipeline; `None` for all.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from membudget import pipeline
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> blocks = [torch.nn.Linear(4, 4) for _ in range(2)]
        >>> stages = pipeline.split(blocks, "1F1B")
        >>> schedule = pipeline.PipelineSchedule(
        ...     stages, "1F1B", micro_batches=2, loss_fn=torch.nn.functional.mse_loss
        ... )
        >>> output = schedule.step(torch.ones(4, 4), target=torch.zeros(4, 4))
        >>> [event.action.kind for event in schedule.events]
        ['forward', 'backward', 'forward', 'backward']
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        schedule: str | PipelinePlan = "1F1B",
        *,
        micro_batches: int | None = None,
        loss_fn: Callable[..., Tensor] | None = None,
        checkpoint: CheckpointMode | Sequence[CheckpointMode] | None = None,
        ahead: bool | None = None,
        meter: bool = False,
        **options: Any,
    ):
        """Prepare to run the stages of this rank.

        Args:
            stages: The stages of this rank, from `split` or made by hand as torch's
                `PipelineStage`, with regions on their modules. They become part of
                this schedule.
            schedule: Name of the schedule; see `pipeline_order`. Or a plan of
                `fit_pipeline`, which also says what the next three are by default.
            micro_batches: Number of micro-batches into which `step` splits a batch.
            checkpoint: Of which micro-batches the regions drop their activations:
                `"always"`, the default, `"except_last"` or `"never"`, for all stages
                or for each.
            ahead: Whether stages recompute while they wait for a gradient, which is the
                default. That holds the activations of one micro-batch of a stage at
                once; without it, one region after another recomputes in the backward
                pass.
            loss_fn: Called on the last stage with a micro-batch's output and target.
            meter: Whether to count the bytes around every action; see `bytes`.
            **options: Those of torch's schedules: `args_chunk_spec`,
                `kwargs_chunk_spec`, `output_merge_spec`, `scale_grads`.

        Raises:
            OptionError: The schedule does not exist for these stages, or puts others
                on this rank.
        """
        given = [stages] if isinstance(stages, PipelineStage) else [*stages]
        if not given:
            raise OptionError("a rank of a pipeline needs at least one stage; got none")
        rank, ranks = given[0].group_rank, given[0].group_size
        self.order = pipeline_order(
            **_named(schedule, micro_batches, checkpoint, ahead),
            ranks=ranks,
            stages_per_rank=max(1, given[0].num_stages // ranks),
        )
        _check_places(self.order, rank, [stage.stage_index for stage in given])
        self.group = given[0].group
        self._log = EventLog(rank, given[0].device, meter)
        self._here = {s.stage_index: RecomputingStage.of(s) for s in given}
        for stage in self._here.values():
            stage.join(self.order, self._log)
        self._sends: dict[tuple[str, int], deque[list[Any]]] = {}
        super().__init__(
            [*self._here.values()],
            self.order.micro_batches,
            loss_fn,
            self.order.ranks,
            **options,
        )

    @property
    def stages(self) -> tuple[RecomputingStage, ...]:
        """The stages of this rank, in order."""
        return tuple(self._here[index] for index in sorted(self._here))

    @property
    def events(self) -> tuple[PipelineEvent, ...]:
        """What this rank did in the last step, in seconds since its first action.

        On an accelerator these are the seconds of the host, which launches kernels and
        does not wait for them.
        """
        events = self._log.events
        first_s = events[0].start_s if events else 0.0
        return tuple(
            event._replace(start_s=event.start_s - first_s, end_s=event.end_s - first_s)
            for event in events
        )

    def gathered_events(self) -> tuple[PipelineEvent, ...]:
        """Return what all ranks did in the last step; call it on every rank."""
        return self._log.gathered(self.group)

    @property
    def bytes(self) -> tuple[ActionBytes, ...]:
        """Live bytes of this rank's device around each action of the last step."""
        return tuple(self._log.bytes)

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> None:
        apart = any(a.kind == "backward_weight" for r in self.order.ranks for a in r)
        group: AbstractContextManager[None]
        group = execution_group() if apart else nullcontext()
        self._log.begin_step()
        with group:
            super()._step_microbatches(*args, **kwargs)
            for sends in self._sends.values():
                while sends:
                    _wait(sends.popleft())

    def _maybe_compute_loss(
        self, stage: Any, output: Any, targets: Any, mb_index: int, *rest: Any
    ) -> None:
        with stage.noted("forward", mb_index):
            super()._maybe_compute_loss(  # type: ignore[no-untyped-call]
                stage, output, targets, mb_index, *rest
            )

    def perform(self, name: str, stage: int, micro_batch: int) -> None:
        """Send, or recompute."""
        here = self._here[stage]
        if name == "recompute":
            here.recompute(micro_batch)
            return
        with here.noted(name, micro_batch):
            sends = self._sends.setdefault((name, stage), deque())
            while len(sends) >= MOST_SENDS:
                _wait(sends.popleft())
            forwards = name == "send_forward"
            get = here.get_fwd_send_ops if forwards else here.get_bwd_send_ops
            transfers = get(micro_batch)
            sends.append([*zip(transfers, posted(transfers), strict=True)])

    def receive(self, name: str, stage: int, micro_batch: int) -> list[Any]:
        """Post receives; return what can be waited for."""
        here = self._here[stage]
        forwards = name == "receive_forward"
        with here.noted(name, micro_batch):
            get = here.get_fwd_recv_ops if forwards else here.get_bwd_recv_ops
            works = posted(get(micro_batch))
        return [
            LoggedReceive(work, partial(here.noted, "wait", micro_batch))
            for work in works
        ]


def _wait(sends: list[Any]) -> None:
    for _, work in sends:
        work.wait()


def _named(
    schedule: str | PipelinePlan,
    micro_batches: int | None,
    checkpoint: CheckpointMode | Sequence[CheckpointMode] | None,
    ahead: bool | None,
) -> dict[str, Any]:
    """Return arguments of `pipeline_order`; what is not given is the plan's."""
    found: dict[str, Any] = {"schedule": schedule, "micro_batches": micro_batches}
    if isinstance(schedule, PipelinePlan):
        order = schedule.order
        found = {"schedule": order.name, "micro_batches": order.micro_batches}
        found |= {"checkpoint": schedule.checkpoint, "ahead": schedule.ahead}
    given = {"micro_batches": micro_batches, "checkpoint": checkpoint, "ahead": ahead}
    return found | {key: value for key, value in given.items() if value is not None}


def _check_places(order: PipelineOrder, rank: int, stages: Sequence[int]) -> None:
    """Raise if a schedule puts other stages on a rank than it has."""
    expected = sorted(stage for stage, r in order.rank_of.items() if r == rank)
    if sorted(stages) != expected:
        raise OptionError(
            f"{order.name} puts the stages {expected} on rank {rank} of "
            f"{len(order.ranks)}; got {sorted(stages)}"
        )
