"""Every case of the zoo with all it saves offloaded equals the plain step."""

from __future__ import annotations

import pytest

from membudget.errors import ChangedSinceForwardError
from tests.offload.ways import WAYS
from tests.oracles import (
    Backward,
    assert_same_step,
    backward_once,
    backward_twice,
    double_backward,
    plain,
    run_step,
)
from tests.zoo import CASES, Case

BACKWARDS: dict[str, Backward] = {
    "once": backward_once,
    "twice": backward_twice,
    "double": double_backward,
}


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_offloaded_step_is_the_plain_step(
    case: Case, way: str, backward: str
) -> None:
    if backward == "double" and case.not_double:
        pytest.skip(case.not_double)
    expected = run_step(case, plain, BACKWARDS[backward])
    try:
        found = run_step(case, WAYS[way], BACKWARDS[backward])
    except ChangedSinceForwardError:
        # A region may refuse what it cannot compute again.
        assert case.refused
        assert "rerun" in way
        return
    assert_same_step(expected, found)
