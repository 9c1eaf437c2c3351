"""One step for all ranks: the largest number of each operator, one's live ranges."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

import membudget as mb
from membudget.graph import StepGraph
from membudget.profile.reduced import places_of, reduced


def step(width: int, count: int) -> StepGraph:
    model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))
    return mb.profile(model, torch.ones(count, width), fake=True).graph


def of_both(first: StepGraph, second: StepGraph) -> StepGraph:
    """Reduce the steps of two ranks, as seen from the first."""
    asked: list[list[float]] = []

    def note(own: Sequence[float]) -> list[float]:
        asked.append([*own])
        return [*own]

    reduced(second, note, note)  # type: ignore[arg-type]
    numbers, seconds = asked

    def most(own: Sequence[int]) -> list[int]:
        return [int(max(pair)) for pair in zip(own, numbers, strict=True)]

    def slowest(own: Sequence[float]) -> list[float]:
        return [max(pair) for pair in zip(own, seconds, strict=True)]

    return reduced(first, most, slowest)


def test_the_reduced_step_has_the_most_bytes_of_all_ranks() -> None:
    short, long = step(32, 16), step(32, 64)
    found = of_both(short, long)

    assert [s.bytes for s in found.storages if s.birth >= 0] == [
        s.bytes for s in long.storages if s.birth >= 0
    ]
    assert [v.bytes for v in found.values if v.operator >= 0] == [
        v.bytes for v in long.values if v.operator >= 0
    ]
    assert found.static == long.static
    assert found.seconds == long.seconds > short.seconds


def test_a_rank_alone_reduces_to_its_own_step() -> None:
    own = step(32, 16)

    assert of_both(own, own) == own


def test_ranks_of_other_lengths_have_the_same_places_and_other_models_do_not() -> None:
    assert places_of(step(32, 16)) == places_of(step(16, 64))

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    other = mb.profile(model, torch.ones(2, 4), fake=True).graph
    assert places_of(other) != places_of(step(4, 2))
