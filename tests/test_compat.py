"""Options of torch's names reach the region."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from membudget import compat
from membudget.engine import sequential
from membudget.engine.options import RegionOptions

X = torch.ones(2, requires_grad=True)


def contexts() -> Any:
    return nullcontext(), nullcontext()


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> list[RegionOptions]:
    """Return the options of the regions that run."""
    seen: list[RegionOptions] = []

    def run(
        function: Any, args: Any, kwargs: Any, options: RegionOptions, *others: Any
    ) -> Any:
        seen.append(options)
        return function(*args, **kwargs)

    monkeypatch.setattr(compat, "run_region", run)
    monkeypatch.setattr(sequential, "run_region", run)
    return seen


OPTIONS: list[dict[str, Any]] = [
    {"determinism_check": "none"},
    {"determinism_check": "values"},
    {"debug": True},
    {"early_stop": False},
    {"preserve_rng_state": False},
    {"context_fn": contexts},
    {"debug": True, "early_stop": False, "preserve_rng_state": False},
]


@pytest.mark.parametrize("given", OPTIONS, ids=lambda given: "-".join(given))
def test_each_option_reaches_the_region_and_no_other_changes(options, given):
    y = compat.checkpoint(torch.sin, X, use_reentrant=False, **given)
    assert torch.equal(y, X.sin())
    assert options == [RegionOptions(**given)]


@pytest.mark.parametrize("given", OPTIONS, ids=lambda given: "-".join(given))
def test_each_option_reaches_the_segments_of_a_chain(options, given):
    layers = [torch.sin] * 4
    compat.checkpoint_sequential(layers, 3, X, use_reentrant=False, **given)
    assert options == [RegionOptions(**given)] * 2


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_the_variant_that_is_asked_for_is_taken(options, use_reentrant):
    compat.checkpoint(torch.sin, X, use_reentrant=use_reentrant)
    compat.checkpoint_sequential([torch.sin] * 2, 2, X, use_reentrant=use_reentrant)
    assert [o.use_reentrant for o in options] == [use_reentrant] * 2


def test_left_out_the_variant_is_warned_of_and_is_not_the_reentrant_one(options):
    with pytest.warns(UserWarning, match="checkpoint: pass use_reentrant explicitly"):
        compat.checkpoint(torch.sin, X)
    with pytest.warns(UserWarning, match="checkpoint_sequential: pass use_reentrant"):
        compat.checkpoint_sequential([torch.sin] * 2, 2, X)
    assert [o.use_reentrant for o in options] == [False, False]


def test_keywords_of_the_function_are_no_options(options):
    compat.checkpoint(torch.sum, X, use_reentrant=False, dim=0)
    assert options == [RegionOptions()]
