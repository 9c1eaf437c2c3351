"""Whether a step under a plan is the plain step, also where verifying takes too much.

A replay region verifies itself in its first step (`engine.replay.verify`): it holds
what it drops until its forward ends, and makes it all again beside that. Where the
budget has no room for that, the step's outcome is compared instead: loss, gradients,
buffers and random streams, by fingerprints, with those of a step that is right by
construction: the plain one, or one whose blocks run their own code again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from membudget.apply import Applied, apply
from membudget.engine.bits import Fingerprint, fingerprint
from membudget.errors import CheckpointError
from membudget.graph import StepGraph
from membudget.memory.storage import plain_parts
from membudget.modes import choose_by_mode
from membudget.planner.answers import Chosen
from membudget.planner.overhead import NO_OVERHEADS
from membudget.planner.plan import Plan
from membudget.planner.regions import Region, made_in, saved_in, storages_of
from membudget.profile import Profile
from membudget.profile.run import state_kept
from membudget.profile.step import Step

VERIFYING_ERROR = 1.1
"""By how much more than `verifying_bytes` may be alive."""


SHARES = (1 / 2, 1 / 4, 1 / 10)
"""How large blocks may be that run again; those are taken whose step takes least."""


class Checked(Enum):
    """How a step under a plan was found to be the plain one, bit for bit."""

    VALUES = "each value that is made again, in the first step"
    PLAIN = "the outcome of a step, against the plain one"
    RERUN = "the outcome of a step, against one whose blocks run again"
    NOTHING = (
        "nothing: the budget has no room for it; audit() where the plain step fits"
    )


@dataclass(frozen=True)
class Checker:
    """Checks plans for one step.

    Attributes:
        step: The step; its model carries no regions.
        profile: The plain step, recorded.
        budget_bytes: What checking may take, too, unless the plain step was run.
    """

    step: Step
    profile: Profile
    budget_bytes: int

    def check(self, graph: StepGraph, plan: Plan, chosen: Chosen) -> Checked:
        """Tell how a plan can be trusted; the model is left without it.

        Returns:
            `VALUES` if its regions have to verify themselves in the first step: where
            there is room, and where the outcome is another than it should be.
        """
        if not plan.regions:
            return Checked.PLAIN
        if VERIFYING_ERROR * verifying_bytes(graph, chosen) <= self.budget_bytes:
            return Checked.VALUES
        how, put_other = self._reference(graph)
        if put_other is None:
            return how
        try:
            right = self._outcome(put_other)
        except CheckpointError:  # The blocks' code does something else the next time.
            return Checked.NOTHING
        found = self._outcome(lambda: put_plan(self.step, plan, verify=False))
        return how if found == right else Checked.VALUES

    def _reference(
        self, graph: StepGraph
    ) -> tuple[Checked, Callable[[], Applied] | None]:
        if self.profile.tensors == "real":
            return Checked.PLAIN, lambda: Applied({}, {})
        cuts = [choose_by_mode("full", graph, NO_OVERHEADS, share) for share in SHARES]
        blocks = min(cuts, key=lambda cut: cut.simulation.peak_bytes)
        if not blocks.calls or blocks.simulation.peak_bytes > self.budget_bytes:
            return Checked.NOTHING, None
        model, names = self.step.model, {call.path for call in blocks.calls}
        return Checked.RERUN, lambda: apply(
            model, where=lambda name, _: name in names, engine="rerun"
        )

    def _outcome(self, put: Callable[[], Applied]) -> list[Fingerprint]:
        applied = put()
        try:
            with state_kept(self.step, has_values=True):
                return [fingerprint(part) for part in _left_behind(self.step)]
        finally:
            applied.remove()


def put_plan(step: Step, plan: Plan, verify: bool) -> Applied:
    """Put a plan on the model of a step."""
    if not plan.regions:
        return Applied({}, {})
    return apply(step.model, plan, verify=verify)


def verifying_bytes(graph: StepGraph, chosen: Chosen) -> int:
    """Return about what is alive while regions verify themselves, at most.

    Args:
        graph: The plain step.
        chosen: The regions, which are not empty, and what comes of them.
    """
    alive_bytes = chosen.simulation.alive_bytes
    return max(
        alive_bytes[region.end - 1] + 2 * _dropped_bytes(graph, region)
        for region in chosen.regions
    )


def _dropped_bytes(graph: StepGraph, region: Region) -> int:
    saved = [graph.saved[index].value for index in saved_in(graph, region)]
    dropped = made_in(graph, region).intersection(storages_of(graph, saved))
    return sum(graph.storages[index].bytes for index in dropped - region.kept)


def _left_behind(step: Step) -> Iterator[Tensor]:
    """Run a step, and yield what it leaves behind."""
    yield step.run().detach()
    gradients = [leaf.grad for leaf in step.leaves() if leaf.grad is not None]
    for tensor in (*gradients, *step.model.buffers()):
        yield from plain_parts(tensor)
    yield torch.get_rng_state()
    if torch.cuda.is_available():
        yield from torch.cuda.get_rng_state_all()
