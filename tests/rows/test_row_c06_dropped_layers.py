"""Row C6: layers that are dropped at random keep the loop's budget."""

from __future__ import annotations

from tests.loop.training import check_held
from tests.loops.models import Language


def test_layers_that_are_dropped_at_random_keep_the_budget():
    check_held([48] * 6, 0.7, make=lambda: Language(drop=0.4))
