"""The result of `fit`: a model whose step fits its budget, its plan and its report."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from membudget.allocation import note_shortage
from membudget.apply import Applied, Status
from membudget.attempt import Attempt
from membudget.audit import AuditReport, audit
from membudget.modes import AUTO
from membudget.planner.plan import Plan
from membudget.planner.planner import smoothed
from membudget.profile import Profile
from membudget.profile.cache import FROM_CACHE, NOT_CACHED
from membudget.profile.chosen_draws import DECIDE
from membudget.race import Slowdown
from membudget.report.kept_text import kept_text
from membudget.report.memory_text import memory_lines
from membudget.report.plan_text import PLAIN_FITS, head
from membudget.report.rank_text import RankBytes, rank_lines
from membudget.report.region_table import region_table
from membudget.step import CallableStep, Step
from membudget.terms import term_off
from membudget.text import format_bytes

DOES_NOT_FIT = (
    "the plain step ran out of memory, so it was recorded on fake tensors: times are "
    "estimated"
)

NOT_COMPARED = (
    "the plain step was recorded, but ran out of memory when it was measured: plans "
    "are verified by fingerprints alone, and not compared with it"
)

MAPS_BLOCKS = (
    "the process's memory is limited, so malloc returns blocks of 128 KiB and more to "
    "the system when they are freed"
)

PRICED = "× the engine's usual overhead, as measured in the forward pass"

_LINES = {
    DOES_NOT_FIT: ("profile", "fake"),
    FROM_CACHE: ("profile", "cached"),
    NOT_CACHED: ("profile", "not cached"),
    NOT_COMPARED: ("compared", "no"),
    MAPS_BLOCKS: ("malloc", "maps"),
    DECIDE: ("draws", "decide"),
}
"""What the report says of a note of the profile, by how the note begins."""


class Fitted:
    """A model whose step fits its budget; as a context manager, undoes `fit` on exit.

    Attributes:
        plan: The plan applied to the model.
        mode: The `mode` that was passed to `fit`, such as `"auto"`.
        profile: Profile of the plain step, without regions.
        attempts: Every plan that was measured; the last one is applied.
        slowdown: Measured slowdown of the plan; `None` if nothing was timed.
        skipped: What `fit` did not do, because its seconds were over, in words.
        ranks: What each rank of the process group measured; empty if the model is
            trained by one process.
    """

    def __init__(
        self,
        mode: str,
        step: Step,
        profile: Profile,
        attempts: Sequence[Attempt],
        applied: Applied,
        slowdown: Slowdown | None = None,
        skipped: Sequence[str] = (),
        ranks: Sequence[RankBytes] = (),
    ):
        """Store the results of fitting; called by `fit`."""
        self.mode = mode
        self._step = step
        self.profile = profile
        self.attempts = tuple(attempts)
        self._applied = applied
        self.slowdown = slowdown
        self.skipped = tuple(skipped)
        self.ranks = tuple(ranks)
        applied.say_kept(self._kept_text())

    @property
    def plan(self) -> Plan:
        """The plan applied to the model."""
        return self.attempts[-1].plan

    @property
    def peak_bytes(self) -> int:
        """Measured peak bytes that a step allocates."""
        return self.attempts[-1].peak_bytes

    def status(self) -> Status:
        """Return the counters of every region."""
        return self._applied.status()

    def audit(self, batch: Any = None) -> AuditReport:
        """Compare a step under the plan with the plain step bitwise, on any batch."""
        step = self._step
        if batch is not None:
            step = Step(step.model, batch, step.loss_fn)
        is_own = isinstance(step, CallableStep)
        if is_own or not self.plan.regions:  # Without regions both runs are plain.
            return audit(plain=step.run, budgeted=step.run, modules=step.model)
        return audit(step.model, step.batch, step.loss_fn)

    def report(self) -> str:
        """Return predicted and measured values, and what each region keeps, as text."""
        *before, last = self.attempts
        lines = [head(self.plan, self.peak_bytes, self.profile.peak_bytes)]
        lines += memory_lines(last.memory)
        if last.unlimited_bytes:
            size = format_bytes(last.unlimited_bytes)
            lines.append(f"unlimited {size:>12}  reserved where the device has more")
        lines += self._timed_lines()
        if self.mode != AUTO:
            lines.append(f"mode      {self.mode:>12}  a rule, without planning")
        for start, (what, how) in _LINES.items():
            found = [note for note in self.profile.notes if note.startswith(start)]
            lines += [f"{what:10}{how:>12}  {note}" for note in found]
        if self.skipped:
            lines.append(f"time      {'over':>12}  skipped: {', '.join(self.skipped)}")
        if before:
            took = ("too many" if a.ran_out else f"{a.peak_bytes:,}" for a in before)
            more = ", ".join(took)
            lines.append(
                f"plans     {len(self.attempts):12}  the earlier ones took {more} bytes"
            )
        other = [r.name for r in self.status().regions if r.differences]
        if other:
            lines.append(
                f"differs   {len(other):12}  regions ran other operators than planned, "
                f"and may keep less: {other[0] or 'the model'!r} first"
            )
        if self.status().left_out:
            paths = ", ".join(repr(p or "the model") for p in self.status().left_out)
            lines.append(f"left out  {paths}: no region, under which values differ")
        regions = PLAIN_FITS
        if self.plan.regions:
            regions = region_table(smoothed(self.profile.graph), last.schedule)
        lines += rank_lines(self.ranks, self.plan.budget_bytes)
        return "\n".join([*lines, "", regions])

    __str__ = report

    def _timed_lines(self) -> list[str]:
        """Return what timing steps under the plan has shown."""
        last, slowdown = self.attempts[-1], self.slowdown
        if slowdown is None:
            return []
        lines = [f"{'':10}{slowdown.median:12.3f}  {slowdown.how}"]
        if last.overhead_scale != 1.0:
            lines.append(f"overhead  {last.overhead_scale:12.2f}  {PRICED}")
        off = term_off(self.profile, last, slowdown)
        return [*lines, f"error     {off}"] if off else lines

    def _kept_text(self) -> str:
        """Return what an error says that reports a failed allocation under the plan."""
        schedule = self.attempts[-1].schedule
        kept = kept_text(self.profile.graph, schedule, self.plan.budget_bytes)
        less = "Use a smaller batch"
        if self.mode == AUTO and not schedule.is_smallest:
            less = "Give fit a smaller budget, so that less is kept, or a smaller batch"
        return f"{kept}. {less}"

    def remove(self) -> None:
        """Remove the plan and restore the original model."""
        self._applied.remove()

    def __enter__(self) -> Fitted:
        """Return the fitted model itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the plan from the model; say what it keeps if memory ran out."""
        if error is not None:
            note_shortage(error, self._kept_text)
        self.remove()
