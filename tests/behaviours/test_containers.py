"""Behaviour 104: containers among the arguments are seen again as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.behaviours.steps import Region, differences


def leaf() -> Tensor:
    return torch.linspace(-1.0, 1.0, 6).reshape(2, 3).requires_grad_()


def consume(x: Tensor, parts: list[Tensor]) -> Tensor:
    while parts:
        x = (x * parts.pop()).exp()
    return x


def append(x: Tensor, cache: list[Tensor]) -> Tensor:
    cache.append(x.sin())
    return torch.cat(cache).exp().sin()


def fill(x: Tensor, cache: dict[str, Tensor]) -> Tensor:
    cache["x"] = cache.pop("w") * x
    return torch.stack([part.exp() for part in cache.values()]).sin()


# torch 2.13 hands the recompute the very container, as the function left it.
@pytest.mark.parametrize(
    ("function", "container"),
    [
        pytest.param(consume, lambda w: [w, w + 1], id="consumed_list"),
        pytest.param(append, lambda w: [w], id="list_that_grows"),
        pytest.param(fill, lambda w: {"w": w}, id="dict_that_changes"),
    ],
)
@pytest.mark.parametrize("keyword", [False, True])
def test_b104_a_container_that_the_function_changes_is_seen_as_it_was(
    function: Callable[..., Tensor], container: Callable[[Tensor], Any], keyword: bool
) -> None:
    name = function.__code__.co_varnames[1]

    def step(region: Region) -> Any:
        x, w = leaf(), leaf()
        held = container(w)
        y = (
            region(function, x, **{name: held})
            if keyword
            else region(function, x, held)
        )
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        return x, w, y, held

    assert differences(step) == []


# torch 2.13: as above.
def test_b104_a_container_that_the_caller_changes_afterwards_is_seen_as_it_was() -> (
    None
):
    def step(region: Region) -> Any:
        x, w = leaf(), leaf()
        parts, options = [w, w.sin()], {"scale": [2.0]}

        def function(x: Tensor, parts: list[Tensor], options: Any) -> Tensor:
            return (x * parts[0] * parts[1]).exp() * options["scale"][0]

        y = region(function, x, parts, options=options)
        parts.clear()
        options["scale"][0] = 7.0
        y.sum().backward()
        return x, w, y

    assert differences(step) == []


# torch 2.13: as above.
def test_b104_a_container_given_twice_is_one_container_again() -> None:
    def step(region: Region) -> Any:
        x = leaf()

        def function(first: list[Tensor], second: list[Tensor]) -> Tensor:
            first.append(first[0].exp())
            return second[-1].sin() * second.pop(0)

        held = [x, x * 2]
        y = region(function, held, held)
        y.sum().backward()
        return x, y, held

    assert differences(step) == []
