"""What is left of a step for the exact planner."""

from __future__ import annotations

from tests.oracles.problem import reduced
from tests.planner.drafts import Draft


def test_operators_that_saved_the_same_share_a_stage():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[4])
    draft.save(a)
    (b,) = draft.run(a, makes=[4])
    draft.save(a)
    draft.run(b, makes=[4])
    draft.save(b)
    demands = reduced(draft.finish()).demands
    assert [(demand.item, demand.stage) for demand in demands] == [
        (2, 2),
        (1, 0),
        (1, 0),
    ]


def test_what_one_operator_saved_twice_is_asked_for_once():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[4])
    draft.run(a, a, makes=[4])
    draft.save(a, a)
    (demand,) = reduced(draft.finish()).demands
    assert demand.times == 2


def test_what_the_user_holds_to_the_end_is_kept_by_every_schedule():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[4])
    draft.save(a)
    draft.hold(a)
    problem = reduced(draft.finish())
    assert problem.always == {1}
    assert not problem.items
    assert not problem.demands


def test_an_operator_that_nobody_asks_has_a_stage_without_demands():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[4])
    draft.save(a, is_asked=False)
    problem = reduced(draft.finish())
    assert not problem.demands
    assert problem.idle == {0: []}


def test_what_no_schedule_moves_is_fixed():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[4])
    draft.run(a, makes=[2])
    draft.save(a)
    draft.run(makes=[1])
    # The first output goes with its last reader, the others with their makers.
    assert list(reduced(draft.finish()).fixed_bytes) == [4, 6, 1, 0, 0, 0]
