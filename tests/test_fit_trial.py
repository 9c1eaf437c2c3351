"""What some steps were measured to take."""

from __future__ import annotations

import pytest

from membudget.trial import Trial


@pytest.mark.parametrize(
    ("planned", "plain", "slowdown"),
    [
        ((3.0,), (2.0,), 1.5),
        # One slow step of a busy machine says nothing.
        ((3.0, 3.0, 99.0), (2.0, 2.0, 2.0), 1.5),
        ((3.0, 3.0, 3.0), (2.0, 99.0, 2.0), 1.5),
        ((1.0, 2.0, 3.0, 4.0), (1.0, 1.0, 3.0, 1.0), 2.5),
    ],
)
def test_the_slowdown_is_that_of_the_median_steps(planned, plain, slowdown):
    assert Trial(0, planned, plain).slowdown == slowdown


def test_without_plain_steps_there_is_no_slowdown():
    assert Trial(0, (3.0,), ()).slowdown is None
