"""Row C1: gradients that are there before the forward count in a loop's budget."""

from __future__ import annotations

from tests.loop.training import check_held


def test_gradients_of_earlier_micro_batches_count():
    fitted = check_held([48] * 6, 0.6, accumulation=3)
    assert len(fitted.status().situations) == 2  # Without and with gradients.
