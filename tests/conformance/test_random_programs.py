"""Random programs under random nestings of regions equal the plain step, bit for bit.

Loss, gradients, buffers and all random streams are compared after one backward, after
two through the same graph, and after one through the gradients.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
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
from tests.programs import INPUTS, Machine, Program, run_program
from tests.strategies import programs
from tests.zoo import Call, Case

# The same examples in each run; a failure then repeats without a data base.
# Without shrinking: a program as it was drawn can be read, and shrinking takes minutes.
_settings = functools.partial(
    settings,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

_BACKWARDS = st.sampled_from([backward_once, backward_twice, double_backward])
_OPTIONS = st.fixed_dictionaries(
    {
        "early_stop": st.booleans(),
        "determinism_check": st.sampled_from(["default", "values", "none"]),
    }
)


def merely_call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function without a region."""
    return function(*args, **kwargs)


def case_of(program: Program) -> Case:
    """Return a case that runs `program`; its function takes the caller of regions."""

    def make() -> Call:
        machine = Machine()
        leaves = tuple(
            torch.randn(4, 4).requires_grad_(program.trainable[i])
            for i in range(INPUTS)
        )
        return Call(
            functools.partial(run_program, program, machine, leaves),
            state={
                "machine": machine,
                "leaves": leaves,
                "generator": machine.generator,
            },
            # With the leaves in it, there is always something to differentiate.
            used=lambda results: [*results, *leaves],
        )

    return Case("random program", make)


def check(program: Program, options: dict[str, Any], backward: Backward) -> None:
    """Hold a program under regions to the same program without."""
    case = case_of(program)
    caller = functools.partial(mb.checkpoint, **options)
    assert_same_step(
        run_step(case, lambda call: call.function(merely_call), backward),
        run_step(case, lambda call: call.function(caller), backward),
    )


@given(programs(), _OPTIONS, _BACKWARDS)
@_settings(max_examples=60)
def test_a_random_program_under_regions_is_the_plain_program(
    program: Program, options: dict[str, Any], backward: Backward
) -> None:
    check(program, options, backward)


@pytest.mark.slow
@pytest.mark.timeout(600)
@given(programs(most_instructions=30), _OPTIONS, _BACKWARDS)
@_settings(max_examples=500)
def test_a_long_random_program_under_regions_is_the_plain_program(
    program: Program, options: dict[str, Any], backward: Backward
) -> None:
    check(program, options, backward)
