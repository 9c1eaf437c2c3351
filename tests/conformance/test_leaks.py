"""A region leaves no storage alive, and no reference cycle, with the collector off.

Each situation makes tensors, shows them to a `Watched`, which keeps weak references to
their storages, and ends. Afterwards none of them may live.
The situations are those of fault row 22 and of behaviours 111 to 117.
"""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

import membudget as mb
from tests.garbage import cyclic_garbage, is_made_by_a_region, no_collector
from tests.oracles import Way, run_step
from tests.situations import SITUATIONS, Block, KeepsActivation, Situation, Watched
from tests.zoo import CASES, Case


def _name(situation: Situation) -> str:
    return situation.__name__


def in_situation(situation: Situation, watched: Watched) -> None:
    """Bring a fresh block and input into a situation, twice."""
    for _ in range(2):
        situation(Block(watched), torch.randn(3, 4, requires_grad=True))


@pytest.mark.parametrize("situation", SITUATIONS, ids=_name)
def test_no_storage_is_alive_without_the_collector(situation: Situation) -> None:
    # A first use may import modules, which leaves garbage of Python's own.
    in_situation(situation, Watched())
    watched = Watched()
    with no_collector():
        in_situation(situation, watched)

        assert len(watched.references) >= 6
        assert watched.alive() == 0


@pytest.mark.parametrize("situation", SITUATIONS, ids=_name)
def test_no_reference_cycle_is_left(situation: Situation) -> None:
    in_situation(situation, Watched())  # As above.
    with no_collector():
        in_situation(situation, Watched())

        assert cyclic_garbage() == []


def test_an_activation_stored_on_the_module_is_the_only_one_alive() -> None:
    watched = Watched()
    block = KeepsActivation(watched)
    with no_collector():
        for _ in range(3):
            x = torch.randn(3, 4, requires_grad=True)
            mb.checkpoint(block, x).sum().backward()
            del x

        assert watched.alive() == 1
        block.kept = None
        assert watched.alive() == 0


def test_an_output_stored_in_a_captured_dict_dies_with_the_dict() -> None:
    # torch's reentrant variant keeps three storages here: pytorch/pytorch#84413.
    watched = Watched()
    block = Block(watched)

    def step() -> None:
        outputs: dict[str, Tensor] = {}

        def function(x: Tensor) -> Tensor:
            outputs["y"] = block(x)
            return outputs["y"] * 2

        x = torch.randn(3, 4, requires_grad=True)
        mb.checkpoint(function, x).sum().backward()

    with no_collector():
        step()

        assert watched.alive() == 0


def test_the_forward_keeps_the_output_alone() -> None:
    watched = Watched()
    block = Block(watched)
    x = torch.randn(3, 4, requires_grad=True)
    with no_collector():
        y = mb.checkpoint(block, x)

        assert watched.alive() == 1  # y itself.
        assert y.requires_grad


def test_a_region_holds_no_graph_of_its_inputs() -> None:
    watched = Watched()
    block = Block(watched)
    x = torch.randn(3, 4, requires_grad=True)
    with no_collector():
        y = mb.checkpoint(block, x.exp().sin())
        alive = watched.alive()
        z = mb.checkpoint(block, y.detach())
        del y

        # z and the input of its region; not what made that input.
        assert (alive, watched.alive()) == (1, 2)
        assert z.requires_grad


@pytest.mark.parametrize("way", ["loss dropped", "backward"])
def test_nothing_piles_up_over_steps(way: str) -> None:
    watched = Watched()
    block = Block(watched)
    with no_collector():
        counts = []
        for _ in range(5):
            loss = mb.checkpoint(block, torch.randn(3, 4, requires_grad=True)).sum()
            if way == "backward":
                loss.backward()
            del loss
            counts.append((watched.alive(), _living_frames()))

    assert counts == [(0, 0)] * 5


def _living_frames() -> int:
    """Return how many regions live: new ones, which the collector has not frozen."""
    return sum(type(thing).__name__ == "Frame" for thing in gc.get_objects())


_ONE_REGION: Way = lambda call: mb.checkpoint(  # noqa: E731 - typed
    call.function, *call.args, **call.kwargs
)


@pytest.mark.parametrize("case", [case for case in CASES if not case.refused], ids=str)
def test_a_region_round_any_case_leaves_no_cycle(case: Case) -> None:
    run_step(case, _ONE_REGION)
    with no_collector():
        run_step(case, _ONE_REGION)

        assert [t for t in cyclic_garbage() if is_made_by_a_region(t)] == []
