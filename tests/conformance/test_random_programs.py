"""Random programs under random nestings of regions equal the plain step, bit for bit.

Loss, gradients, buffers and all random streams are compared after one backward, after
two through the same graph, and after one through the gradients.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import membudget as mb
from tests.oracles import (
    Backward,
    assert_same_step,
    backward_once,
    backward_twice,
    double_backward,
    run_step,
)
from tests.programs import Program, case_of, merely_call
from tests.strategies import generated, programs

_BACKWARDS = st.sampled_from([backward_once, backward_twice, double_backward])
_OPTIONS = st.fixed_dictionaries(
    {
        "early_stop": st.booleans(),
        "determinism_check": st.sampled_from(["default", "values", "none"]),
    }
)


def check(program: Program, options: dict[str, Any], backward: Backward) -> None:
    """Hold a program under regions to the same program without."""
    case = case_of(program)
    caller = functools.partial(mb.checkpoint, **options)
    assert_same_step(
        run_step(case, lambda call: call.function(merely_call), backward),
        run_step(case, lambda call: call.function(caller), backward),
    )


@given(programs(), _OPTIONS, _BACKWARDS)
@generated(max_examples=60)
def test_a_random_program_under_regions_is_the_plain_program(
    program: Program, options: dict[str, Any], backward: Backward
) -> None:
    check(program, options, backward)


@pytest.mark.slow
@given(programs(most_instructions=30), _OPTIONS, _BACKWARDS)
@generated(max_examples=500)
def test_a_long_random_program_under_regions_is_the_plain_program(
    program: Program, options: dict[str, Any], backward: Backward
) -> None:
    check(program, options, backward)
