"""Behaviours 12-17: whatever goes in and comes out, as the function itself has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import membudget as mb
from tests.behaviours.steps import Region, differences


class Pair(NamedTuple):
    """A named tuple of tensors."""

    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class State:
    """A frozen record of tensors and a number."""

    hidden: Tensor
    cell: Tensor
    steps: int = 0


def test_b12_arguments_and_results_that_are_no_tensors_are_the_same_objects() -> None:
    things: tuple[Any, ...] = (
        object(),
        "text",
        None,
        3,
        {"a": 1},
        {1, 2},
        iter([]),
        int,
    )
    received: list[Any] = []

    def function(x: Tensor, *rest: Any, last: Any) -> Any:
        received[:] = [*rest, last]
        return rest[0], x.sin().exp(), *rest[1:], last

    x = torch.ones(3, requires_grad=True)
    first, y, *others = mb.checkpoint(function, x, *things[:-1], last=things[-1])
    results = [first, *others]
    assert all(a is b for a, b in zip(received, things, strict=True))
    assert all(a is b for a, b in zip(results, things, strict=True))
    y.sum().backward()
    assert x.grad is not None
    # The recomputation is handed the very same objects, too.
    assert all(a is b for a, b in zip(received, things, strict=True))


def use_dict(a: Tensor, b: Tensor, region: Region) -> Any:
    def function(batch: dict[str, Any]) -> dict[str, Any]:
        h = (batch["a"] @ batch["nested"]["b"]).sin()
        return {"h": h, "nested": {"two": [h.exp(), (h * 2,)]}, "name": batch["name"]}

    return region(function, {"a": a, "nested": {"b": b}, "name": "x"})


def use_list(a: Tensor, b: Tensor, region: Region) -> Any:
    return region(lambda ts: [(ts[0] @ ts[1]).sin(), [ts[1].exp()]], [a, b])


def use_tuple(a: Tensor, b: Tensor, region: Region) -> Any:
    return region(lambda ts: ((ts[0] @ ts[1][0]).sin(), (ts[1][0].exp(),)), (a, (b,)))


def use_named_tuple(a: Tensor, b: Tensor, region: Region) -> Any:
    return region(lambda p: Pair((p.left @ p.right).sin(), p.left.exp()), Pair(a, b))


def use_dataclass(a: Tensor, b: Tensor, region: Region) -> Any:
    def function(state: State) -> State:
        hidden = (state.hidden @ state.cell).sin()
        return State(hidden, hidden.exp(), state.steps + 1)

    return region(function, State(a, b))


def leaves(thing: Any) -> list[Tensor]:
    """Return the tensors in a structure."""
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, State):
        return [thing.hidden, thing.cell]
    parts = thing.values() if isinstance(thing, dict) else thing
    if isinstance(parts, str):
        return []
    return [leaf for part in parts for leaf in leaves(part)]


STRUCTURES = [use_dict, use_list, use_tuple, use_named_tuple, use_dataclass]


@pytest.mark.parametrize("use", STRUCTURES)
def test_b13_structures_keep_their_types_and_the_tensors_inside_get_gradients(
    use: Callable[..., Any],
) -> None:
    def step(region: Region) -> Any:
        a, b = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
        result = use(a, b, region)
        torch.stack([leaf.sum() for leaf in leaves(result)]).sum().backward()
        assert a.grad is not None
        assert b.grad is not None
        return result, a, b

    assert differences(step) == []


def test_b13_a_structure_that_autograd_does_not_know_is_passed_on_untouched() -> None:
    class Opaque:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    def step(region: Region) -> Any:
        a = torch.randn(3, requires_grad=True)
        held = Opaque(a * 2)
        result = region(lambda o: Opaque(o.tensor.sin().exp()), held)
        assert type(result) is Opaque
        result.tensor.sum().backward()
        return result.tensor, a

    assert differences(step) == []


def test_b14_keyword_tensors_get_gradients() -> None:
    def step(region: Region) -> Any:
        x, scale, shift = (torch.randn(3, requires_grad=True) for _ in range(3))
        y = region(
            lambda x, *, scale, shift: (x * scale).sin() * shift,
            x,
            scale=scale,
            shift=shift * 2,
        )
        y.sum().backward()
        return y, x, scale, shift

    assert differences(step) == []


def test_b14_a_region_called_with_keywords_alone_gets_gradients() -> None:
    def step(region: Region) -> Any:
        x = torch.randn(3, requires_grad=True)
        y = region(lambda *, x: x.sin().exp(), x=x.exp())
        y.sum().backward()
        return y, x

    assert differences(step) == []


def test_b15_a_function_without_arguments_works() -> None:
    def step(region: Region) -> Any:
        w = torch.randn(4, requires_grad=True)
        y = region(lambda: w.sin().exp())
        y.sum().backward()
        return y, w

    assert differences(step) == []


def test_b16_the_same_tensor_may_be_given_twice() -> None:
    def step(region: Region) -> Any:
        x = torch.randn(3, 3, requires_grad=True)
        h = x.exp()
        y = region(lambda a, b, c: (a @ b).sin() * c, h, h, c=h)
        y.sum().backward()
        return y, x

    assert differences(step) == []


def test_b16_the_same_tensor_may_be_returned_twice() -> None:
    def twice(x: Tensor) -> list[Tensor]:
        y = x.sin().exp()
        return [y, y]

    def step(region: Region) -> Any:
        x = torch.randn(3, requires_grad=True)
        first, second = region(twice, x)
        assert first is second
        (first * 2 + second).sum().backward()
        return first, x

    assert differences(step) == []


@pytest.mark.parametrize("requires_grad", [True, False])
def test_b17_an_input_returned_unchanged_is_the_input(requires_grad: bool) -> None:
    def step(region: Region) -> Any:
        x, w = torch.randn(3), torch.randn(3, requires_grad=True)
        x.requires_grad_(requires_grad)
        same, y = region(lambda x: (x, (x * w).sin()), x)
        assert same is x
        (same.sum() + y.sum()).backward()
        return y, x, w

    assert differences(step) == []
