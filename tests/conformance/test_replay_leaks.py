"""A replay region leaves no storage alive, and no cycle, with the collector off.

Each situation makes tensors, shows them to a `Watched`, which keeps weak references to
their storages, and ends. Afterwards none of them lives, and nothing of the recording.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import membudget as mb
from membudget import policies
from tests.devices import settle
from tests.garbage import cyclic_garbage, is_made_by_a_region, module_of, no_collector
from tests.keeps import replay, replayed
from tests.oracles import run_step
from tests.situations import Block, KeepsActivation, Watched
from tests.zoo import CASES, Case

Region = Callable[..., Any]  # Turns a function into a region.
Situation = Callable[[Region, Block, Tensor], object]


def forward_and_backward(region: Region, block: Block, x: Tensor) -> None:
    region(block)(x).sum().backward()


def forward_only(region: Region, block: Block, x: Tensor) -> None:
    region(block)(x)


def exception_in_forward(region: Region, block: Block, x: Tensor) -> None:
    block.fails_in_forward = True
    with pytest.raises(ValueError, match="in the forward"):
        region(block)(x)


def exception_in_nested_forward(region: Region, block: Block, x: Tensor) -> None:
    block.fails_in_forward = True
    with pytest.raises(ValueError, match="in the forward"):
        region(lambda x: region(block)(x.sin()).exp())(x)


def weight_changed_since(region: Region, block: Block, x: Tensor) -> None:
    y = region(block)(x)
    with torch.no_grad():
        block.linear.weight.add_(1)
    with pytest.raises(mb.ChangedSinceForwardError, match=r"linear\.weight"):
        y.sum().backward()


def fail(gradient: Tensor) -> None:
    """Fail in a backward."""
    raise ValueError("in the backward")


def exception_between_two_replays(region: Region, block: Block, x: Tensor) -> None:
    def function(x: Tensor) -> Tensor:
        x = block(x)
        x.register_hook(fail)
        return x.exp()

    with pytest.raises(ValueError, match="in the backward"):
        region(function)(x).sum().backward()


def exception_in_retained_graph(region: Region, block: Block, x: Tensor) -> None:
    y = x * 1
    y.register_hook(fail)
    z = region(block)(y)
    for _ in range(2):
        with pytest.raises(ValueError, match="in the backward"):
            z.sum().backward(retain_graph=True)


def retained_graph(region: Region, block: Block, x: Tensor) -> None:
    y = region(block)(x)
    y.sum().backward(retain_graph=True)
    y.sum().backward(retain_graph=True)


def partial_backwards_of_retained_graph(
    region: Region, block: Block, x: Tensor
) -> None:
    y = region(block)(x)
    z = region(block)(y)
    for _ in range(3):
        torch.autograd.grad(z.sum(), y, retain_graph=True)


def gradient_of_the_weight_alone(region: Region, block: Block, x: Tensor) -> None:
    region(block)(x).sum().backward(inputs=[block.linear.weight])


def double_backward(region: Region, block: Block, x: Tensor) -> None:
    (grad,) = torch.autograd.grad(region(block)(x).sum(), x, create_graph=True)
    grad.sum().backward()


def execution_group(region: Region, block: Block, x: Tensor) -> None:
    y = region(block)(x)
    with mb.execution_group():
        y[0].sum().backward(retain_graph=True)
        y[1].sum().backward()


def nested(region: Region, block: Block, x: Tensor) -> None:
    def outer(x: Tensor) -> Tensor:
        return block(region(block)(block(x))).sin()

    region(outer)(x).sum().backward()


def nested_forward_only(region: Region, block: Block, x: Tensor) -> None:
    region(lambda x: region(block)(block(x)).sin())(x)


def inside_a_rerun(region: Region, block: Block, x: Tensor) -> None:
    mb.checkpoint(lambda x: region(block)(block(x)).sin(), x).sum().backward()


def around_a_rerun(region: Region, block: Block, x: Tensor) -> None:
    region(lambda x: mb.checkpoint(block, block(x)).sin())(x).sum().backward()


def closure_over_tensors(region: Region, block: Block, x: Tensor) -> None:
    factor = block.watched(torch.randn(3, 4))
    region(lambda: block(x * factor))().sum().backward()


def written_in_place(region: Region, block: Block, x: Tensor) -> None:
    region(lambda x: block(x).mul_(2).cos_().exp())(x).sum().backward()


def gradient_taken_inside(region: Region, block: Block, x: Tensor) -> None:
    def function(x: Tensor) -> Tensor:
        y = block(x)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y * block.watched(grad)

    region(function)(x).sum().backward()


def output_in_a_captured_dict(region: Region, block: Block, x: Tensor) -> Tensor:
    outputs: dict[str, Tensor] = {}

    def function(x: Tensor) -> Tensor:
        outputs["y"] = block(x)
        return outputs["y"] * 2

    y: Tensor = region(function)(x)
    return y


def backward_of_a_captured_dict(region: Region, block: Block, x: Tensor) -> None:
    output_in_a_captured_dict(region, block, x).sum().backward()


SITUATIONS: list[Situation] = [
    forward_and_backward,
    forward_only,
    exception_in_forward,
    exception_in_nested_forward,
    weight_changed_since,
    exception_between_two_replays,
    exception_in_retained_graph,
    retained_graph,
    partial_backwards_of_retained_graph,
    gradient_of_the_weight_alone,
    double_backward,
    execution_group,
    nested,
    nested_forward_only,
    inside_a_rerun,
    around_a_rerun,
    closure_over_tensors,
    written_in_place,
    gradient_taken_inside,
    output_in_a_captured_dict,
    backward_of_a_captured_dict,
]

REGIONS: dict[str, Region] = {
    "nothing": replay(),
    "tanh": replay(policies.operators("tanh")),
    "everything": replay(policies.everything),
    "verified": replay(verify=True),
    "fingerprints": replay(verify="fingerprints"),
}


def in_situation(situation: Situation, region: Region, watched: Watched) -> None:
    """Bring a fresh block and input into a situation, twice."""
    for _ in range(2):
        situation(region, Block(watched), torch.randn(3, 4, requires_grad=True))


def living() -> list[str]:
    """Name what recordings are made of and that lives."""
    settle()
    names = [type(thing).__name__ for thing in gc.get_objects() if _is_recorded(thing)]
    for_good = "Known", "Routes", "Verified"
    return [name for name in names if name not in for_good]


def _is_recorded(thing: object) -> bool:
    return module_of(thing).startswith("membudget.engine.replay")


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda s: s.__name__)
def test_no_storage_and_no_cycle_is_left(situation: Situation, region: str) -> None:
    # A first use may import modules, which leaves garbage of Python's own.
    in_situation(situation, REGIONS[region], Watched())
    watched = Watched()
    with no_collector():
        in_situation(situation, REGIONS[region], watched)

        assert len(watched.references) >= 6
        assert watched.alive() == 0
        assert living() == []
        assert cyclic_garbage() == []


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_replay_region_round_any_case_leaves_no_cycle(case: Case) -> None:
    way = replayed(policies.nothing)
    run_step(case, way)
    with no_collector():
        run_step(case, way)

        assert [t for t in cyclic_garbage() if is_made_by_a_region(t)] == []


def test_an_activation_stored_on_the_module_is_the_only_one_alive() -> None:
    watched = Watched()
    block = KeepsActivation(watched)
    with no_collector():
        for _ in range(3):
            x = torch.randn(3, 4, requires_grad=True)
            replay()(block)(x).sum().backward()
            del x

        assert watched.alive() == 1
        block.kept = None
        assert watched.alive() == 0


def test_a_replay_region_holds_no_graph_of_its_inputs() -> None:
    watched = Watched()
    block = Block(watched)
    x = torch.randn(3, 4, requires_grad=True)
    with no_collector():
        y = replay()(block)(x.exp().sin())
        alive = watched.alive()
        z = replay()(block)(y.detach())
        del y

        # z and the input of its region; not what made that input.
        assert (alive, watched.alive()) == (1, 2)
        assert z.requires_grad


def test_a_backward_that_is_over_holds_nothing_it_made_again() -> None:
    x = torch.randn(2**16, requires_grad=True)
    y = replay()(lambda x: x.sin().exp().cos().tanh())(x)

    for most in (x.nbytes, 0):  # The first leaves the gradient.
        step = mb.peak(lambda: y.backward(torch.ones_like(x), retain_graph=True))
        assert step.end_bytes == most


@pytest.mark.parametrize("way", ["loss dropped", "backward"])
def test_nothing_piles_up_over_steps(way: str) -> None:
    watched = Watched()
    block = Block(watched)
    with no_collector():
        counts = []
        for _ in range(5):
            loss = replay()(block)(torch.randn(3, 4, requires_grad=True)).sum()
            if way == "backward":
                loss.backward()
            del loss
            counts.append((watched.alive(), len(living())))

    assert counts == [(0, 0)] * 5
