"""How a variant is run: plain's rivals, and what is done with the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import membudget as mb
from membudget import policies
from membudget.engine.policy import Policy
from membudget.engine.replay import following as routes
from membudget.engine.replay import verified
from membudget.policies import Candidate
from tests.offload.ways import offloaded
from tests.operators.variants import some
from tests.oracles import (
    Backward,
    Way,
    backward_once,
    backward_twice,
    double_backward,
    tensors_in,
)
from tests.zoo import Call, Case


@dataclass(frozen=True)
class Step:
    """What a step does with the call and its loss.

    Attributes:
        backward: How the loss goes backward.
        differentiates_inside: Whether the call itself computes a gradient.
        changes_leaves: Whether the leaves are changed before the backward, which a
            region may refuse.
        harmless_where: Tried only where plain's gradients are those of this backward.
    """

    backward: Backward
    differentiates_inside: bool = False
    changes_leaves: bool = False
    harmless_where: Backward | None = None

    def of(self, case: Case) -> Case:
        """Return the case whose call does so."""
        if not self.differentiates_inside:
            return case
        return replace(case, make=lambda: _differentiated_inside(case.make()))


def write_then_backward(loss: Tensor, leaves: list[Tensor]) -> None:
    """Write into the leaves, which plain accepts where no backward formula reads them.

    A region that recomputes from them must notice.
    """
    with torch.no_grad():
        for leaf in leaves:
            leaf.add_(1)
    loss.backward()


def exchange_then_backward(loss: Tensor, leaves: list[Tensor]) -> None:
    """Give the leaves other memory, of which most saved tensors know nothing.

    A leaf that autograd saves as it is takes its saved tensor along: plain's gradient
    is then that of another function, and nobody relies on it.
    """
    for leaf in leaves:
        leaf.data = leaf.data + 1
    loss.backward()


STEPS = {
    "once": Step(backward_once),
    "twice": Step(backward_twice),
    "double backward": Step(double_backward),
    "inner gradient": Step(backward_twice, differentiates_inside=True),
    "written since": Step(write_then_backward, changes_leaves=True),
    "exchanged since": Step(
        exchange_then_backward, changes_leaves=True, harmless_where=backward_once
    ),
}


def _differentiated_inside(call: Call) -> Call:
    function = call.function

    def with_gradients(*args: Any, **kwargs: Any) -> Any:
        outputs = function(*args, **kwargs)
        held = {"function": function, "args": args, "kwargs": kwargs}
        inputs = [t for _, t in tensors_in(held) if t.requires_grad]
        sums = [_real(t).sum() for _, t in tensors_in(outputs) if t.requires_grad]
        gradients = torch.autograd.grad(
            sums, inputs, create_graph=True, allow_unused=True
        )
        return outputs, [g for g in gradients if g is not None]

    return replace(call, function=with_gradients)


def _real(tensor: Tensor) -> Tensor:
    return tensor.real + tensor.imag if tensor.is_complex() else tensor


def region(**options: Any) -> Way:
    """Return the way that runs a call as one region, for the first time."""

    def way(call: Call) -> Any:
        verified.VERIFIED.clear()
        return mb.checkpoint(**options)(call.function)(*call.args, **call.kwargs)

    return way


replay = partial(region, engine="replay")

RERUN = "rerun"
UNGUARDED = "rerun, no guards"
OFFLOADED = "offloaded"

WAYS: dict[str, Way] = {
    RERUN: region(engine="rerun"),
    UNGUARDED: region(engine="rerun", guards=False),
    "replay": replay(verify=False),
    "replay, verified": replay(verify=True),
    "replay, fingerprints": replay(verify="fingerprints"),
    "replay, no guards": replay(verify=True, guards=False),
    OFFLOADED: offloaded,
}

_SOME = policies.operators("mul", "mm", "addmm", "exp", "sum", "cat", "view")

# What differs in one of the others nearly always differs in one of these.
_MANY_STEPS = ("once", "double backward")
FEW_WAYS = {n: WAYS[n] for n in (RERUN, "replay", "replay, verified", OFFLOADED)}
FEW_STEPS = {name: step for name, step in STEPS.items() if name not in _MANY_STEPS}


def keeping_each(run: Callable[[Way], object], most: int) -> Iterator[tuple[str, Way]]:
    """Yield the ways that keep one output of an operator, each in turn; and all.

    Args:
        run: Runs the step, to find out which outputs there are.
        most: How many of them at most.
    """
    seen: set[tuple[int, int]] = set()

    def see(candidate: Candidate) -> bool:
        seen.add((candidate.index, candidate.output_index))
        return False

    with suppress(Exception):  # What it raises, other ways raise, too.
        run(replay(keep=see, verify=False))
    for position, (index, output) in enumerate(some(sorted(seen), most)):
        verify = position % 2 == 1
        name = f"replay keeping output {output} of operator {index}"
        keep = _only(index, output)
        yield name + ", verified" * verify, replay(keep=keep, verify=verify)
    yield "replay keeping everything", replay(keep=policies.everything, verify=False)


def following(run: Callable[[Way], object]) -> Iterator[tuple[str, Way]]:
    """Yield ways whose calls follow the route of a call before.

    Args:
        run: Runs the step: once, to draw up the route.
    """
    keeps = {"nothing": policies.nothing, "all": policies.everything, "some": _SOME}
    for name, keep in keeps.items():
        routes._UNVERIFIED.clear()
        way = partial(_followed, keep)
        with suppress(Exception):  # What it raises, the call that follows raises, too.
            run(way)
        yield f"replay following, keeping {name}", way


def _followed(keep: Policy, call: Call) -> Any:
    def function(*args: Any, **kwargs: Any) -> Any:
        return call.function(*args, **kwargs)

    return mb.checkpoint(engine="replay", verify=False, keep=keep)(function)(
        *call.args, **call.kwargs
    )


def _only(index: int, output: int) -> Callable[[Candidate], bool]:
    return lambda candidate: (
        (candidate.index, candidate.output_index) == (index, output)
    )
