"""What an error says of a recompute that differs: the tensor, the hints, both runs."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.engine.comparison import metadata
from membudget.engine.messages import likely_causes, mismatch_error, module_names
from membudget.engine.options import RegionOptions
from membudget.engine.reach import reach
from membudget.engine.reads import Reads


@dataclass
class Site:
    module_path: str = "layers.1"
    operator: str = "torch.Tensor.exp"
    line: str = "model.py:7 in forward"


def error(index: int | None, site: Any, traces: str = "") -> Any:
    return mismatch_error(index, site, "two", "three", ["a cache", "a flag"], traces)


def test_an_error_names_the_tensor_the_place_and_the_causes():
    found = error(4, Site())
    assert str(found).splitlines() == [
        "the recompute of a region did not repeat its forward: saved tensor 4 differs.",
        "  saved in the forward: two",
        "  recomputed: three",
        "  where: module 'layers.1', torch.Tensor.exp at model.py:7 in forward",
        "  likely cause: a cache",
        "  likely cause: a flag",
        "  To see the operators of both runs, give the region debug=True or use "
        "set_checkpoint_debug_enabled(True).",
    ]
    assert (found.index, found.saved, found.recomputed) == (4, "two", "three")
    assert list(found.causes) == ["a cache", "a flag"]
    assert found.module_path == "layers.1"
    assert found.operator == "torch.Tensor.exp"
    assert found.line == "model.py:7 in forward"


def test_an_error_about_the_number_of_tensors_names_no_place():
    found = error(None, None)
    assert "the number of tensors differs" in str(found)
    assert "where:" not in str(found)
    assert found.index is None
    assert found.module_path == found.operator == found.line == ""


def test_an_error_outside_of_modules_names_the_operator_alone():
    assert "  where: torch.Tensor.exp at " in str(error(0, Site(module_path="")))


def test_traces_stand_in_the_place_of_the_advice_to_make_them():
    text = str(error(0, Site(), traces="both traces"))
    assert text.endswith("both traces")
    assert "debug=True" not in text


X = torch.zeros(2, 3)

LAST = "Python state that the forward advanced"


def causes(saved: Tensor | None, made: Tensor | None, **options: Any) -> list[str]:
    pair = [None if t is None else metadata(t) for t in (saved, made)]
    return likely_causes(torch.sin, (), RegionOptions(**options), *pair)


@pytest.mark.parametrize(
    ("made", "hint"),
    [
        (X.double(), "the dtype changed from torch.float32 to torch.float64"),
        (X.to("meta"), "the device changed from cpu to meta"),
        (torch.zeros(3, 2).t(), "only the memory layout differs"),
    ],
)
def test_the_first_difference_of_the_metadata_is_the_hint(made, hint):
    first, last = causes(X, made)
    assert first.startswith(hint)
    assert last.startswith(LAST)


def test_a_shape_that_changed_is_hinted_at_where_code_was_compiled(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._dynamo", torch)
    first, _ = causes(X, torch.zeros(4, 3))
    assert "mark_dynamic" in first
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    assert len(causes(X, torch.zeros(4, 3))) == 1


@pytest.mark.parametrize(
    ("saved", "made"), [(None, None), (X, None), (None, X), (X, torch.ones(2, 3))]
)
def test_without_a_difference_at_hand_only_the_general_hint_is_given(saved, made):
    (only,) = causes(saved, made)
    assert only.startswith(LAST)


def test_guards_that_are_off_are_named():
    assert causes(None, None, guards=False)[0].startswith("guards=False")
    first, *_ = causes(None, None, preserve_rng_state=False)
    assert first.startswith("preserve_rng_state=False")
    assert len(causes(None, None, guards=False, preserve_rng_state=False)) == 3


def test_a_container_that_grew_is_named_with_both_lengths():
    cache: list[int] = [1]
    table: dict[str, int] = {}

    def function(x: Tensor) -> Tensor:
        return x * len(cache) * len(table)

    reads = Reads(reach(function))
    cache += [2, 3]
    reads.finish(function, [], None)
    first, *_ = likely_causes(function, reads.grown, RegionOptions(), None, None)
    assert first.startswith("the list 'cache' grew from 1 to 3")
    table["a"] = 1
    reads.finish(function, [], None)
    found = likely_causes(function, reads.grown, RegionOptions(), None, None)
    assert found[1].startswith("the dict 'table' grew from 0 to 1")
    cache.clear()
    reads.finish(function, [], None)
    assert (
        "grew"
        not in likely_causes(
            function, Reads(reach(function)).grown, RegionOptions(), None, None
        )[0]
    )


def test_every_module_has_its_path_below_the_label_of_the_region():
    inner = nn.Sequential(nn.Tanh())
    model = nn.Sequential(nn.Linear(2, 2), inner)
    names = module_names(model, "blocks.3")
    assert names[id(model)] == "blocks.3"
    assert names[id(model[0])] == "blocks.3.0"
    assert names[id(inner[0])] == "blocks.3.1.0"
    assert module_names(model)[id(inner[0])] == "1.0"


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
    assert all(place.startswith("test_messages.py:") for place, _ in stack)
