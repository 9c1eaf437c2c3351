"""Architectures that nobody chose for this library, trained in five ways each.

Every test is about one architecture, most about one way. What the ways give is compared
with the plain step bit for bit, and peaks are counted by an allocator of our own.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

import membudget as mb
from tests.field.case import Case
from tests.field.known import KNOWN, matches
from tests.field.registry import CASES
from tests.field.subject import (
    EVALUATION,
    FIRST,
    OTHER_SHAPE,
    RUNS,
    SECOND,
    Subject,
    differences,
)
from tests.field.ways import DRAWN, PERCENTS, WAYS, Examined, examine

pytestmark = [
    pytest.mark.field,
    pytest.mark.slow,
    # The libraries warn of what they will change; those are no tests of the libraries.
    pytest.mark.filterwarnings("ignore"),
]
PEAKS_ARE_WITHIN = 0.01


class Examination:
    """An architecture, and what was seen of it, each way examined once."""

    def __init__(self, case: Case) -> None:
        self.subject = Subject(case)
        self.in_way = cache(lambda way: examine(self.subject, way))


@pytest.fixture(scope="module", params=CASES.values(), ids=list(CASES))
def architecture(request: pytest.FixtureRequest) -> Examination:
    return Examination(request.param)


@pytest.fixture
def examined(architecture: Examination, way: str) -> Examined:
    return architecture.in_way(way)


EVERY_WAY = [*WAYS, DRAWN]
every_way = pytest.mark.parametrize("way", EVERY_WAY)
every_budget = pytest.mark.parametrize("way", PERCENTS)
every_plan = pytest.mark.parametrize("way", [*PERCENTS, DRAWN])


def test_the_plain_step_repeats_itself(architecture: Examination):
    subject = architecture.subject
    for run in RUNS:
        assert differences(subject.plain[run], subject.outcome(run)) == []
    gradients = [v for n, v in subject.plain[FIRST].items() if "gradient" in n]
    assert any(g is not None and g.any() for g in gradients)


@every_way
def test_the_first_batch_gives_the_bits_of_the_plain_step(examined: Examined):
    assert examined[FIRST] == []


@every_way
def test_a_second_batch_gives_the_bits_of_the_plain_step(examined: Examined):
    assert examined[SECOND] == []


@every_way
def test_another_shape_gives_the_bits_of_the_plain_step(examined: Examined):
    assert examined[OTHER_SHAPE] == []


@every_way
def test_evaluation_gives_the_bits_of_the_plain_step(examined: Examined):
    assert examined[EVALUATION] == []


def test_offloading_gives_the_bits_of_the_plain_step(architecture: Examination):
    subject = architecture.subject
    off = mb.offload("256MiB", window="1MiB", smallest="1KiB")
    for run in (FIRST, FIRST, SECOND):
        plain = subject.plain[run]  # Before `off` is entered.
        subject.reset()
        with off:
            found = subject.outcome(run)
        assert differences(plain, found) == []
    assert off.status().out_bytes
    subject.reset()


@every_way
def test_removing_leaves_the_model_as_it_was(examined: Examined):
    assert examined["structure"]
    assert examined["removed"] == []


@every_budget
def test_the_budget_holds_or_the_least_that_its_refusal_names(examined: Examined):
    assert examined["peak"] <= examined["applied"].plan.budget_bytes


@every_budget
def test_the_budget_holds_whichever_layers_chance_drops(examined: Examined):
    peaks = examined["drawn peaks"]
    assert max(peaks, default=0) <= examined["applied"].plan.budget_bytes


@every_budget
def test_a_refusal_names_no_more_than_the_plain_step_takes(
    architecture: Examination, examined: Examined
):
    budget_bytes = examined["applied"].plan.budget_bytes
    # Leasts that are named have a hundredth for what a prediction leaves out.
    assert budget_bytes <= 1.02 * architecture.subject.plain_peak_bytes


@every_plan
def test_the_predicted_peak_is_the_measured_one(examined: Examined, record_property):
    error = examined["predicted"] / examined["peak"] - 1
    record_property("error of the predicted peak", abs(error))
    assert abs(error) <= PEAKS_ARE_WITHIN


@every_budget
def test_every_region_runs_the_operators_of_its_plan(examined: Examined):
    examined["applied"]
    assert [r.name for r in examined["status"].regions if r.differences] == []


def test_there_are_forty_architectures_and_half_of_them_are_held_out():
    assert len(CASES) >= 40
    halves = Counter(case.half for case in CASES.values())
    assert abs(halves["tuned"] - halves["held out"]) <= len(CASES) // 5


def test_every_known_failure_is_one_of_a_test_here(request: pytest.FixtureRequest):
    names = [item.name for item in request.session.items]
    unmatched = [p for p in KNOWN if not any(matches(name, p) for name in names)]
    if len(names) > len(CASES) * len(EVERY_WAY):  # Else only some were asked for.
        assert unmatched == []
