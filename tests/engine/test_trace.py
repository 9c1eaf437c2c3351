"""What `debug=True` lists: both runs, around the first operator that differs."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

import membudget as mb

TITLE = re.compile(
    r"operators of the (?P<run>\w+) "
    r"\((?P<count>\d+) in all, from number (?P<first>\d+)\)"
)
LINE = re.compile(
    r"(?P<mark>[> ]) +(?P<number>\d+) (?P<operator>aten\.[\w.]+)"
    r"\((?P<operands>.*?)\)  \[(?P<stack>.*)\]"
)


class Parting:
    """Runs `before` sines, then something else in each run, then `after` sines."""

    def __init__(self, before: int, after: int) -> None:
        self.before, self.after, self.calls = before, after, 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        for _ in range(self.before):
            x = x.sin()
        x = outermost(x) if self.calls == 1 else torch.stack([x, x]).exp()
        for _ in range(self.after):
            x = x.sin()
        return x


def outermost(x: Tensor) -> Tensor:
    return middle(x)


def middle(x: Tensor) -> Tensor:
    return innermost(x)


def innermost(x: Tensor) -> Tensor:
    return x.cosh()


def listed(before: int, after: int) -> dict[str, tuple[re.Match[str], list[dict]]]:
    """Return what a message lists, by run: the title and the lines."""
    x = torch.ones(2, 3, requires_grad=True)
    loss = mb.checkpoint(Parting(before, after), x, debug=True, engine="rerun").sum()
    with pytest.raises(mb.RecomputeMismatchError, match="did not repeat") as caught:
        loss.backward()
    found: dict[str, tuple[re.Match[str], list[dict]]] = {}
    lines: list[dict] = []
    for text in str(caught.value).splitlines():
        if title := TITLE.search(text):
            lines = []
            found[title["run"]] = (title, lines)
        elif line := LINE.search(text):
            lines.append(line.groupdict())
    return found


def test_each_operator_is_listed_with_its_number_and_its_operands():
    _, lines = listed(before=1, after=0)["forward"]
    (sine, cosh) = lines
    assert (sine["number"], sine["operator"]) == ("0", "aten.sin.default")
    assert (cosh["number"], cosh["operator"]) == ("1", "aten.cosh.default")
    assert sine["operands"] == cosh["operands"] == "float32[2, 3]"
    _, lines = listed(before=1, after=0)["recompute"]
    assert lines[1]["operands"] == "float32[2, 3], float32[2, 3]"


def test_the_first_operator_that_differs_is_marked_in_both_runs():
    for _, lines in listed(before=6, after=6).values():
        assert [line["number"] for line in lines if line["mark"] == ">"] == ["6"]


def test_the_list_holds_four_operators_before_the_mark_and_three_after_it():
    title, lines = listed(before=6, after=6)["forward"]
    assert (title["count"], title["first"]) == ("13", "2")
    assert [int(line["number"]) for line in lines] == [2, 3, 4, 5, 6, 7, 8, 9]


def test_the_list_begins_with_the_first_operator_where_few_ran_before():
    title, lines = listed(before=1, after=1)["forward"]
    assert title["first"] == lines[0]["number"] == "0"


def test_a_run_that_ends_early_is_marked_nowhere():
    x = torch.ones(3, requires_grad=True)
    calls = []

    def shrinking(x: Tensor) -> Tensor:
        calls.append(1)
        x = x.cosh()
        return x.exp().atan() if len(calls) == 1 else x

    loss = mb.checkpoint(shrinking, x, debug=True, engine="rerun").sum()
    with pytest.raises(mb.RecomputeMismatchError, match="did not repeat") as caught:
        loss.backward()
    marks = [line["mark"] for line in LINE.finditer(str(caught.value))]
    assert marks.count(">") == 1


def test_three_lines_of_the_users_code_are_given_innermost_first():
    _, lines = listed(before=0, after=0)["forward"]
    stack = [place.split() for place in lines[0]["stack"].split(" < ")]
    assert [name for _, name in stack] == ["innermost", "middle", "outermost"]
    assert all(place.startswith("test_trace.py:") for place, _ in stack)
