"""The report of a fitted model: what was tried, and what is not as usual."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import membudget as mb
from membudget.apply import RegionStatus, Status
from membudget.fit import fit
from membudget.fitted import DOES_NOT_FIT, MAPS_BLOCKS, Fitted
from membudget.profile.cache import FROM_CACHE, NOT_CACHED
from membudget.report.plan_text import PLAIN_FITS, head
from tests.planner.models import mlp


@cache
def plain() -> Fitted:
    """Return a fitted model that needs no region."""
    torch.manual_seed(0)
    return fit(*mlp(), "1GiB", fake=True)


class Regions:
    """Stands for what is applied to a model."""

    def __init__(self, *regions: RegionStatus, **left_out: str) -> None:
        self.status = lambda: Status(regions, left_out)

    def say_kept(self, text: str) -> None:
        """No error is raised under it."""


def lines(mode: str = "auto", notes: Any = (), count: int = 1, **parts: Any) -> Any:
    """Return what a report says between its head and its table."""
    done = plain()
    attempts = [
        replace(done.attempts[0], peak_bytes=1000 * number, memory=None)
        for number in range(count + 10, 10, -1)
    ]
    profile = replace(done.profile, notes=notes)
    applied: Any = parts.get("applied", Regions())
    skipped = parts.get("skipped", ())
    fitted = Fitted(mode, done._step, profile, attempts, applied, None, skipped)
    text = head(fitted.plan, fitted.peak_bytes, profile.peak_bytes)
    assert fitted.report().startswith(text + "\n")
    assert fitted.report().endswith(f"\n\n{PLAIN_FITS}")
    return fitted.report().removeprefix(text).removesuffix(PLAIN_FITS).split("\n")[1:-2]


def test_a_usual_report_has_nothing_between_head_and_table():
    assert lines() == []


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"mode": "every_2"}, "mode           every_2  a rule, without planning"),
        ({"notes": (DOES_NOT_FIT,)}, f"profile           fake  {DOES_NOT_FIT}"),
        ({"notes": (MAPS_BLOCKS,)}, f"malloc            maps  {MAPS_BLOCKS}"),
        ({"notes": (FROM_CACHE,)}, f"profile         cached  {FROM_CACHE}"),
        (
            {"notes": ("another", f"{NOT_CACHED}it is compiled")},
            f"profile     not cached  {NOT_CACHED}it is compiled",
        ),
        ({"notes": ("another",)}, None),
        (
            {"skipped": ["annealing", "timing steps"]},
            "time              over  skipped: annealing, timing steps",
        ),
        (
            {"count": 3},
            "plans                3  the earlier ones took 13,000, 12,000 bytes",
        ),
        (
            {"applied": Regions(a="x", **{"": "y"})},
            "left out  'a', 'the model': no region, under which values differ",
        ),
        (
            {
                "applied": Regions(
                    RegionStatus("0", 1, 1, 0),
                    RegionStatus("1", 1, 1, 0, 0, 2),
                    RegionStatus("2", 1, 1, 0, 0, 1),
                )
            },
            "differs              2  regions ran other operators than planned, and "
            "may keep less: '1' first",
        ),
        (
            {"applied": Regions(RegionStatus("", 1, 1, 0, 0, 2))},
            "differs              1  regions ran other operators than planned, and "
            "may keep less: 'the model' first",
        ),
    ],
)
def test_what_is_not_as_usual_has_a_line(options, line):
    assert lines(**options) == ([] if line is None else [line])


def test_the_last_attempt_is_the_one_that_is_applied():
    done = plain()
    last = replace(done.attempts[0], peak_bytes=7)
    applied: Any = Regions()
    attempts = [*done.attempts, last]
    fitted = Fitted("auto", done._step, done.profile, attempts, applied)
    assert fitted.peak_bytes == 7
    assert fitted.attempts == (*done.attempts, last)


def test_an_audit_may_be_of_another_batch():
    model, batch = mlp()
    with fit(model, batch, "80%", fake=True) as fitted:
        assert fitted.plan.regions
        seen: list[int] = []
        model.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
        assert fitted.audit(batch[:3]).equal
        assert fitted.audit().regions_ran == len(fitted.status().regions)
    assert seen == [3] * 3 + [len(batch)] * 3


def test_a_plan_without_regions_is_audited_against_itself():
    model, batch = mlp()
    fitted = fit(model, batch, "100%", fake=True)
    report = fitted.audit()
    assert report.equal
    assert report.regions is None
    assert report.compared.gradients == len(list(model.parameters()))


def test_a_step_of_the_user_is_audited_by_what_it_returns():
    model, batch = mlp()

    def step() -> torch.Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        return loss.detach()

    with mb.fit(step, modules=model, budget="80%") as fitted:
        assert fitted.plan.regions
        report = fitted.audit()
    assert report.equal
    assert (report.compared.losses, report.compared.outputs) == (0, 1)
