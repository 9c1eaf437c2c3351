"""Every case of the zoo under the replay engine equals the plain step, bit for bit.

Equal means each bit of the loss, the outputs, every gradient, every buffer and other
state, and every random stream: whatever is kept, and however often one goes backward. A
replay does not run the function again, so it takes what a rerun refuses, too.

What is kept is drawn at random as well: any set of operators, also over programs that
are drawn, in which replay regions are nested.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import membudget as mb
from membudget.engine.options import Verify
from membudget.policies import Candidate
from tests.keeps import (
    BACKWARDS,
    KEEPS,
    QUICK,
    VERIFIES,
    replay,
    replayed,
    replayed_twice,
)
from tests.oracles import StepResult, assert_same_step, plain, run_step
from tests.programs import Program, case_of, merely_call
from tests.strategies import generated, programs
from tests.zoo import CASES, Call, Case

_MOST_OPERATORS = 40  # More than most cases run.


def twice_plain(call: Call) -> Any:
    """Run the call twice."""
    return [plain(call), plain(call)]


@functools.cache
def plain_step(case: Case, backward: str) -> StepResult:
    """Return the step without regions, which many tests compare with."""
    return run_step(case, plain, BACKWARDS[backward])


def skip_what_is_not_offered(case: Case, backward: str) -> None:
    """Skip a case that cannot be differentiated twice."""
    if backward == "double-backward" and case.not_double:
        pytest.skip(case.not_double)


_KEEPS = [
    pytest.param(keep, marks=() if keep in QUICK else pytest.mark.slow)
    for keep in KEEPS
]
_KEEPS_AND_BACKWARDS = [
    pytest.param(
        keep,
        backward,
        marks=() if keep in QUICK or backward == "once" else pytest.mark.slow,
    )
    for keep in KEEPS
    for backward in BACKWARDS
]


@pytest.mark.parametrize(("keep", "backward"), _KEEPS_AND_BACKWARDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_replayed_step_is_the_plain_step(
    case: Case, keep: str, backward: str
) -> None:
    skip_what_is_not_offered(case, backward)

    step = run_step(case, replayed(KEEPS[keep]), BACKWARDS[backward])

    assert_same_step(plain_step(case, backward), step)


@pytest.mark.parametrize("verify", [True, "fingerprints"])
@pytest.mark.parametrize("keep", _KEEPS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_verified_step_is_the_plain_step_and_pins_nothing(
    case: Case, keep: str, verify: Verify
) -> None:
    # An unrepeatable output would warn, and warnings are errors here. The second step
    # has been verified already, where the function is the same.
    way = replayed(KEEPS[keep], verify=verify)

    for _ in range(2):
        assert_same_step(plain_step(case, "once"), run_step(case, way))


@pytest.mark.parametrize("keep", QUICK)
@pytest.mark.parametrize(
    "case", [case for case in CASES if not case.not_twice], ids=str
)
def test_two_replay_regions_in_one_step_are_two_plain_calls(
    case: Case, keep: str
) -> None:
    if case.name == "in_place_on_the_input":
        pytest.skip("two plain calls are refused by autograd itself")
    if case.name == "embedding_with_max_norm":
        pytest.xfail("a weight that each call writes counts as changed since")
    step = run_step(case, replayed_twice(KEEPS[keep]))

    assert_same_step(run_step(case, twice_plain), step)


class KeepSet:
    """Keep what the operators with these numbers make."""

    def __init__(self, numbers: frozenset[int]) -> None:
        self.numbers = numbers

    def __call__(self, candidate: Candidate) -> bool:
        """Return whether the output is kept."""
        return candidate.index in self.numbers

    def __repr__(self) -> str:
        """Return the numbers, so that a failing example can be read."""
        return f"keep {sorted(self.numbers)}"


# Of a set, most members are kept or few are: both are as likely.
_KEEP_SETS = st.builds(
    KeepSet,
    st.frozensets(st.integers(1, _MOST_OPERATORS))
    | st.frozensets(st.integers(1, _MOST_OPERATORS)).map(
        lambda numbers: frozenset(range(1, _MOST_OPERATORS)) - numbers
    ),
)


def hold_case_to_plain(
    case: Case, keep: KeepSet, backward: str, verify: Verify
) -> None:
    """Hold a case that keeps a drawn set to the plain step."""
    if backward == "double-backward" and case.not_double:
        backward = "retain-graph"
    step = run_step(case, replayed(keep, verify=verify), BACKWARDS[backward])

    assert_same_step(plain_step(case, backward), step)


def hold_program_to_plain(program: Program, keep: KeepSet, backward: str) -> None:
    """Hold a program whose regions keep a drawn set to the plain program."""
    case, region = case_of(program), replay(keep)

    def caller(function: Any, *args: Any, **kwargs: Any) -> Any:
        return region(function)(*args, **kwargs)

    assert_same_step(
        run_step(case, lambda call: call.function(merely_call), BACKWARDS[backward]),
        run_step(case, lambda call: call.function(caller), BACKWARDS[backward]),
    )


_CASES = st.sampled_from(CASES)
_BACKWARDS = st.sampled_from(sorted(BACKWARDS))


@given(_CASES, _KEEP_SETS, _BACKWARDS, st.sampled_from(VERIFIES))
@generated(max_examples=100)
def test_whichever_operators_are_kept_a_replayed_step_is_the_plain_step(
    case: Case, keep: KeepSet, backward: str, verify: Verify
) -> None:
    hold_case_to_plain(case, keep, backward, verify)


@given(programs(), _KEEP_SETS, _BACKWARDS)
@generated(max_examples=40)
def test_a_random_program_under_replay_regions_is_the_plain_program(
    program: Program, keep: KeepSet, backward: str
) -> None:
    hold_program_to_plain(program, keep, backward)


@pytest.mark.slow
@given(_CASES, _KEEP_SETS, _BACKWARDS, st.sampled_from(VERIFIES))
@generated(max_examples=3000)
def test_of_many_keep_sets_each_leaves_the_step_plain(
    case: Case, keep: KeepSet, backward: str, verify: Verify
) -> None:
    hold_case_to_plain(case, keep, backward, verify)


@pytest.mark.slow
@given(programs(most_instructions=30), _KEEP_SETS, _BACKWARDS)
@generated(max_examples=500)
def test_a_long_random_program_under_replay_regions_is_the_plain_program(
    program: Program, keep: KeepSet, backward: str
) -> None:
    hold_program_to_plain(program, keep, backward)


@given(programs(), _KEEP_SETS, _BACKWARDS, st.sets(st.integers(0, 6)))
@generated(max_examples=40)
def test_a_random_program_under_regions_of_both_engines_is_the_plain_program(
    program: Program, keep: KeepSet, backward: str, rerun: set[int]
) -> None:
    case, region = case_of(program), replay(keep)

    def caller(function: Any, *args: Any, **kwargs: Any) -> Any:
        # The choice is by what a rerun of the region around will see again.
        if len(args) + len(kwargs) in rerun:
            return mb.checkpoint(function, *args, **kwargs)
        return region(function)(*args, **kwargs)

    assert_same_step(
        run_step(case, lambda call: call.function(merely_call), BACKWARDS[backward]),
        run_step(case, lambda call: call.function(caller), BACKWARDS[backward]),
    )
