"""Row B12: a file that is no plan is refused in words, and one is written whole."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import membudget as mb
from membudget.errors import OptionError, PlanError
from membudget.planner.plan import VERSION, Plan
from membudget.planning import plan_for
from membudget.text import write_whole
from tests.planner.drafts import PLAN
from tests.planner.models import MODELS

DEEP = 100_000


def nested(depth: int) -> Any:
    data: Any = []
    for _ in range(depth):
        data = [data]
    return data


MALFORMED = {
    "arrays": ("[" * DEEP, "nested too deeply|cannot be read"),
    "objects": ('{"regions":' * DEEP, "nested too deeply"),
    "ratio": (PLAN.to_json().replace("1.25", "1" * 400), "slowdown must be less than"),
    "bytes": (PLAN.to_json().replace("2000", "2" * 5000), "cannot be read"),
    "count": (PLAN.to_json().replace("2000", "2" * 400), "peak_bytes must be less"),
    "empty": ("", "the plan cannot be read: it is an empty text"),
    "blank": (" \n", "the plan cannot be read: it is an empty text"),
    "mark": ("\ufeff" + PLAN.to_json(), "begins with a byte order mark"),
}


@pytest.mark.parametrize(("text", "words"), MALFORMED.values(), ids=[*MALFORMED])
def test_a_malformed_text_is_no_plan(text, words):
    with pytest.raises(PlanError, match=words):
        Plan.from_json(text)


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_file_is_no_plan(tmp_path, kind):
    path, (text, _) = tmp_path / "plan.json", MALFORMED[kind]
    path.write_text(text, encoding="utf-8")
    for source in (path, str(path)):
        with pytest.raises(PlanError, match=r"the plan cannot be read|less than"):
            Plan.from_json(source)


@pytest.mark.parametrize("kind", ["deep", "deeper", "large", "negative"])
@pytest.mark.parametrize("name", ["version", "model", "slowdown", "regions"])
def test_data_that_cannot_be_printed_is_no_plan(name, kind):
    value = {
        "deep": nested(500),
        "deeper": nested(50_000),
        "large": 10**5000,
        "negative": -(10**5000),
    }[kind]
    with pytest.raises(PlanError, match=rf"plan\.{name}"):
        Plan.from_dict(PLAN.to_dict() | {name: value})


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(PLAN.to_dict())), anything)
def test_whatever_a_field_holds_is_a_plan_or_a_plan_error(name, value):
    try:
        found = Plan.from_dict(PLAN.to_dict() | {name: value})
    except PlanError:
        return
    assert Plan.from_json(found.to_json()) == found


@settings(max_examples=200, deadline=None)
@given(st.text() | st.text().map("{{{}".format))
def test_whatever_a_text_holds_is_a_plan_error(text):
    with pytest.raises(PlanError, match="plan"):
        Plan.from_json(text)


def plan_of(model: nn.Module, batch: Any) -> Plan:
    return plan_for(mb.profile(model, batch, fake=True), model, "60%")


def test_a_plan_for_another_model_names_the_layers_and_the_widths_that_differ():
    model, batch = MODELS["mlp"]()
    plan = plan_of(model, batch)
    with pytest.raises(PlanError, match="Make a plan for this model") as raised:
        mb.apply(model.double(), plan)
    words = str(raised.value)
    assert (
        "0.weight is float32[128,64] in the first and float64[128,64] in the" in words
    )
    assert f"and {len(plan.parameters) - 3} more" in words


def test_a_plan_of_an_older_version_is_refused_with_the_version_expected():
    words = f"versions 6 and {VERSION}; this one has version 3: make the"
    with pytest.raises(PlanError, match=words):
        Plan.from_dict(PLAN.to_dict() | {"version": 3})


def test_two_writers_of_one_file_use_two_temporary_names(tmp_path, monkeypatch):
    path, names = tmp_path / "plan.json", []
    honest = os.fsync

    def synced(number: int) -> None:
        names.append({file.name for file in tmp_path.iterdir()} - {path.name})
        if len(names) == 1:  # Another writer, in the middle of the first.
            write_whole(path, "second", "the plan")
        honest(number)

    monkeypatch.setattr("membudget.text.os.fsync", synced)
    write_whole(path, "first", "the plan")
    assert path.read_text() == "first"
    assert len(names) == 2  # Both reached the disk before they were renamed.
    assert names[0] < names[1]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_file_has_the_permissions_of_any_other_file(tmp_path):
    ours, other = tmp_path / "plan.json", tmp_path / "other"
    write_whole(ours, "{}", "the plan")
    other.touch()
    assert stat.S_IMODE(ours.stat().st_mode) == stat.S_IMODE(other.stat().st_mode)


@pytest.mark.parametrize("name", ["missing/plan.json", "\0", "."])
def test_a_file_that_cannot_be_written_is_an_option_error(tmp_path: Path, name):
    with pytest.raises(OptionError, match="the plan cannot be written"):
        PLAN.to_json(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
