"""The hints that an error gives, each drawn from a fact."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from membudget.engine.compare import metadata
from membudget.engine.diagnosis import likely_causes, module_names
from membudget.engine.options import RegionOptions
from membudget.engine.reach import reach
from membudget.engine.reads import Reads

X = torch.zeros(2, 3)
LAST = "Python state that the forward advanced"


def causes(saved: Tensor | None, made: Tensor | None, **options: Any) -> list[str]:
    pair = [None if t is None else metadata(t) for t in (saved, made)]
    return likely_causes(torch.sin, None, RegionOptions(**options), *pair)


@pytest.mark.parametrize(
    ("made", "hint"),
    [
        (X.double(), "the dtype changed from torch.float32 to torch.float64"),
        (X.to("meta"), "the device changed from cpu to meta"),
        (torch.zeros(3, 2).t(), "only the memory layout differs"),
    ],
)
def test_the_first_difference_of_the_metadata_is_the_hint(made, hint):
    first, last = causes(X, made)
    assert first.startswith(hint)
    assert last.startswith(LAST)


def test_a_shape_that_changed_is_hinted_at_where_code_was_compiled(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._dynamo", torch)
    first, _ = causes(X, torch.zeros(4, 3))
    assert "mark_dynamic" in first
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    assert len(causes(X, torch.zeros(4, 3))) == 1


@pytest.mark.parametrize(
    ("saved", "made"), [(None, None), (X, None), (None, X), (X, torch.ones(2, 3))]
)
def test_without_a_difference_at_hand_only_the_general_hint_is_given(saved, made):
    (only,) = causes(saved, made)
    assert only.startswith(LAST)


def test_guards_that_are_off_are_named():
    assert causes(None, None, guards=False)[0].startswith("guards=False")
    first, *_ = causes(None, None, preserve_rng_state=False)
    assert first.startswith("preserve_rng_state=False")
    assert len(causes(None, None, guards=False, preserve_rng_state=False)) == 3


def test_a_container_that_grew_is_named_with_both_lengths():
    cache: list[int] = [1]
    table: dict[str, int] = {}

    def function(x: Tensor) -> Tensor:
        return x * len(cache) * len(table)

    reads = Reads(reach(function))
    cache += [2, 3]
    reads.finish()
    first, *_ = likely_causes(function, reads, RegionOptions(), None, None)
    assert first.startswith("the list 'cache' grew from 1 to 3")
    table["a"] = 1
    reads.finish()
    found = likely_causes(function, reads, RegionOptions(), None, None)
    assert found[1].startswith("the dict 'table' grew from 0 to 1")
    cache.clear()
    reads.finish()
    assert (
        "grew"
        not in likely_causes(
            function, Reads(reach(function)), RegionOptions(), None, None
        )[0]
    )


def test_every_module_has_its_path_below_the_label_of_the_region():
    inner = nn.Sequential(nn.Tanh())
    model = nn.Sequential(nn.Linear(2, 2), inner)
    names = module_names(model, "blocks.3")
    assert names[id(model)] == "blocks.3"
    assert names[id(model[0])] == "blocks.3.0"
    assert names[id(inner[0])] == "blocks.3.1.0"
    assert module_names(model)[id(inner[0])] == "1.0"
