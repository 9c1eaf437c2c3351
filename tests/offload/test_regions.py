"""Regions and modules that offload: `apply`, torch's policies, torch's wrappers."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import membudget as mb
from membudget import compat
from membudget.attach import carried_by
from membudget.errors import CheckpointError
from membudget.offload import shared_offload
from tests.devices import settle

WIDTH = 128
SIZE = 256 * WIDTH * 4
"""Bytes of a batch."""


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(*(block() for _ in range(4)))


@pytest.fixture(autouse=True)
def no_shared_memory() -> Iterator[None]:
    """Leave no host memory to other tests."""
    shared_offload.cache_clear()
    yield
    shared_offload.cache_clear()


def gradients(function: Callable[[Tensor], Tensor], model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    function(torch.ones(256, WIDTH).sin()).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) > 0 and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("engine", ["rerun", "replay"])
def test_regions_of_a_model_may_hold_their_inputs_on_the_host(
    model: nn.Sequential, engine: str
) -> None:
    expected = gradients(model, model)
    off = mb.offload("8MiB", window=0)
    mb.apply(model, names="*", offload=off, engine=engine)
    for _ in range(3):
        assert same(gradients(model, model), expected)
    assert off.status().out_bytes == 3 * 4 * SIZE


def test_apply_makes_host_memory_of_its_own(model: nn.Sequential) -> None:
    expected = gradients(model, model)
    mb.apply(model, names="*", offload=True)
    assert same(gradients(model, model), expected)
    carried: Any = carried_by(model[0])
    assert carried.options.offload.status().out_bytes == 4 * SIZE


def test_what_holds_inputs_must_be_made_by_offload(model: nn.Sequential) -> None:
    with pytest.raises(mb.OptionError, match="must be made by membudget"):
        mb.apply(model, names="*", offload="8MiB")
    off = mb.offload("1MiB")
    with pytest.raises(mb.OptionError, match="without use_reentrant"):
        mb.checkpoint(block(), torch.ones(1), use_reentrant=True, offload=off)


def test_a_region_that_is_forgotten_leaves_its_host_memory() -> None:
    off = mb.offload("8MiB", smallest=1)
    keep = mb.policies.offloaded(mb.policies.matmuls, off)
    layer, x = block(), torch.ones(256, WIDTH)
    mb.checkpoint(layer, x, keep=keep).sum().backward()
    mb.checkpoint(layer, x, offload=off).sum().backward()
    slab = weakref.ref(off.open()[0])
    del off, keep
    settle()
    gc.collect()
    assert slab() is None


@pytest.mark.parametrize("name", ["MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD"])
def test_a_policy_of_torch_really_offloads(model: nn.Sequential, name: str) -> None:
    """Torch's own checkpoint recomputes these instead."""

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        is_product = operator == torch.ops.aten.addmm.default
        return CheckpointPolicy[name] if is_product else CheckpointPolicy.MUST_RECOMPUTE

    contexts = functools.partial(compat.create_selective_checkpoint_contexts, policy)
    expected = gradients(model, model)

    def forward(region: Any, x: Tensor) -> Tensor:
        for layer in model:
            x = region(layer, x, use_reentrant=False, context_fn=contexts)
        return x

    ours = functools.partial(forward, compat.checkpoint)
    for _ in range(2):
        assert same(gradients(ours, model), expected)
    assert same(gradients(functools.partial(forward, checkpoint), model), expected)
    assert shared_offload().status().out_bytes == 2 * 4 * SIZE


def test_the_offload_wrapper_wraps_nothing_and_offloads(model: nn.Sequential) -> None:
    expected, names = gradients(model, model), list(model.state_dict())
    assert compat.offload_wrapper(model) is model
    assert list(model.state_dict()) == names
    assert same(gradients(model, model), expected)
    assert shared_offload().status().out_bytes >= 4 * SIZE


def test_around_a_region_the_offload_wrapper_moves_its_inputs(
    model: nn.Sequential,
) -> None:
    expected = gradients(model, model)
    for layer in model:
        compat.offload_wrapper(compat.checkpoint_wrapper(layer))
    assert same(gradients(model, model), expected)
    assert shared_offload().status().out_bytes == 4 * SIZE


def test_inside_of_a_region_the_offload_wrapper_is_refused() -> None:
    inside = compat.offload_wrapper(block())
    with pytest.raises(CheckpointError, match="leaves nothing to recompute"):
        compat.checkpoint_wrapper(inside)
