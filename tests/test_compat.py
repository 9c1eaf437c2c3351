"""Options of torch's names reach the region."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from membudget import compat
from membudget.attach import ModuleRegion, carried_by
from membudget.engine import sequential
from membudget.engine.options import RegionOptions
from membudget.errors import OptionTypeError

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


def test_by_default_a_region_is_that_of_membudget_without_options(options):
    compat.checkpoint(torch.sin, X, use_reentrant=False)
    # The last segment of a chain is no region.
    compat.checkpoint_sequential([torch.sin] * 2, 2, X, use_reentrant=False)
    assert options == [RegionOptions()] * 2


def test_the_context_that_does_nothing_is_no_option(options):
    compat.checkpoint(
        torch.sin, X, use_reentrant=False, context_fn=compat.noop_context_fn
    )
    assert options == [RegionOptions(context_fn=None)]


def test_warnings_name_the_line_that_left_the_variant_out(options):
    says = "and membudget uses use_reentrant=False, where torch would"
    with pytest.warns(UserWarning, match=says) as first:
        compat.checkpoint(torch.sin, X)
    with pytest.warns(UserWarning, match=says) as second:
        compat.checkpoint_sequential([torch.sin] * 2, 2, X)
    assert [w.filename for w in (*first, *second)] == [__file__] * 2


@pytest.mark.parametrize("number", [0, 1])
def test_a_number_is_a_truth_value(options, number):
    compat.checkpoint_sequential([torch.sin] * 2, 2, X, use_reentrant=number)
    assert [o.use_reentrant for o in options] == [bool(number)]


def test_an_input_in_place_of_the_variant_is_refused():
    with pytest.raises(OptionTypeError, match="must be a bool; got Tensor"):
        compat.checkpoint_sequential([torch.sin], 1, X, X)  # type: ignore[arg-type]


@pytest.mark.parametrize("preserve", [True, False])
def test_torch_s_function_is_a_reentrant_region(options, preserve):
    y = compat.CheckpointFunction.apply(torch.add, preserve, X, X)
    assert torch.equal(y, X + X)
    assert options == [RegionOptions(use_reentrant=True, preserve_rng_state=preserve)]


def test_a_wrapped_module_has_a_region_of_its_class_s_name():
    module = torch.nn.Linear(2, 2)
    assert compat.checkpoint_wrapper(module, debug=True) is module
    carried = carried_by(module)
    assert isinstance(carried, ModuleRegion)
    assert carried.options == RegionOptions(debug=True)
    assert carried.statistics.label == "Linear"


@pytest.mark.parametrize(("name", "is_one"), [("REENTRANT", True), ("NO_", False)])
def test_an_implementation_is_told_by_its_name(name, is_one):
    module = torch.nn.Linear(2, 2)
    compat.checkpoint_wrapper(module, SimpleNamespace(name=name))
    carried = carried_by(module)
    assert isinstance(carried, ModuleRegion)
    assert carried.options.use_reentrant is is_one


def test_a_function_for_the_wrapper_is_refused():
    module = torch.nn.Linear(2, 2)
    with pytest.raises(compat.CheckpointError, match="takes no checkpoint_fn: the"):
        compat.checkpoint_wrapper(module, checkpoint_fn=torch.sin)
    assert carried_by(module) is None


def layers() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())


def regions(model: torch.nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if carried_by(m) is not None]


def test_modules_are_selected_by_a_function_or_a_policy_and_all_by_default():
    for options, names in [
        ({}, ["0", "1"]),
        ({"check_fn": lambda m: isinstance(m, torch.nn.Tanh)}, ["1"]),
        ({"check_fn": lambda m: False, "auto_wrap_policy": every}, ["0", "1"]),
    ]:
        model = layers()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compat.apply_activation_checkpointing(model, **options)  # type: ignore[arg-type]
        assert regions(model) == names


def every(module: torch.nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return True


def none(module: torch.nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"check_fn": lambda module: False}, "check_fn"),
        ({"auto_wrap_policy": none}, "auto_wrap_policy"),
    ],
)
def test_a_selection_of_nothing_is_warned_of_where_it_was_made(options, what):
    says = f"selected no submodule of Sequential, .* look at {what}$"
    with pytest.warns(UserWarning, match=says) as caught:
        compat.apply_activation_checkpointing(layers(), **options)
    assert [w.filename for w in caught] == [__file__]


def test_a_wrapper_of_the_user_gets_the_modules_that_are_selected():
    seen: list[str] = []

    def wrapper(module: torch.nn.Module, **options: Any) -> torch.nn.Module:
        seen.append(type(module).__name__)
        return torch.nn.Identity()

    model = layers()
    compat.apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper)
    assert seen == ["Linear", "Tanh"]
    assert [type(m) for m in model] == [torch.nn.Identity] * 2


def test_a_name_that_torch_lacks_is_lacking():
    assert compat.CheckpointImpl.NO_REENTRANT.name == "NO_REENTRANT"
    with pytest.raises(
        AttributeError, match=r"'membudget\.compat' has no attribute 'no"
    ):
        compat.nowhere  # noqa: B018
