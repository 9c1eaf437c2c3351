"""The order in which each rank of a pipeline computes, sends and receives.

A rank runs the actions of its list one after another. A stage forwards each micro-batch
and later runs its backward pass, whole or in two parts: gradients of the inputs, which
the stage before waits for, and gradients of the weights. Between stages of different
ranks, activations travel forwards and gradients backwards.

`recomputing_ahead` puts a recompute in front of each backward pass that may have to
wait for its gradient:

    ... receive_backward  recompute  backward  send_backward ...
        └── the gradient travels ──┘
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from membudget.errors import OptionError

ActionKind = Literal[
    "forward",
    "recompute",
    "backward",
    "backward_input",
    "backward_weight",
    "send_forward",
    "receive_forward",
    "send_backward",
    "receive_backward",
    "unshard",
    "reshard",
    "reduce_gradients",
    "wait",
]

CheckpointMode = Literal["always", "except_last", "never"]

BACKWARDS: tuple[ActionKind, ...] = ("backward", "backward_input")
"""The actions that need the gradient of a stage's output."""


class PipelineAction(NamedTuple):
    """One action of a rank.

    Attributes:
        kind: What is done.
        stage: Index of the stage, 0 for the first.
        micro_batch: Index of the micro-batch; -1 for actions that concern all of them.
    """

    kind: ActionKind
    stage: int
    micro_batch: int = -1


@dataclass(frozen=True)
class PipelineOrder:
    """The actions of every rank in one step, in the order in which a rank runs them.

    Attributes:
        name: Name of the schedule, such as `"1F1B"`.
        ranks: The actions of each rank.
        micro_batches: Number of micro-batches of a step.
        checkpoint: For each stage, of which micro-batches it drops the activations: of
            all, of all but the last, or of none.
    """

    name: str
    ranks: tuple[tuple[PipelineAction, ...], ...]
    micro_batches: int
    checkpoint: tuple[CheckpointMode, ...]

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """The rank on which each stage runs."""
        return {
            a.stage: rank for rank, actions in enumerate(self.ranks) for a in actions
        }

    @property
    def stages(self) -> int:
        """Number of stages, over all ranks."""
        return len(self.checkpoint)

    @cached_property
    def recomputed_ahead(self) -> frozenset[tuple[int, int]]:
        """The stages and micro-batches that an action of their own recomputes."""
        return frozenset(
            (a.stage, a.micro_batch)
            for actions in self.ranks
            for a in actions
            if a.kind == "recompute"
        )

    def recomputes(self, stage: int, micro_batch: int) -> bool:
        """Return whether a stage drops the activations of a micro-batch."""
        return drops(self.checkpoint[stage], micro_batch, self.micro_batches)

    def most_in_flight(self, stage: int) -> int:
        """Return the most micro-batches that a stage holds between its two passes."""
        held = most = 0
        for action in self.ranks[self.rank_of[stage]]:
            if action.stage == stage:
                held += action.kind == "forward"
                most = max(most, held)
                held -= action.kind in ("backward", "backward_weight")
        return most


def drops(mode: CheckpointMode, micro_batch: int, micro_batches: int) -> bool:
    """Return whether a mode drops the activations of a micro-batch."""
    if mode == "except_last":
        return micro_batch < micro_batches - 1
    return mode == "always"


def checked_modes(
    checkpoint: CheckpointMode | Sequence[CheckpointMode], stages: int
) -> tuple[CheckpointMode, ...]:
    """Return one mode per stage, from one for all or from a sequence.

    Raises:
        OptionError: A mode is unknown, or there are more or fewer than stages.

    Example:
        >>> checked_modes("always", 2)
        ('always', 'always')
    """
    known = get_args(CheckpointMode)
    modes: Sequence[CheckpointMode]
    modes = [checkpoint] * stages if isinstance(checkpoint, str) else [*checkpoint]
    if wrong := [mode for mode in modes if mode not in known]:
        raise OptionError(
            f"checkpoint is one of {', '.join(map(repr, known))}, or one of them for "
            f"each stage; got {wrong[0]!r}"
        )
    if len(modes) != stages:
        raise OptionError(
            f"checkpoint names {len(modes)} stages, and the pipeline has {stages}"
        )
    return tuple(modes)


def gpipe(stages: int, micro_batches: int) -> dict[int, list[PipelineAction]]:
    """Return what each rank computes under GPipe: all forwards, then all backwards.

    Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using
    Pipeline Parallelism".
    """
    return {
        stage: [
            PipelineAction(kind, stage, micro_batch)
            for kind in ("forward", "backward")
            for micro_batch in range(micro_batches)
        ]
        for stage in range(stages)
    }


def one_forward_one_backward(
    stages: int, micro_batches: int
) -> dict[int, list[PipelineAction]]:
    """Return what each rank computes under 1F1B.

    Stage s of n begins with min(n - s, m) forwards, and then runs a backward pass
    before each further forward, so that it never holds more micro-batches than these.
    Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN
    Training".

    Example:
        >>> for actions in one_forward_one_backward(2, 3).values():
        ...     print(*(f"{a.kind[0]}{a.micro_batch}" for a in actions))
        f0 f1 b0 f2 b1 b2
        f0 b0 f1 b1 f2 b2
    """
    order = {}
    for stage in range(stages):
        ahead = min(stages - stage, micro_batches)
        actions = [PipelineAction("forward", stage, i) for i in range(ahead)]
        for i in range(micro_batches):
            actions.append(PipelineAction("backward", stage, i))
            if i + ahead < micro_batches:
                actions.append(PipelineAction("forward", stage, i + ahead))
        order[stage] = actions
    return order


def with_checkpoint(
    order: PipelineOrder, checkpoint: Sequence[CheckpointMode], ahead: bool = True
) -> PipelineOrder:
    """Return an order with other modes, which recomputes ahead, or lazily."""
    ranks = tuple(
        tuple(action for action in actions if action.kind != "recompute")
        for actions in order.ranks
    )
    modes = checked_modes(checkpoint, order.stages)
    lazily = replace(order, ranks=ranks, checkpoint=modes)
    return recomputing_ahead(lazily) if ahead else lazily


def recomputing_ahead(order: PipelineOrder) -> PipelineOrder:
    """Put a recompute before each backward pass whose gradient another rank sends.

    Where the gradient is computed on the same rank, as on the last stage, nothing is
    waited for: recomputing ahead would only hold a stage's activations all at once.
    """
    return replace(
        order,
        ranks=tuple(tuple(_with_recomputes(order, rank)) for rank in order.ranks),
    )


def _with_recomputes(
    order: PipelineOrder, actions: Iterable[PipelineAction]
) -> Iterable[PipelineAction]:
    for action in actions:
        stage, micro_batch = action.stage, action.micro_batch
        if (
            action.kind in BACKWARDS
            and order.recomputes(stage, micro_batch)
            and is_sent(order.rank_of, stage, stage + 1)
        ):
            yield PipelineAction("recompute", stage, micro_batch)
        yield action


def is_sent(rank_of: Mapping[int, int], stage: int, neighbour: int) -> bool:
    """Return whether tensors travel between ranks from one stage to a neighbour."""
    return rank_of.get(neighbour, rank_of[stage]) != rank_of[stage]
