"""Fitted polynomials as text, and at a size."""

from __future__ import annotations

from fractions import Fraction

import pytest

from membudget.profile.polynomial import (
    CLOSE,
    Fit,
    added,
    envelope,
    evaluate,
    fitted,
    largest_root,
    residual,
)


def fit_of(*coefficients: float) -> Fit:
    return Fit(tuple(map(Fraction, coefficients)), 0.0)


@pytest.mark.parametrize(
    ("coefficients", "text"),
    [
        ((100, 1.5), "100 + 1.5 batch"),
        ((0, 2), "2 batch"),
        ((5, 0), "5"),
        ((0, 0), "0"),
        ((-3, 2), "-3 + 2 batch"),
        ((5, -2, 4), "5 - 2 batch + 4 batch^2"),
        ((1234567, 0, 1.25), "1,234,567 + 1.2 batch^2"),
        ((1, 2, 3, 4), "1 + 2 batch + 3 batch^2 + 4 batch^3"),
    ],
)
def test_a_polynomial_is_written_by_ascending_powers(coefficients, text):
    assert fit_of(*coefficients).text("batch") == text
    assert fit_of(*coefficients).degree == len(coefficients) - 1


def test_a_polynomial_at_a_size_is_rounded():
    fit = fit_of(1, 0.5, 2)
    assert [fit.at(size) for size in (0, 1, 3)] == [1, 4, 20]
    assert evaluate(fit.coefficients, 3) == Fraction(41, 2)


def test_polynomials_of_different_degrees_add_up():
    line, parabola = fit_of(1, 2).coefficients, fit_of(3, 4, 5).coefficients
    assert list(map(int, added(line, parabola))) == [4, 6, 5]
    assert list(map(int, added(parabola, line))) == [4, 6, 5]


def test_an_error_is_relative_to_what_was_measured():
    line = fit_of(0, 10).coefficients
    assert residual(line, [1, 2, 3], [10, 16, 31]) == Fraction(4, 16)
    assert residual(line, [1], [0]) == 10


@pytest.mark.parametrize(("far", "degree"), [(0, 1), (10, 1), (30, 2)])
def test_a_line_is_taken_if_it_is_within_half_a_hundredth(far, degree):
    # The line of least squares misses the middle by two thirds of `far`.
    fit = fitted([1, 2, 3], [1000, 2000 - far, 3000])
    assert Fraction(1, 200) == CLOSE
    assert fit.degree == degree
    assert (fit.residual == 0) == (far != 10)


def test_no_polynomial_goes_above_a_parabola():
    assert fitted([1, 2, 3, 4, 5], [1, 16, 81, 256, 625]).degree == 2


@pytest.mark.parametrize(
    ("coefficients", "budget", "size"),
    [
        ((10, 5), 24, 2),
        ((10, 5), 25, 3),
        ((10, 5), 14, 0),
        ((10, 5), 15, 1),
        ((10, 0), 10, None),
        ((10, 0), 9, 0),
        ((10, -1), 5, None),
        ((0, 0, 1), 99, 9),
        ((0, 0, 1), 100, 10),
        # Falls until 10, and grows from there on.
        ((100, -20, 1), 0, 10),
        ((100, -20, 1), 1, 11),
        ((101, -20, 1), 0, 0),
        # Its minimum lies between 2 and 3.
        ((7, -5, 1), 1, 3),
        ((7, -5, 1), 0, 0),
        # It falls for ever, though not in its last power.
        ((10, 3, 0), 10**9, 333333330),
    ],
)
def test_the_largest_size_within_a_budget_is_found(coefficients, budget, size):
    assert largest_root(fit_of(*coefficients).coefficients, budget) == size


def test_an_envelope_leaves_out_what_another_curve_exceeds_everywhere():
    sizes = [1, 2, 3, 4]
    curves = [[5 + x for x in sizes], [4 + x for x in sizes], [3 * x for x in sizes]]
    assert [list(map(int, c)) for c in envelope(sizes, curves)] == [
        [0, 3, 0],
        [5, 1, 0],
    ]
    square = [x * x for x in sizes]
    assert [list(map(int, c)) for c in envelope(sizes, [square] * 2)] == [[0, 0, 1]]
