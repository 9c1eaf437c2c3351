"""What the notes of an error say of a plan."""

from __future__ import annotations

import re

import membudget as mb
from membudget.modes import schedule_of_mode
from membudget.planner.choice import Choice, bytes_of
from membudget.planner.overheads import NO_OVERHEADS
from membudget.planner.planner import plain_schedule
from membudget.planner.schedule import Simulator
from membudget.planner.slices import useful_kept
from membudget.report.kept_text import kept_text
from tests.planner.models import gpt, mlp


def test_regions_that_keep_are_named_largest_first_and_add_up():
    graph = mb.profile(*gpt(blocks=8), fake=True).graph
    schedule = schedule_of_mode("selective", graph, NO_OVERHEADS)
    text = kept_text(graph, schedule, 1_234_567)
    assert "a plan for 1,234,567 bytes above what is in use before the step" in text
    assert f"it is predicted to take {schedule.peak_bytes:,}" in text
    total = sum(bytes_of(graph, useful_kept(graph, c)) for c in schedule.choices)
    assert f"Its regions keep {total:,} bytes: " in text
    found = re.findall(r"(?:'[\d.]+'|others) ([\d,]+)", text)
    sizes = [int(size.replace(",", "")) for size in found]
    assert sum(sizes) == total
    named = sizes[:4]
    assert named == sorted(named, reverse=True)


def test_a_plan_without_regions_and_one_that_keeps_nothing_say_so():
    graph = mb.profile(*mlp(), fake=True).graph
    text = kept_text(graph, plain_schedule(graph), 10)
    assert text.startswith("memory ran out under a plan without regions for 10 bytes")
    assert "keep" not in text
    call = next(call for call in graph.calls if call.path == "1")
    choice = Choice(call.start, call.end)
    schedule = Simulator(graph).schedule([call], [choice])
    assert kept_text(graph, schedule, 10).endswith(
        "Its regions (1) keep nothing inside"
    )
