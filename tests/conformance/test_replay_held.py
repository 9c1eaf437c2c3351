"""What a replay region holds belongs to whatever surrounds it, exactly.

Sources, the inputs of a region and what its policy keeps, are saved tensors of the
surroundings: an outer region drops them, an offloader moves them, a report counts them.
Whatever else the region made dies in its forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import membudget as mb
from membudget import policies
from membudget.engine.options import Verify
from tests.garbage import no_collector
from tests.keeps import KEEPS, VERIFIES, every_second, replay
from tests.situations import Block, Watched

ELEMENTS = 2**16
S = 4 * ELEMENTS  # Bytes.

Function = Callable[[Tensor], Tensor]


def in_a_rerun(function: Function, x: Tensor) -> Tensor:
    return mb.checkpoint(function, x)


def in_a_rerun_without_guards(function: Function, x: Tensor) -> Tensor:
    return mb.checkpoint(function, x, guards=False)


def in_the_checkpoint_of_torch(function: Function, x: Tensor) -> Tensor:
    y: Tensor = torch_checkpoint(function, x, use_reentrant=False)
    return y


def in_a_replay(function: Function, x: Tensor) -> Tensor:
    return replay()(function)(x)


def among_numpy_arrays(function: Function, x: Tensor) -> Tensor:
    place = torch.get_default_device()
    with saved_tensors_hooks(
        lambda t: t.cpu().numpy().copy(),
        lambda array: torch.from_numpy(array).to(place),
    ):
        return function(x)


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize(
    "outer",
    [
        in_a_rerun,
        in_a_rerun_without_guards,
        in_the_checkpoint_of_torch,
        in_a_replay,
        among_numpy_arrays,
    ],
)
def test_what_surrounds_a_replay_region_has_what_it_holds(
    outer: Callable[[Function, Tensor], Tensor], keep: str
) -> None:
    watched = Watched()
    block, region = Block(watched), replay(KEEPS[keep])
    x = torch.randn(3, 4, requires_grad=True)
    with no_collector():
        y = outer(lambda x: region(block)(watched(x.erf())).sin(), x)

        assert len(watched.references) == 6
        assert watched.alive() == 0
        y.sum().backward()
        assert watched.alive() == 0


@pytest.mark.parametrize("verify", VERIFIES)
@pytest.mark.parametrize(
    ("keep", "alive"),
    [
        pytest.param(policies.nothing, 1, id="nothing"),  # y itself.
        pytest.param(policies.operators("tanh"), 2, id="tanh"),
        pytest.param(policies.matmuls, 2, id="matmuls"),
        # The exponential, which saves its output and the cosine its input; the product
        # is saved by nobody, and the tanh saves its output.
        pytest.param(policies.everything, 4, id="everything"),
    ],
)
def test_the_forward_keeps_the_output_and_what_the_policy_does(
    keep: Any, alive: int, verify: Verify
) -> None:
    watched = Watched()
    x = torch.randn(3, 4, requires_grad=True)
    with no_collector():
        y = replay(keep, verify=verify)(Block(watched))(x)

        assert watched.alive() == alive
        assert y.requires_grad


def test_what_nobody_needs_is_not_handed_to_the_surroundings() -> None:
    unused = torch.randn(3, 4)

    def function(x: Tensor) -> Tensor:
        for width in range(1, 5):
            # Nothing that lives on comes of this.
            (x.detach() * unused)[:, :width].sin()
        return x.erf().exp()

    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    x = torch.randn(3, 4, requires_grad=True)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = replay()(function)(x.sin())

    # The sine's input, and the input of the region.
    assert len(packed) == 2
    assert y.requires_grad


def four(x: Tensor) -> Tensor:
    """Save the input, an output, an input and an output."""
    return x.sin().exp().cos().tanh()


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        pytest.param(policies.nothing, 0, id="nothing"),
        pytest.param(policies.operators("exp"), 1, id="exp"),
        # Nobody needs the sine where the exponential is kept.
        pytest.param(policies.operators("sin", "exp"), 1, id="sin and exp"),
        # The output, which is needed as well, is no copy.
        pytest.param(every_second, 1, id="exp and output"),
        pytest.param(policies.everything, 1, id="everything"),
    ],
)
def test_a_region_holds_its_input_and_what_is_kept_and_needed(
    keep: Any, kept: int
) -> None:
    x = torch.randn(ELEMENTS, requires_grad=True)

    forward = mb.peak(lambda: replay(keep)(four)(x.neg()))

    # The input, the output, which the caller holds, and what is kept.
    assert forward.end_bytes == (2 + kept) * S


@pytest.mark.parametrize("keep", [policies.nothing, policies.everything])
def test_what_nobody_needs_dies_in_the_forward(keep: Any) -> None:
    def negations(x: Tensor) -> Tensor:
        for _ in range(8):
            x = x.neg()
        return x

    x = torch.randn(ELEMENTS, requires_grad=True)

    assert mb.peak(lambda: replay(keep)(negations)(x)).peak_bytes == 2 * S


def test_what_was_kept_for_an_output_dies_with_it() -> None:
    watched = Watched()

    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        return watched(x.sin()).cos(), watched(x.erf()).cos()

    x = torch.randn(3, 4, requires_grad=True)
    with no_collector():
        y, z = replay(policies.everything)(two)(x)
        before = watched.alive()
        del z

        assert (before, watched.alive()) == (2, 1)
        assert y.requires_grad


def test_where_everything_is_kept_the_peak_is_the_plain_one() -> None:
    x, gradient = torch.randn(ELEMENTS, requires_grad=True), torch.ones(ELEMENTS)

    step = mb.peak(lambda: replay(policies.everything)(chain(8))(x).backward(gradient))

    assert step.peak_bytes == (8 + 2) * S


@pytest.mark.parametrize("length", [1, 4, 16])
def test_the_forward_of_a_chain_needs_two_tensors_at_once(length: int) -> None:
    x = torch.randn(ELEMENTS, requires_grad=True)

    assert mb.peak(lambda: replay()(chain(length))(x)).peak_bytes == min(length, 2) * S


@pytest.mark.parametrize("segments", [1, 2, 4, 8, 16])
def test_the_peak_of_k_segments_of_m_sines_is_that_of_reruns(segments: int) -> None:
    # The formula is in `test_bytes.py`.
    size = 16 // segments
    x, gradient = torch.randn(ELEMENTS, requires_grad=True), torch.ones(ELEMENTS)

    def step() -> None:
        y = x
        for _ in range(segments):
            y = replay()(chain(size))(y)
        y.backward(gradient)

    assert mb.peak(step).peak_bytes == (segments + size + 1) * S


def chain(length: int) -> Function:
    """Return so many sines."""

    def run(x: Tensor) -> Tensor:
        for _ in range(length):
            x = x.sin()
        return x

    return run
