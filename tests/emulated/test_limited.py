"""What `fit` fits into a budget trains where the device raises beyond the budget."""

from __future__ import annotations

import pytest

from tests.emulated.limited import (
    MODELS,
    MOST_OPERATORS,
    operators_of,
    rows_of,
    trains_in_what_is_free,
)

ALWAYS = (
    *("mlp", "convolutions_in_place", "shared_modules", "recommender", "routed"),
    *("wavenet", "segmentation", "codebook"),
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ALWAYS else pytest.mark.slow) for n in MODELS],
)
def test_a_budget_is_enough_on_a_device_that_has_no_more(name: str):
    assert operators_of(name) <= MOST_OPERATORS
    for row in rows_of(name):
        assert row.is_equal
        assert row.raises
        assert row.least_bytes <= row.budget_bytes < row.plain_bytes
        assert row.reserved_bytes <= row.budget_bytes


@pytest.mark.parametrize("name", ["mlp", "rmsnorm_decoder"])
def test_a_step_fits_what_is_free_where_others_take_of_it(name: str):
    assert trains_in_what_is_free(name)


def test_at_least_forty_models_are_trained_under_a_limit():
    assert len(MODELS) >= 40
    assert set(ALWAYS) < set(MODELS)
