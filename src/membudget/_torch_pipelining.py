"""Private APIs of `torch.distributed.pipelining` that membudget uses, with the reasons.

torch's runtime interprets a list of actions per rank. It is private, and has no action
that recomputes, keeps every receive buffer and every send to the end of the step, and
says nothing of when it does what. The two classes here open it at these places:

* `Stage` makes a receive buffer when it is received into, and drops it when it is used;
* `Runtime` runs any list of actions, and leaves transfers and actions that torch does
  not know to its subclass.

Importing this module raises `OptionError` if torch lacks one of the names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from membudget.errors import OptionError

try:
    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining._utils import (
        _make_tensor_from_meta,  # A receive buffer, also of the shard of a DTensor.
    )
    from torch.distributed.pipelining._utils import (
        generate_stage_to_rank_mapping as _rank_of_each_stage,
    )
    from torch.distributed.pipelining.schedules import (
        _Action as Action,  # What the runtime interprets.
    )
    from torch.distributed.pipelining.schedules import (
        _add_reduce_grad,  # Gradients are averaged after the last backward pass.
        _add_send_recv,  # Puts sends and receives where no rank can wait for ever.
        _add_unshard_reshard,  # FSDP gathers parameters around a stage's actions.
        _batch_p2p,  # Posts transfers without tying independent ones together.
        _PipelineScheduleRuntime,
    )
    from torch.distributed.pipelining.schedules import _ComputationType as Type
    from torch.distributed.pipelining.stage import (
        _RecvInfo,  # One tensor that a stage receives, with its buffer.
    )

    _TYPES: dict[str, Any] = {
        "forward": Type.FORWARD,
        "backward": Type.FULL_BACKWARD,
        "backward_input": Type.BACKWARD_INPUT,
        "backward_weight": Type.BACKWARD_WEIGHT,
        "send_forward": Type.SEND_F,
        "receive_forward": Type.RECV_F,
        "send_backward": Type.SEND_B,
        "receive_backward": Type.RECV_B,
        "unshard": Type.UNSHARD,
        "reshard": Type.RESHARD,
        "reduce_gradients": Type.REDUCE_GRAD,
    }
except (AttributeError, ImportError) as error:
    raise OptionError(
        f"membudget.pipeline drives the pipelining engine of torch 2.13, and torch "
        f"{torch.__version__} lacks a part of it ({error}). Use torch 2.13, or torch's "
        f"own schedules with `membudget.execution_group()` around each step."
    ) from error


buffer_like: Callable[..., Tensor] = _make_tensor_from_meta
ReceiveInfo: Any = _RecvInfo


class OwnType(StrEnum):
    """Actions that torch's runtime does not know; it only looks up and prints them."""

    RECOMPUTE = "RECOMPUTE"


TYPES: dict[str, Any] = {**_TYPES, "recompute": OwnType.RECOMPUTE}
"""The actions by the names that `planner.pipeline_order` gives them."""

_NAMES = {type_: name for name, type_ in TYPES.items()}

# A name, a stage and a micro-batch (-1 for none).
NamedAction = tuple[Any, int, int]

_CLASSES: dict[str, Any] = {
    "Interleaved1F1B": schedules.ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": schedules.ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": schedules.ScheduleZBVZeroBubble,
    "DualPipeV": schedules.ScheduleDualPipeV,
}
OF_TORCH = tuple(_CLASSES)
"""Schedules whose order of computations is torch's."""

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""Schedules that put the first and the last stage on the same rank."""


def computations(
    name: str, ranks: int, stages_per_rank: int, micro_batches: int
) -> dict[int, list[NamedAction]]:
    """Return what each rank computes under one of torch's schedules.

    The schedule is made for stand-ins of stages: it reads their numbers alone.

    Raises:
        OptionError: The schedule does not exist for these numbers.
    """
    stages = ranks * stages_per_rank
    places = rank_of_stages(name, ranks, stages)
    stand_ins = [
        SimpleNamespace(
            num_stages=stages,
            group_size=ranks,
            group_rank=0,
            stage_index=index,
            submod=None,
        )
        for index, rank in places.items()
        if rank == 0
    ]
    try:
        made = _CLASSES[name](stand_ins, micro_batches)
    except ValueError as error:
        raise OptionError(
            f"{name} does not exist for {ranks} ranks of {stages_per_rank} stages and "
            f"{micro_batches} micro-batches: {error}"
        ) from None
    return {
        rank: [_named(part) for action in actions for part in _parts(action)]
        for rank, actions in made.pipeline_order.items()
    }


def rank_of_stages(name: str, ranks: int, stages: int) -> dict[int, int]:
    """Return the rank of each stage under a schedule."""
    style = "v" if name in V_SHAPED else "loop"
    found: dict[int, int] = _rank_of_each_stage(ranks, stages, style)
    return found


def _parts(action: Any) -> Iterable[Any]:
    """Yield an action, or its parts, which overlap in torch: here they run in turn."""
    if action is None:
        return ()
    return action.sub_actions or (action,)


def _named(action: Any) -> NamedAction:
    number = action.microbatch_index
    name = _NAMES[action.computation_type]
    return (name, action.stage_index, -1 if number is None else number)


def _action(name: str, stage: int, micro_batch: int) -> Any:
    return Action(stage, TYPES[name], None if micro_batch < 0 else micro_batch)


def with_transfers(
    computed: dict[int, list[NamedAction]],
    rank_of: dict[int, int],
    micro_batches: int,
) -> list[list[NamedAction]]:
    """Add what else a rank does: transfers, and what FSDP and averaging need.

    A receive stands where its sender has just sent, in an order in which one process
    could run all ranks. So a rank that waits for a send waits for what comes before it
    in that order, and never for ever.
    """
    actions: dict[int, Any] = {}
    for rank, named in computed.items():
        unsharded: Any = _add_unshard_reshard([_action(*one) for one in named])
        actions[rank] = _add_reduce_grad(unsharded, micro_batches)
    complete = _add_send_recv(actions, rank_of.__getitem__, len(rank_of))
    return [[_named(action) for action in complete[rank]] for rank in sorted(complete)]


class OrderRuntime(_PipelineScheduleRuntime):
    """torch's runtime over any list of actions, with transfers of its own."""

    def __init__(
        self,
        stages: Sequence[Any],
        micro_batches: int,
        loss_fn: Callable[..., Tensor] | None,
        ranks: Sequence[Sequence[NamedAction]],
        **options: Any,
    ):
        """Prepare to run `ranks`, the actions of every rank."""
        super().__init__([*stages], micro_batches, loss_fn, **options)  # type: ignore[no-untyped-call]
        self._prepare_schedule_with_comms(
            {n: [_action(*named) for named in rank] for n, rank in enumerate(ranks)},
            format="compute_comms",
        )
        # torch registers functions for its own computations alone. A method would tie
        # the schedule, and with it the stages' parameters, into a reference cycle.
        for name in ("send_forward", "send_backward", "recompute"):
            self._comp_type_to_function_map[TYPES[name]] = _run_own
        for name in ("receive_forward", "receive_backward"):
            self._comp_type_to_function_map[TYPES[name]] = _receive_into

    def perform(self, name: str, stage: int, micro_batch: int) -> None:
        """Send, or recompute."""
        raise NotImplementedError

    def receive(self, name: str, stage: int, micro_batch: int) -> list[Any]:
        """Post receives; return what can be waited for."""
        raise NotImplementedError


def _run_own(action: Any, context: Any) -> None:
    context.schedule_ref.perform(*_named(action))


def _receive_into(action: Any, context: Any) -> None:
    name, stage, number = _named(action)
    runtime = context.schedule_ref
    works = runtime.fwd_recv_ops if name == "receive_forward" else runtime.bwd_recv_ops
    works[stage, number] = runtime.receive(name, stage, number)


def posted(transfers: list[dist.P2POp]) -> list[Any]:
    """Post transfers, and return what can be waited for."""
    works: list[Any] = _batch_p2p(transfers)
    return works
