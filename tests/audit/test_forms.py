"""The verdict of an audit: faults are put in, and the audit must name them.

Where membudget's own regions do not have the fault, `torch.utils.checkpoint` serves: it
updates buffers twice and does not restore Python's and NumPy's random streams.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.audit import audit
from tests import devices
from tests.audited import audit_torch, names


class Block(nn.Module):
    """Everything that a region must see again: streams of all kinds, and buffers."""

    counter: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout()
        self.sources: Any = (
            devices.generator(),
            np.random.default_rng(0),
            random.Random(0),
        )
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.counter += 1
        generator, numpy_generator, python_generator = self.sources
        scale = torch.rand(4, generator=generator)
        scale = scale * numpy_generator.random() * python_generator.random()
        scale = scale * random.random() * np.random.random()  # noqa: NPY002
        return self.dropout(self.norm(torch.tanh(self.linear(x)) * scale)) + x


class Recomputed(nn.Module):
    """A block that computes something else in a recompute."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        if mb.is_recomputing():
            x = self.change(x)
        return torch.tanh(self.linear(x)).sin()


def test_a_model_with_every_kind_of_state_is_equal_under_regions():
    model = nn.Sequential(*(Block() for _ in range(3)))

    report = audit(model, torch.randn(5, 4))

    assert report.differences == ()
    assert report.equal
    assert report.repeatable
    assert report.regions_ran == 3
    assert report.recomputes == 3
    assert report.warnings == ()


def test_each_thing_is_counted_once():
    model: Any = nn.Sequential(*(Block() for _ in range(2)))
    model[1].linear.weight = model[0].linear.weight
    unused = nn.Parameter(torch.ones(1))
    model.register_parameter("unused", unused)

    compared = audit(model, torch.randn(5, 4)).compared

    assert compared.losses == 1
    assert compared.outputs == 1
    assert compared.parameters == 8
    assert compared.gradients == 7
    assert compared.no_gradients == 1
    assert compared.buffers == 8
    # Those of torch, Python and NumPy, and three private ones in each block.
    assert compared.streams >= 9


@pytest.mark.parametrize("change", [lambda x: x + 1, lambda x: x.flip(0)])
def test_values_that_the_recompute_changes_are_found_in_the_gradients(change):
    model = nn.Sequential(nn.Linear(4, 4), Recomputed(change), nn.Linear(4, 4))

    report = audit(model, torch.randn(3, 4), names="1")

    assert not report.equal
    assert "1.linear.weight" in names(report, "gradient")
    assert {item.kind for item in report.differences} == {"gradient"}
    assert "2.weight" not in names(report, "gradient")


def test_a_difference_says_how_many_elements_differ_and_the_first_with_both_values():
    weight = nn.Parameter(torch.zeros(2, 3))
    module = nn.Module()
    module.weight = weight

    def step(scale: list[float]) -> None:
        (weight * torch.tensor([[1.0, 1.0, 1.0], scale])).sum().backward()

    report = audit(
        step, plain=[1.0, 0.5, 3.0], budgeted=[1.0, 0.25, 4.0], modules=module
    )

    (difference,) = report.differences
    assert (difference.kind, difference.name) == ("gradient", "weight")
    assert (difference.elements, difference.total) == (2, 6)
    assert difference.index == (1, 1)
    assert (difference.plain, difference.other) == ("0.5", "0.25")
    assert str(difference) == (
        "gradient weight: 2 of 6 elements, first at [1, 1]: plain 0.5, budgeted 0.25"
    )


def test_a_gradient_that_only_one_run_computes_is_a_difference():
    layers = nn.Linear(2, 2), nn.Linear(2, 2)

    def step(last: int) -> None:
        layers[0](torch.ones(1, 2)).sum().backward()
        if last:
            layers[1](torch.ones(1, 2)).sum().backward()

    report = audit(step, plain=1, budgeted=0, modules=layers)

    assert names(report, "gradient") == ["modules[1].weight", "modules[1].bias"]
    assert report.differences[0].other == "None"


@pytest.mark.parametrize(
    ("plain", "budgeted"),
    [(0.0, -0.0), (float("nan"), 1.0), (1.0, float("inf"))],
)
def test_bytes_are_compared_not_numbers(plain, budgeted):
    report = audit(torch.tensor, plain=plain, budgeted=budgeted, modules=())

    assert names(report, "output") == ["output"]


def test_a_nan_equals_the_same_nan_and_no_other():
    bits = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32)
    nans = bits.view(torch.float32)

    same = audit(torch.clone, plain=nans, budgeted=nans, modules=())
    other = audit(torch.clone, plain=nans, budgeted=nans.flip(0), modules=())

    assert same.equal
    assert "nan (0x7fc00000)" in other.differences[0].detail


def test_a_buffer_that_is_updated_twice_is_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())

    report = audit_torch(model, torch.randn(5, 4))

    assert names(report, "gradient") == []
    assert names(report, "buffer") == [
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]
    assert report.differences[-1].detail == "plain 1, budgeted 2"


def test_random_numbers_that_an_option_leaves_alone_are_found():
    model = nn.Sequential(*(nn.Sequential(nn.Dropout(), nn.Linear(4, 4)) for _ in "ab"))

    report = audit(model, torch.randn(5, 4), preserve_rng_state=False)

    assert names(report, "stream") == [devices.stream_name()]
    assert {"0.1.weight", "1.1.weight"} <= {*names(report, "gradient")}


def test_buffers_that_an_option_leaves_alone_are_found():
    model = nn.Sequential(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Tanh()))

    report = audit(model, torch.randn(5, 4), names="0", guards=False)

    assert "0.0.num_batches_tracked" in names(report, "buffer")
    assert names(report, "gradient") == []


def test_a_tensor_attribute_that_no_one_registered_is_compared():
    class Average(nn.Linear):
        average: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.average.lerp_(x.mean(0), 0.5)
            return super().forward(x).tanh()

    model = Average(4, 4)
    model.average = torch.zeros(4)

    theirs = audit_torch(model, torch.randn(5, 4))

    assert names(theirs, "attribute") == ["average"]
    assert audit(nn.Sequential(model), torch.randn(5, 4)).equal


def test_a_list_that_grew_twice_is_a_warning_and_not_a_difference():
    class Auxiliary(nn.Linear):
        losses: list[float]

        def forward(self, x: Tensor) -> Tensor:
            self.losses.append(x.mean().item())
            return super().forward(x).tanh()

    model = Auxiliary(4, 4)
    model.losses = []

    report = audit_torch(model, torch.randn(5, 4))

    assert report.equal
    assert "len(losses)" in [item.name for item in report.side_effects]
    assert "is_recomputing" in report.warnings[-1]
    assert model.losses == []


def test_a_plain_step_that_is_not_repeatable_is_reported_with_the_place():
    calls = 0

    class Counts(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return super().forward(x) * calls

    model = nn.Sequential(nn.Linear(2, 2), Counts(2, 2))

    report = audit(model, torch.randn(3, 2), names="0")

    assert not report.repeatable
    assert {item.kind for item in report.unrepeatable} == {"loss", "output", "gradient"}
    assert "1.weight" in [item.name for item in report.unrepeatable]
    assert any("is not repeatable" in text for text in report.warnings)


def test_regions_that_do_not_run_are_reported():
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
    model.forward = lambda x: model["used"](x)

    report = audit(model, torch.randn(3, 2), names="other")

    assert report.equal
    assert report.regions_ran == 0
    assert "no region ran" in str(report)


def test_gradients_that_are_all_zero_are_reported():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    report = audit(model, torch.randn(3, 2), lambda output, _: output.sum() * 0)

    assert report.zero_gradients
    assert "every gradient is zero" in str(report)


@pytest.mark.cpu_only("emu has no sparse tensors")
def test_sparse_gradients_are_compared_by_index_and_value():
    table = nn.Embedding(10, 2, sparse=True)

    def step(rows: list[int]) -> None:
        table(torch.tensor(rows)).sum().backward()

    assert audit(step, plain=[1, 2], budgeted=[2, 1], modules=table).equal
    other: Any = audit(step, plain=[1, 2], budgeted=[1, 3], modules=table)
    assert names(other, "gradient") == ["weight"]
