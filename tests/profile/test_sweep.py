"""How the bytes of a step grow with a size."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import membudget as mb
from membudget.profile import Point, of_points
from membudget.profile.polynomial import CLOSE, envelope, evaluate, fitted, largest_root
from membudget.report.module_tree import summarise
from tests.profile.small_models import language_model, perceptron

BUDGETS = st.integers(0, 1 << 40)


def test_the_bytes_of_a_perceptron_are_linear_in_the_batch():
    found = mb.sweep(perceptron, batch=[1, 2, 4, 8])

    for fit in (found.peak, found.saved, found.static, found.total):
        assert (fit.degree, fit.residual) == (1, 0.0)
    # A row of the batch, and of the hidden features, which the last layer keeps.
    assert found.static.coefficients[1] == 32 * 4
    assert list(map(int, found.saved.coefficients)) == [0, 128 * 4]


def test_the_prediction_holds_far_beyond_the_measured_sizes():
    found = mb.sweep(perceptron, batch=[1, 2, 4, 8])
    step = mb.profile(*perceptron(batch=100), fake=True)

    # At 100, another moment makes the peak.
    assert found.peak.at(100) < step.peak_bytes / 2
    assert found.total_at(100) == step.total_peak_bytes
    largest = found.largest(step.total_peak_bytes)
    assert (largest.size, largest.total_bytes) == (100, step.total_peak_bytes)
    assert largest.is_extrapolated
    assert found.largest(step.total_peak_bytes - 1).size == 99


@pytest.mark.parametrize("budget", [60_000, 100_000, 300_000, 10**6])
def test_the_largest_size_is_the_largest_that_fits(budget):
    size = mb.sweep(perceptron, batch=[1, 2, 4, 8]).largest(budget).size

    assert mb.profile(*perceptron(size), fake=True).total_peak_bytes <= budget
    assert mb.profile(*perceptron(size + 1), fake=True).total_peak_bytes > budget


def test_the_bytes_of_attention_are_quadratic_in_the_length():
    def make(length):
        return language_model(length=length, vocabulary=16)

    found = mb.sweep(make, length=[64, 128, 192, 256])

    assert found.saved.degree == found.peak.degree == 2
    assert found.saved.residual == 0.0
    # The scores of two sequences in each of four blocks.
    assert found.saved.coefficients[2] == 4 * 2 * 4
    step = mb.profile(*make(320), fake=True)
    assert found.saved.at(320) == summarise(step.graph).saved_bytes
    assert found.peak.at(320) == pytest.approx(step.peak_bytes, rel=float(CLOSE))


def test_a_sweep_may_be_real():
    real = mb.sweep(perceptron, batch=[2, 4], fake=False)

    assert real.total == mb.sweep(perceptron, batch=[4, 2]).total


def test_the_optimizer_s_bytes_are_reported():
    plain = mb.sweep(perceptron, batch=[1, 2])
    adam = mb.sweep(perceptron, batch=[1, 2], optimizer=torch.optim.AdamW)

    parameters = sum(p.nbytes for p in perceptron()[0].parameters())
    more = adam.points[0].static_bytes - plain.points[0].static_bytes
    assert more >= 2 * parameters


def test_a_sweep_is_a_table_with_the_fits_below():
    text = str(mb.sweep(perceptron, batch=[4, 1, 2, 2]))

    assert [line.split()[0] for line in text.splitlines()[:4]] == ["batch", *"124"]
    assert "+ 128 batch   (off by 0.00%, at most)" in text


def test_a_peak_that_moves_to_another_operator_is_reported():
    near = str(mb.sweep(perceptron, batch=[1, 2, 4]))
    far = str(mb.sweep(perceptron, batch=[1, 10, 1000]))

    assert "makes the peak" not in near
    assert "another operator makes the peak as batch grows" in far


def test_a_sweep_is_written_as_json():
    found = mb.sweep(perceptron, batch=[1, 2, 4])
    data = json.loads(json.dumps(found.to_dict()))

    assert data["name"] == "batch"
    for point in data["points"]:
        parts = point["static_bytes"] + point["peak_bytes"]
        assert point["total_bytes"] == parts
    assert data["fits"]["static_bytes"]["coefficients"][1] == 128


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, "a sweep is over one size.* got none"),
        ({"batch": [1, 2], "width": [8, 16]}, "got batch, width"),
        ({"batch": [4]}, r"at least two different sizes of batch; got \[4\]"),
        ({"batch": [4, 4]}, r"at least two different sizes of batch; got \[4, 4\]"),
        ({"batch": 4}, r"at least two different sizes"),
        ({"batch": [1, 0]}, "batch must be whole and positive; got 0"),
        ({"batch": [1, -2]}, "batch must be whole and positive; got -2"),
        ({"batch": [1, 2.5]}, "batch must be whole and positive; got 2.5"),
        ({"batch": [1, True]}, "batch must be whole and positive; got True"),
        ({"batch": "1,2"}, "batch must be whole and positive; got '1,2'"),
        ({"depth": [1, 2]}, r"perceptron\(depth=1\) cannot be called: .*'depth'"),
    ],
)
def test_sizes_that_cannot_be_swept_are_rejected(sizes, message):
    with pytest.raises(mb.OptionError, match=message):
        mb.sweep(perceptron, **sizes)


@pytest.mark.parametrize("made", ["model", (1,), None])
def test_a_make_function_with_another_result_is_rejected(made):
    def make(batch):
        return made

    with pytest.raises(mb.OptionError, match=f"a {type(made).__name__}$"):
        mb.sweep(make, batch=[1, 2])


def test_an_error_of_the_function_itself_is_not_hidden():
    def make(batch):
        raise TypeError("the data is not there")

    with pytest.raises(TypeError, match="the data is not there"):
        mb.sweep(make, batch=[1, 2])


# The largest size that fits.


def of_totals(*totals: int) -> mb.Sweep:
    """Return a sweep over 1, 2, 4, ... whose static bytes are 0."""
    points = [Point(1 << i, total, 0, 0, 0.0) for i, total in enumerate(totals)]
    return of_points("batch", points, [[("mm", total)] for total in totals])


@pytest.mark.parametrize(
    ("budget", "size", "is_extrapolated"),
    [(9, 0, False), (10, 1, False), (39, 3, False), (40, 4, False), (75, 7, True)],
)
def test_the_largest_size_says_if_it_is_extrapolated(budget, size, is_extrapolated):
    found = of_totals(10, 20, 40).largest(budget)

    assert (found.size, found.is_extrapolated) == (size, is_extrapolated)
    assert found.total_bytes == 10 * size


def test_a_measured_size_takes_precedence_over_the_fit():
    # No parabola is close to this; its fit is far off at 4.
    found = of_totals(10, 11, 90, 91)

    assert found.largest(11).size == 2 or found.largest(11).size == 3
    assert found.largest(90).size < 8
    assert found.largest(91).size >= 8


def test_steps_of_other_operators_are_predicted_by_their_peaks():
    def make(depth):
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(depth))), torch.ones(2, 8)

    found = mb.sweep(make, depth=[3, 6, 9])
    step = mb.profile(*make(20), fake=True)

    assert found.moments == (found.peak.coefficients,)
    assert found.total_at(20) == step.total_peak_bytes
    assert found.largest(step.total_peak_bytes).size == 20


def test_bytes_that_do_not_grow_fit_at_every_size():
    def make(batch):
        return nn.Linear(4, 4), torch.ones(2, 4)

    found = mb.sweep(make, batch=[1, 2])

    assert found.largest(10).size == 0
    with pytest.raises(mb.OptionError, match="do not grow with batch, so every"):
        found.largest(1 << 30)


@given(st.lists(st.integers(0, 1 << 40), min_size=2, max_size=6), BUDGETS, BUDGETS)
def test_a_larger_budget_never_gives_a_smaller_size(totals, one, other):
    found = of_totals(*totals)
    sizes = []
    for budget in sorted((one, other)):
        try:
            sizes.append(found.largest(budget).size)
        except mb.OptionError:
            sizes.append(1 << 90)

    assert sizes == sorted(sizes)


def test_a_budget_of_a_sweep_is_bytes_with_or_without_a_unit():
    found = of_totals(1024, 2048, 4096)
    assert found.largest("2KiB") == found.largest(2048)
    with pytest.raises(mb.OptionError, match="a number of bytes"):
        found.largest("2 Kib of")


@given(st.lists(st.integers(0, 1 << 40), min_size=2, max_size=6), BUDGETS)
def test_the_largest_size_fits_and_the_next_does_not(totals, budget):
    totals.sort()
    found = of_totals(*totals)
    try:
        largest = found.largest(budget)
    except mb.OptionError:
        return
    measured = {point.size: point.total_bytes for point in found.points}

    assert all(measured[size] <= budget for size in measured if size <= largest.size)
    assert all(measured[size] > budget for size in measured if size > largest.size)
    if largest.is_extrapolated:
        assert largest.total_bytes <= budget
        assert found.total_at(largest.size + 1) >= budget


# Polynomials.

COEFFICIENTS = st.integers(0, 1 << 40)


@given(st.sets(st.integers(1, 1 << 16), min_size=3), COEFFICIENTS, COEFFICIENTS)
def test_a_line_is_found_exactly(sizes, constant, slope):
    xs = sorted(sizes)
    fit = fitted(xs, [constant + slope * x for x in xs])

    assert fit.residual == 0
    assert list(map(int, fit.coefficients)) == [constant, slope]


@given(st.sets(st.integers(1, 1 << 16), min_size=3), COEFFICIENTS, COEFFICIENTS)
def test_a_parabola_is_found_exactly_unless_a_line_is_close(sizes, slope, curve):
    xs = sorted(sizes)
    fit = fitted(xs, [slope * x + curve * x * x for x in xs])

    if fit.degree == 1:
        assert fit.residual < CLOSE
    else:
        assert fit.residual == 0
        assert list(map(int, fit.coefficients)) == [0, slope, curve]


def test_a_parabola_that_would_open_downwards_is_not_taken():
    fit = fitted([1, 2, 3], [10, 18, 22])

    assert fit.degree == 1
    assert fit.residual > CLOSE


def test_two_sizes_are_fitted_by_a_line():
    assert list(map(int, fitted([1, 3], [10, 20]).coefficients)) == [5, 5]


@given(
    st.lists(st.tuples(*[st.integers(0, 99)] * 3), min_size=1), st.integers(1, 1 << 20)
)
def test_an_envelope_is_the_largest_of_its_curves(curves, size):
    def at(x):
        return [a + b * x + c * x * x for a, b, c in curves]

    xs = [1, 2, 3, 5]
    found = envelope(xs, zip(*map(at, xs), strict=True))

    assert max(evaluate(c, size) for c in found) == max(at(size))


@given(COEFFICIENTS, st.integers(-1000, 1000), st.integers(0, 50), BUDGETS)
def test_the_largest_root_is_the_last_size_that_fits(constant, slope, curve, budget):
    coefficients = tuple(map(Fraction, (constant, slope, curve)))
    size = largest_root(coefficients, budget)

    def at(x):
        return constant + slope * x + curve * x * x

    if size is None:
        assert curve == 0
        assert slope <= 0
    elif size:
        assert at(size) <= budget < at(size + 1)
    else:
        assert min(map(at, range(1, 1001))) > budget
