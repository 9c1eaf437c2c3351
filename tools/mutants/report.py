"""Say what became of each mutant, and of all of them."""

from __future__ import annotations

from collections import Counter

from tools.mutants.equivalent import Key, key_of
from tools.mutants.verdict import Verdict

INDENT = " " * 12


class Report:
    """The lines of one run.

    Attributes:
        missed: How many mutants survived that are not listed as equivalent.
    """

    def __init__(self, reasons: dict[Key, str], seed: int) -> None:
        """Start a run; `reasons` lists the equivalent mutants."""
        self._reasons = reasons
        self._seed = seed
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0

    @property
    def missed(self) -> int:
        """How many mutants survived that are not listed as equivalent."""
        return self._counts["survived"]

    def add(self, verdict: Verdict) -> str:
        """Count a mutant and return what to print about it."""
        mutant = verdict.mutant
        reason = self._reasons.get(key_of(mutant))
        outcome = "survived" if reason is None else "equivalent"
        if verdict.caught_by is not None:
            outcome = "caught"
        self._counts[outcome] += 1
        self._seconds += verdict.seconds
        place = f"{mutant.path.removeprefix('src/membudget/')}:{mutant.line}"
        lines = [f"{outcome:<11} {place} {mutant.operator} {verdict.seconds:.1f} s"]
        if verdict.caught_by is not None:
            lines.append(f"{INDENT}by {verdict.caught_by}")
            if reason is not None:
                lines.append(f"{INDENT}yet listed as equivalent: {reason}")
        else:
            lines.append(f"{INDENT}{verdict.tests} tests run these lines")
            lines += [INDENT + line for line in mutant.diff()]
            if reason is not None:
                lines.append(f"{INDENT}{reason}")
        return "\n".join(lines)

    def summary(self) -> str:
        """Return the last line."""
        drawn = sum(self._counts.values())
        caught, listed = self._counts["caught"], self._counts["equivalent"]
        rate = f"{100 * caught / drawn:.1f} %" if drawn else "none"
        return (
            f"{caught} of {drawn} mutants caught ({rate}), {listed} equivalent, "
            f"{self.missed} survived; {self._seconds:.0f} CPU s, seed {self._seed}"
        )
