"""Options: refused when they contradict each other, and what follows from them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import membudget as mb
from membudget.engine.options import (
    DEFAULTS,
    OPTION_NAMES,
    RegionOptions,
    checked_options,
    take_options,
)


def contexts() -> Any:
    return nullcontext(), nullcontext()


def keep(candidate: Any) -> bool:
    return False


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"determinism_check": "shape"}, "determinism_check must be one of.*'shape'"),
        ({"engine": "rerunning"}, "engine must be one of.*'rerunning'"),
        ({"verify": "twice"}, "verify must be True.*'twice'"),
        ({"keep": keep, "engine": "rerun"}, "keep needs the replay engine"),
        ({"keep": keep, "use_reentrant": True}, "keep needs the replay engine"),
        ({"engine": "replay", "context_fn": contexts}, "supports neither context_fn"),
        ({"engine": "replay", "use_reentrant": True}, "supports neither context_fn"),
        ({"context_fn": 3}, "context_fn must be a function"),
        (
            {"use_reentrant": True, "context_fn": contexts},
            "supports neither context_fn",
        ),
        (
            {"use_reentrant": True, "debug": True},
            "supports neither context_fn nor debug",
        ),
        ({"keep": 3}, "keep must be a policy"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, match):
    with pytest.raises(mb.OptionError, match=match):
        RegionOptions(**options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"keep": keep},
        {"keep": keep, "engine": "replay"},
        {"engine": "replay", "debug": True},
        {"engine": "rerun", "context_fn": contexts, "debug": True},
        {"use_reentrant": True, "engine": "rerun"},
        *({"verify": verify} for verify in (True, False, "fingerprints")),
        *({"determinism_check": check} for check in ("default", "values", "none")),
    ],
)
def test_options_that_go_together_are_taken(options):
    made = RegionOptions(**options)
    assert {name: getattr(made, name) for name in options} == options


@pytest.mark.parametrize(
    ("options", "always", "may"),
    [
        ({}, False, True),
        ({"engine": "rerun"}, False, False),
        ({"engine": "replay"}, True, False),
        ({"keep": keep}, True, True),
        ({"keep": keep, "engine": "replay"}, True, False),
        # Whoever asks something of a rerun gets one.
        ({"determinism_check": "values"}, False, False),
        ({"determinism_check": "none"}, False, False),
        ({"early_stop": False}, False, False),
        ({"preserve_rng_state": False}, False, False),
        ({"debug": True}, False, False),
        ({"use_reentrant": True}, False, False),
        ({"context_fn": contexts}, False, False),
        ({"guards": False}, False, True),
    ],
)
def test_the_engine_follows_from_the_options(options, always, may):
    made = RegionOptions(**options)
    assert (made.always_replays, made.may_replay) == (always, may)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, False),
        ({"debug": True}, True),
        ({"determinism_check": "values"}, True),
        ({"determinism_check": "none"}, False),
        ({"context_fn": contexts}, True),
        ({"early_stop": False}, False),
    ],
)
def test_a_forward_needs_more_than_hooks_only_where_something_is_noted(
    options, expected
):
    assert RegionOptions(**options).is_instrumented is expected


def test_options_are_taken_out_of_keywords_and_the_others_stay():
    keywords = {"early_stop": False, "mask": 3, "debug": True}
    options = take_options(keywords)
    assert (options.early_stop, options.debug) == (False, True)
    assert keywords == {"mask": 3}


def test_without_options_the_defaults_are_taken():
    keywords = {"mask": 3}
    assert take_options(keywords) is DEFAULTS
    assert take_options({}) is DEFAULTS
    assert keywords == {"mask": 3}


def test_a_value_that_cannot_be_hashed_is_an_option_as_any_other():
    options = take_options({"keep": ["*.attention"], "verify": False})
    assert options.keep == ["*.attention"]
    assert options.always_replays
    assert not options.verify


def test_a_flag_and_a_number_that_equal_each_other_are_not_confused():
    first = take_options({"early_stop": True})
    second = take_options({"early_stop": 1})
    assert first.early_stop is True
    assert second.early_stop == 1
    assert type(second.early_stop) is int


def test_a_name_that_is_no_option_is_refused_with_those_that_are():
    with pytest.raises(mb.OptionError, match="unknown option 'debugging', 'kep'") as e:
        checked_options({"kep": None, "debugging": True, "debug": True})
    for name in OPTION_NAMES:
        assert name in str(e.value)
    assert checked_options({"debug": True}).debug


def test_what_is_derived_is_no_option():
    with pytest.raises(mb.OptionError, match="unknown option 'decisions', 'policy'"):
        checked_options({"policy": None, "decisions": {}})


def test_leftover_keywords_of_a_decorator_are_refused():
    with pytest.raises(mb.OptionError, match="unknown option 'kep'"):
        mb.checkpoint(kep=None)
    region: Any = mb.checkpoint(early_stop=False)
    x = torch.ones(2, requires_grad=True)
    assert torch.equal(region(torch.sin)(x), x.sin())


def test_the_defaults_are_those_that_the_documentation_tells():
    expected = {
        "use_reentrant": False,
        "context_fn": None,
        "determinism_check": "default",
        "debug": False,
        "early_stop": True,
        "preserve_rng_state": True,
        "guards": True,
        "engine": "auto",
        "keep": None,
        "verify": True,
    }
    found = {name: getattr(DEFAULTS, name) for name in OPTION_NAMES}
    assert {name: found[name] for name in expected} == expected
    for name, default in expected.items():
        assert type(found[name]) is type(default)
