"""Profile a step at several sizes, and learn how its bytes grow.

The bytes that are alive at one moment of a step are a polynomial in most sizes: of
degree one in the batch, of degree two in the length of a sequence whose attention keeps
its scores. The peak is the largest of them, and another moment may make it at another
size: of a small batch, the gradients of the parameters; of a large one, the
activations. So a polynomial is fitted to each moment, and what they say at a size is
right for as long as the same operators run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from membudget.errors import OptionError
from membudget.profile.devices import Device
from membudget.profile.live_ranges import saved_activations
from membudget.profile.optimizer import OptimizerLike
from membudget.profile.polynomial import (
    Fit,
    added,
    envelope,
    evaluate,
    fitted,
    largest_root,
    residual,
)
from membudget.profile.profiling import profile
from membudget.sizes import format_bytes
from membudget.target import call_make


@dataclass(frozen=True, slots=True)
class Point:
    """What was measured at one size.

    Attributes:
        size: The size.
        peak_bytes: The most bytes that the step allocates.
        saved_bytes: Of the activations that autograd keeps.
        static_bytes: What is there before: parameters, optimizer, batch.
        seconds: Of the step.
    """

    size: int
    peak_bytes: int
    saved_bytes: int
    static_bytes: int
    seconds: float

    @property
    def total_bytes(self) -> int:
        """Static bytes and the step's peak."""
        return self.static_bytes + self.peak_bytes


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest size that fits a budget.

    Attributes:
        size: The size; 0 if none fits.
        total_bytes: What it needs: measured if it was, else predicted; 0 for size 0.
        is_extrapolated: Whether it lies outside of the sizes that were measured.
    """

    size: int
    total_bytes: int
    is_extrapolated: bool


@dataclass(frozen=True)
class Sweep:
    """Steps of several sizes.

    Attributes:
        name: Of the size.
        points: What was measured, by ascending size.
        peak: How `peak_bytes` grow.
        saved: How `saved_bytes` grow.
        static: How `static_bytes` grow.
        total: How `total_bytes` grow: the sum of the fits of static and peak bytes.
        moments: The polynomials of the moments that make the peak at some size, from
            the constant on; that of `peak` if not all sizes run the same operators.
    """

    name: str
    points: tuple[Point, ...]
    peak: Fit
    saved: Fit
    static: Fit
    total: Fit
    moments: tuple[tuple[Fraction, ...], ...]

    def total_at(self, size: int) -> int:
        """Return the total at a size: measured if it was, else predicted."""
        for point in self.points:
            if point.size == size:
                return point.total_bytes
        peak = evaluate(self.curve_at(size), size)
        return round(peak + evaluate(self.static.coefficients, size))

    def largest(self, budget_bytes: int) -> Largest:
        """Return the largest size whose total fits; more bytes never give a smaller.

        The measured sizes have the last word; between and beyond them, the polynomials
        of the moments.

        Args:
            budget_bytes: For the total: parameters and optimizer too.

        Raises:
            OptionError: If the total does not grow with the size, and all of them fit.
        """
        fitting = [p.size for p in self.points if p.total_bytes <= budget_bytes]
        above = [p.size for p in self.points if p.total_bytes > budget_bytes]
        ends = [min(above) - 1] if above else []
        for moment in self.moments:
            total = added(moment, self.static.coefficients)
            end = largest_root(total, budget_bytes)
            ends += [] if end is None else [end]
        if not ends:
            raise OptionError(
                f"the bytes do not grow with {self.name}, so that every {self.name} "
                f"fits {format_bytes(budget_bytes)}"
            )
        size = max(min(ends), *fitting, 0)
        is_inside = self.points[0].size <= size <= self.points[-1].size
        return Largest(
            size=size,
            total_bytes=self.total_at(size) if size else 0,
            is_extrapolated=bool(size) and not is_inside,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return {
            "name": self.name,
            "points": [
                {**asdict(point), "total_bytes": point.total_bytes}
                for point in self.points
            ],
            "fits": {
                f"{quantity}_bytes": {
                    "coefficients": [float(c) for c in fit.coefficients],
                    "residual": fit.residual,
                }
                for quantity, fit in self.fits()
            },
        }

    def __str__(self) -> str:
        """Return the measured sizes as a table, and the fits below."""
        from membudget.report.profile_text import sweep_text

        return sweep_text(self)

    def curve_at(self, size: int) -> tuple[Fraction, ...]:
        """Return the polynomial of the op index that makes the peak at a size."""
        return max(self.moments, key=lambda moment: evaluate(moment, size))

    def fits(self) -> list[tuple[str, Fit]]:
        """Return the fitted polynomials, by name."""
        names = ("total", "static", "peak", "saved")
        return [(name, getattr(self, name)) for name in names]


def sweep(
    make: Callable[..., Any],
    *,
    fake: bool | None = True,
    device: str | Device | None = None,
    optimizer: OptimizerLike = None,
    **sizes: Iterable[int],
) -> Sweep:
    """Profile a step at several sizes.

    Args:
        make: Called with the size by name; returns (model, batch) or (model, batch,
            loss_fn), as `profile` takes them.
        fake: As for `profile`, but fake unless said otherwise.
        device: As for `profile`.
        optimizer: As for `profile`.
        **sizes: One name with the sizes to try, such as `batch=[1, 2, 4, 8]`.

    Returns:
        What was measured, and how it grows.

    Raises:
        OptionError: If there is not one name with at least two different positive
            sizes, `make` does not take it or returns something else, or a profile is
            refused.

    Example:
        >>> import torch
        >>> def make(batch):
        ...     return torch.nn.Linear(8, 4), torch.zeros(batch, 8)
        >>> found = sweep(make, batch=[1, 2, 4])
        >>> found.static.text("batch"), found.largest(2000).is_extrapolated
        ('144 + 32 batch', True)
    """
    name, values = _one_size(sizes)
    points, curves = [], []
    for size in values:
        model, batch, loss_fn = call_make(make, {name: size})
        found = profile(
            model, batch, loss_fn, fake=fake, device=device, optimizer=optimizer
        )
        graph = found.graph
        points.append(
            Point(
                size=size,
                peak_bytes=found.peak_bytes,
                saved_bytes=sum(s.bytes for s in saved_activations(graph)),
                static_bytes=graph.static.total,
                seconds=graph.seconds,
            )
        )
        alive = zip(graph.operators, found.timeline.alive_bytes, strict=True)
        curves.append([(o.name, size + o.workspace_bytes) for o, size in alive])
    return of_points(name, points, curves)


def of_points(
    name: str, points: Sequence[Point], curves: Sequence[Sequence[tuple[str, int]]]
) -> Sweep:
    """Return the sweep of what was measured.

    Args:
        name: Of the size.
        points: By ascending size.
        curves: For each size, the operators with the bytes alive at each.
    """
    sizes = [point.size for point in points]
    peak = fitted(sizes, [point.peak_bytes for point in points])
    static = fitted(sizes, [point.static_bytes for point in points])
    saved = fitted(sizes, [point.saved_bytes for point in points])
    total = added(peak.coefficients, static.coefficients)
    off = residual(total, sizes, [point.total_bytes for point in points])
    moments: tuple[tuple[Fraction, ...], ...] = (peak.coefficients,)
    if len({tuple(operator for operator, _ in curve) for curve in curves}) == 1:
        columns = zip(*([size for _, size in curve] for curve in curves), strict=True)
        moments = envelope(sizes, columns)
    return Sweep(
        name, tuple(points), peak, saved, static, Fit(total, float(off)), moments
    )


def _one_size(sizes: dict[str, Iterable[int]]) -> tuple[str, list[int]]:
    if len(sizes) != 1:
        raise OptionError(
            "a sweep is over one size, such as batch=[1, 2, 4]; got "
            f"{', '.join(sizes) or 'none'}"
        )
    ((name, given),) = sizes.items()
    values = [given] if isinstance(given, int | str) else list(given)
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise OptionError(f"{name} must be whole and positive; got {value!r}")
    distinct = sorted(set(values))
    if len(distinct) < 2:
        raise OptionError(
            f"a sweep needs at least two different sizes of {name}; got {values}"
        )
    return name, distinct
