"""The memory-time trade-off of a training step: its slowdown at many budgets."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from membudget.errors import MissingExtraError, OptionError
from membudget.report import rendered
from membudget.text import format_bytes, write_whole

if TYPE_CHECKING:
    from membudget.profile.result import Profile


@dataclass(frozen=True, slots=True)
class TradeoffRow:
    """The fastest plan found for one budget.

    Attributes:
        budget_bytes: Bytes that the step may allocate.
        peak_bytes: Predicted peak bytes that the step allocates.
        slowdown: Predicted step time ÷ plain step time.
        regions: Number of modules with regions in the plan; 0 for the plain step.
    """

    budget_bytes: int
    peak_bytes: int
    slowdown: float
    regions: int


@dataclass(frozen=True)
class Tradeoff:
    """The fastest plans found for a step, from the smallest feasible budget upwards.

    Attributes:
        model: Class name of the model.
        cost: Source of the operator times; see `Profile`.
        static_bytes: Bytes in use before the step, which the budgets do not include.
        rows: Plans in order of increasing budget.
    """

    model: str
    cost: str
    static_bytes: int
    rows: tuple[TradeoffRow, ...]

    @property
    def plain_peak_bytes(self) -> int:
        """Peak bytes that the plain step allocates."""
        return self.rows[-1].budget_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-compatible data."""
        return {**asdict(self), "rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        """Return a table with one line per budget."""
        plain = self.plain_peak_bytes or 1
        rows = [
            (
                format_bytes(row.budget_bytes),
                f"{row.budget_bytes / plain:.1%}",
                format_bytes(row.peak_bytes),
                f"{row.slowdown:.3f}",
                str(row.regions),
            )
            for row in self.rows
        ]
        titles = ("budget", "of plain", "peak", "slowdown", "regions")
        return (
            f"{self.model}: bytes above the {format_bytes(self.static_bytes)} in use "
            f"before the step; times {self.cost}\n\n{rendered(titles, rows, left=0)}"
        )

    def save_png(self, path: str | Path) -> None:
        """Plot slowdown against predicted peak and save the plot as a PNG file.

        Raises:
            MissingExtraError: If matplotlib is not installed.
            OptionError: If the file cannot be written.
        """
        check_can_draw()
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.add_subplot()
        mebibytes = [row.peak_bytes / 1024**2 for row in self.rows]
        axes.plot(mebibytes, [row.slowdown for row in self.rows], marker="o")
        axes.set_xlabel("predicted peak of the step, MiB")
        axes.set_ylabel("predicted slowdown")
        axes.set_title(f"{self.model}, times {self.cost}")
        axes.grid(alpha=0.3)
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=150)
        write_whole(Path(path), picture.getvalue(), repr(str(path)))


def tradeoff(profile: Profile, budgets: int = 20) -> Tradeoff:
    """Find the fastest plan for each of many budgets.

    Args:
        profile: Profile of the plain step, without regions.
        budgets: Number of budgets, evenly spaced from the smallest feasible budget to
            the plain step's peak. Duplicate budgets are planned once.

    Returns:
        The fastest plan found for each budget; `fit` searches longer for its budget.

    Raises:
        OptionError: If `budgets` is not a whole number of at least 2.

    Example:
        >>> import membudget as mb, torch
        >>> layers = [torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)]
        >>> blocks = [torch.nn.Sequential(*layers[:2]) for _ in range(3)]
        >>> model = torch.nn.Sequential(*blocks, torch.nn.Linear(64, 1))
        >>> found = tradeoff(mb.profile(model, torch.ones(512, 64), fake=True), 3)
        >>> [row.peak_bytes <= row.budget_bytes for row in found.rows]
        [True, True, True]
        >>> found.rows[-1].slowdown
        1.0
    """
    if isinstance(budgets, bool) or not isinstance(budgets, int) or budgets < 2:
        raise OptionError(
            "a trade-off is planned for a whole number of budgets, at least 2; got "
            f"{budgets!r}"
        )
    from membudget.planning import planner_of  # Here, because it imports torch.

    graph = profile.graph
    planner = planner_of(profile)
    rows = []
    for budget in _spaced(planner.least_bytes(), planner.plain_peak_bytes, budgets):
        schedule = planner.fastest(budget, quickly=True)
        peak_bytes = schedule.peak_bytes
        regions = len({call.path for call in schedule.calls})
        rows.append(TradeoffRow(budget, peak_bytes, schedule.slowdown, regions))
    return Tradeoff(profile.model, profile.cost, graph.static.total, tuple(rows))


def _spaced(least: int, most: int, count: int) -> list[int]:
    """Return at most `count` evenly spaced integers from `least` to `most`.

    Example:
        >>> _spaced(10, 21, 3), _spaced(5, 5, 3)
        ([10, 15, 21], [5])
    """
    steps = count - 1
    return sorted({least + (most - least) * step // steps for step in range(count)})


def check_can_draw() -> None:
    """Raise `MissingExtraError` if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plots", "a picture") from error
