"""The report of an audit: one screen of text, or data for JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from membudget.apply import RegionStatus
from membudget.audit import AuditReport, Compared, Difference, audit

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


def region(name: str, forwards: int = 1, recomputes: int = 1) -> RegionStatus:
    return RegionStatus(name, forwards, recomputes, 0)


def difference(name: str, kind: Any = "gradient") -> Difference:
    return Difference(kind, name, "1 of 4 elements")


@pytest.mark.parametrize(
    ("compared", "text"),
    [
        (Compared(), ""),
        (
            Compared(1, 1, 1, 1, 1, 1, 1, 1),
            "1 loss, 1 output, 1 gradient, 1 missing gradient, 1 parameter, 1 buffer, "
            "1 tensor attribute, 1 random stream",
        ),
        (
            Compared(2, 3, 4, 5, 6, 7, 8, 9000),
            "2 losses, 3 outputs, 4 gradients, 5 missing gradients, 6 parameters, "
            "7 buffers, 8 tensor attributes, 9,000 random streams",
        ),
        (Compared(gradients=1, streams=2), "1 gradient, 2 random streams"),
    ],
)
def test_what_was_compared_is_counted_in_words(compared, text):
    assert str(compared) == text


def test_a_list_shows_twelve_differences_in_columns():
    short, long = difference("w", "loss"), difference("x" * 50)
    lines = str(AuditReport((short, long), compared=Compared(gradients=1))).splitlines()
    assert lines[0] == "audit: NOT equal: 2 differences"
    assert lines[1:4] == [
        "  compared  1 gradient",
        "  regions   not counted, the step calls them itself",
        "differences, plain beside budgeted:",
    ]
    assert lines[4] == f"  loss      {'w':40}  1 of 4 elements"
    assert lines[5] == f"  gradient  {'x' * 50}  1 of 4 elements"
    assert len(lines) == 6

    twelve = str(AuditReport((short,) * 12)).splitlines()
    assert twelve[-1] == "  loss  w  1 of 4 elements"
    assert str(AuditReport((short,) * 13)).splitlines()[-1] == "  and 1 more"
    assert str(AuditReport((short,) * 1013)).splitlines()[-1] == "  and 1,001 more"
    one = str(AuditReport((short,))).splitlines()
    assert one[0] == "audit: NOT equal: 1 difference"


def test_each_kind_of_difference_has_a_list():
    report = AuditReport(
        (), (difference("calls", "value"),), (difference("w"),), Compared(gradients=1)
    )
    lines = str(report).splitlines()
    titles = [line for line in lines if line.endswith(":")]
    assert titles == [
        "differences between two plain runs:",
        "Python values that differ:",
    ]
    data = report.to_dict()
    assert [item["name"] for item in data["side_effects"]] == ["calls"]
    assert [item["name"] for item in data["unrepeatable"]] == ["w"]
    assert data["equal"] is True
    assert data["repeatable"] is False


def test_the_report_names_at_most_six_regions():
    six = tuple(region(str(i), 0, 0) for i in range(6))
    ran = (region("a"), region("b", 2, 4), region("c", 1, 0))
    lines = str(AuditReport((), regions=(*six, *ran))).splitlines()
    assert lines[2] == (
        "  regions   3 of 9 ran (without 0, 1, 2, 3, 4, 5), 5 recomputes "
        "(not once a forward: b (4), c (0))"
    )
    seven = str(AuditReport((), regions=(*six, region("6", 0, 0)))).splitlines()
    assert seven[2] == (
        "  regions   0 of 7 ran (without 0, 1, 2, 3, 4, 5, ...), 0 recomputes"
    )


@pytest.mark.parametrize(
    ("report", "warnings"),
    [
        (AuditReport((), compared=Compared(gradients=1), regions=(region("0"),)), []),
        (AuditReport((), compared=Compared(gradients=1)), []),
        (
            AuditReport((), compared=Compared(gradients=1), regions=(region("0", 0),)),
            ["no region ran"],
        ),
        (
            AuditReport(
                (), compared=Compared(gradients=1), regions=(region("0", 1, 0),)
            ),
            ["no region was recomputed"],
        ),
        (AuditReport(()), ["no gradient was compared"]),
        (AuditReport((), zero_gradients=True), ["no gradient was compared"]),
        (
            AuditReport((), compared=Compared(gradients=1), zero_gradients=True),
            ["every gradient is zero"],
        ),
        (
            AuditReport((), (difference("x"),) * 2, compared=Compared(gradients=1)),
            ["2 Python value(s) differ"],
        ),
        (
            AuditReport((), (), (difference("x"),), Compared(gradients=1)),
            ["the plain step is not repeatable"],
        ),
    ],
)
def test_a_report_warns_of_each_reason_not_to_rely_on_it(report, warnings):
    assert len(report.warnings) == len(warnings)
    for found, beginning in zip(report.warnings, warnings, strict=True):
        assert found.startswith(beginning)
        assert f"  warning   {found}" in str(report).splitlines()
    assert report.to_dict()["warnings"] == list(report.warnings)


def test_a_report_counts_regions_only_if_there_were_any():
    assert AuditReport(()).regions_ran is None
    assert AuditReport(()).recomputes is None
    counted = AuditReport((), regions=(region("0", 2, 3), region("1", 0, 0)))
    assert (counted.regions_ran, counted.recomputes) == (1, 3)
    assert counted.to_dict()["regions"][0]["recomputes"] == 3
    assert counted.to_dict()["regions_ran"] == 1
    assert counted.to_dict()["recomputes"] == 3


def test_the_loss_is_shown_with_where_it_is_from():
    report = AuditReport((), loss_from="output.loss", loss="1.5")
    assert "  loss      1.5, output.loss" in str(report).splitlines()
    assert "loss" not in str(AuditReport((), loss="1.5"))
    assert (report.to_dict()["loss"], report.to_dict()["loss_from"]) == (
        "1.5",
        "output.loss",
    )
