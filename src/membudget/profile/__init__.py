"""Profile a training step: saved tensors, cost of each operator, peak memory.

`profiling` defines `profile`. `step_recorder` and `lifetimes` observe the step;
`result` assembles its graph; `cache` keeps it in a file; `fake` runs a step on fake
tensors; `workspace`, `cost` and `devices` measure or estimate memory and time;
`live_ranges` analyses the graph.

`sweep`, in this module, profiles a step at several sizes and extrapolates. The live
bytes at one op index are usually a polynomial in the size: linear in the batch size,
quadratic in the sequence length if attention saves its scores. The op index of the peak
depends on the size: small batches peak at the parameters' gradients, large ones at the
activations. `sweep` fits one polynomial per op index; the largest of these polynomials
predicts the peak as long as the same operators run at every size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from membudget.batch import call_make
from membudget.errors import OptionError
from membudget.profile.cache import Cache
from membudget.profile.devices import DEVICES, Device
from membudget.profile.live_ranges import saved_activations
from membudget.profile.optimizer_step import OptimizerLike
from membudget.profile.polynomial import (
    Fit,
    added,
    envelope,
    evaluate,
    fitted,
    largest_root,
    residual,
)
from membudget.profile.profiling import profile, profile_step
from membudget.profile.result import Profile
from membudget.text import format_bytes, parse_bytes

__all__ = [
    "DEVICES",
    "Cache",
    "Device",
    "Profile",
    "Sweep",
    "profile",
    "profile_step",
    "sweep",
]


@dataclass(frozen=True, slots=True)
class Point:
    """Measurements of a step at one size.

    Attributes:
        size: Value of the swept size, such as the number of samples in the batch.
        peak_bytes: Peak of the bytes that the step allocates.
        saved_bytes: Bytes of activations that autograd saves.
        static_bytes: Bytes in use before the step: parameters, buffers, optimizer
            state, batch.
        seconds: Duration of the step.
    """

    size: int
    peak_bytes: int
    saved_bytes: int
    static_bytes: int
    seconds: float

    @property
    def total_bytes(self) -> int:
        """Sum of the static bytes and the step's peak bytes."""
        return self.static_bytes + self.peak_bytes


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest size in a sweep at which the step fits in a byte budget.

    Attributes:
        size: The largest size at which the step fits; 0 if there is none.
        total_bytes: Total bytes at `size`, measured or predicted; 0 if `size` is 0.
        is_extrapolated: Whether `size` lies outside the range of measured sizes.
    """

    size: int
    total_bytes: int
    is_extrapolated: bool


@dataclass(frozen=True)
class Sweep:
    """Profiles of a step at several sizes, with polynomials fitted to the bytes.

    Attributes:
        name: Name of the swept size, such as `"batch"`.
        points: The measurements, in order of increasing size.
        peak: Polynomial fitted to `peak_bytes`.
        saved: Polynomial fitted to `saved_bytes`.
        static: Polynomial fitted to `static_bytes`.
        total: Polynomial for `total_bytes`: the sum of `static` and `peak`.
        moments: Polynomials (coefficients in ascending powers), one per op index at
            which the peak can occur; only `peak` if the operators vary with the size.
    """

    name: str
    points: tuple[Point, ...]
    peak: Fit
    saved: Fit
    static: Fit
    total: Fit
    moments: tuple[tuple[Fraction, ...], ...]

    def total_at(self, size: int) -> int:
        """Return the total bytes at a size, measured or predicted."""
        for point in self.points:
            if point.size == size:
                return point.total_bytes
        peak = evaluate(self.curve_at(size), size)
        return round(peak + evaluate(self.static.coefficients, size))

    def largest(self, budget: int | str) -> Largest:
        """Return the largest size whose total bytes fit in a budget.

        Measurements take precedence over the predictions of the fitted polynomials. A
        larger budget never gives a smaller size.

        Args:
            budget: Budget for the total bytes, parameters and optimizer state included,
                as a number or text such as `"80GiB"`.

        Raises:
            OptionError: If the budget is not a number of bytes, or if every size fits
                because the total bytes do not grow with the size.
        """
        budget_bytes = parse_bytes(budget)
        fitting = [p.size for p in self.points if p.total_bytes <= budget_bytes]
        above = [p.size for p in self.points if p.total_bytes > budget_bytes]
        # No polynomial may predict that a size fits which was measured not to fit.
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
        """Return the sweep as plain data for JSON."""
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
        """Return a table of the measured sizes, followed by the fitted polynomials."""
        from membudget.report.profile_text import sweep_text

        return sweep_text(self)

    def curve_at(self, size: int) -> tuple[Fraction, ...]:
        """Return the polynomial of the op index with the most live bytes at a size."""
        return max(self.moments, key=lambda moment: evaluate(moment, size))

    def fits(self) -> list[tuple[str, Fit]]:
        """Return the fitted polynomials as pairs of name and fit."""
        names = ("total", "static", "peak", "saved")
        return [(name, getattr(self, name)) for name in names]


def sweep(
    make: Callable[..., Any],
    *,
    fake: bool | None = True,
    device: str | Device | None = None,
    optimizer: OptimizerLike = None,
    cache: str | Path | None = None,
    **sizes: Iterable[int],
) -> Sweep:
    """Profile a training step at several sizes and fit polynomials to its bytes.

    Args:
        make: Function that takes the size as a keyword argument and returns `(model,
            batch)` or `(model, batch, loss_fn)`.
        fake: Whether to run on fake tensors, as in `profile`, but `True` by default.
        device: Device whose roofline gives the operator times, as in `profile`.
        optimizer: Optimizer whose memory is counted, as in `profile`.
        cache: Folder in which the profiles are kept, as in `profile`.
        **sizes: One keyword with the sizes to profile, such as `batch=[1, 2, 4, 8]`.

    Returns:
        The measurements and the polynomials fitted to the measured bytes.

    Raises:
        OptionError: If `sizes` is not one keyword with at least two different positive
            integers, if `make` rejects the keyword or does not return a tuple of two or
            three items, or if `profile` raises an `OptionError`.

    Example:
        >>> import torch
        >>> def make(batch):
        ...     return torch.nn.Linear(8, 4), torch.zeros(batch, 8)
        >>> found = sweep(make, batch=[1, 2, 4])
        >>> found.static.text("batch"), found.largest(2000).is_extrapolated
        ('144 + 32 batch', True)
    """
    name, values = _one_size(sizes)
    profiled = partial(
        profile, fake=fake, device=device, optimizer=optimizer, cache=cache
    )
    points, curves = [], []
    for size in values:
        found = profiled(*call_make(make, {name: size}))
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
    """Fit polynomials to measured bytes and to the live bytes at each operator."""
    sizes = [point.size for point in points]
    peak = fitted(sizes, [point.peak_bytes for point in points])
    static = fitted(sizes, [point.static_bytes for point in points])
    saved = fitted(sizes, [point.saved_bytes for point in points])
    total = added(peak.coefficients, static.coefficients)
    off = residual(total, sizes, [point.total_bytes for point in points])
    moments: tuple[tuple[Fraction, ...], ...] = (peak.coefficients,)
    # An op index is the same operator at every size only if the sequences are equal.
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
