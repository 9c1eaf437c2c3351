"""Which stage of a backward pass serves a saved tensor, in turns as well."""

from __future__ import annotations

from membudget.engine.alignment import Alignment, OperatorSequence
from membudget.engine.stages import CallStages, Stages


class Handle:
    """What stands for a saved tensor."""

    stage = -1


def put(stages: CallStages, count: int, operator: int) -> int:
    """Return the stage of the next saved tensor."""
    handle = Handle()
    stages.put(handle, count, operator)
    return handle.stage


PLAN = Stages([(0, 0), (2, 1), (5, 0)], [set(), {(1, 0)}, {(1, 0), (3, 0)}])


def test_an_operator_saves_its_outputs_in_its_own_stage_and_the_next_its_inputs():
    assert [PLAN.of(2, saved) for saved in range(3)] == [0, 1, 1]
    assert [PLAN.of(operator, 0) for operator in (0, 3, 5, 9)] == [0, 1, 2, 2]


def test_tensors_are_counted_from_the_latest_operator():
    stages = CallStages(PLAN, None)
    at = [(0, 0), (1, 1), (2, 2), (2, 2), (3, 3), (5, 5)]
    assert [put(stages, *place) for place in at] == [0, 0, 0, 1, 1, 2]


def test_each_turn_has_stages_of_its_own_up_to_some():
    alignment = Alignment(OperatorSequence([]))
    stages = CallStages(PLAN, alignment)
    found = []
    for turn in range(70):
        found.append(put(stages, 10 * turn + 3, 3))
        alignment.returns.append((10 * turn + 4, 3))
    assert found == [1 + 3 * min(turn, 64) for turn in range(70)]
    assert all(stages.held_in(stage) == {(1, 0)} for stage in found)


def test_what_was_saved_before_a_number_was_known_moves():
    alignment = Alignment(OperatorSequence([]))
    stages = CallStages(PLAN, alignment)
    handles = [Handle() for _ in range(4)]
    for count, handle in enumerate(handles, start=4):
        stages.put(handle, count, count)
    assert [handle.stage for handle in handles] == [1, 2, 2, 2]
    stages.move(6, 8, 4)  # Operators 6, 7 and 8 are counterparts of 2, 3 and 4.
    assert [handle.stage for handle in handles] == [1, 0, 0, 1]


def test_a_stage_knows_the_last_operation_before_it_by_a_number():
    alignment = Alignment(OperatorSequence([]))
    stages = CallStages(PLAN, alignment)
    assert stages.is_current(2, 7, 3)
    alignment.returns.append((6, 3))  # Operations 7, 8, ... are counterparts of 3, ...
    first, second = 2, 2 + 3
    assert stages.begins_to(first) == ()
    assert stages.begins_to(second) == (6,)
    assert stages.is_current(first, 3, 3)
    assert not stages.is_current(first, 7, 3)
    assert stages.is_current(second, 7, 3)
    assert not stages.is_current(second, 3, 3)
    assert stages.is_current(second, 1, 1)
