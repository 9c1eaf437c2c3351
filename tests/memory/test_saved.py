"""The report of what autograd saves, with its origin."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from tests.devices import is_cpu


def kinds(model: nn.Module, x: Tensor) -> dict[str, list[tuple[str, int]]]:
    found: dict[str, list[tuple[str, int]]] = {}
    for record in mb.saved(model, x).records:
        found.setdefault(record.module_path, []).append((record.kind, record.bytes))
    return found


def test_each_layer_saves_what_its_derivative_needs():
    model = nn.Sequential(
        nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 2)
    )
    x = torch.zeros(3, 4)
    assert kinds(model, x) == {
        "0": [("input", x.nbytes)],
        "1": [("activation", 96)],
        "2": [
            ("activation", 96 if is_cpu() else 24)
        ],  # Its mask, on a device Booleans.
        "3": [("activation", 96)],
        "4": [("activation", 96), ("parameter", 64)],
    }


def test_relu_and_tanh_save_their_output():
    x = torch.randn(4, requires_grad=True)
    for function in (torch.relu, torch.tanh):
        report = mb.saved(function, x)
        (record,) = report.records
        assert record.kind == "activation"
        assert report.total_bytes == report.result.nbytes


def test_a_storage_counts_once_and_totals_are_sums():
    x = torch.randn(4, 6, requires_grad=True)
    report = mb.saved(lambda x: (x[:2] * x[2:]).sin().sum() + x.exp().sum(), x)
    assert any(record.is_view for record in report.records)
    parts = (report.parameter_bytes, report.input_bytes, report.activation_bytes)
    assert report.total_bytes == sum(parts)
    assert report.total_bytes == sum(report.by_module().values())
    assert report.total_bytes == sum(report.by_operator().values())
    assert report.to_dict()["total_bytes"] == report.total_bytes


def test_the_operator_and_the_line_are_the_user_s():
    x = torch.randn(3, requires_grad=True)
    (record,) = mb.saved(lambda: x.sin()).records
    assert record.operator == "torch.Tensor.sin"
    assert record.line.startswith("test_saved.py:")


def test_the_table_names_everything():
    text = str(mb.saved(nn.Sequential(nn.Linear(2, 3), nn.GELU()), torch.zeros(1, 2)))
    assert "torch.nn.functional.gelu" in text
    assert "float32[1, 3]" in text


def test_a_region_counts_what_it_keeps_and_not_what_it_drops():
    model = nn.Sequential(nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 4))
    x = torch.randn(8, 4)
    report = mb.saved(lambda x: mb.checkpoint(model, x), x)
    assert report.total_bytes == report.input_bytes == x.nbytes


def test_the_graph_stays_usable():
    x = torch.randn(5, requires_grad=True)
    report = mb.saved(lambda x: x.sin().exp().sum(), x)
    (plain,) = torch.autograd.grad(x.sin().exp().sum(), x)
    (gradient,) = torch.autograd.grad(report.result, x)
    assert torch.equal(gradient, plain)


def test_an_in_place_change_of_a_saved_tensor_is_an_error():
    x = torch.randn(5, requires_grad=True)
    h = x * 2
    report = mb.saved(lambda: (h * h).sum())
    h.detach().add_(1)
    with pytest.raises(mb.ChangedSinceForwardError, match="modified by an inplace"):
        report.result.backward()


def test_a_tensor_that_autograd_released_is_not_counted():
    x = torch.randn(5, requires_grad=True)

    def step() -> None:
        x.sin().exp().sum().backward()

    assert mb.saved(step).total_bytes == 0


def test_the_table_has_one_line_per_tensor_and_counts_a_storage_once():
    x = torch.randn(4, 6, requires_grad=True)
    report = mb.saved(lambda x: x[:2] * x[2:], x)
    assert [record.is_view for record in report.records] == [True, True]
    title, _, header, _, *rows, _ = str(report).splitlines()
    assert title.strip() == "saved for backward: 96 bytes"
    columns = [cell.strip() for cell in header.strip("┃").split("┃")]
    assert columns == ["module", "operator", "line", "kind", "shape", "bytes"]
    # Bytes are aligned on the right, all else on the left.
    assert rows[0].endswith(" 96 │")
    assert rows[0].startswith("│ ")
    cells = [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]
    assert [row[3:] for row in cells] == [
        ["input (view)", "float32[2, 6]", "96"],
        ["input (view)", "float32[2, 6]", "(shared)"],
    ]


def test_the_totals_are_those_of_each_kind():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    x = torch.randn(3, 4)
    report = mb.saved(model, x)
    found = report.to_dict()
    assert found["parameter_bytes"] == report.parameter_bytes == 2 * 8 * 4
    assert found["input_bytes"] == report.input_bytes == x.nbytes
    assert found["activation_bytes"] == report.activation_bytes == 3 * 8 * 4
    nothing = mb.saved(torch.sin, x)
    assert nothing.parameter_bytes == nothing.input_bytes == 0
    assert nothing.activation_bytes == nothing.total_bytes == 0


@pytest.mark.parametrize(
    ("make", "is_view"),
    [
        (lambda x: x * 1, False),
        (lambda x: (x * 1).t(), True),
        (lambda x: (x * 1)[0], True),
        # Not made by a view operator, but a part of a storage.
        (lambda x: torch.empty(0).set_((x * 1).untyped_storage(), 0, (2,), (1,)), True),
    ],
    ids=["whole", "view-of-all", "view-of-a-part", "part"],
)
def test_a_saved_tensor_is_a_view_if_it_is_one_or_a_part_of_its_storage(make, is_view):
    x = torch.randn(2, 3)
    weight = torch.ones((), requires_grad=True)

    with torch.no_grad():
        factor = make(x)
    (record,) = [
        r for r in mb.saved(lambda: (factor * weight).sum()).records if r.shape
    ]

    assert record.is_view is is_view
