"""A graph is the same after it was written to JSON and read."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import membudget as mb
from membudget.graph import (
    ModuleCall,
    Operator,
    Saved,
    StaticBytes,
    StepGraph,
    Storage,
    Value,
)
from membudget.profile import Profile

SIZES = st.integers(0, 1 << 40)
INDICES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
MOMENTS = st.integers(0, 6)
PHASES = st.sampled_from(["forward", "backward", "optimizer"])
KINDS = st.sampled_from(
    ["parameter", "buffer", "input", "outside", "activation", "gradient", "optimizer"]
)
TEXTS = st.text(max_size=5)

OPERATORS = st.builds(
    Operator,
    name=TEXTS,
    phase=PHASES,
    module_path=TEXTS,
    line=TEXTS,
    inputs=INDICES,
    outputs=INDICES,
    flops=SIZES,
    read_bytes=SIZES,
    written_bytes=SIZES,
    workspace_bytes=SIZES,
    seconds=st.floats(0, 10),
)
VALUES = st.builds(Value, shape=INDICES, operator=st.integers(-1, 5))
SAVED = st.builds(Saved, asked=INDICES)
CALLS = st.builds(ModuleCall)


@st.composite
def storages(draw: Any) -> Storage:
    """Return a storage of a step of at most six operators."""
    birth, death = sorted(draw(st.tuples(st.integers(-1, 6), MOMENTS)))
    released = draw(st.none() | MOMENTS)
    return Storage(draw(SIZES), draw(KINDS), draw(TEXTS), birth, death, released)


@st.composite
def graphs(draw: Any) -> StepGraph:
    """Return any graph: its numbers need not fit together."""
    lists = (OPERATORS, VALUES, storages(), SAVED)
    operators, values, made, saved = (
        tuple(draw(st.lists(kind, max_size=6))) for kind in lists
    )
    made = tuple(s for s in made if s.birth <= len(operators))
    static = draw(st.builds(StaticBytes, SIZES, SIZES, SIZES, SIZES))
    calls = tuple(draw(st.lists(CALLS, max_size=3)))
    moments = draw(MOMENTS), draw(MOMENTS)
    return StepGraph(operators, values, made, saved, calls, *moments, static)


@settings(max_examples=50)
@given(graphs())
def test_a_graph_survives_a_json_round_trip(graph):
    text = json.dumps(graph.to_dict())

    assert StepGraph.from_dict(json.loads(text)) == graph


@settings(max_examples=20)
@given(graphs(), st.lists(TEXTS, max_size=2).map(tuple))
def test_a_profile_survives_a_json_round_trip(graph, notes):
    found = Profile(graph, "Model", "fake", "H100", "the output", notes)

    assert Profile.from_json(found.to_json()) == found


def data() -> dict[str, Any]:
    value = Value(0, 4, (1,), "float32", -1, 0)
    storage = Storage(4, "input", "x", -1, 0, None)
    static = StaticBytes(0, 0, 4, 0)
    return StepGraph((), (value, value), (storage,), (), (), 0, 0, static).to_dict()


def test_calls_and_pins_are_read_unchanged_written():
    whole = data()
    operator: dict[str, Any] = {
        "name": "aten.topk.default",
        "phase": "forward",
        "must_keep": True,
    }
    for field in dataclasses.fields(Operator):
        column = "is_pinned" if field.name == "must_keep" else field.name
        whole["operators"][column] = [operator.get(field.name, 0)]
    whole["calls"] = {"path": ["", "0"], "start": [0, 0], "end": [1, 0]}

    graph = StepGraph.from_dict(json.loads(json.dumps(whole)))

    assert graph.operators[0].must_keep is True
    assert graph.calls == (ModuleCall("", 0, 1), ModuleCall("0", 0, 0))


def test_a_storage_that_is_never_released_is_referenced_until_its_death():
    held = Storage(4, "activation", "", 1, 9, None)
    assert held.released_or_dead == 9
    assert dataclasses.replace(held, released=3).released_or_dead == 3


def test_a_newer_version_is_refused():
    with pytest.raises(mb.OptionError, match="version 1; the data has version 2"):
        StepGraph.from_dict({**data(), "version": 2})


def test_data_without_a_version_is_rejected():
    with pytest.raises(mb.OptionError, match="has version None"):
        StepGraph.from_dict({})


@pytest.mark.parametrize("key", [k for k in data() if k != "version"])
def test_a_missing_part_is_rejected_by_its_name(key):
    whole = data()
    del whole[key]

    with pytest.raises(mb.OptionError, match=f"incomplete: KeyError\\('{key}'"):
        StepGraph.from_dict(whole)


@pytest.mark.parametrize("column", list(data()["values"]))
def test_a_missing_column_is_rejected_by_its_name(column):
    whole = data()
    del whole["values"][column]

    with pytest.raises(mb.OptionError, match=f"incomplete: KeyError\\('{column}'"):
        StepGraph.from_dict(whole)


@pytest.mark.parametrize("column", list(data()["values"]))
def test_columns_of_different_lengths_are_rejected(column):
    whole = data()
    whole["values"][column].append(0)

    with pytest.raises(mb.OptionError, match=r"incomplete: .*(longer|shorter)"):
        StepGraph.from_dict(whole)


def test_static_bytes_of_another_kind_are_rejected():
    whole = data()
    whole["static"]["more"] = 1

    with pytest.raises(mb.OptionError, match="incomplete: TypeError"):
        StepGraph.from_dict(whole)


@pytest.mark.parametrize("table", [None, 3, [], "text"])
def test_a_malformed_table_is_rejected(table):
    with pytest.raises(mb.OptionError, match="incomplete"):
        StepGraph.from_dict({**data(), "values": table})


@pytest.mark.parametrize(
    "key", ["model", "tensors", "cost", "loss_from", "notes", "graph"]
)
def test_a_profile_without_a_part_is_rejected(key):
    found = Profile(StepGraph.from_dict(data()), "M", "real", "measured", "output")
    whole = found.to_dict()
    del whole[key]

    with pytest.raises(mb.OptionError, match=f"incomplete: KeyError\\('{key}'"):
        Profile.from_dict(whole)


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("notes", 5),
        ("chance", ["x"]),
        ("chance", [float("inf")]),
        ("graph", 5),
        ("graph", []),
        ("graph", {**data(), "calls": 5}),
        ("graph", {**data(), "backward_start": float("inf")}),
        ("graph", {**data(), "static": 5}),
    ],
)
def test_a_profile_with_a_part_of_another_kind_is_rejected(key, wrong):
    found = Profile(StepGraph.from_dict(data()), "M", "real", "measured", "output")

    with pytest.raises(mb.OptionError, match=r"incomplete|the data has version None"):
        Profile.from_dict(found.to_dict() | {key: wrong})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "cannot be read"),
        ("[1]", "cannot be read|is a list"),
        ("", "cannot be read"),
    ],
)
def test_a_text_that_is_not_a_profile_is_rejected(text, says):
    with pytest.raises(mb.OptionError, match=says):
        Profile.from_json(text)


def test_a_profile_survives_a_file_round_trip(tmp_path):
    found = Profile(StepGraph.from_dict(data()), "M", "real", "measured", "output")

    found.to_json(tmp_path / "step.json")

    assert Profile.from_json(tmp_path / "step.json") == found
    assert Profile.from_json(str(tmp_path / "step.json")) == found
    assert [p.name for p in tmp_path.iterdir()] == ["step.json"]


def test_a_file_that_cannot_be_written_is_rejected(tmp_path):
    found = Profile(StepGraph.from_dict(data()), "M", "real", "measured", "output")

    with pytest.raises(mb.OptionError, match=r"none/step\.json' cannot be written"):
        found.to_json(tmp_path / "none" / "step.json")
