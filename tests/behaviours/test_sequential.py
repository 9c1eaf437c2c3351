"""Behaviours 126-129: a chain of layers is run in even segments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget import compat
from tests.behaviours.steps import Region, differences, plain

Run = Callable[..., Any]


def leaf() -> Tensor:
    return torch.linspace(-1.0, 1.0, 6).reshape(2, 3).requires_grad_()


def numbered(count: int, log: list[int]) -> list[Callable[[Tensor], Tensor]]:
    """Return layers that note their numbers when they run."""

    def layer(number: int, x: Tensor) -> Tensor:
        log.append(number)
        return (x + number).tanh()

    return [functools.partial(layer, i) for i in range(count)]


def recomputed(count: int, segments: Any, run: Run = mb.checkpoint_sequential) -> Any:
    """Return the numbers of the layers that a backward recomputes, in order."""
    log: list[int] = []
    y = run(numbered(count, log), segments, leaf())
    assert log == list(range(count))
    log.clear()
    y.sum().backward()
    return log


def segments_of(*sizes: int) -> list[int]:
    """Return what is recomputed, in order, of segments of `sizes`: not the last."""
    segments, start = [], 0
    for size in sizes:
        segments.append(range(start, start + size))
        start += size
    return [number for segment in reversed(segments[:-1]) for number in segment]


def chain_step(kind: str, segments: Any) -> Callable[[Region], Any]:
    """Return a step over five layers, of which one draws and one keeps statistics."""

    def step(region: Region) -> Any:
        model = nn.Sequential(
            nn.Linear(6, 6),
            nn.Dropout(0.4),
            nn.BatchNorm1d(6),
            nn.GELU(),
            nn.Linear(6, 6),
        )
        x = torch.randn(8, 6, requires_grad=True)
        layers: Any = {"list": list(model), "module_list": nn.ModuleList(model)}.get(
            kind, model
        )
        y = (
            model(x)
            if region is plain
            else mb.checkpoint_sequential(layers, segments, x)
        )
        y.square().sum().backward()
        return model, x, y

    return step


# torch 2.13 advances the statistics of BatchNorm twice in every segment but the last.
@pytest.mark.parametrize("segments", [1, 2, 3, 4, 5, None, "sqrt"])
@pytest.mark.parametrize("kind", ["sequential", "list", "module_list"])
def test_b126_segments_equal_the_plain_chain(kind: str, segments: Any) -> None:
    assert differences(chain_step(kind, segments)) == []


# torch 2.13 makes 1, 1, 1, 1, 1 and 6 of eleven layers in six segments.
def test_b126_eleven_layers_in_six_segments_are_five_pairs_and_one() -> None:
    assert recomputed(11, 6) == segments_of(2, 2, 2, 2, 2, 1)


# torch 2.13: as above.
@pytest.mark.parametrize("count", range(1, 8))
def test_b126_segments_differ_by_one_layer_at_most(count: int) -> None:
    for segments in range(1, count + 1):
        size, longer = divmod(count, segments)
        sizes = [size + 1] * longer + [size] * (segments - longer)
        assert recomputed(count, segments) == segments_of(*sizes)


# torch 2.13 asks for a number.
@pytest.mark.parametrize("segments", [None, "sqrt"])
def test_b126_the_square_root_of_the_layers_is_the_default(segments: Any) -> None:
    assert recomputed(16, segments) == segments_of(4, 4, 4, 4)
    assert recomputed(1, segments) == []


# torch 2.13 takes one input.
def test_b126_several_inputs_may_go_through_the_chain() -> None:
    def step(region: Region) -> Any:
        x, mask = leaf(), torch.tensor([1.0, 0.0, 2.0], requires_grad=True)

        def masked(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            return (x * mask).exp().sin(), mask.exp()

        def joined(x: Tensor, mask: Tensor) -> Tensor:
            return (x + mask).tanh()

        layers: list[Any] = [masked, masked, joined, torch.sin]
        if region is plain:
            y = joined(*masked(*masked(x, mask))).sin()
        else:
            y = mb.checkpoint_sequential(layers, 3, x, mask)
        y.sum().backward()
        return x, mask, y

    assert differences(step) == []


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_b126_torchs_signature_works(use_reentrant: bool) -> None:
    def step(region: Region) -> Any:
        model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), leaf()
        if region is plain:
            y = model(x)
        else:
            y = compat.checkpoint_sequential(
                model, 2, input=x, use_reentrant=use_reentrant, preserve_rng_state=False
            )
        y.square().sum().backward()
        return model, x, y

    assert differences(step) == []


@pytest.mark.parametrize("segments", [1, 2, 3, 6])
def test_b127_the_last_segment_is_not_recomputed(segments: int) -> None:
    size = 6 // segments
    assert recomputed(6, segments) == segments_of(*[size] * segments)
    run = functools.partial(compat.checkpoint_sequential, use_reentrant=False)
    assert recomputed(6, segments, run) == segments_of(*[size] * segments)


def test_b128_unknown_keywords_are_refused() -> None:
    log: list[int] = []
    layers = numbered(4, log)
    with pytest.raises((TypeError, ValueError), match="earlystop"):
        mb.checkpoint_sequential(layers, 2, leaf(), earlystop=True)
    with pytest.raises((TypeError, ValueError), match="earlystop"):
        compat.checkpoint_sequential(
            layers, 2, leaf(), use_reentrant=False, earlystop=True
        )
    assert log == []


# torch 2.13 says "range() arg 3 must not be zero".
def test_b129_more_segments_than_layers_are_refused_with_both_numbers() -> None:
    log: list[int] = []
    with pytest.raises(mb.OptionError, match=r"segments.*\b4\b.*\b7\b"):
        mb.checkpoint_sequential(numbered(4, log), 7, leaf())
    assert log == []


# torch 2.13 fails inside `range`, or runs plain without a word.
@pytest.mark.parametrize("segments", [0, -1, 2.0, "cbrt", True])
def test_b129_segments_that_cannot_be_meant_are_refused(segments: Any) -> None:
    log: list[int] = []
    with pytest.raises(mb.OptionError, match=f"segments.*{segments}"):
        mb.checkpoint_sequential(numbered(4, log), segments, leaf())
    assert log == []


def test_b129_a_chain_without_layers_is_refused() -> None:
    with pytest.raises(mb.OptionError, match="layers"):
        mb.checkpoint_sequential([], None, leaf())
