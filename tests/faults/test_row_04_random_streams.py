"""Row 4: the recompute draws other random numbers than the forward drew.

Torch restores its global generators alone. Python's `random`, NumPy and a generator of
the user's own move on: the recompute scales by another number, saves tensors of the
right shape, and the gradients are wrong without an error. The streams are then ahead
of where a plain step leaves them, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from tests import devices
from tests.faults.implementations import (
    Checkpoint,
    are_equal,
    gradients,
    ours,
    plain,
    torch_fails,
    torch_rerun,
)

Region = Callable[[Tensor], Tensor]


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    # Regions draw from NumPy's global stream, which only this function seeds.
    np.random.seed(seed)  # noqa: NPY002


def scaled_by_random(x: Tensor) -> Tensor:
    return (x * random.random()).sin()


def scaled_by_numpy(x: Tensor) -> Tensor:
    return (x * np.random.rand()).sin()  # noqa: NPY002


def scaled_by_closed_over_generator() -> Region:
    generator = devices.generator().manual_seed(3)
    return lambda x: (x * torch.rand(x.shape, generator=generator)).sin()


class Jitter(nn.Module):
    """Multiplies by noise from a generator that the module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = devices.generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return (x * torch.rand(x.shape, generator=self.generator)).sin()


SOURCES: dict[str, Callable[[], Region]] = {
    "random": lambda: scaled_by_random,
    "numpy": lambda: scaled_by_numpy,
    "closed-over generator": scaled_by_closed_over_generator,
    "generator of a module": Jitter,
    "generator of an inner module": lambda: nn.Sequential(nn.Tanh(), Jitter()),
}
every_source = pytest.mark.parametrize(
    "make_region", SOURCES.values(), ids=SOURCES.keys()
)


def input_gradient(checkpoint: Checkpoint, make_region: Callable[[], Region]) -> Tensor:
    seed_all(0)
    x = torch.linspace(1.0, 2.0, 8, requires_grad=True)
    checkpoint(make_region(), x).sum().backward()
    assert x.grad is not None
    return x.grad


def draws_after_step(checkpoint: Checkpoint) -> tuple[float, float, Tensor, Tensor]:
    """Run a step that draws from every stream; return the next draw from each."""
    seed_all(0)
    own = devices.generator().manual_seed(3)

    def region(x: Tensor) -> Tensor:
        noise = torch.rand(8, generator=own)
        x = nn.functional.dropout(x * noise, 0.5) * random.random()
        return (x * np.random.rand()).sin()  # noqa: NPY002

    x = torch.linspace(1.0, 2.0, 8, requires_grad=True)
    checkpoint(region, x).sum().backward()
    number = float(np.random.rand())  # noqa: NPY002
    return random.random(), number, torch.rand(2), torch.rand(2, generator=own)


def layerdrop_step(
    checkpoint: Checkpoint, seed: int
) -> tuple[dict[str, Tensor | None], float]:
    """Run six layers of which Python's `random` drops some; return what is left."""
    seed_all(seed)
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def region(x: Tensor) -> Tensor:
        for layer in layers:
            if random.random() > 0.3:
                x = torch.tanh(layer(x))
        return x

    checkpoint(region, torch.ones(2, 4, requires_grad=True)).sum().backward()
    return gradients(layers), random.random()


def torch_layerdrop_outcome(seed: int) -> str:
    try:
        found = layerdrop_step(torch_rerun, seed)[0]
    except CheckpointError:
        return "refused"
    return "equal" if are_equal(found, layerdrop_step(plain, seed)[0]) else "wrong"


@every_source
def test_row04_recompute_draws_what_the_forward_drew(
    make_region: Callable[[], Region],
) -> None:
    expected = input_gradient(plain, make_region)

    assert torch.equal(input_gradient(ours, make_region), expected)


def test_row04_streams_continue_as_after_a_plain_step() -> None:
    assert are_equal(draws_after_step(ours), draws_after_step(plain))


def test_row04_layerdrop_drops_the_same_layers_again() -> None:
    for seed in range(30):
        expected = layerdrop_step(plain, seed)

        assert are_equal(layerdrop_step(ours, seed), expected), f"seed {seed}"


@torch_fails
@every_source
def test_row04_torch_draws_other_numbers_silently(
    make_region: Callable[[], Region],
) -> None:
    expected = input_gradient(plain, make_region)

    assert not torch.equal(input_gradient(torch_rerun, make_region), expected)


@torch_fails
def test_row04_torch_leaves_three_streams_advanced() -> None:
    found, expected = draws_after_step(torch_rerun), draws_after_step(plain)

    equal = [are_equal(a, b) for a, b in zip(found, expected, strict=True)]
    assert equal == [False, False, True, False]


@torch_fails
def test_row04_torch_drops_other_layers_silently_for_some_seeds() -> None:
    outcomes = {torch_layerdrop_outcome(seed) for seed in range(30)}

    assert outcomes >= {"wrong", "refused"}
