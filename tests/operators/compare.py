"""Compare every way of running a variant with plain, and count what was compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tests.operators.ways import Step, keeping_each
from tests.oracles import StepResult, Way, differences, plain, run_step
from tests.zoo import Case

@dataclass
class Findings:
    """What comparing one operator or module found.

    Attributes:
        triples: How many times a variant was compared in one way with plain.
        differing: Which of them differ, and in what.
        unrepeatable: The variants of which two plain steps differ.
        refused: How many steps plain itself refused.
    """

    triples: int = 0
    differing: list[str] = field(default_factory=list)
    unrepeatable: list[str] = field(default_factory=list)
    refused: int = 0


@dataclass(frozen=True)
class Comparison:
    """The ways that are compared with plain, in which steps.

    Attributes:
        ways: The ways, by name.
        steps: The steps, by name.
        most_kept: How many operators of a variant are kept in turn.
    """

    ways: Mapping[str, Way]
    steps: Mapping[str, Step]
    most_kept: int

    def of(self, cases: Iterable[Case]) -> Findings:
        """Compare all variants of one operator."""
        findings = Findings()
        for case in cases:
            for name, step in self.steps.items():
                self._compare(step.of(case), step, f"{case} | {name}", findings)
        return findings

    def _compare(self, case: Case, step: Step, name: str, findings: Findings) -> None:
        def run(way: Way) -> StepResult:
            return run_step(case, way, step.backward)

        try:
            expected = run(plain)
        except Exception:  # Plain may refuse a variant with any error.
            findings.refused += 1
            return
        if differences(expected, run(plain)):
            findings.unrepeatable.append(name)
            return
        for way_name, way in self._ways(run):
            findings.triples += 1
            if found := _difference(run, way, expected):
                findings.differing.append(f"{name} | {way_name}: {found}")

    def _ways(self, run: Callable[[Way], object]) -> Iterator[tuple[str, Way]]:
        yield from self.ways.items()
        try:
            yield from keeping_each(run, self.most_kept)
        except Exception as error:
            raise AssertionError from error


def _difference(
    run: Callable[[Way], StepResult], way: Way, expected: StepResult
) -> str:
    """Say in what a way differs from plain; empty where it does not."""
    try:
        found = differences(expected, run(way))
    except Exception as error:  # Any error is a difference: plain raised none.
        return f"raises {type(error).__name__}: {error}"
    return ", ".join(found)
