"""A stage serves the saved tensors from its first up to the next stage's first."""

from __future__ import annotations

import pytest

from membudget.engine.stages import Stages


@pytest.mark.parametrize(("saved", "stage"), [(0, 0), (2, 0), (3, 1), (6, 1), (7, 2)])
def test_a_saved_tensor_belongs_to_the_last_stage_that_begins_by_it(saved, stage):
    assert Stages([0, 3, 7], [(), (), ()]).of(saved) == stage
