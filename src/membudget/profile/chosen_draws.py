"""Choose random numbers with which a step takes most, where they decide what runs.

The step is recorded with the largest numbers that can be drawn, and with the smallest.
Between a draw and the next runs what the draw decides, so that each gets the letter
with which more bytes are allocated there:

    draw          1st        2nd        3rd         (`draws` has the letters)
    largest       8 KiB      0          4 KiB       layers 1 and 3 run
    smallest      0          8 KiB      4 KiB       layers 2 and 3 run
    chosen        L          S          -           all run

Draws inside of what others decide are chosen after those. The step may take less than
with one letter for all, so the best of all that were recorded stays.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

from membudget._torch import fake_errors
from membudget.allocation import is_out_of_memory
from membudget.draws import AS_DRAWN, LARGEST, SMALLEST
from membudget.profile.step_recorder import StepRecorder
from membudget.profile.timing import is_grouped
from membudget.state.snapshot import State
from membudget.step import Step

DECIDE = "random numbers decide what the step runs"
"""How the note of a profile begins."""

REGIONS_OF_CHANCE = (
    f"{DECIDE}: no plan fits that leaves those modules without a region, and where "
    "other operators run, theirs may take more"
)
"""The note of a profile whose plan has regions where chance decides."""

MOST_DEPTH = 3
"""How deep draws inside of what others decide are chosen, or how often a loop repeats
that draws until a number is large."""

Make = Callable[[], StepRecorder]
Record = Callable[[StepRecorder, Step], None]


def recorded_with_most(
    step: Step,
    start: State,
    make: Make,
    record: Record,
    warm_up: Callable[[], object],
) -> StepRecorder:
    """Record a step; if random numbers decide what it runs, the one that takes most.

    Leaves the letters of the numbers in `step.draws`, and in what is `noted`.

    Args:
        step: The step.
        start: The state in which it begins.
        make: Makes a recorder.
        record: Records the step with it.
        warm_up: Does what has been done before the first recording.
    """
    trials = _Trials(step, start, make, record, warm_up)
    natural = trials.run("")
    if not natural.noted.may_decide:
        trials.check("")
        return natural
    most = trials.best(trials.letters_with_most())
    found = trials.recorded(most)
    trials.check(most)
    if trials.decide():
        found.noted.letters = most or AS_DRAWN
    return found


@dataclass
class _Trials:
    """Recordings of a step with several letters.

    Attributes:
        found: Bytes that a forward allocates after each draw until the next, before the
            first one at place 0; by letters.
        counts: How many draws there were, also in steps that failed; by letters.
        latest: The latest recording, with its letters.
    """

    step: Step
    start: State
    make: Make
    record: Record
    warm_up: Callable[[], object]
    found: dict[str, list[int]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    failed: Exception | None = None
    latest: tuple[str, StepRecorder] | None = None

    def recorded(self, letters: str) -> StepRecorder:
        """Return a recording that nothing has run after."""
        if self.latest is not None and self.latest[0] == letters and not is_grouped():
            return self.latest[1]
        return self.run(letters)

    def run(self, letters: str) -> StepRecorder:
        """Record the step once; a step that fails is none of those found."""
        is_further = self.latest is not None
        if is_further:
            self.start.restore()
        self.step.draws = letters
        self.found.pop(letters, None)
        recorder = self.make()
        try:
            if is_further:
                self.warm_up()
            self.step.prepare()
            self.record(recorder, self.step)
        except Exception as error:
            asks_for_value = isinstance(error.__cause__, fake_errors())
            draws = letters or recorder.noted.draws
            if asks_for_value or is_out_of_memory(error) or not draws:
                raise
            self.failed = error  # Such as that no layer ran, and made no loss.
        else:
            self.found[letters] = _allocated_bytes(recorder)
        self.counts[letters] = len(recorder.noted.draws)
        self.latest = letters, recorder
        return recorder

    def letters_with_most(self) -> str:
        """Return the letter of each draw with which more is allocated.

        Draws inside of what others decide come to light once those are chosen.
        """
        letters = ""
        for _ in range(MOST_DEPTH):
            if letters not in self.counts:
                self.run(letters)
            count = self.counts[letters] - len(letters)
            more = self._more(letters, count) if count > 0 else ""
            letters += more
            if not more.strip(AS_DRAWN):
                break
        return letters

    def _more(self, letters: str, count: int) -> str:
        """Return the letters of so many draws after those that are chosen."""
        tails = []
        # What drops layers mostly runs them all with the largest: that run is the last.
        for letter in (SMALLEST, LARGEST):
            tried = letters + letter * count
            if tried not in self.counts:
                self.run(tried)
            tail = self.found.get(tried, [])[len(letters) + 1 :]
            last = tail[count - 1 :]  # With those that only this letter brings.
            tail = [*tail[: count - 1], sum(last)] if last else tail
            tails.append(tail + [-1] * (count - len(tail)))
        return "".join(
            AS_DRAWN if small == large else SMALLEST if small > large else LARGEST
            for small, large in zip(*tails, strict=True)
        )

    def best(self, letters: str) -> str:
        """Return the letters with which most is allocated; of equal ones, the first."""
        if not self.found or not self.decide():
            return ""
        order = [tried for tried in (letters, *self.found) if tried in self.found]
        return max(order, key=lambda tried: sum(self.found[tried]))

    def decide(self) -> bool:
        """Return whether the numbers decide what runs."""
        first, *others = self.found.values()
        return self.failed is not None or any(other != first for other in others)

    def check(self, letters: str) -> None:
        """Raise what a step raised, if it was not recorded with these letters."""
        if letters not in self.found:
            assert self.failed is not None
            raise self.failed


def _allocated_bytes(recorder: StepRecorder) -> list[int]:
    moments = [draw.moment for draw in recorder.noted.draws]
    end = sum(operator.phase == "forward" for operator in recorder.operators)
    found = [0] * (len(moments) + 1)
    for storage in recorder.lifetimes.storages:
        if 0 <= storage.birth < end:
            found[bisect_right(moments, storage.birth)] += storage.bytes
    return found


def notes_on_draws(letters: str) -> tuple[str, ...]:
    """Return the caveat that a profile has of what its step drew."""
    if not letters:
        return ()
    how = "those with which it allocates most, of some that were tried"
    if not letters.strip(AS_DRAWN):
        how = "as they were drawn; another step may take more"
    return (f"{DECIDE}: they are {how}",)
