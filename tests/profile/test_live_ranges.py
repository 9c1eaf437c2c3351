"""What autograd saves in a recorded step, and what is live at its peak, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from membudget.graph import Saved, StaticBytes, StepGraph, Storage, Value
from membudget.profile.live_ranges import (
    LiveItem,
    PeakContents,
    SavedRange,
    peak_contents,
    saved_activations,
    saved_ranges,
    touched_storages,
)
from tests.planner.drafts import operator

# Three operators forward, three backward.
TURN, COUNT = 3, 6


def storage(
    size: int, birth: int, death: int, released: int | None = None, **facts: Any
) -> Storage:
    return replace(Storage(size, "activation", "", birth, death, released), **facts)


def saved(value: int, moment: int, freed: int, line: str = "") -> Saved:
    return Saved(value, moment, (freed - 1,), freed, "h", line)


def graph_of(
    storages: list[Storage], records: list[Saved] | None = None, workspace: int = 0
) -> StepGraph:
    """Return a step whose operator at the birth of a storage makes its only value."""
    phases = ["forward"] * TURN + ["backward"] * (COUNT - TURN)
    operators = []
    for moment, phase in enumerate(phases):
        made = [i for i, s in enumerate(storages) if s.birth == moment]
        operators.append(
            replace(
                operator(phase, 1.0),
                name=f"aten.of{moment}.default",
                module_path=f"m{moment}",
                line=f"line {moment}",
                outputs=tuple(made),
                workspace_bytes=workspace if moment == TURN else 0,
            )
        )
    values = [
        Value(i, s.bytes, (s.bytes,), "uint8", s.birth, 0)
        for i, s in enumerate(storages)
    ]
    static = StaticBytes(0, 0, 0, 0)
    parts = tuple(values), tuple(storages), tuple(records or ()), ()
    return StepGraph(tuple(operators), *parts, TURN, COUNT, static)


def test_saved_activations_are_the_largest_first_each_once():
    storages = [storage(4, 0, 6), storage(8, 1, 6), storage(8, 2, 6)]
    records = [
        saved(0, 0, 6, "a"),
        saved(2, 1, 6, "b"),
        saved(0, 1, 6, "c"),
        saved(1, 2, 6, "d"),
    ]
    found = saved_activations(graph_of(storages, records))
    assert [(s.storage, s.bytes, s.line) for s in found] == [
        (1, 8, "d"),
        (2, 8, "b"),
        (0, 4, "a"),
    ]
    assert (found[1].operator, found[1].module_path) == ("aten.of1.default", "h")
    assert (found[1].shape, found[1].dtype) == ((8,), "uint8")


@pytest.mark.parametrize(
    ("made", "freed", "is_listed"),
    [
        (storage(4, 0, 4), 4, True),
        # It is freed before the backward pass, or has died.
        (storage(4, 0, 6), 3, False),
        (storage(4, 0, 3), 6, False),
        # It was there before the step, or another's memory was filled.
        (storage(4, -1, 6), 6, False),
        (storage(4, 0, 6, kind="outside"), 6, False),
    ],
)
def test_only_what_the_step_made_and_the_backward_needs_is_listed(
    made, freed, is_listed
):
    found = saved_activations(graph_of([made], [saved(0, 0, freed)]))
    assert bool(found) is is_listed


@pytest.mark.parametrize(
    ("made", "found"),
    [
        (storage(4, 0, 5, released=2), SavedRange(1, 5, 2)),
        (storage(4, 0, 5, released=0), SavedRange(1, 5, 1)),
        # Held to the end of the forward, to the end of autograd's hold, or longer.
        (storage(4, 0, 5), SavedRange(1, 5, 3)),
        (storage(4, 0, 4), SavedRange(1, 4, 3)),
        (storage(4, 0, 6), SavedRange(1, 5, 6)),
        (storage(4, -1, 6), None),
        (storage(4, 3, 6), None),
    ],
)
def test_a_saved_storage_may_be_dropped_once_only_autograd_holds_it(made, found):
    records = [saved(0, 1, 4), saved(0, 2, 5)]
    ranges = saved_ranges(graph_of([made], records))
    assert ranges == ({} if found is None else {0: found})


PEAK = [
    storage(100, 0, 6, released=1),
    storage(30, 1, 6),
    storage(20, 3, 6, kind="gradient", name="h.0.weight"),
    storage(10, 3, 4, kind="optimizer"),
    storage(5, 3, 4),
    storage(5, 2, 3),
    storage(7, 4, 6),
    storage(50, -1, 6, kind="parameter"),
    storage(0, 3, 4),
]


def peak_of(workspace: int = 0) -> PeakContents:
    return peak_contents(graph_of(PEAK, [saved(0, 1, 6), saved(1, 1, 5)], workspace))


def test_what_is_live_at_the_peak_is_listed_by_size_with_its_group():
    found = peak_of(9)
    assert found.moment == 3
    assert found.operator is not None
    assert found.operator.name == "aten.of3.default"
    assert [(i.storage, i.bytes, i.group) for i in found.items] == [
        (0, 100, "saved activations"),
        (1, 30, "saved activations"),
        (2, 20, "gradients"),
        (3, 10, "optimizer state"),
        (-1, 9, "workspace"),
        (4, 5, "temporaries"),
    ]
    assert found.peak_bytes == 174
    # The second is held by the user, too, until the step ends.
    assert [i.storage for i in found.items if i.is_droppable] == [0]
    assert found.droppable_bytes == 100
    assert list(found.by_group().items()) == [
        ("saved activations", 130),
        ("gradients", 20),
        ("optimizer state", 10),
        ("workspace", 9),
        ("temporaries", 5),
    ]


def test_each_item_has_the_place_where_it_was_made():
    found = {item.storage: item for item in peak_of(9).items}
    first, gradient, workspace = found[0], found[2], found[-1]
    assert (first.module_path, first.line) == ("m0", "line 0")
    assert (first.operator, first.phase) == ("aten.of0.default", "forward")
    assert (first.shape, first.dtype) == ((100,), "uint8")
    # The gradient of a parameter belongs to the module that owns it.
    assert gradient.module_path == "h.0"
    assert (workspace.operator, workspace.phase) == ("aten.of3.default", "backward")
    assert (workspace.module_path, workspace.line) == ("m3", "line 3")
    assert (workspace.shape, workspace.dtype) == ((), "")
    assert not workspace.is_droppable
    assert -1 not in {item.storage for item in peak_of().items}


def test_what_the_operator_at_the_peak_uses_is_not_droppable():
    graph = graph_of(PEAK, [saved(0, 1, 6), saved(1, 1, 5)])
    operators = list(graph.operators)
    operators[3] = replace(operators[3], inputs=(0,))
    touching = replace(graph, operators=tuple(operators))
    assert touched_storages(touching, 3) == {0, 2, 3, 4, 8}
    assert peak_contents(touching).droppable_bytes == 0


def test_a_step_without_operators_has_no_peak():
    empty = replace(graph_of([]), operators=())
    assert peak_contents(empty) == PeakContents(0, None, ())
    assert peak_contents(empty).peak_bytes == 0


def test_the_optimizer_s_bytes_are_counted_apart():
    def item(size: int, phase: Any, path: str) -> LiveItem:
        return LiveItem(0, size, "temporaries", path, "", "", phase)

    items = item(1, "forward", "a"), item(2, "optimizer", "a"), item(4, "backward", "b")
    found = PeakContents(0, None, (*items, item(8, "forward", "a")))
    assert found.optimizer_bytes == 2
    assert found.by_module() == {"a": 9, "b": 4}
    assert found.by_group() == {"temporaries": 15}
