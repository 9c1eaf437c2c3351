"""Sizes of tensors tell situations apart, in whatever argument they are."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.loop.situation import situation_of, sizes_text, tensors_of

MODEL = nn.Linear(4, 4)


@dataclass
class Batch:
    """Inputs of a model, as some libraries pass them."""

    x: Tensor


class Graph:
    """Any object with a tensor."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


@pytest.mark.parametrize(
    "made",
    [
        lambda x: x,
        lambda x: {"x": [x]},
        Batch,
        Graph,
        lambda x: UserDict(x=x),
        lambda x: SimpleNamespace(x=x),
    ],
    ids=["tensor", "dict", "dataclass", "object", "user-dict", "namespace"],
)
def test_tensors_are_found_in_every_argument(made: Callable[[Tensor], Any]):
    small, large = torch.ones(2, 4), torch.ones(3, 4)
    one, other = (situation_of(MODEL, (made(x),), {}, 0) for x in (small, large))
    assert one.kind == other.kind
    assert (one.sizes, other.sizes) == ((2, 4), (3, 4))
    assert tensors_of((made(small),), {}) == [small]
    assert sizes_text((made(small),), {}) == "2x4"


def test_a_module_among_the_arguments_is_no_size():
    found = situation_of(MODEL, (nn.Linear(2, 2),), {}, 0)
    assert found.sizes == ()
    assert sizes_text((nn.Linear(2, 2),), {}) == "no tensors"


class Checks(nn.Module):
    """Refuses an empty batch, as models of the user's may."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Any:
        if not len(x):
            raise ValueError("an empty batch")
        return self.layers(x)


def test_a_batch_that_the_model_refuses_leaves_the_others_their_plans():
    model = Checks()
    with mb.budget(model, "1GiB") as fitted:
        with pytest.raises(ValueError, match="an empty batch"):
            model(torch.ones(0, 4))
        model(torch.ones(8, 4)).sum().backward()
        model(torch.ones(8, 4)).sum().backward()
    assert "no plan" not in fitted.report()
    assert fitted.status().situations[-1].plans
