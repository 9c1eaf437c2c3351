"""What `torch.utils.checkpoint` makes of the zoo: the reason for this package.

A case that says torch gets it wrong, or refuses it, must see that happen: otherwise the
case has lost its teeth. Where a case says that torch is right, torch must be, too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.oracles import assert_same_step, differences, plain, run_step
from tests.zoo import CASES, Call, Case

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."),
    reason="the cases say what torch 2.13 does",
)

# Its faulty gradients come from memory that nobody has filled; by luck that can hold
# the noise of the forward.
_BY_LUCK = "rrelu_in_training"


def torch_region(call: Call) -> Any:
    """Run the call as a region of torch."""
    return checkpoint(call.function, *call.args, use_reentrant=False, **call.kwargs)


@pytest.mark.parametrize("case", [c for c in CASES if c.name != _BY_LUCK], ids=str)
def test_torch_makes_of_a_case_what_the_case_says(case: Case) -> None:
    expected = run_step(case, plain)
    if case.torch_here == "raises":
        # A `RuntimeError` of its own, or whatever the function raises when run again.
        with pytest.raises(Exception, match=case.torch_says):
            run_step(case, torch_region)
        return
    found = differences(expected, run_step(case, torch_region))
    assert bool(found) == (case.torch_here == "wrong")


def test_the_zoo_has_25_cases_that_torch_fails() -> None:
    assert sum(case.torch != "right" for case in CASES) >= 25


def test_every_case_is_repeatable() -> None:
    for case in CASES:
        assert_same_step(run_step(case, plain), run_step(case, plain))
