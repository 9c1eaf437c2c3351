"""Row B7: nested tensors inside a region.

The ragged size of a jagged tensor is tied to the object that holds its offsets, so what
a region makes with offsets of its own cannot come back, and is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import membudget as mb
from tests.behaviours.steps import region_with

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

jagged = torch.nested.nested_tensor_from_jagged
OFFSETS = torch.tensor([0, 3, 8])
Region = Callable[..., Tensor]


class Layers(nn.Module):
    """Two layers and a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.norm = (
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.LayerNorm(8),
        )


def with_offsets_made_inside(m: Any, x: Tensor, region: Region) -> Tensor:
    def run(x: Tensor) -> Tensor:
        return m.down(F.gelu(m.up(jagged(x, torch.tensor([0, 3, 8]))))).values()

    return region(run, x).sin()


def with_offsets_from_outside(m: Any, x: Tensor, region: Region) -> Tensor:
    return region(lambda x: m.down(F.gelu(m.up(jagged(x, OFFSETS)))).values(), x)


def with_offsets_as_argument(m: Any, x: Tensor, region: Region) -> Tensor:
    def run(x: Tensor, offsets: Tensor) -> Tensor:
        return m.norm(F.gelu(m.up(jagged(x, offsets)))).values()

    return region(run, x, torch.tensor([0, 3, 8]))


def given(m: Any, x: Tensor, region: Region) -> Tensor:
    nested = jagged(x, torch.tensor([0, 3, 8]))
    return region(lambda n: m.down(F.gelu(m.up(n)) * n), nested).values()


def from_region_to_region(m: Any, x: Tensor, region: Region) -> Tensor:
    nested = region(lambda x: F.gelu(m.up(jagged(x, torch.tensor([0, 3, 8])))), x)
    return region(lambda n: m.down(n).sin(), nested).values()


def padded(m: Any, x: Tensor, region: Region) -> Tensor:
    def run(x: Tensor) -> Tensor:
        nested = F.silu(m.up(jagged(x, torch.tensor([0, 3, 8]))))
        return torch.nested.to_padded_tensor(nested, 0.0).exp()

    return region(run, x)


def dropping(m: Any, x: Tensor, region: Region) -> Tensor:
    def run(x: Tensor) -> Tensor:
        return m.up(F.dropout(jagged(x, torch.tensor([0, 3, 8])).sin(), 0.5)).values()

    return region(run, x).exp()


def attending(m: Any, x: Tensor, region: Region) -> Tensor:
    """Run attention, which makes strided nested tensors on a CPU."""

    def run(x: Tensor) -> Tensor:
        nested = jagged(x, torch.tensor([0, 3, 8]))
        q = m.up(nested).unflatten(-1, (2, 4)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(-2)
        return m.down(y).values()

    return region(run, x)


def strided(m: Any, x: Tensor, region: Region) -> Tensor:
    def run(x: Tensor) -> Tensor:
        nested = torch.nested.as_nested_tensor([x[:3], x[3:]], layout=torch.strided)
        return torch.nested.to_padded_tensor(m.up(nested).relu(), 0.0).sin()

    return region(run, x)


CASES = [
    *(with_offsets_made_inside, with_offsets_from_outside, with_offsets_as_argument),
    *(given, from_region_to_region, padded, dropping, attending, strided),
]
REGIONS = {
    "auto": mb.checkpoint,
    "rerun": region_with(engine="rerun"),
    "unguarded": region_with(engine="rerun", guards=False),
    "whole": region_with(engine="rerun", early_stop=False),
    "values": region_with(engine="rerun", determinism_check="values"),
    "replay": region_with(engine="replay"),
    "unverified": region_with(engine="replay", verify=False),
    "fingerprints": region_with(engine="replay", verify="fingerprints"),
    "matmuls": region_with(keep=mb.policies.matmuls),
    "everything": region_with(keep=mb.policies.everything),
}


def plain(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    return function(*args)


def steps(case: Callable[..., Tensor], region: Region) -> list[Any]:
    """Return loss, gradients and stream of three steps, each with two backwards."""
    layers, facts = Layers(), []
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(8, 8, requires_grad=True)
        loss = case(layers, x, region).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        gradients = [p.grad for p in layers.parameters() if p.grad is not None]
        facts += [loss.detach(), x.grad, *gradients, torch.get_rng_state()]
        layers.zero_grad()
    return facts


@pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)
@pytest.mark.parametrize("case", CASES)
def test_row_b7_a_region_with_nested_tensors_is_plain(case, region) -> None:
    found, expected = steps(case, region), steps(case, plain)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_row_b7_what_came_jagged_is_recomputed_and_not_kept() -> None:
    runs = []

    def run(nested: Tensor) -> Tensor:
        runs.append(1)
        return nested.sin().exp()

    nested = jagged(torch.ones(8, 8, requires_grad=True), torch.tensor([0, 3, 8]))
    mb.checkpoint(run, nested, engine="rerun").values().sum().backward()
    assert len(runs) == 2


def test_row_b7_a_kept_tensor_that_is_written_afterwards_raises() -> None:
    made = []

    def run(x: Tensor) -> Tensor:
        made.append(jagged(x, torch.tensor([0, 3, 8])).exp())
        return made[0].values()

    y = mb.checkpoint(run, torch.ones(8, 8, requires_grad=True), engine="rerun")
    with torch.no_grad():
        made[0].mul_(2)
    with pytest.raises(mb.ChangedSinceForwardError, match="modified by an inplace"):
        y.sum().backward()
