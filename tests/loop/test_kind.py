"""Chords between recorded sizes bound what lies between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from membudget._torch_accelerator import HOST
from membudget.engine import native
from membudget.loop.kind import CallKind, Tail
from membudget.loop.micro_batch import MicroBatchStep, RecordedBatch
from membudget.profile import profile_step
from tests.loops.models import Language


def recorded(length: int, make: Callable[[], nn.Module] = Language) -> RecordedBatch:
    step = MicroBatchStep(make(), (torch.randint(64, (4, length)),), {})
    return RecordedBatch(profile_step(step, fake=True))


class Branched(Language):
    """Runs another operator first."""

    def forward(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(tokens.clone(), *args, **kwargs)


@pytest.fixture(scope="module")
def kind() -> CallKind:
    found = CallKind(Tail())
    for length in (16, 64):
        found.add((4, length), recorded(length))
    high = found.points[4, 64]
    assert found.fastest(high, int(0.6 * high.profile.peak_bytes), 0)
    return found


@pytest.mark.parametrize("length", [20, 40, 56])
def test_a_prediction_between_recorded_sizes_is_an_upper_bound(kind, length):
    exact = CallKind(kind.tail)
    point = exact.add((4, length), recorded(length))
    for found in kind.between((4, length)):
        simulated = point.simulated(found.schedule)
        assert simulated.peak_bytes <= found.peak_bytes
        assert point.predicted(found.schedule).held_bytes <= found.held_bytes


@pytest.mark.parametrize("length", [80, 128])
def test_a_line_through_two_sizes_is_a_lower_bound_beyond_them(kind, length):
    exact = recorded(length).with_tail(kind.tail.bytes_of(recorded(length)))
    assert kind.plain_at_least((4, length)) <= exact.peak_bytes


@pytest.mark.parametrize("sizes", [(4, 128), (8, 32), (3, 32), (4, 8)])
def test_a_size_beside_the_recorded_ones_has_no_bounds_above(kind, sizes):
    assert kind.around(sizes) is None
    assert kind.between(sizes) == []


def test_a_size_on_the_line_lies_at_its_share(kind):
    _, _, place = kind.around((4, 28))
    assert place == Fraction(1, 4)


def test_another_tail_changes_every_prediction(kind):
    tail = Tail()
    other = CallKind(tail)
    before = other.add((4, 16), recorded(16)).profile.peak_bytes
    tail.learn(other.points[4, 16].recording, 10 << 20, holds_casts=False)
    assert other.points[4, 16].profile.peak_bytes > before


def test_schedules_of_other_operators_serve_no_size_between():
    mixed = CallKind(Tail())
    for length in (16, 64):
        mixed.add((4, length), recorded(length))
    other = mixed.add((4, 80), recorded(80, Branched))
    assert mixed.fastest(other, int(0.6 * other.profile.peak_bytes), 0)
    assert mixed.schedules
    assert mixed.between((4, 40)) == []


@pytest.mark.skipif(not native.is_available(), reason="there is no C++ compiler")
def test_verification_needs_memory_where_cpp_cannot_read_tensors(kind):
    assert native.extension()
    point = kind.points[4, 64]
    there = replace(point, device=torch.device("meta"))
    assert point.device == HOST
    assert (point.verified_bytes, there.verified_bytes > 0) == (0, True)
