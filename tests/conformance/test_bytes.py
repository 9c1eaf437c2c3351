"""The peak of a chain of n equal layers, in exact bytes, held against a formula.

Each layer is `torch.sin` on a tensor of S bytes, which saves its input. What is alive
before the step (the chain's input, and the gradient of its output) is not counted; of
what the step makes, the caller holds the output, S, to the end of the backward.
Everything below is in units of S. The derivative of a layer, `grad * input.cos()`,
makes two tensors, the cosine and the product; in a chain, the incoming `grad` is a
third, but it takes the place of the saved tensor that the layer above has let go of.

*Plain.* The outputs of all n layers are alive when the backward begins, n - 1 of them
as saved tensors; the first derivative adds two:

    n + 2

*In k segments of m = n/k layers* (Chen et al. 2016). The inputs of all segments but the
first are kept, k - 1, and the output. The recompute of a segment makes the inputs of
its layers but the first, m - 1: it stops before the last layer runs. The derivative
adds two:

    (k - 1) + 1 + (m - 1) + 2  =  k + m + 1

In each further segment one kept input is gone and an incoming gradient is there, so the
peak is the same in all. It is least for k = m = √n. Without a region round the last
segment (`checkpoint_sequential`) that segment's saved tensors are the same ones.

*Halved recursively*, n = 2^d: both halves of a chain are regions, whose halves are
regions, down to single layers. At the top the input of the second half is kept, and the
output. To come to the last layer, the second half is recomputed up to *its* middle, the
last quarter up to its middle, and so on: d - 1 inputs. The derivative adds two:

    1 + 1 + (d - 1) + 2  =  d + 3

Each further layer frees as much as it makes. The price is time: of a region of L > 1
layers the first half is run again, because the second half's input is then known; at
each of the d - 1 levels that is n/2 layers:

    n (d - 1) / 2  layers recomputed

The state of the random stream is read in 5,056 bytes that are let go at once, and kept
outside of torch's allocator. S is much larger, so those moments are not the peak.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import membudget as mb
from membudget.memory.peak import peak
from tests.oracles import CountedOperators

ELEMENTS = 65536
S = 4 * ELEMENTS

Run = Callable[[Tensor], Tensor]


def plain(layers: int) -> Run:
    """Return a chain that keeps everything."""
    return lambda x: _repeated(layers, x)


def segmented(layers: int, segments: int, **options: Any) -> Run:
    """Return a chain in which each segment is a region."""
    size = layers // segments

    def run(x: Tensor) -> Tensor:
        for _ in range(segments):
            x = mb.checkpoint(_repeated, size, x, **options)
        return x

    return run


def sequential(layers: int, segments: int) -> Run:
    """Return a chain under `checkpoint_sequential`."""
    return lambda x: mb.checkpoint_sequential([torch.sin] * layers, segments, x)


def halved(layers: int, **options: Any) -> Run:
    """Return a chain whose halves are regions, down to single layers."""

    def run(x: Tensor, length: int = layers) -> Tensor:
        if length == 1:
            return x.sin()
        x = mb.checkpoint(run, x, length // 2, **options)
        return mb.checkpoint(run, x, length // 2, **options)

    return run


def _repeated(times: int, x: Tensor) -> Tensor:
    for _ in range(times):
        x = x.sin()
    return x


def peak_of_a_step(run: Run, retain_graph: bool = False) -> float:
    """Return the peak of forward and backward, in units of S, after a first step.

    In the first step, regions take fingerprints: to meter that takes a hundred times as
    long, because the meter records each of their many small operators.
    """
    run(torch.randn(ELEMENTS, requires_grad=True)).sum().backward()
    return peak_of_a_first_step(run, retain_graph)


def peak_of_a_first_step(run: Run, retain_graph: bool = False) -> float:
    """Return the peak of forward and backward, in units of S."""
    x = torch.randn(ELEMENTS, requires_grad=True)
    gradient = torch.ones(ELEMENTS)
    step = peak(lambda: run(x).backward(gradient, retain_graph=retain_graph))
    return step.peak_bytes / S


def recomputed_layers(run: Run, layers: int) -> int:
    """Return how many layers run besides those of the forward."""
    with CountedOperators() as operators:
        run(torch.randn(2, requires_grad=True)).sum().backward()
    return operators.counts["sin"] - layers


@pytest.mark.parametrize("layers", [1, 2, 64])
def test_the_peak_of_a_plain_chain_is_n_plus_2(layers: int) -> None:
    assert peak_of_a_step(plain(layers)) == layers + 2


@pytest.mark.parametrize(
    "segments",
    [2, 8, 64, *(pytest.param(k, marks=pytest.mark.slow) for k in (4, 16, 32))],
)
def test_the_peak_in_k_segments_of_m_layers_is_k_plus_m_plus_1(segments: int) -> None:
    expected = segments + 64 // segments + 1

    assert peak_of_a_step(segmented(64, segments)) == expected
    assert peak_of_a_step(sequential(64, segments)) == expected


def test_the_peak_in_root_n_segments_is_the_least_of_all_segmentations() -> None:
    peaks = {k: peak_of_a_step(segmented(64, k)) for k in (2, 4, 8, 16, 32)}

    assert peaks == {2: 35, 4: 21, 8: 17, 16: 21, 32: 35}


@pytest.mark.parametrize("segments", [2, 8, 32])
def test_a_retained_graph_adds_one_gradient_and_no_recomputed_tensor(
    segments: int,
) -> None:
    # The kept inputs outlive their segments, so the incoming gradient takes no place
    # of theirs. What was recomputed is freed as it is used all the same.
    expected = segments + 64 // segments + 2

    assert peak_of_a_step(segmented(64, segments), retain_graph=True) == expected


def test_the_peak_of_a_first_step_is_the_same() -> None:
    assert peak_of_a_first_step(segmented(16, 4)) == 4 + 4 + 1
    assert peak_of_a_first_step(halved(8)) == 3 + 3


@pytest.mark.parametrize("depth", [1, 2, 3, 6, pytest.param(8, marks=pytest.mark.slow)])
def test_the_peak_of_a_chain_halved_d_times_is_d_plus_3(depth: int) -> None:
    assert peak_of_a_step(halved(2**depth)) == depth + 3


@pytest.mark.parametrize(
    "options",
    [
        {"guards": False, "preserve_rng_state": False},
        {"preserve_rng_state": False},
        {"determinism_check": "none"},
    ],
    ids=str,
)
def test_the_options_of_a_region_do_not_change_the_peak(
    options: dict[str, Any],
) -> None:
    assert peak_of_a_step(segmented(64, 8, **options)) == 8 + 8 + 1
    assert peak_of_a_step(halved(64, **options)) == 6 + 3


def test_without_guards_the_peak_is_the_same() -> None:
    assert peak_of_a_step(segmented(64, 8, guards=False)) == 8 + 8 + 1


@pytest.mark.parametrize("segments", [1, 8, 64])
def test_k_segments_recompute_all_layers_but_the_last_of_each(segments: int) -> None:
    assert recomputed_layers(segmented(64, segments), 64) == 64 - segments


@pytest.mark.parametrize("depth", [1, 2, 6])
def test_halving_d_times_recomputes_half_the_chain_d_minus_1_times(depth: int) -> None:
    n = 2**depth

    assert recomputed_layers(halved(n), n) == n * (depth - 1) // 2
