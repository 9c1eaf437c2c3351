"""Operators of one call, numbered like their counterparts in another."""

from __future__ import annotations

import pytest

from membudget.engine.alignment import Alignment, OperatorSequence
from membudget.operator_names import common_name

LAYER = [f"aten.of{n}.default" for n in range(20)]
FIRST, LAST = "aten.first.default", "aten.last.default"


def calls(layers: int, other: str = "") -> list[str]:
    """Return the operators of a stack of layers, the first of them exchanged."""
    changed = [other, *LAYER[1:]] if other else LAYER
    return [FIRST, *(changed if layers else []), *LAYER * (layers - 1), LAST]


def numbers(planned: list[str], ran: list[str]) -> tuple[list[int], Alignment]:
    """Return the numbers of the operators of a call, as a recorder finds them."""
    alignment = Alignment(OperatorSequence(planned))
    found = [0]
    for recorded, name in enumerate(map(common_name, ran)):
        place, names = found[-1], alignment.names
        is_next = place < len(names) and names[place] is name
        number = place + 1
        if not is_next:
            number = alignment.number_of(name, place, recorded + 1, recorded)
        found.append(number)
    return found[1:], alignment


def test_a_call_like_the_recorded_one_is_counted():
    found, alignment = numbers(calls(3), calls(3))
    assert found == list(range(1, 63))
    assert not alignment.has_left


def test_a_layer_that_is_missing_is_skipped():
    found, alignment = numbers(calls(3), calls(2))
    assert found == [*range(1, 42), 62]
    assert alignment.has_left
    assert alignment.returns == []


def test_a_layer_more_takes_a_turn_more_at_the_last_one():
    found, alignment = numbers(calls(3), calls(4))
    assert found == [*range(1, 62), *range(42, 62), 62]
    assert alignment.returns == [(61, 42)]


def test_an_operator_in_the_place_of_another_shifts_nothing():
    found, alignment = numbers(calls(3), calls(3, other="aten.other.default"))
    assert found == list(range(1, 63))
    assert not alignment.has_left


@pytest.mark.parametrize("ran", [[], [LAST], [FIRST, LAST], ["aten.x.default"] * 70])
def test_a_call_that_is_like_nothing_is_counted(ran):
    assert numbers(calls(2), ran)[0] == list(range(1, len(ran) + 1))


def test_a_few_operators_alike_are_no_reason_to_go_far_back():
    planned = ["aten.a.default", *LAYER[:4], *(f"aten.b{n}.default" for n in range(40))]
    found, alignment = numbers(planned, [*planned, *LAYER[:4]])
    assert found == list(range(1, len(planned) + 5))
    assert not alignment.has_left


def test_operators_that_do_the_same_are_counterparts():
    planned = [name.replace(".default", "_.default") for name in calls(3)]
    found, alignment = numbers(planned, calls(3))
    assert found == list(range(1, 63))
    assert not alignment.has_left
