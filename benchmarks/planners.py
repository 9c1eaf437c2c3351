"""What plans cost at budgets of a step's activations: predicted beside measured.

For each model and each share: the budget is the gradients' bytes and that share of what
the plain step's peak has above them. A plan is made from a profile of the step, put on
the model, and the step is measured: its peak by the meter, its time in turns with the
plain step. Before anything is timed the audit compares the step with the plain one, bit
for bit. `bound` is the least slowdown of any schedule, by the profile's seconds.
`least` stands where no plan fits, with the least share that one fits into.

    python3 run.py bench planners [--seconds 240] [--model NAME]
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import in_turns, machine, save, show
from models import WORKLOADS
from profiled import MODELS
from rich.console import Console
from rich.table import Table
from torch import nn

import membudget as mb
from membudget.planning import make_plan, planner_of
from membudget.profile.step import Step

SHARES = (0.8, 0.6, 0.5, 0.4, 0.3, 0.2)
# The bounds that this project set itself for the measured slowdown of the GPT-2.
BOUNDS = {0.8: 1.06, 0.6: 1.10, 0.4: 1.15, 0.2: 1.22}
BOUNDED = "GPT-2, 12 blocks"

Made = tuple[nn.Module, Any]


def gpt2() -> Made:
    """Return a GPT-2 of 12 blocks of 256 with attention written out."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=1000,
        n_positions=128,
        n_embd=256,
        n_layer=12,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    config._attn_implementation = "eager"
    tokens = torch.randint(1000, (8, 128))
    inputs = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    return GPT2LMHeadModel(config).train(), inputs


MADE: dict[str, Callable[[], Made]] = {
    BOUNDED: gpt2,
    "ResNet": WORKLOADS["ResNet"].make,
    "MLP": WORKLOADS["MLP"].make,
    "U-Net": lambda: MODELS["U-Net"](8),
}


def measure(name: str, seconds: float) -> dict[str, Any]:
    """Return a row for each share."""
    torch.manual_seed(0)
    model, batch = MADE[name]()
    found = mb.profile(model, batch)
    start = time.perf_counter()
    planner = planner_of(found)
    init_s = time.perf_counter() - start
    storages = found.graph.storages
    gradients = sum(s.bytes for s in storages if s.kind == "gradient")
    rows, plans = {}, {}
    for share in SHARES:
        budget = gradients + int(share * (found.peak_bytes - gradients))
        start = time.perf_counter()
        try:
            chosen = planner.choose(budget)
        except mb.BudgetError as error:
            least = (error.least_bytes - gradients) / (found.peak_bytes - gradients)
            rows[share] = {"least_share": least}
            continue
        plan = make_plan(found, planner.graph, chosen, model, budget)
        plan_s = time.perf_counter() - start
        rows[share] = {**_checked(model, batch, plan), "plan_s": plan_s}
        plans[share] = plan
    _time(model, batch, plans, rows, seconds)
    return {
        "plain_peak_bytes": found.peak_bytes,
        "gradient_bytes": gradients,
        "cut_s": init_s,
        "rows": {str(share): row for share, row in rows.items()},
    }


def _checked(model: nn.Module, batch: Any, plan: mb.Plan) -> dict[str, Any]:
    applied = mb.apply(model, plan)
    equal = mb.audit(model, batch).equal if plan.regions else True
    step = Step(model, batch, None)
    step.run()
    step.prepare()
    peak = mb.peak(step.run).peak_bytes
    step.prepare()
    applied.remove()
    return {
        "regions": len(plan.regions),
        "predicted_peak_bytes": plan.peak_bytes,
        "peak_bytes": peak,
        "budget_bytes": plan.budget_bytes,
        "predicted_slowdown": plan.slowdown,
        "bound": plan.bound,
        "equal": equal,
    }


def _time(
    model: nn.Module,
    batch: Any,
    plans: dict[float, mb.Plan],
    rows: dict[float, Any],
    seconds: float,
) -> None:
    """Time the plain step and the step under each plan in turns, on copies."""

    def case(plan: mb.Plan | None) -> Callable[[], None]:
        own = copy.deepcopy(model)
        step = Step(own, batch, None)
        if plan is not None:
            mb.apply(own, plan, verify=False)

        def run() -> None:
            step.run()
            step.prepare()

        return run

    cases = {"plain": case(None)}
    cases |= {str(share): case(plan) for share, plan in plans.items()}
    estimates, rounds = in_turns(cases, seconds=seconds)
    for share in plans:
        ratio, quartile = estimates[str(share)].ratio(estimates["plain"])
        rows[share] |= {"slowdown": ratio, "slowdown_quartile": quartile}
        rows[share]["rounds"] = rounds


def table(name: str, found: dict[str, Any]) -> Table:
    """Return the rows as a table."""
    result = Table(title=f"{name}: {found['plain_peak_bytes']:,} bytes at the peak")
    for head in (
        *("share", "regions", "peak ÷ budget", "predicted ÷ measured peak"),
        *("bound", "slowdown predicted", "measured (quartile)", "equal"),
        "planned in s",
    ):
        result.add_column(head, justify="right")
    for share, row in found["rows"].items():
        if "least_share" in row:
            result.add_row(share, f"least {row['least_share']:.3f}")
            continue
        result.add_row(
            share,
            str(row["regions"]),
            f"{row['peak_bytes'] / row['budget_bytes']:.3f}",
            f"{row['predicted_peak_bytes'] / row['peak_bytes']:.4f}",
            f"{row['bound']:.3f}",
            f"{row['predicted_slowdown']:.3f}",
            f"{row['slowdown']:.3f} ({row['slowdown_quartile']:.3f})",
            str(row["equal"]),
            f"{row['plan_s']:.2f}",
        )
    return result


def verdicts(results: dict[str, Any]) -> list[str]:
    """Say of each bound whether it was met."""
    lines = []
    rows = results.get(BOUNDED, {}).get("rows", {})
    for share, bound in BOUNDS.items():
        row = rows.get(str(share), {})
        if "slowdown" in row:
            met = "met" if row["slowdown"] <= bound else "NOT met"
            lines.append(
                f"{BOUNDED}, {share:.0%}: slowdown {row['slowdown']:.3f}, "
                f"bound {bound}: {met}"
            )
    over = [
        f"{name} {share}"
        for name, found in results.items()
        for share, row in found["rows"].items()
        if "peak_bytes" in row and row["peak_bytes"] > row["budget_bytes"]
    ]
    lines.append(f"plans over their budget: {', '.join(over) or 'none'}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--model", choices=list(MADE))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    names = [options.model] if options.model else list(MADE)
    console = Console()
    console.print(", ".join(f"{key} {value}" for key, value in machine().items()))
    results: dict[str, Any] = {}
    for name in names:
        results[name] = measure(name, options.seconds / len(names))
        show(console, table(name, results[name]))
    found = verdicts(results)
    for line in found:
        console.print(line)
    if options.model is None:
        path = save("planners", {**results, "verdicts": found})
        console.print(f"written to {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
