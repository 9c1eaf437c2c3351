"""Behaviour 121: saved-tensor hooks of others, around a region and inside it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import membudget as mb
from tests.behaviours.steps import (
    Block,
    Region,
    differences,
)


class Packed(saved_tensors_hooks):
    """Saved-tensor hooks that note the tensors packed and unpacked."""

    def __init__(self) -> None:
        self.packed: list[Tensor] = []
        self.unpacked = 0

        def pack(tensor: Tensor) -> Tensor:
            self.packed.append(tensor)
            return tensor

        def unpack(tensor: Tensor) -> Tensor:
            self.unpacked += 1
            return tensor

        super().__init__(pack, unpack)

    def storages(self) -> list[int]:
        """Return the addresses of what was packed."""
        return [t.untyped_storage().data_ptr() for t in self.packed]


def test_b121_ambient_hooks_pack_the_inputs_of_the_region_and_nothing_else() -> None:
    x, w = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
    h = x.exp()
    hooks = Packed()
    with hooks:
        y = mb.checkpoint(lambda h: (h @ w).sin().exp(), h)
    assert hooks.storages() == [h.untyped_storage().data_ptr()]
    assert hooks.unpacked == 0
    y.sum().backward()
    assert hooks.unpacked == 1


@pytest.mark.parametrize("nest", ["keyword", "list", "dict"])
def test_b121_ambient_hooks_pack_keyword_and_nested_inputs_too(nest: str) -> None:
    # torch 2.13 keeps keyword and nested tensors itself, out of reach of hooks.
    x, y = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
    a, b = x.exp(), y.exp()
    hooks = Packed()
    with hooks:
        if nest == "keyword":
            result = mb.checkpoint(lambda a, *, b: (a @ b).sin(), a, b=b)
        elif nest == "list":
            result = mb.checkpoint(lambda ts: (ts[0] @ ts[1]).sin(), [a, b])
        else:
            result = mb.checkpoint(lambda d: (d["a"] @ d["b"]).sin(), {"a": a, "b": b})
    addresses = {t.untyped_storage().data_ptr() for t in (a, b)}
    assert set(hooks.storages()) == addresses
    result.sum().backward()


def test_b121_ambient_hooks_may_give_back_a_copy() -> None:
    def step(region: Region) -> Any:
        model, x = Block(dropout=0.2), torch.randn(2, 5, 8, requires_grad=True)
        with saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
            y = region(model, region(model, x.exp()))
        y.square().sum().backward()
        return y, model, x

    assert differences(step) == []


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_b121_save_on_cpu_works_in_and_out_of_a_region(
    outside: bool, inside: bool, nested: bool
) -> None:
    def step(region: Region) -> Any:
        model, x = Block(dropout=0.2), torch.randn(2, 5, 8, requires_grad=True)

        def function(x: Tensor) -> Tensor:
            with save_on_cpu() if inside else nullcontext():
                h = model(x)
            return (region(model, h) if nested else h).sin()

        with save_on_cpu() if outside else nullcontext():
            y = region(function, x)
            loss = y.square().sum()
        loss.backward()
        return y, model, x

    assert differences(step) == []


def test_b121_hooks_that_are_disabled_refuse_the_region_as_torch_says() -> None:
    x = torch.randn(3, requires_grad=True)
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("not in here"),
        pytest.raises(RuntimeError, match="not in here"),
    ):
        mb.checkpoint(lambda x: x.sin().exp(), x)
