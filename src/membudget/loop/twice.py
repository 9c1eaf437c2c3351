"""Foresee a backward pass with `create_graph=True`, through which a later one runs.

It keeps what others free, so that no plan lowers what both need. Nothing tells it from
another before it begins. There it is recorded, with the later one, which is refused
together with it, or before the next forward:

    forward      inner backward                  the loop's own      outer backward
    ├────────────┤├──────────────────────────────┤├─── · · · ───┤├───────────────────┤
                                                 ^               needs beside what is
                                                 kept until      kept: `outer_bytes`

The loop may call the model in between, with parameters that the inner backward pass has
changed (MAML).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Module

from membudget._torch import new_fake_mode, tree_map_only
from membudget._torch_modules import is_asked
from membudget.allowance import Budget
from membudget.errors import BudgetError
from membudget.loop.awaited import Forward
from membudget.loop.call_recorder import CallRecorder, UnrecordableError
from membudget.loop.history import History
from membudget.loop.micro_batch import MicroBatchStep, differentiable
from membudget.loop.room import Room
from membudget.loop.situation import tensors_of
from membudget.planner.planner import plain_schedule
from membudget.profile import Profile
from membudget.profile.fake import twin
from membudget.refusal import name_holders
from membudget.scope import Scope
from membudget.state.autocast import Autocast, clear_casts, outside_autocast
from membudget.state.bits import has_bits


class Call:
    """A call of the model, with what is needed to record it when it has returned.

    Of its strided tensors, integers alone are held with their numbers.
    """

    def __init__(self, model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]):
        """Note a call that is about to run."""
        self._autocast = Autocast()
        tensors = [*model.parameters(), *tensors_of(args, kwargs)]
        self._tensors = [ref(tensor) for tensor in tensors]
        with new_fake_mode():
            self._args, self._kwargs = tree_map_only(
                Tensor, _without_memory, (args, kwargs)
            )

    def step(self, model: Module) -> TwiceStep:
        """Return the step of the backward pass that runs now, and of one through it."""
        found = (tensor() for tensor in self._tensors)
        asked = [t is not None and t.requires_grad and is_asked(t) for t in found]
        return TwiceStep(model, self._args, self._kwargs, asked)

    def enter_autocast(self, scope: Scope) -> None:
        """Restore the state of autocast in which the model was called."""
        self._autocast.enter(scope)


def _without_memory(tensor: Tensor) -> Tensor:
    if not (tensor.is_floating_point() and has_bits(tensor)):
        return tensor
    return twin(tensor).detach().requires_grad_(tensor.requires_grad)


class TwiceStep(MicroBatchStep):
    """Forward, inner and outer backward pass; the outer one is its backward phase."""

    def __init__(
        self,
        model: Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        asked: Sequence[bool],
    ):
        """Define the step; nothing runs.

        Args:
            model: The model.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            asked: Whether the inner backward pass is asked for the gradient of each
                parameter, and of each tensor among the arguments.
        """
        super().__init__(model, args, kwargs)
        self._asked = asked

    def run_as_drawn(self, before_backward: Callable[[], None] | None) -> Any:
        """Run the step; what the inner backward pass has made is live until its end."""
        clear_casts()
        output = self._called()
        roots = differentiable(output)
        parameters = map(self.leaves_of.of, self.model.parameters())
        leaves = [*parameters, *tensors_of(self.args, self.kwargs)]
        asked = [
            leaf for leaf, is_one in zip(leaves, self._asked, strict=True) if is_one
        ]
        with outside_autocast(), self.leaves_of.gradients_kept():
            seeds = [torch.empty_like(root, requires_grad=True) for root in roots]
            inner = torch.autograd.grad(
                roots, asked, seeds, create_graph=True, allow_unused=True
            )
            if before_backward is not None:
                before_backward()
            made = [t for t in inner if t is not None and t.requires_grad]
            torch.autograd.backward(made, [torch.empty_like(t) for t in made])
        return output, inner


class Twice:
    """The backward passes of one model through which later ones run."""

    def __init__(self, model: Module, recorder: CallRecorder, room: Room):
        """Store what records a call, and what is left for it."""
        self._model, self._recorder, self._room = model, recorder, room
        self._kept: list[ref[Forward]] = []

    def begun(self, forward: Forward, call: Call | None, history: History) -> None:
        """Note that the backward pass of a forward begins; refuse what does not fit.

        Args:
            forward: The forward.
            call: The call; `None` if what its micro-batch takes has been measured.
            history: Its situation, which is planned for what is found here.

        Raises:
            BudgetError: If more is needed than was left, and nothing else asked for.
        """
        forward.outer_bytes = 0
        predicted = history.predicted
        if call is None or predicted is None or not torch.is_grad_enabled():
            return
        try:
            with Scope() as scope:
                call.enter_autocast(scope)
                profile = self._recorder.recorded(call.step(self._model)).profile
        except UnrecordableError:
            return  # What it takes is measured.
        forward.outer_bytes = _outer_bytes(profile)
        self._kept.append(ref(forward))
        # What regions dropped is made for each pass, the second time beside the first.
        again_bytes = predicted.foreseen_bytes - predicted.held_bytes
        need_bytes = profile.peak_bytes + again_bytes
        history.expect(need_bytes)
        budget = self._room.for_micro_batch(history)
        if need_bytes > budget.step_bytes:
            # No name of its own: a traceback through this frame would hold it.
            self._room.refuse(_refusal(profile, history.text, need_bytes, budget))

    def check(self, history: History, output_bytes: int) -> None:
        """Refuse a forward beside whose outputs an outer backward pass finds no room.

        Args:
            history: The situation that is about to run.
            output_bytes: Bytes of its outputs, which the loop may keep.

        Raises:
            BudgetError: If nothing else was asked for.
        """
        forwards = [forward for kept in self._kept if (forward := kept())]
        kept = [forward for forward in forwards if forward.outer_bytes]
        self._kept = [ref(forward) for forward in kept]
        outer_bytes = max((forward.outer_bytes for forward in kept), default=0)
        budget = self._room.for_micro_batch(history)
        if outer_bytes and outer_bytes + output_bytes > budget.step_bytes:
            what = "a backward pass through one that keeps its graph"
            self._room.refuse(budget.too_small_for(what, outer_bytes + output_bytes))


def _refusal(
    profile: Profile, text: str, need_bytes: int, budget: Budget
) -> BudgetError:
    what = f"a micro-batch of {text} whose backward pass keeps its graph"
    error = budget.too_small_for(what, need_bytes)
    graph, before_bytes = profile.graph, budget.before_bytes
    name_holders(error, graph, plain_schedule(graph), before_bytes, "plain one")
    return error


def _outer_bytes(profile: Profile) -> int:
    """Return what the outer backward pass needs beside all that is kept for it."""
    graph, alive = profile.graph, profile.timeline.alive_bytes
    start = graph.backward_start
    pairs = zip(graph.operators[start:], alive[start:], strict=True)
    most = max((live + o.workspace_bytes for o, live in pairs), default=0)
    return max(0, most - (alive[start - 1] if start else 0))
