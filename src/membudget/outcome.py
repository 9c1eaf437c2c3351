"""What one run of a step takes and computes: the plain step beside a planned one.

Regions compare recomputed values with those that they dropped, which says nothing of
what is computed differently while a region records. So each plan's measured step is
also compared with the plain step, as a whole. Each is the second step from one state
and draws the same random numbers; the first fills caches, and verifies the plan. On an
accelerator, more are metered: each leaves the allocator as the training does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from membudget._torch_accelerator import is_on_accelerator, limited
from membudget.audit.differences import Outcome, Results, compare
from membudget.errors import RecomputeMismatchError
from membudget.memory import Peak, peak_on
from membudget.memory.allocator import RESERVED, at_rest
from membudget.planned import without_plan
from membudget.state.identity import digest
from membudget.state.snapshot import State
from membudget.step import Step, state_kept

R = TypeVar("R")

MORE_STEPS = 2
"""Steps that are metered after the first, on an accelerator."""

REPEATS = 3
"""Plain runs that must agree before a difference is blamed on regions: a kernel that
adds in any order may give the same bits twice by chance."""


@dataclass(frozen=True)
class Metered:
    """One run of a step.

    Attributes:
        peak_bytes: Peak bytes that the step allocated; on an accelerator, reserved.
        outcome: Fingerprints of all that it computed or changed.
        memory: What the meter measured, in detail.
    """

    peak_bytes: int
    outcome: Outcome
    memory: Peak[Any] | None = None

    @property
    def live_bytes(self) -> int:
        """Peak bytes of tensors, without what an allocator reserves beside them."""
        return self.peak_bytes if self.memory is None else self.memory.peak_bytes


def metered(step: Step, start: State) -> Metered:
    """Meter one run of the step, and take fingerprints of what it computed.

    Args:
        step: The step, inside of `state_kept`.
        start: What `state_kept` yields.
    """
    step.prepare()
    of_device = is_on_accelerator(step.device)
    with limited(step.device, _limit_of(step)):
        found = peak_on(step.device, partial(_trained, step) if of_device else step.run)
    results = Results(digest)
    results.add("loss", found.result)
    outcome = Outcome(step.roots(), start, results)
    memory = replace(found, result=None)
    if of_device:
        memory = memory.less(step.optimizer.state_bytes)
    return Metered(memory.bounded_bytes, outcome, memory)


def _limit_of(step: Step) -> int | None:
    """Return what the process may reserve in all, if the step is limited."""
    if step.limit_bytes is None:
        return None
    before_bytes = at_rest(step.device)[RESERVED] + step.optimizer.state_bytes
    return before_bytes + step.limit_bytes


def _trained(step: Step) -> Any:
    """Run steps, with the optimizer's between; return the last one's loss.

    An allocator reserves more for the second, where blocks of the first hold the
    optimizer's state, at times for the third, which finds others cut, and hardly ever
    for a later one. A loop's variable holds the loss until the next one takes its
    place: so small a block keeps a segment from going back.
    """
    losses = [step.run()]
    with step.optimizer.begun(step.device):
        for _ in range(MORE_STEPS):
            step.prepare()
            losses = [step.run(losses.clear)]
            step.optimizer.step(step.device)
    return losses.pop()


def plain_run(step: Step) -> Metered:
    """Run a step without a plan twice, and meter the second run."""
    with state_kept(step, has_values=True) as start:
        step.run()
        return metered(step, start)


def check_equal(step: Step, plain: Metered, planned: Metered) -> None:
    """Compare loss, gradients, buffers, attributes and random numbers of two runs.

    What plain runs compute differently is not compared.

    Raises:
        RecomputeMismatchError: If anything differs; the error names it.
    """
    wrong = different(plain, planned)
    for _ in range(REPEATS):
        if not wrong:
            return
        with without_plan(step.model, put_back=True):
            unrepeatable = different(plain, plain_run(step))
        wrong = [name for name in wrong if name not in unrepeatable]
    if wrong:
        more = f", as do {len(wrong) - 1} more" if wrong[1:] else ""
        raise RecomputeMismatchError(f"{wrong[0]} differs from the plain step's{more}")


def different(one: Metered, other: Metered) -> list[str]:
    """Return what two runs computed differently, in words."""
    found = compare(one.outcome, other.outcome, "the other").differences
    return [f"the {d.kind} {d.name}".replace("loss loss", "loss") for d in found]


def at_fault(
    regions: Sequence[R], why: str, wrong: Callable[[Sequence[R]], str]
) -> list[tuple[R, str]]:
    """Bisect regions under which a step goes wrong; return those at fault, with why.

    Args:
        regions: Regions that are wrong together.
        why: What is wrong with them, in words.
        wrong: Says what is wrong with some of the regions alone; empty if nothing is.

    Example:
        >>> at_fault("abcdefg", "?", lambda some: "f is wrong" if "f" in some else "")
        [('f', 'f is wrong')]
    """
    if len(regions) == 1:
        return [(regions[0], why)]
    middle = len(regions) // 2
    found = [
        fault
        for half in (regions[:middle], regions[middle:])
        if (reason := wrong(half))
        for fault in at_fault(half, reason, wrong)
    ]
    # Perhaps only regions of both halves together go wrong.
    return found or [(region, why) for region in regions]
