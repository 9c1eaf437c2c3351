"""Compare every way of running a variant with plain, and count what was compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from membudget.errors import ChangedSinceForwardError
from tests.operators.ways import RERUN, UNGUARDED, Step, following, keeping_each
from tests.oracles import (
    StepResult,
    Way,
    differences,
    facts_in,
    plain,
    run_step,
    same_bits,
    tensors_in,
)
from tests.zoo import Case


@dataclass
class Findings:
    """What comparing one operator or module found.

    Attributes:
        triples: How often a variant was compared with plain, in one way.
        differing: Which of these differ, and in what.
        unrepeatable: The steps of which two plain runs differ.
    """

    triples: int = 0
    differing: list[str] = field(default_factory=list)
    unrepeatable: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Comparison:
    """What plain is compared with.

    Attributes:
        ways: The ways to run a call, by name.
        steps: The steps that are made of a call, by name.
        most_kept: How many operators of a variant are kept in turn, at most.
    """

    ways: Mapping[str, Way]
    steps: Mapping[str, Step]
    most_kept: int

    def of(self, variants: Iterable[Case]) -> Findings:
        """Compare all variants of an operator."""
        findings = Findings()
        for variant in variants:
            for name, step in self.steps.items():
                self._compare(variant, step, f"{variant}, {name}", findings)
        return findings

    def _compare(
        self, variant: Case, step: Step, name: str, findings: Findings
    ) -> None:
        case = step.of(variant)

        def run(way: Way) -> StepResult:
            return run_step(case, way, step.backward)

        try:
            expected, again = run(plain), run(plain)
            if step.harmless_where is not None:
                usual = run_step(case, plain, step.harmless_where)
                again = replace(again, gradients=usual.gradients)
        except Exception:  # Plain may refuse a variant with any error.
            return
        if differences(expected, again):
            if step.harmless_where is None:
                findings.unrepeatable.append(name)
            return
        written = _written(case, expected)
        writes_arguments = any(not name.startswith(".function") for name in written)
        for way_name, way in self._ways(run):
            if way_name == UNGUARDED and (written or step.changes_leaves):
                continue  # It promises nothing where what the call reads changes.
            may_refuse = step.changes_leaves or (writes_arguments and way_name == RERUN)
            findings.triples += 1
            if found := _difference(run, way, expected, may_refuse):
                findings.differing.append(f"{name}, {way_name}: {found}")

    def _ways(self, run: Callable[[Way], object]) -> Iterator[tuple[str, Way]]:
        yield from self.ways.items()
        yield from keeping_each(run, self.most_kept)
        yield from following(run)


def _difference(
    run: Callable[[Way], StepResult], way: Way, expected: StepResult, may_refuse: bool
) -> str:
    """Say in what a way differs from plain; empty where it does not.

    Args:
        run: Runs the step in a way.
        way: The way.
        expected: The plain step.
        may_refuse: Whether the way may say that something was changed.
    """
    try:
        return ", ".join(differences(expected, run(way)))
    except ChangedSinceForwardError as error:
        return "" if may_refuse else f"raises {error!r}"
    except Exception as error:  # Plain raised none, so any is a difference.
        return f"raises {error!r}"


def _written(case: Case, after: StepResult) -> list[str]:
    """Name what a call writes of its arguments and its module.

    Args:
        case: The case of the call.
        after: A plain step of it. Some kernels raise no version, so values count, too.
    """
    call = case.build()
    held = {"function": call.function, "args": call.args, "kwargs": call.kwargs}
    before = dict(facts_in(held))
    versions = {name: (tensor, tensor._version) for name, tensor in tensors_in(held)}
    plain(call)
    return [
        *(n for n, fact in before.items() if not same_bits(fact, after.values[n])),
        *(n for n, (tensor, version) in versions.items() if tensor._version != version),
    ]
