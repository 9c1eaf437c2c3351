"""Every run of an audit starts with the same batch, and the audit restores it."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from membudget.audit import audit


@dataclass(slots=True)
class SlottedBatch:
    x: Tensor
    count: int = 0


class Holder:
    def __init__(self, x: Any) -> None:
        self.x = x


def consume(batch: Any) -> Tensor:
    """Take the tensor out of a batch, and leave the batch changed."""
    if isinstance(batch, dict | UserDict):
        return batch.pop("x")
    if isinstance(batch, list):
        return batch.pop()
    x: Tensor = batch.x
    batch.x = None
    return x


@pytest.mark.parametrize(
    "make",
    [
        lambda x: [x],
        Holder,
        SlottedBatch,
    ],
)
def test_a_batch_that_the_step_consumes_is_restored_for_the_next_run(make):
    class Consumes(nn.Sequential):
        def forward(self, batch: Any) -> Tensor:
            return super().forward(consume(batch))

    x = torch.randn(5, 4)
    batch = make(x)

    assert audit(Consumes(nn.Linear(4, 4), nn.Tanh()), batch).equal
    assert consume(batch) is x


@pytest.mark.parametrize(
    "batch",
    [
        {"x": None},
        OrderedDict(x=None),
        UserDict(x=None),
        defaultdict(list, x=None),
    ],
    ids=["dict", "OrderedDict", "UserDict", "defaultdict"],
)
def test_a_mapping_that_the_loss_function_consumes_is_restored_for_the_next_run(batch):
    x = torch.randn(5, 4)
    batch["x"], batch["labels"] = x, torch.ones(5, 4)

    class TakesLabels(nn.Linear):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)

    def loss_fn(output: Tensor, batch: Any) -> Tensor:
        return (output - batch.pop("labels")).square().sum()

    model = TakesLabels(4, 4)
    assert audit(model, batch, loss_fn, blocks=TakesLabels).equal
    assert list(batch) == ["x", "labels"]
    assert batch["x"] is x


def test_a_batch_tensor_that_the_step_overwrites_is_restored():
    class Overwrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.layers(x.mul_(2)) * mask

    x, mask = torch.randn(5, 4), torch.ones(1, 4).expand(5, 4)
    before = x.clone()

    report = audit(Overwrites(), (x, mask))

    assert report.equal
    assert torch.equal(x, before)


def test_a_batch_that_requires_a_gradient_is_compared_and_left_without_one():
    x = torch.randn(5, 4, requires_grad=True)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    report = audit(model, {"input": x})

    assert report.compared.gradients == 3
    assert x.grad is None


def test_a_model_with_a_reference_to_itself_is_walked_once():
    model: Any = nn.Sequential(nn.Linear(4, 4))
    model.owner = Holder(torch.ones(1))
    model.owner.model = [model]
    model.owner.owner = model.owner

    assert audit(model, torch.randn(5, 4)).compared.parameters == 2
