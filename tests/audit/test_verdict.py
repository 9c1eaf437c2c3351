"""The report of an audit: one screen of text, or data for JSON."""

from __future__ import annotations

import json

import torch
from torch import nn

from membudget.apply import RegionStatus
from membudget.audit import AuditReport, audit

X = torch.ones(2, 4)


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def faulty_report() -> AuditReport:
    model = nn.Sequential(*(linear() for _ in range(10)))

    def step(scale: float) -> None:
        (model(X).sum() * scale).backward()

    return audit(step, plain=1.0, budgeted=2.0, modules=model)


def test_the_report_has_all_differences_and_prints_one_screen():
    report = faulty_report()

    assert len(report.differences) == 20
    lines = str(report).splitlines()
    assert len(lines) <= 24
    assert lines[0] == "audit: NOT equal: 20 differences"
    assert lines[-1] == "  and 8 more"


def test_the_report_of_an_equal_step_says_so():
    torch.manual_seed(0)
    model = nn.Sequential(linear(), nn.Tanh(), linear())

    text = str(audit(model, X, lambda output, _: output.sum() * 0 + output[0, 0]))

    lines = text.splitlines()
    assert lines[0] == "audit: equal to the last bit"
    assert lines[1].startswith(
        "  compared  1 loss, 1 output, 4 gradients, 4 parameters, 1 tensor attribute, "
    )
    assert lines[2].endswith(", loss_fn(output, batch)")
    assert lines[3] == "  regions   3 of 3 ran, 3 recomputes"
    assert len(lines) == 4


def test_the_report_names_regions_that_did_not_run_or_not_once_per_forward():
    regions = (
        RegionStatus("used", forwards=1, recomputes=1, skipped=0),
        RegionStatus("frozen", forwards=0, recomputes=0, skipped=1),
        RegionStatus("twice", forwards=1, recomputes=2, skipped=0),
    )

    text = str(AuditReport((), regions=regions))

    assert (
        "  regions   2 of 3 ran (without frozen), 3 recomputes "
        "(not once a forward: twice (2))"
    ) in text.splitlines()


def test_the_report_is_data_for_json():
    data = json.loads(json.dumps(faulty_report().to_dict()))

    assert data["equal"] is False
    assert data["repeatable"] is True
    assert data["regions"] is None
    assert data["compared"]["gradients"] == 20
    assert data["differences"][0]["name"] == "0.weight"
    assert data["differences"][0]["index"] == [0, 0]
