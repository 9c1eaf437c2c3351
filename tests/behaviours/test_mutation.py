"""Behaviours 102 and 103: what changes after the forward is refused.

A recompute reads again what the forward read. If that holds something else by then,
the gradient would be that of another function: an error names what was changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from tests.behaviours.steps import Region, differences


def leaf() -> Tensor:
    return torch.linspace(-1.0, 1.0, 6).reshape(2, 3).requires_grad_()


def activation() -> Tensor:
    """Return a tensor that may be changed in place, and has a gradient."""
    return leaf() * 2


def refused(loss: Tensor, name: str) -> None:
    """Require that the backward raises and names what was changed."""
    with pytest.raises(mb.ChangedSinceForwardError, match=re.escape(name)) as caught:
        loss.backward()
    assert any(name in changed for changed in caught.value.names)


def product(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).exp()


# torch 2.13 refuses these too, without a name.
def test_b102_an_input_that_the_caller_changed_is_refused() -> None:
    x = activation()
    loss = mb.checkpoint(product, x, torch.ones(3)).sum()
    x.mul_(2)
    refused(loss, "argument 0")


def test_b102_a_weight_that_the_caller_changed_is_refused() -> None:
    w = torch.ones(3)
    loss = mb.checkpoint(product, leaf(), w).sum()
    w.add_(5)
    refused(loss, "argument 1")


def test_b102_an_input_that_the_region_changed_is_refused() -> None:
    def changing(x: Tensor) -> Tensor:
        x.mul_(2)
        return x.exp().sin()

    refused(mb.checkpoint(changing, activation()).sum(), "argument 0")


def test_b102_a_change_of_what_no_region_reads_is_harmless() -> None:
    def step(region: Region) -> Any:
        x, both = leaf(), torch.ones(2, 3)
        y = region(product, x, both[0].clone())
        both.add_(1)
        y.sum().backward()
        return x

    assert differences(step) == []


def test_b102_a_change_through_a_view_is_refused() -> None:
    x = activation()
    loss = mb.checkpoint(product, x, torch.ones(3)).sum()
    x[0, 1:].zero_()
    refused(loss, "argument 0")


@dataclasses.dataclass
class Batch:
    """A record with a tensor in it."""

    weight: Tensor

    def times(self, x: Tensor) -> Tensor:
        return product(x, self.weight)


class Scaled(nn.Module):
    """A product with a parameter, a buffer and a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.plain = torch.ones(3)
        self.register_buffer("scale", torch.ones(3))
        self.scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight * self.scale * self.plain).exp()


def by_keyword(x: Tensor, w: Tensor) -> Tensor:
    return mb.checkpoint(product, x, w=w)


def in_a_list(x: Tensor, w: Tensor) -> Tensor:
    return mb.checkpoint(lambda x, ws: product(x, ws[1]), x, [x, w])


def in_a_tuple(x: Tensor, w: Tensor) -> Tensor:
    return mb.checkpoint(lambda x, ws: product(x, *ws), x, (w,))


def in_a_dict(x: Tensor, w: Tensor) -> Tensor:
    return mb.checkpoint(lambda x, d: product(x, d["mask"]), x, {"mask": w})


def in_a_record(x: Tensor, w: Tensor) -> Tensor:
    return mb.checkpoint(lambda x, batch: product(x, batch.weight), x, Batch(w))


def deep_inside(x: Tensor, w: Tensor) -> Tensor:
    nested = {"batches": [Batch(w)]}
    return mb.checkpoint(lambda x, d: product(x, d["batches"][0].weight), x, nested)


def in_a_closure(x: Tensor, w: Tensor) -> Tensor:
    return mb.checkpoint(lambda x: product(x, w), x)


def in_a_closed_over_list(x: Tensor, w: Tensor) -> Tensor:
    many = [w]
    return mb.checkpoint(lambda x: product(x, many[0]), x)


def in_a_closure_of_a_closure(x: Tensor, w: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return product(x, w)

    return mb.checkpoint(lambda x: inner(x), x)


def in_a_partial(x: Tensor, w: Tensor) -> Tensor:
    return mb.checkpoint(functools.partial(product, w=w), x)


def as_a_default(x: Tensor, w: Tensor) -> Tensor:
    return mb.checkpoint(lambda x, w=w: product(x, w), x)


def as_an_attribute(x: Tensor, w: Tensor) -> Tensor:
    batch = Batch(w)
    return mb.checkpoint(lambda x: product(x, batch.weight), x)


def by_a_bound_method(x: Tensor, w: Tensor) -> Tensor:
    return mb.checkpoint(Batch(w).times, x)


# How a region gets at a tensor `w`, and what an error calls it.
WAYS = [
    pytest.param(by_keyword, "argument 'w'"),
    pytest.param(in_a_list, "argument 1[1]"),
    pytest.param(in_a_tuple, "argument 1[0]"),
    pytest.param(in_a_dict, "argument 1['mask']"),
    pytest.param(in_a_record, "argument 1['weight']"),
    pytest.param(deep_inside, "argument 1['batches'][0]['weight']"),
    pytest.param(in_a_closure, "'w'"),
    pytest.param(in_a_closed_over_list, "'many[0]'"),
    pytest.param(in_a_closure_of_a_closure, "'w'"),
    pytest.param(in_a_partial, "'w'"),
    pytest.param(as_a_default, "default"),
    pytest.param(as_an_attribute, "'batch.weight'"),
    pytest.param(by_a_bound_method, "weight"),
]


# torch 2.13 guards positional tensors only, and computes another gradient.
@pytest.mark.parametrize(("run", "name"), WAYS)
def test_b103_a_changed_tensor_is_refused_however_the_region_gets_it(
    run: Callable[[Tensor, Tensor], Tensor], name: str
) -> None:
    w = torch.ones(3)
    loss = run(leaf(), w).sum()
    w.add_(5)
    refused(loss, name)


# torch 2.13: as above. A region may also hold on to the storage that it was given.
@pytest.mark.parametrize(("run", "name"), WAYS)
def test_b103_a_tensor_whose_storage_was_exchanged_is_refused_or_right(
    run: Callable[[Tensor, Tensor], Tensor], name: str
) -> None:
    x, w = leaf(), torch.ones(3)
    (expected,) = torch.autograd.grad(product(x, w).sum(), x)
    loss = run(x, w).sum()
    w.data = torch.full((3,), 5.0)
    try:
        loss.backward()
    except mb.ChangedSinceForwardError as refusal:
        named = refusal.names
        assert any(name in changed for changed in named)
    else:
        assert x.grad is not None
        assert torch.equal(x.grad, expected)


# torch 2.13: as above.
@pytest.mark.parametrize("exchanged", [False, True], ids=["in_place", "data"])
@pytest.mark.parametrize("name", ["weight", "scale", "plain"])
def test_b103_a_changed_parameter_buffer_or_attribute_is_refused(
    name: str, exchanged: bool
) -> None:
    inner = Scaled()
    model = nn.Sequential(nn.Tanh(), inner)
    loss = mb.checkpoint(model, leaf()).sum()
    held = getattr(inner, name)
    if exchanged:
        held.data = torch.full((3,), 5.0)
    else:
        with torch.no_grad():
            held.add_(5)
    refused(loss, name)


# torch 2.13: as above.
def test_b103_a_buffer_that_was_replaced_is_refused_or_right() -> None:
    model, x = Scaled(), leaf()
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    loss = mb.checkpoint(model, x).sum()
    model.scale = torch.full((3,), 5.0)
    with contextlib.suppress(mb.ChangedSinceForwardError):
        loss.backward()
        assert x.grad is not None
        assert torch.equal(x.grad, expected)


# torch 2.13: as above.
def test_b103_an_optimizer_step_between_forward_and_backward_is_refused() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(leaf()).sum().backward()
    loss = mb.checkpoint(lambda x: model(x).exp(), leaf()).sum()
    optimizer.step()
    refused(loss, "weight")


# torch 2.13: as above.
def test_b103_a_change_in_a_nested_region_is_refused() -> None:
    model = Scaled()
    loss = mb.checkpoint(lambda x: mb.checkpoint(model, x.sin()).exp(), leaf()).sum()
    with torch.no_grad():
        model.weight.add_(5)
    refused(loss, "weight")


def test_b103_a_change_of_a_part_that_the_region_does_not_read_is_harmless() -> None:
    def step(region: Region) -> Any:
        read, other = nn.Linear(3, 3), nn.Linear(3, 3)
        both, x = nn.ModuleDict({"read": read, "other": other}), leaf()
        y = region(lambda x: both["read"](x).exp(), x)
        with torch.no_grad():
            other.weight.add_(5)
        y.sum().backward()
        return both, x

    assert differences(step) == []
