"""Say how two plans of training loops differ, situation by situation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from membudget.planner.loop_plan import LoopPlan, SituationPlan
from membudget.text import format_bytes


def loop_differences(
    first: Sequence[LoopPlan], second: Sequence[LoopPlan]
) -> Iterator[str]:
    """Yield one line for each difference between what two loops taught."""
    for one, other in zip_longest(first, second):
        if one is None or other is None:
            which, only = ("second", other) if one is None else ("first", one)
            yield f"loop of {only.model}: only in the {which} plan"
            continue
        for name in ("model", "torch", "device"):
            values = [getattr(loop, name) for loop in (one, other)]
            if values[0] != values[1]:
                yield f"loop of {one.model}: {name} {values[0]} -> {values[1]}"
        if one.conditions != other.conditions:
            yield f"loop of {one.model}: of other code, optimizer, settings or machine"
        found = [*_situations(one, other)]
        if not found and one.learned != other.learned:
            found = [f"loop of {one.model}: other recordings or schedules"]
        yield from found


def _situations(first: LoopPlan, second: LoopPlan) -> Iterator[str]:
    before, after = (
        {(s.kind, s.sizes): s for s in loop.situations} for loop in (first, second)
    )
    for key in dict.fromkeys([*before, *after]):
        one, other = before.get(key), after.get(key)
        if one is None or other is None:
            which, only = ("second", other) if one is None else ("first", one)
            assert only is not None
            yield f"situation {_name(only)}: only in the {which} plan"
        elif _plan_of(one) != _plan_of(other):
            yield f"situation {_name(one)}: {_plan_of(one)} -> {_plan_of(other)}"


def _name(situation: SituationPlan) -> str:
    return f"{situation.tensors} of kind {situation.kind}"


def _plan_of(situation: SituationPlan) -> str:
    size, slowdown = format_bytes(situation.peak_bytes), situation.slowdown
    return f"{size} at a slowdown of {slowdown:.3f}"
