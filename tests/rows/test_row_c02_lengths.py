"""Row C2: a longer micro-batch keeps the loop's budget, and has a plan of its own."""

from __future__ import annotations

from tests.loop.training import check_held


def test_longer_and_shorter_micro_batches_keep_the_budget():
    fitted = check_held([32, 64, 16, 48, 40, 24, 56, 64], 0.6)
    assert len(fitted.status().situations) == 7
