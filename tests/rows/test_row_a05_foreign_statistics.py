"""Row A5: running statistics that are not an `nn.BatchNorm`'s."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import membudget as mb
from membudget.errors import ChangedSinceForwardError
from tests.behaviours.steps import plain

Region = Callable[..., Any]


class Box:
    """An object of the user's that holds one thing."""

    def __init__(self, content: Any) -> None:
        self.content = content


class Normalised(nn.Module):
    """Normalises by statistics of its own, held in one of several ways."""

    def __init__(self, features: int, place: str) -> None:
        super().__init__()
        self.inner = nn.Linear(4, features)
        mean, variance = torch.zeros(features), torch.ones(features)
        held = {"mean": mean, "variance": variance}
        if place == "buffer":
            for name, tensor in held.items():
                self.register_buffer(name, tensor)
            self.statistics: Callable[[], Any] = lambda: self.get_buffers()
        elif place == "dict":
            self.held = held
            self.statistics = lambda: self.held
        elif place == "closure":
            self.statistics = lambda: held
        else:
            self.deep = Box(Box(held))
            self.statistics = lambda: self.deep.content.content

    def get_buffers(self) -> dict[str, Tensor]:
        return dict(self.named_buffers(recurse=False))

    def forward(self, x: Tensor) -> Tensor:
        held = self.statistics()
        y = F.batch_norm(
            self.inner(x), held["mean"], held["variance"], None, None, True, 0.1
        )
        return y.sin().sum()


def facts(module: Normalised) -> list[Tensor]:
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return [t.clone() for t in (*gradients, *module.statistics().values())]


def step(module: Normalised, region: Region) -> list[Tensor]:
    torch.manual_seed(1)
    module.zero_grad()
    region(module, torch.randn(8, 4)).backward()
    return facts(module)


def built(features: int, place: str) -> Normalised:
    torch.manual_seed(0)
    return Normalised(features, place)


def are_equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize("engine", ["auto", "rerun"])
@pytest.mark.parametrize("features", [16, 20_000])
def test_row_a05_statistics_in_buffers_of_any_size_are_advanced_once(
    features: int, engine: str
):
    def region(*args: Any) -> Any:
        return mb.checkpoint(*args, engine=engine)

    one, other = built(features, "buffer"), built(features, "buffer")

    for _ in range(3):
        assert are_equal(step(one, region), step(other, plain))


class Guided(nn.Module):
    """Calls a module that it hides from its own list of submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.__dict__["teacher"] = nn.BatchNorm1d(4)

    @property
    def normalise(self) -> nn.BatchNorm1d:
        return self.__dict__["teacher"]

    def forward(self, x: Tensor) -> Tensor:
        return self.normalise(self.inner(x)).sin().sum()


@pytest.mark.parametrize("engine", ["auto", "rerun", "replay"])
def test_row_a05_statistics_of_a_module_that_is_no_submodule_are_advanced_once(
    engine: str,
):
    found: list[list[Tensor]] = []
    for region in (partial(mb.checkpoint, engine=engine), plain):
        torch.manual_seed(0)
        module = Guided()
        for _ in range(3):
            region(module, torch.randn(8, 4)).backward()
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        found.append([*gradients, *module.normalise.state_dict().values()])

    assert are_equal(*found)


@pytest.mark.parametrize("features", [16, 20_000])
@pytest.mark.parametrize("place", ["dict", "closure", "object"])
def test_row_a05_statistics_elsewhere_are_refused_and_then_replayed(
    place: str, features: int
):
    one, other = built(features, place), built(features, place)
    with pytest.raises(ChangedSinceForwardError, match="behind the version counters"):
        step(one, mb.checkpoint)
    step(other, plain)
    # The forward that failed has advanced them as a plain one does.
    assert are_equal(facts(one)[-2:], facts(other)[-2:])

    for _ in range(3):
        assert are_equal(step(one, mb.checkpoint), step(other, plain))
