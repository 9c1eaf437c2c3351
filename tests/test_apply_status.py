"""The counters of regions as a table, and how `apply` is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import membudget as mb
from membudget.apply import RegionStatus, Status
from membudget.attach import carried_by, has_region
from membudget.engine import native

HEAD = "forwards  recomputes  skipped"


def lines(*regions: RegionStatus, **left_out: str) -> list[str]:
    return str(Status(regions, left_out)).splitlines()


def test_each_region_is_a_line_of_numbers_below_their_titles():
    assert lines(RegionStatus("h.0", 12, 3, 4)) == [
        f"region  {HEAD}",
        "h.0           12           3        4",
    ]


def test_the_first_column_is_as_wide_as_the_longest_name():
    head, first = lines(RegionStatus("decoder.0", 1, 1, 0))
    assert head == f"region     {HEAD}"
    assert first == "decoder.0         1           1        0"
    head, *_, last = lines(RegionStatus("0", 1, 1, 0), encoder="the loss differs")
    assert head == f"region   {HEAD}"
    assert last == "encoder  (no region, under which the loss differs)"


@pytest.mark.parametrize(
    ("region", "note"),
    [
        (RegionStatus("0", 0, 0, 0), "  (did not run)"),
        (RegionStatus("0", 1, 0, 0), ""),
        (RegionStatus("0", 0, 0, 1), ""),
        (
            RegionStatus("0", 1, 1, 0, unrepeatable=2),
            "  (2 values did not reproduce, and are kept)",
        ),
        (
            RegionStatus("0", 1, 1, 0, differences=3),
            "  (3 calls ran other operators than planned)",
        ),
        (
            RegionStatus("0", 1, 1, 0, 2, 3),
            "  (2 values did not reproduce, and are kept)"
            "  (3 calls ran other operators than planned)",
        ),
    ],
)
def test_a_region_that_did_not_run_as_planned_has_a_note(region, note):
    counters = f"{region.forwards:8}  {region.recomputes:10}  {region.skipped:7}"
    assert lines(region)[1] == f"0       {counters}{note}"


def test_regions_of_an_application_that_never_ran_are_all_zero():
    applied = mb.apply(nn.Sequential(nn.Linear(2, 2)), names="0")
    assert applied.status() == Status((RegionStatus("0", 0, 0, 0, 0, 0),), {})


@pytest.mark.parametrize(("engine", "shows"), [("rerun", False), ("replay", True)])
def test_the_recorder_is_shown_once_a_region_has_replayed(engine, shows):
    model = nn.Sequential(nn.Linear(2, 2))
    applied = mb.apply(model, names="0", engine=engine)
    assert "recorder" not in str(applied.status())
    model(torch.ones(1, 2)).sum().backward()
    assert str(applied.status()).count("\nreplay recorder: ") == shows
    assert applied.status().recorder == (native.status() if shows else "")


def test_a_forward_in_which_nothing_requires_a_gradient_is_skipped():
    model = nn.Sequential(nn.Linear(2, 2))
    applied = mb.apply(model, names="0")
    with torch.no_grad():
        model(torch.ones(1, 2))
    model.requires_grad_(False)
    model(torch.ones(1, 2))
    (region,) = applied.status().regions
    assert (region.forwards, region.recomputes, region.skipped) == (0, 0, 1)


@pytest.mark.parametrize(
    "selection", [{"names": "0"}, {"blocks": nn.Linear}, {"where": lambda *_: True}]
)
def test_spans_beside_a_selection_are_refused(selection: dict[str, Any]):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(mb.SelectionError, match="pass spans or blocks, names and whe"):
        mb.apply(model, spans=[("0", "1")], **selection)
    assert [type(module) for module in model] == [nn.Linear, nn.Linear]


def test_a_handle_leaves_alone_what_has_replaced_its_regions():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    first = mb.apply(model, blocks=nn.Linear)
    second = mb.apply(model, blocks=nn.Linear, every=2)

    first.say_kept("mine")
    first.remove()

    assert [module for module in model if has_region(module)] == [model[0], model[2]]
    carried = [carried_by(model[i]) for i in (0, 2)]
    assert [c.kept for c in carried if c is not None] == ["", ""]
    model(torch.ones(1, 2)).sum().backward()
    assert [r.recomputes for r in second.status().regions] == [1, 1]
    second.remove()
    assert [type(module) for module in model] == 4 * [nn.Linear]
