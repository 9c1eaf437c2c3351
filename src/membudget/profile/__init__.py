"""One training step, recorded: what it saves, what each operator costs, its peak.

`profiling` has the call itself. `step_recorder` and `lifetimes` watch the step, and
`result` builds its graph; `fake` runs a step without memory; `workspace`, `cost` and
`devices` find what operators and optimizers need; `live_ranges` reads the graph.

`sweep`, here, profiles several sizes and extrapolates. The live bytes at one op index
are a polynomial in most sizes: of degree one in the batch size, of degree two in the
length of a sequence whose attention saves its scores. The peak is the largest of them,
and can move to another op index: with a small batch to the gradients of the parameters,
with a large one to the activations. So one `polynomial` is fitted to each op index;
they predict the peak as long as the same operators run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from membudget.errors import OptionError
from membudget.profile.devices import DEVICES, Device
from membudget.profile.live_ranges import saved_activations
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
from membudget.profile.result import Profile
from membudget.profile.workspace import OptimizerLike
from membudget.step import call_make
from membudget.text import format_bytes, parse_bytes

__all__ = ["DEVICES", "Device", "Profile", "Sweep", "profile", "sweep"]


@dataclass(frozen=True, slots=True)
class Point:
    """What was measured at one size.

    Attributes:
        size: The size.
        peak_bytes: Peak of the bytes that the step allocates.
        saved_bytes: Bytes of activations that autograd saves.
        static_bytes: Bytes in use before the step: parameters, buffers, optimizer
            state, batch.
        seconds: Time of the step.
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
        total_bytes: Its total, measured or else predicted; 0 for size 0.
        is_extrapolated: Whether it lies outside the measured sizes.
    """

    size: int
    total_bytes: int
    is_extrapolated: bool


@dataclass(frozen=True)
class Sweep:
    """Steps of several sizes.

    Attributes:
        name: Name of the size, such as `"batch"`.
        points: The measurements, by ascending size.
        peak: Fit of `peak_bytes`.
        saved: Fit of `saved_bytes`.
        static: Fit of `static_bytes`.
        total: Fit of `total_bytes`: the sum of the fits of static and peak bytes.
        moments: The polynomials of the op indices that make the peak at some size,
            constant first; only that of `peak` if sizes run different operators.
    """

    name: str
    points: tuple[Point, ...]
    peak: Fit
    saved: Fit
    static: Fit
    total: Fit
    moments: tuple[tuple[Fraction, ...], ...]

    def total_at(self, size: int) -> int:
        """Return the total at a size, measured or else predicted."""
        for point in self.points:
            if point.size == size:
                return point.total_bytes
        peak = evaluate(self.curve_at(size), size)
        return round(peak + evaluate(self.static.coefficients, size))

    def largest(self, budget: int | str) -> Largest:
        """Return the largest size whose total fits a budget.

        Measured sizes take precedence; between and beyond them the polynomials of
        `moments` predict. A larger budget never gives a smaller size.

        Args:
            budget: Budget of the total, parameters and optimizer state included: bytes,
                as a number or `"80GiB"`.

        Raises:
            OptionError: If the budget is no number of bytes, or every size fits,
                because the total does not grow with it.
        """
        budget_bytes = parse_bytes(budget)
        fitting = [p.size for p in self.points if p.total_bytes <= budget_bytes]
        above = [p.size for p in self.points if p.total_bytes > budget_bytes]
        ends = [min(above) - 1] if above else []
        for moment in self.moments:
            total = added(moment, self.static.coefficients)
            end = largest_root(total, budget_bytes)
            ends += [] if end is None else [end]
        if not ends:
            raise OptionError(
                f"the bytes do not grow with {self.name}, so every {self.name} "
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
        make: Called with the size as keyword; returns (model, batch) or (model, batch,
            loss_fn) for `profile`.
        fake: As for `profile`, but `True` by default.
        device: As for `profile`.
        optimizer: As for `profile`.
        **sizes: One name with its sizes, such as `batch=[1, 2, 4, 8]`.

    Returns:
        The measurements, and how they grow.

    Raises:
        OptionError: If there is not exactly one name with at least two different
            positive sizes, `make` does not accept it or returns something else, or
            `profile` raises it.

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
    """Fit the points; a curve has each operator's name and the live bytes at it."""
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
