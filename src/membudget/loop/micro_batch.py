"""One micro-batch of a training loop as a step that can be recorded without memory.

The loop calls the model, computes a loss of its own and runs the backward pass. Before
the model is called, only the call is known. So the step ends at the model's outputs,
and what lies beyond, its *tail*, is a number of bytes that is assumed at first, and
measured when the micro-batch runs:

    model's forward        outputs     loss          gradients of      model's
    (recorded on fakes)                (the tail)    the outputs       backward
    ├──────────────────────────┤├───────────────────────────┤├────────────────────┤
                                 workspace of one operator

The operator is the one that makes the gradients of the outputs: there, all that the
forward saves is live, and all that the loss needs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import Module

from membudget._torch import tree_map_only
from membudget.attach import without_wrapper
from membudget.errors import OptionError
from membudget.graph import StepGraph, Value
from membudget.loop.collectives import OWN_COLLECTIVES
from membudget.loop.leaves import LeavesOf
from membudget.planning import without_regions
from membudget.profile import Profile
from membudget.state.autocast import clear_casts, outside_autocast
from membudget.state.identity import is_leaf
from membudget.state.walk import walk
from membudget.step import Step

LOSS_COPIES = 4
"""Copies in float32 of the outputs that an unknown loss is assumed to need.

Cross entropy needs the most of the common ones: it copies outputs of lower precision to
float32, saves their logarithmic softmax, and makes two gradients of that size.
"""


class MicroBatchStep(Step):
    """A call of the model by a training loop, and a backward pass from its outputs.

    Attributes:
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        leaves_of: What stands in for the parameters of the model.
    """

    def __init__(self, model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]):
        """Define the step; nothing runs."""
        # The backward pass must end where the call begins: what made the arguments is
        # not run.
        args, kwargs = tree_map_only(Tensor, _leaf_of, (args, kwargs))
        super().__init__(model, [args, kwargs], None)
        self.args, self.kwargs = args, kwargs
        self.loss_from = "the model's outputs"
        self.leaves_of = LeavesOf(model)

    def run_as_drawn(self, before_backward: Callable[[], None] | None) -> Any:
        """Run forward and backward; the outputs stay live, as they do in most loops.

        Raises:
            OptionError: If no output requires a gradient.
        """
        self.leaves_of.begin()
        clear_casts()
        output = self._called()
        roots = differentiable(output)
        if not roots:
            raise OptionError("no output of the model requires a gradient")
        with outside_autocast(), self.leaves_of.gradients_kept():
            if before_backward is not None:
                before_backward()
            gradients = [torch.empty_like(root) for root in roots]
            torch.autograd.backward(roots, gradients)
        return output

    def _called(self) -> Any:
        with without_wrapper(self.model):
            return functional_call(
                self.model, self.leaves_of.by_name, self.args, self.kwargs
            )


def _leaf_of(tensor: Tensor) -> Tensor:
    if is_leaf(tensor):
        return tensor
    return tensor.detach().requires_grad_(tensor.requires_grad)


def differentiable(output: Any) -> list[Tensor]:
    """Return the tensors of a model's output that a loss is made of.

    If the output has a loss, it alone is.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else None
    if isinstance(loss, Tensor) and loss.requires_grad:
        return [loss]
    found = walk([("output", output)], "output").tensors.values()
    tensors = (tensor for _, tensor in found)
    return [t for t in tensors if t.requires_grad and t.grad_fn is not None]


class RecordedBatch:
    """A recorded micro-batch, in whose graph the tail can be set.

    Attributes:
        profile: The micro-batch on fake tensors, with an empty tail.
        cached: Names of the parameters whose casts autocast caches in the loop.
        are_there: Whether an earlier forward has cached them.
    """

    def __init__(
        self, profile: Profile, cached: Collection[str] = (), are_there: bool = False
    ):
        """Store the profile of a `MicroBatchStep`.

        Args:
            profile: The profile, in which no cast is cached.
            cached: Names of the parameters whose casts autocast caches in the loop.
            are_there: Whether an earlier forward has cached them.
        """
        self.cached, self.are_there = cached, are_there
        without = {*profile.chance, *_communicating(profile.graph)}
        self.profile = without_regions(profile, without)

    @cached_property
    def tail_operator(self) -> int:
        """Index of the operator that makes the last gradient of an output."""
        graph = self.profile.graph
        index = graph.backward_start
        while graph.operators[index + 1 : index + 2] and _makes(graph, index + 1):
            index += 1
        return index

    @cached_property
    def output_bytes(self) -> int:
        """Bytes of the outputs' gradients, which the recording has in its tail."""
        return sum(value.bytes for value in self._gradients)

    @cached_property
    def returns_loss(self) -> bool:
        """Whether all outputs with a gradient are single numbers."""
        return not self._numbers

    @cached_property
    def assumed_bytes(self) -> int:
        """Bytes that are assumed of a tail that has not been measured."""
        return self.output_bytes + LOSS_COPIES * 4 * self._numbers

    @cached_property
    def _numbers(self) -> int:
        """How many numbers the outputs have, without single ones."""
        counts = (math.prod(value.shape) for value in self._gradients)
        return sum(count for count in counts if count > 1)

    @cached_property
    def casts(self) -> dict[int, int]:
        """Storages of casts that autocast caches, with the storage of the parameter."""
        graph = self.profile.graph
        made = ((graph.operators[i].outputs[0], of) for i, of in self._casting.items())
        return {graph.values[output].storage: of for output, of in made}

    @cached_property
    def absent(self) -> frozenset[int]:
        """Op indices of casts that do not run in the loop, because they are cached."""
        seen: set[int] = set(self._casting.values()) if self.are_there else set()
        absent = set()
        for index, parameter in self._casting.items():
            if parameter in seen:
                absent.add(index)
            seen.add(parameter)
        return frozenset(absent)

    @cached_property
    def _casting(self) -> dict[int, int]:
        """Op indices of casts that autocast caches, with the parameter's storage."""
        graph, found = self.profile.graph, {}
        for index, operator in enumerate(graph.operators[: graph.backward_start]):
            if self.cached and operator.name.startswith("aten._to_copy."):
                of = graph.values[operator.inputs[0]].storage
                facts = graph.storages[of]
                is_held = facts.kind in ("parameter", "outside")
                if is_held and facts.name in self.cached:
                    found[index] = of
        return found

    @cached_property
    def direct_reads(self) -> int:
        """How often a parameter is read that autocast also casts, at most."""
        graph, cast = self.profile.graph, set(self.casts.values())
        reads = Counter(
            graph.values[value].storage
            for operator in graph.operators[: graph.backward_start]
            if not operator.name.startswith("aten._to_copy.")
            for value in operator.inputs
        )
        return max((reads[parameter] for parameter in cast), default=0)

    @property
    def _gradients(self) -> list[Value]:
        graph = self.profile.graph
        made = graph.operators[graph.backward_start : self.tail_operator + 1]
        return [graph.values[value] for o in made for value in o.outputs]

    def with_tail(self, tail_bytes: int) -> Profile:
        """Return the profile with a tail that allocates so many bytes at its peak."""
        graph, index = self.profile.graph, self.tail_operator
        beside = max(0, tail_bytes - self.output_bytes)
        operators = list(graph.operators)
        operators[index] = replace(operators[index], workspace_bytes=beside)
        changed = replace(graph, operators=tuple(operators))
        return replace(self.profile, graph=changed)


def _communicating(graph: StepGraph) -> set[int]:
    """Return the numbers of the calls that communicate, as SyncBatchNorm does.

    No region may run them again: the other ranks would not answer a second time.
    """
    collectives = [
        index
        for index, operator in enumerate(graph.operators[: graph.backward_start])
        if operator.name.startswith(OWN_COLLECTIVES)
    ]
    return {
        number
        for number, call in enumerate(graph.calls)
        if any(call.start <= index < call.end for index in collectives)
    }


def _makes(graph: StepGraph, index: int) -> bool:
    """Return whether an operator makes a gradient of an output from nothing."""
    name = graph.operators[index].name
    return name.startswith(("aten.empty", "aten.new_empty"))
