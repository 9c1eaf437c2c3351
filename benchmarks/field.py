"""The field suite as a table: each architecture, what works, peaks, slowdowns.

    python3 run.py bench field [--only NAME ...] [--seconds S]

Each architecture of `tests/field` runs under regions of both engines and within two
budgets: 60 and 30 % of what its plain step takes above the gradients. The slowdown that
the plan predicts stands beside the measured one: the median of interleaved steps, each
with other random numbers. Peaks are counted by the suite's own allocator, so a C++
compiler is needed. For a plain step of t CPU seconds, `fit` may take 35 t + 2.

A run of all architectures writes docs/field.md; one of some prints the table only.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import truediv
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

import membudget as mb

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # The architectures stand in `tests.field`.

from harness import machine, rounds_in_turns  # noqa: E402

from tests.field.case import seed_everything  # noqa: E402
from tests.field.registry import CASES  # noqa: E402
from tests.field.subject import FIRST, RUNS, Subject, differences  # noqa: E402
from tests.field.ways import (  # noqa: E402
    ENGINES,
    PERCENTS,
    WAYS,
    Examined,
    examine,
    fit_or_least,
)

REFUSED = "refused"
HALVES = ("tuned", "held out")
FIRST_STEPS = 12  # In which layers are dropped in most of the ways that they are.
DOCS = ROOT / "docs" / "field.md"


@dataclass(frozen=True)
class Row:
    """What was seen of one architecture.

    Attributes:
        name: Its name.
        half: Whether the library may be tuned on it.
        cells: The cells of the table after those two, as text.
        errors: Of each success, predicted ÷ measured peak - 1, without its sign.
        shares: Of each success, the seconds of `fit` ÷ those that it may take.
        off: Of each success, predicted - measured slowdown, without its sign.
        works: Whether every check of every way succeeded.
    """

    name: str
    half: str
    cells: tuple[str, ...]
    errors: tuple[float, ...]
    shares: tuple[float, ...]
    off: tuple[float, ...]
    works: bool


def fault(examined: Examined) -> str:
    """Return what is wrong in one way, in a few words; empty if nothing is."""
    for check in ("applied", *RUNS, "structure", "removed"):
        try:
            found = examined[check]
        except mb.ChangedSinceForwardError:
            return REFUSED
        except Exception as error:
            return f"{check}: {type(error).__name__}"
        if found is False or (isinstance(found, list) and found):
            return f"{check} differs"
    applied = examined["applied"]
    if hasattr(applied, "plan"):
        if examined["peak"] > applied.plan.budget_bytes:
            return "over its budget"
        if any(region.differences for region in examined["status"].regions):
            return "other operators than planned"
    return ""


def timed(subject: Subject, percent: int, seconds: float) -> tuple[float, float]:
    """Return the steps under a plan ÷ the plain ones, in the median, and their seconds.

    As users train: each step draws other random numbers, and so drops other layers. The
    two of a round draw the same.
    """
    subject.reset()
    fitted = fit_or_least(subject, percent, Examined())
    cases = {
        "planned": stepped(subject),
        "plain": stepped(Subject(CASES[subject.name])),
    }
    for case in cases.values():
        for _ in range(FIRST_STEPS):
            case()
    found = rounds_in_turns(cases, seconds=seconds, batch_s=0)  # One step a round.
    fitted.remove()
    slowdown = median(map(truediv, found["planned"], found["plain"]))
    return slowdown, median(found["plain"]) / 1e6


def stepped(subject: Subject) -> Callable[[], None]:
    """Return what runs the next step: the nth draws from the nth seed."""
    subject.reset()
    seeds = itertools.count()

    def run() -> None:
        seed_everything(next(seeds))
        subject.steps[FIRST].run()
        subject.steps[FIRST].prepare()

    return run


def examined_row(name: str, seconds: float) -> Row:
    """Examine one architecture."""
    subject = Subject(CASES[name])
    stable = all(
        differences(subject.plain[run], subject.outcome(run)) == [] for run in RUNS
    )
    plain_bytes = subject.plain_peak_bytes
    cells = [f"{plain_bytes / 2**20:.1f}"]
    faults = [] if stable else ["the plain step differs"]
    errors, shares, off = [], [], []
    for way in WAYS:
        examined = examine(subject, way)
        found = fault(examined)
        if found:
            faults.append(f"{way}: {found}")
        if way in ENGINES:
            cells.append(found or "✓")
            continue
        cells.append(found or budget_cell(examined))
        if found:
            cells += ["", ""]
            continue
        plan = examined["applied"].plan
        errors.append(abs(plan.peak_bytes / examined["peak"] - 1))
        slowdown, plain_s = timed(subject, PERCENTS[way], seconds)
        fit_s = examined.results["seconds of fit"]
        shares.append(fit_s / (35 * plain_s + 2))
        off.append(abs(plan.slowdown - slowdown))
        cells += [f"{plan.slowdown:.2f} / {slowdown:.2f}", f"{fit_s:.1f}"]
        cells[-1] += f" ({shares[-1]:.2f})"
    figures = tuple(errors), tuple(shares), tuple(off)
    return Row(name, CASES[name].half, tuple(cells), *figures, not faults)


def budget_cell(examined: Examined) -> str:
    """Return the share of the budget that was taken; a star for the least budget."""
    share = examined["peak"] / examined["applied"].plan.budget_bytes
    return f"{share:.3f}" + (" *" if "refused" in examined.results else "")


def markdown(rows: Sequence[Row]) -> str:
    """Return the page of the docs."""
    where = ", ".join(f"{key} {value}" for key, value in machine().items())
    head = ["model", "half", "plain, MiB", *ENGINES]
    for way in PERCENTS:
        head += [f"{way}: peak ÷ budget", "slowdown", "fit, s"]
    errors = [error for row in rows for error in row.errors]
    shares = [share for row in rows for share in row.shares]
    lines = [
        "# The field suite",
        "",
        "Models of other libraries, from configurations, with random weights and all "
        "dropout on. Each step under regions is compared with the plain one bit for "
        "bit, on its batch, on a second one, on another shape, in evaluation, and "
        "after the regions are removed; peaks are counted by an allocator that "
        "shares nothing with membudget.",
        "",
        "- `fit 60%`: the budget is the gradients plus 60 % of what the plain step "
        "takes above them. A star marks models for which that is refused and the "
        "smallest feasible budget is used instead.",
        "- *rerun: refused*: the region writes its own input, which rerun rejects by "
        "design.",
        "- Slowdown: predicted for the recorded step / measured over steps with fresh "
        "random numbers, which may drop other layers.",
        "- `fit, s`: seconds of CPU time; in brackets, relative to a limit of 35 plain "
        "steps + 2 s.",
        "- *held out*: models that nothing was tuned on.",
        "",
        f"`python3 run.py bench field` regenerates this page ({where}).",
        "",
        f"{sum(row.works for row in rows)} of {len(rows)} models work in all ways"
        f"{_refused(rows)}.",
    ]
    if errors:
        lines += [
            "",
            f"Predicted ÷ measured peak is off by {median(errors):.4%} in the median "
            f"of {len(errors)}, and by {max(errors):.2%} at worst. `fit` stayed within "
            f"its time limit in {sum(share <= 1 for share in shares)} of {len(shares)} "
            f"cases, and took {max(shares):.2f} times the limit at worst.",
            "",
            "Median error of predicted slowdowns: "
            + ", ".join(
                f"{median(off):.3f} on the {half} half "
                f"(90th percentile {quantiles(off, n=10)[-1]:.3f})"
                for half in HALVES
                if len(off := [x for r in rows if r.half == half for x in r.off]) > 1
            )
            + ".",
        ]
    lines += ["", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    lines += [
        "| " + " | ".join((row.name, row.half, *row.cells)) + " |" for row in rows
    ]
    return "\n".join(lines) + "\n"


def _refused(rows: Sequence[Row]) -> str:
    """Return which models an engine refuses, after a semicolon; empty if none."""
    refused = [row.name for row in rows if REFUSED in row.cells]
    return f"; rerun refuses {', '.join(refused)}" if refused else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine, print the table, write it if it is of all; 1 if something fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="NAME")
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing, each")
    options: Any = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    for name in options.only or CASES:
        rows.append(examined_row(name, options.seconds))
        print(name, "works" if rows[-1].works else "fails", *rows[-1].cells, flush=True)
    page = markdown(rows)
    print(page)
    if not options.only:
        DOCS.write_text(page, encoding="utf-8")
    return int(not all(row.works for row in rows))


if __name__ == "__main__":
    sys.exit(main())
