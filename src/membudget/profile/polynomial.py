"""Fit polynomials to measured byte counts, in exact rational arithmetic.

Exact arithmetic needs no rounding tolerance to decide whether measured bytes lie on a
polynomial. Coefficients are ordered by ascending power.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import le

CLOSE = Fraction(5, 1000)
"""A fit is close if every measured size is within this fraction of its bytes."""

MOST_DEGREE = 2
_FARTHEST = 1 << 60


@dataclass(frozen=True, slots=True)
class Fit:
    """A polynomial in the size, fitted to measured bytes.

    Attributes:
        coefficients: Coefficients of the polynomial, constant first.
        residual: Largest relative error over the measured sizes.
    """

    coefficients: tuple[Fraction, ...]
    residual: float

    @property
    def degree(self) -> int:
        """Degree of the polynomial."""
        return len(self.coefficients) - 1

    def at(self, size: int) -> int:
        """Return the predicted bytes at a size, rounded to an integer."""
        return round(evaluate(self.coefficients, size))

    def text(self, name: str) -> str:
        """Return the polynomial as text, with `name` as its variable.

        Example:
            >>> Fit((Fraction(100), Fraction(3, 2)), 0.0).text("batch")
            '100 + 1.5 batch'
        """
        powers = ["", f" {name}", *(f" {name}^{k}" for k in range(2, self.degree + 1))]
        terms = [
            f"{float(value):,.1f}".removesuffix(".0") + power
            for value, power in zip(self.coefficients, powers, strict=True)
            if value
        ]
        return " + ".join(terms).replace("+ -", "- ") or "0"


def fitted(
    sizes: Sequence[int], measured: Sequence[int], close: Fraction = CLOSE
) -> Fit:
    """Fit a line, or a parabola if any measurement lies too far from the line.

    A parabola that opens downwards is rejected: bytes do not fall as sizes grow.
    """
    best: Fit | None = None
    for degree in range(1, min(MOST_DEGREE, len(sizes) - 1) + 1):
        found = _least_squares(sizes, measured, degree)
        if best is not None and found[-1] < 0:
            break
        off = residual(found, sizes, measured)
        best = Fit(found, float(off))
        if off < close or not off:
            break
    assert best is not None
    return best


def _least_squares(
    sizes: Sequence[int], measured: Sequence[int], degree: int
) -> tuple[Fraction, ...]:
    """Solve the normal equations by Gauss-Jordan elimination."""
    # Distinct sizes make the matrix positive definite: no pivot is 0.
    count = degree + 1
    rows = [
        [Fraction(sum(x ** (i + j) for x in sizes)) for j in range(count)]
        + [Fraction(sum(y * x**i for x, y in zip(sizes, measured, strict=True)))]
        for i in range(count)
    ]
    for i in range(count):
        rows[i] = [cell / rows[i][i] for cell in rows[i]]
        for j in range(count):
            if j != i:
                factor = rows[j][i]
                pairs = zip(rows[j], rows[i], strict=True)
                rows[j] = [cell - factor * pivot for cell, pivot in pairs]
    return tuple(row[-1] for row in rows)


def residual(
    coefficients: Sequence[Fraction], sizes: Sequence[int], measured: Sequence[int]
) -> Fraction:
    """Return the largest relative error of a polynomial over the measured sizes."""
    return max(
        abs(evaluate(coefficients, x) - y) / max(y, 1)
        for x, y in zip(sizes, measured, strict=True)
    )


def evaluate(coefficients: Sequence[Fraction], size: int) -> Fraction:
    """Evaluate a polynomial at a size, by Horner's rule."""
    value = Fraction(0)
    for coefficient in reversed(coefficients):
        value = value * size + coefficient
    return value


def added(one: Sequence[Fraction], other: Sequence[Fraction]) -> tuple[Fraction, ...]:
    """Return the sum of two polynomials."""
    count = max(len(one), len(other))
    padded = [[*c, *[Fraction(0)] * (count - len(c))] for c in (one, other)]
    return tuple(a + b for a, b in zip(*padded, strict=True))


def largest_root(coefficients: Sequence[Fraction], budget: int) -> int | None:
    """Return the largest size at which a polynomial is at most `budget`.

    Returns:
        The largest size; 0 if no size fits; `None` if the polynomial does not grow, so
        that there is no largest size.
    """
    if not any(c > 0 for c in coefficients[2:]) and coefficients[1] <= 0:
        return None if evaluate(coefficients, _FARTHEST) <= budget else 0
    curve = coefficients[2] if len(coefficients) > 2 else Fraction(0)
    # A parabola that opens upwards may fall first: start from its minimum.
    low = max(1, int(-coefficients[1] / (2 * curve))) if curve else 1
    candidates = [low + 1, low]
    start = next((s for s in candidates if evaluate(coefficients, s) <= budget), 0)
    if not start:
        return 0
    # Double the step until the budget is exceeded, then bisect the last step.
    step = 1
    while evaluate(coefficients, start + step) <= budget:
        step *= 2
    end = start + step
    while end - start > 1:
        middle = (start + end) // 2
        if evaluate(coefficients, middle) <= budget:
            start = middle
        else:
            end = middle
    return start


def envelope(
    sizes: Sequence[int], curves: Iterable[Sequence[int]]
) -> tuple[tuple[Fraction, ...], ...]:
    """Fit a polynomial to each curve, and drop polynomials that another dominates."""
    fits = (
        fitted(sizes, curve, close=Fraction(0)) for curve in set(map(tuple, curves))
    )
    padded = {added(fit.coefficients, [Fraction(0)] * 3) for fit in fits}
    kept: list[tuple[Fraction, ...]] = []
    # A polynomial sorts before those that it dominates in every coefficient.
    for one in sorted(padded, key=lambda c: c[::-1], reverse=True):
        if not any(all(map(le, one, other)) for other in kept):
            kept.append(one)
    return tuple(kept)
