"""What a step takes and computes, and which regions make it compute something else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from membudget.errors import RecomputeMismatchError
from membudget.memory import peak
from membudget.outcome import MORE_STEPS, at_fault, check_equal, plain_run
from membudget.state.identity import digest, is_same
from membudget.step import Step
from tests.changing import Changing
from tests.devices import is_cpu

STEPS = 2 if is_cpu() else 2 + MORE_STEPS
"""Steps of a run."""


class Varying(Changing):
    """Computes something else once `changes` names it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.changed(self.linear(x).mean())


def step_of(model: nn.Module) -> Step:
    return Step(model, torch.ones(4, 8), None)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ("loss", "the loss differs"),
        (
            "gradient",
            r"gradient linear.weight differs from the plain step's, as do \d",
        ),
        ("buffer", "the buffer count differs"),
        ("attribute", "the attribute cache differs"),
        ("stream", "the stream torch.* differs"),
    ],
)
def test_what_a_step_computes_otherwise_is_an_error_that_names_it(changes, named):
    model = Varying()
    step = step_of(model)
    plain = plain_run(step)
    model.changes = changes
    other = plain_run(step)
    model.changes = ""
    check_equal(step, plain, plain_run(step))
    with pytest.raises(RecomputeMismatchError, match=named):
        check_equal(step, plain, other)


def test_what_the_plain_step_does_not_repeat_is_not_compared():
    calls = (number for number in range(1000))  # Nobody can set this back.

    class Counts(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + next(calls))

    step = step_of(Counts(8, 8))
    check_equal(step, plain_run(step), plain_run(step))


def test_what_the_plain_step_repeats_only_by_chance_is_not_compared():
    factors = (factor for factor in (1, 2, 1, 3) for _ in range(STEPS))

    class SometimesOther(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * next(factors)

    step = step_of(SometimesOther(8, 8))
    check_equal(step, plain_run(step), plain_run(step))
    assert next(factors, None) is None


def test_what_a_metered_run_computed_is_of_its_last_step_and_leaves_no_trace():
    model = Varying()
    model.changes = "buffer"
    before = torch.get_rng_state()
    step = step_of(model)
    found = plain_run(step)

    assert model.count.item() == 0
    assert torch.equal(torch.get_rng_state(), before)
    model.count.fill_(STEPS)
    count = found.outcome.of("buffer")["count"]
    assert count is not None
    assert is_same(count, digest(model.count))
    step.prepare()
    assert found.peak_bytes == peak(step.run).peak_bytes


@given(st.integers(1, 40), st.sets(st.integers(0, 39)))
def test_bisecting_finds_every_region_that_is_at_fault_alone(count, faults):
    regions = list(range(count))
    faults &= set(regions)

    def wrong(some: Sequence[int]) -> str:
        return ", ".join(str(region) for region in some if region in faults)

    if faults:
        found = at_fault(regions, "all", wrong)
        assert {region for region, _ in found} == faults
        assert all(why in ("all", str(region)) for region, why in found)


def test_regions_that_only_go_wrong_together_are_all_at_fault():
    found = at_fault("abcd", "why", lambda some: "why" if {*"bc"} <= {*some} else "")
    assert found == [(region, "why") for region in "abcd"]
