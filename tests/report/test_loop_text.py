"""Two plans of loops differ in situations, and in what they were saved under."""

from __future__ import annotations

from dataclasses import replace

from membudget.planner.loop_plan import LoopPlan, SituationPlan
from membudget.report.loop_text import loop_differences
from membudget.report.plan_text import differences
from tests.planner.drafts import PLAN

SITUATION = SituationPlan("k", (8, 48), "8x48", 3, 9000, 2048, 1.25, 0, 2000, 0, 0)
LOOP = LoopPlan("GPT", (), "cpu", "2.0", "c", (SITUATION,), "packed")


def lines(other: LoopPlan) -> list[str]:
    return [*loop_differences((LOOP,), (other,))]


def test_equal_loops_have_no_differences():
    assert lines(replace(LOOP)) == []


def test_a_situation_of_one_plan_alone_is_named():
    longer = replace(SITUATION, sizes=(8, 64), tensors="8x64")
    assert lines(replace(LOOP, situations=(SITUATION, longer))) == [
        "situation 8x64 of kind k: only in the second plan"
    ]
    assert lines(replace(LOOP, situations=())) == [
        "situation 8x48 of kind k: only in the first plan"
    ]


def test_a_situation_with_another_plan_shows_both():
    faster = replace(SITUATION, peak_bytes=4096, slowdown=1.0)
    assert lines(replace(LOOP, situations=(faster,))) == [
        "situation 8x48 of kind k: 2.0 KiB at a slowdown of 1.250 -> 4.0 KiB at a "
        "slowdown of 1.000"
    ]


def test_what_a_loop_was_saved_under_is_compared():
    other = replace(LOOP, torch="3.0", device="cuda", conditions="d")
    assert lines(other) == [
        "loop of GPT: torch 2.0 -> 3.0",
        "loop of GPT: device cpu -> cuda",
        "loop of GPT: of other code, optimizer, settings or machine",
    ]


def test_other_recordings_of_the_same_situations_are_a_difference():
    assert lines(replace(LOOP, learned="other")) == [
        "loop of GPT: other recordings or schedules"
    ]


def test_a_loop_of_one_plan_alone_is_a_difference_of_the_plans():
    with_loop = replace(PLAN, loops=(LOOP,))
    assert differences(PLAN, with_loop) == ["loop of GPT: only in the second plan"]
    assert differences(with_loop, PLAN) == ["loop of GPT: only in the first plan"]
