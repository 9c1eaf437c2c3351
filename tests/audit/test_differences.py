"""Which outcomes of two runs are differences, and which are side effects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from membudget.audit.differences import Outcome, Results, RunDifferences, compare
from membudget.state.identity import host_copy

ONE, TWO = torch.ones(2), torch.full((2,), 2.0)


def outcome(
    tensors: dict[tuple[str, str], Tensor | None] | None = None,
    values: dict[str, Any] | None = None,
    streams: dict[str, Any] | None = None,
    results: dict[str, Any] | None = None,
) -> Outcome:
    """Return what a run left behind, by hand."""
    made = Outcome.__new__(Outcome)
    made.tensors = {
        key: None if tensor is None else host_copy(tensor)  # type: ignore[misc]
        for key, tensor in (tensors or {}).items()
    }
    made.values, made.streams = values or {}, streams or {}
    made.results = results or {}
    return made


def compared(plain: Outcome, other: Outcome, start: Any = None) -> RunDifferences:
    plain.streams_before = start or {}
    return compare(plain, other, "fitted")


@pytest.mark.parametrize(
    "key", [("gradient", "w"), ("parameter", "w"), ("buffer", "w"), ("output", "y")]
)
def test_a_tensor_of_one_run_only_is_a_difference(key):
    with_it, without = outcome({key: ONE}), outcome()
    (found,) = compared(with_it, without).differences
    assert (found.kind, found.name) == key
    assert "fitted none of that name" in found.detail
    (found,) = compared(without, with_it).differences
    assert "plain has none of that name" in found.detail


def test_a_gradient_of_one_run_only_differs_from_none():
    key = ("gradient", "w")
    got, none = outcome({key: ONE}), outcome({key: None})
    (found,) = compared(got, none).differences
    assert "fitted None" in found.detail
    (found,) = compared(none, got).differences
    assert "plain has None" in found.detail
    assert compared(none, outcome({key: None})) == RunDifferences((), ())


def test_an_attribute_of_one_run_only_is_a_side_effect():
    key = ("attribute", "model.cache[3]")
    with_it, without = outcome({key: ONE}), outcome()
    found = compared(with_it, without)
    assert found.differences == ()
    assert [(s.kind, s.name, s.detail) for s in found.side_effects] == [
        ("value", "model.cache[3]", "only plain left this tensor, not fitted")
    ]
    found = compared(without, with_it)
    assert found.differences == ()
    assert [s.detail for s in found.side_effects] == [
        "only fitted left this tensor, not plain"
    ]


def test_an_attribute_of_both_runs_is_compared_bit_for_bit():
    key = ("attribute", "model.average")
    found = compared(outcome({key: ONE}), outcome({key: TWO}))
    assert [d.name for d in found.differences] == ["model.average"]
    assert found.side_effects == ()
    assert compared(outcome({key: ONE}), outcome({key: ONE})) == RunDifferences((), ())


def test_elements_that_differ_are_counted_and_the_first_is_named():
    other = ONE.clone()
    other[1] = 5.0
    found = compared(
        outcome({("loss", "loss"): ONE}), outcome({("loss", "loss"): other})
    )
    (difference,) = found.differences
    assert (difference.elements, difference.total) == (1, 2)
    assert difference.index == (1,)
    assert "1 of 2 elements, first at [1]" in difference.detail


def test_values_are_compared_by_their_text():
    nan = float("nan")
    same = compared(outcome(values={"x": nan}), outcome(values={"x": nan}))
    assert same == RunDifferences((), ())
    found = compared(outcome(values={"x": 1}), outcome(values={"x": True}))
    assert [s.detail for s in found.side_effects] == ["plain 1, fitted True"]
    found = compared(outcome(values={"x": 1}), outcome(values={"y": 2}))
    assert [s.detail for s in found.side_effects] == [
        "plain 1, fitted nothing",
        "plain nothing, fitted 2",
    ]


def test_values_that_the_step_returned_are_differences():
    found = compared(outcome(results={"n": 1}), outcome(results={"n": 2}))
    assert [(d.kind, d.name) for d in found.differences] == [("output", "n")]
    assert found.side_effects == ()


def test_long_values_are_shortened():
    found = compared(outcome(values={"x": "a" * 99}), outcome(values={"x": "b"}))
    (value,) = found.side_effects
    assert len(value.plain or "") == 60
    assert (value.plain or "").endswith("...")


@pytest.mark.parametrize(
    ("plain", "other", "detail"),
    [
        (1, 2, "fitted drew from it, plain did not"),
        (2, 1, "plain drew from it, fitted did not"),
        (2, 3, "both drew from it, and fitted left it elsewhere than plain"),
    ],
)
def test_a_stream_difference_says_which_run_drew(plain, other, detail):
    left, right = (outcome(streams={"torch": s}) for s in (plain, other))
    (found,) = compared(left, right, {"torch": 1}).differences
    assert (found.kind, found.name, found.detail) == ("stream", "torch", detail)
    assert compared(left, left, {"torch": 1}).differences == ()


def test_results_copy_tensors_and_values():
    tensor = torch.ones(2, requires_grad=True) * 1
    results = Results.of({"y": tensor, "n": 3})
    with torch.no_grad():
        tensor.add_(1)
    ((kind, _),) = results.tensors
    assert kind == "output"
    assert 3 in results.values.values()
    held = outcome()
    held.tensors = dict(results.tensors)
    (key,) = held.tensors
    assert compared(held, outcome({key: torch.ones(2)})).differences == ()


def test_values_of_up_to_sixty_characters_are_shown_whole():
    found = compared(outcome(values={"x": "a" * 58}), outcome(values={"x": "b" * 59}))
    (value,) = found.side_effects
    assert value.plain == repr("a" * 58)
    assert value.other == "'" + "b" * 56 + "..."
    assert value.detail == f"plain {value.plain}, fitted {value.other}"
    assert (value.kind, value.name) == ("value", "x")


def test_tensors_of_other_shapes_or_dtypes_are_described():
    key = ("buffer", "w")
    (found,) = compared(outcome({key: ONE}), outcome({key: ONE.double()})).differences
    assert (found.elements, found.total, found.index) == (None, None, None)
    assert found.detail == f"plain is {found.plain}, fitted {found.other}"
    assert "float32" in found.plain
    assert "float64" in found.other


def test_a_tensor_of_one_element_is_shown_by_its_value():
    key = ("loss", "loss")
    left, right = outcome({key: torch.tensor(1.5)}), outcome({key: torch.tensor(2.5)})
    (found,) = compared(left, right).differences
    assert found.detail == "plain 1.5, fitted 2.5"
    assert (found.elements, found.total, found.index) == (1, 1, ())
    assert str(found) == "loss loss: plain 1.5, fitted 2.5"
    assert found.to_dict()["elements"] == 1


def test_large_numbers_of_elements_have_commas():
    key = ("parameter", "w")
    zeros = torch.zeros(2000)
    (found,) = compared(outcome({key: zeros}), outcome({key: zeros + 1})).differences
    assert found.detail == ("2,000 of 2,000 elements, first at [0]: plain 0, fitted 1")


def test_what_only_one_run_has_is_described_as_it_is():
    key = ("gradient", "w")
    (found,) = compared(outcome({key: ONE}), outcome()).differences
    assert found.other == "none of that name"
    assert found.detail == f"plain has {found.plain}, fitted none of that name"
    (found,) = compared(outcome(), outcome({key: None})).differences
    assert (found.plain, found.other) == ("none of that name", "None")


def test_a_stream_of_one_run_only_is_a_difference():
    left, right = outcome(streams={"own": 1}), outcome()
    for one, other in ((left, right), (right, left)):
        (found,) = compared(one, other).differences
        assert found.name == "own"
    # It is where it was, or was not.
    (found,) = compared(left, right, {"own": 1}).differences
    assert found.detail == "fitted drew from it, plain did not"


def test_differences_are_listed_tensors_first_then_results_then_streams():
    key = ("buffer", "w")
    plain = outcome({key: ONE}, {"v": 1}, {"torch": 1}, {"r": 1})
    other = outcome({key: TWO}, {"v": 2}, {"torch": 2}, {"r": 2})
    found = compared(plain, other, {"torch": 0})
    assert [d.kind for d in found.differences] == ["buffer", "output", "stream"]
    assert [d.kind for d in found.side_effects] == ["value"]


def test_an_outcome_gives_all_tensors_of_a_kind_by_name():
    made = outcome({("buffer", "a"): ONE, ("loss", "a"): TWO, ("buffer", "b"): None})
    assert made.of("buffer").keys() == {"a", "b"}
    assert made.of("gradient") == {}


def test_results_note_which_tensors_require_a_gradient():
    results = Results()
    results.add("loss", torch.ones((), requires_grad=True))
    results.add("output", {"y": ONE, "n": 3})
    assert results.values["loss.requires_grad"] is True
    assert [v for name, v in results.values.items() if "y" in name] == [False]
    assert {kind for kind, _ in results.tensors} == {"loss", "output"}
    assert results.copy is host_copy
