"""What plans cost at budgets of a step's activations: predicted beside measured.

For each model and each share: the budget is the gradients' bytes and that share of what
the plain step's peak has above them. A plan is made from a profile of the step, put on
the model, and the step is measured: its peak by the meter, its time in turns with the
plain step. Before anything is timed the audit compares the step with the plain one, bit
for bit. `any` bounds the slowdown of any schedule from below, by the profile's seconds.
`least` stands where no plan fits, with the least share that one fits into.

Planning is timed from a profile to a plan, anew for each budget; like all times here it
is the process's CPU time. Of the chain of 1000 blocks nothing but that is timed: its
profile is made on fake tensors, and no step runs.

`--others` measures beside the plans what other tools do, as long again: see `others`.

    python3 run.py bench planners [--seconds 240] [--model NAME] [--others]
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import others
import torch
from harness import in_turns, machine, save, show
from models import WORKLOADS
from others import Made, Subject
from planners_verdicts import BOUNDED, CHAIN, verdicts
from profiled import MODELS
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import membudget as mb
from membudget.planning import make_plan, planner_of
from membudget.step import Step

SHARES = (0.8, 0.6, 0.5, 0.4, 0.3, 0.2)
# Seconds after which the first step of another tool is given up.
LIMIT = 300


class ChainBlock(nn.Module):
    """Linear, GELU, linear, and the residual."""

    def __init__(self, width: int) -> None:
        """Make the two layers."""
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return as many features as `x` has."""
        y: Tensor = x + self.second(F.gelu(self.first(x)))
        return y


def chain() -> Made:
    """Return a chain of 1000 small blocks."""
    return nn.Sequential(*(ChainBlock(64) for _ in range(1000))), torch.randn(512, 64)


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


def _numbered(name: str, count: int) -> tuple[str, ...]:
    return tuple(f"{name}.{index}" for index in range(count))


SUBJECTS = {
    BOUNDED: Subject(gpt2, _numbered("transformer.h", 12)),
    "ResNet": Subject(WORKLOADS["ResNet"].make, _numbered("blocks", 6)),
    "MLP": Subject(WORKLOADS["MLP"].make, _numbered("blocks", 6)),
    "U-Net": Subject(
        lambda: MODELS["U-Net"](8), (*_numbered("down", 3), *_numbered("up", 2)), False
    ),
}


def measure(name: str, seconds: float, with_others: bool) -> dict[str, Any]:
    """Return a row for each share, and with `others` one for each other way."""
    torch.manual_seed(0)
    model, batch = SUBJECTS[name].make()
    found = mb.profile(model, batch)
    rows, plans = {}, {}
    for share in SHARES:
        plan, rows[share] = _planned(found, model, share)
        if plan is not None:
            rows[share] |= _checked(model, batch, plan)
            plans[share] = plan
    _time(model, batch, plans, rows, seconds)
    result = _result(found, rows)
    if with_others:
        result["others"] = _others(SUBJECTS[name], found, model, batch, seconds)
    return result


def measure_chain() -> dict[str, Any]:
    """Return a row for each share of the chain; nothing runs, plans are timed."""
    torch.manual_seed(0)
    model, batch = chain()
    start = time.process_time()
    found = mb.profile(model, batch, fake=True)
    profile_s = time.process_time() - start
    rows = {share: _planned(found, model, share)[1] for share in SHARES}
    return {**_result(found, rows), "profile_s": profile_s}


def _result(found: mb.Profile, rows: dict[float, Any]) -> dict[str, Any]:
    return {
        "plain_peak_bytes": found.peak_bytes,
        "gradient_bytes": _gradient_bytes(found),
        "rows": {str(share): row for share, row in rows.items()},
    }


def _gradient_bytes(found: mb.Profile) -> int:
    return sum(s.bytes for s in found.graph.storages if s.kind == "gradient")


def _share_of(found: mb.Profile, peak_bytes: int) -> float:
    gradients = _gradient_bytes(found)
    return (peak_bytes - gradients) / (found.peak_bytes - gradients)


def _budget_bytes(found: mb.Profile, share: float) -> int:
    gradients = _gradient_bytes(found)
    return gradients + int(share * (found.peak_bytes - gradients))


def _planned(
    found: mb.Profile, model: nn.Module, share: float
) -> tuple[mb.Plan | None, dict[str, Any]]:
    """Return a plan, if one fits, and what it took and says."""
    budget = _budget_bytes(found, share)
    start = time.process_time()
    # Anew for each budget: a planner that was asked before has some of its answers.
    planner = planner_of(found)
    cut_s = time.process_time() - start
    try:
        chosen = planner.fastest(budget)
    except mb.BudgetError as error:
        return None, {
            "least_share": _share_of(found, error.least_bytes - error.before_bytes)
        }
    plan = make_plan(found, chosen, model, budget)
    plan_s = time.process_time() - start
    return plan, {
        "regions": len(plan.regions),
        "budget_bytes": budget,
        "predicted_peak_bytes": plan.peak_bytes,
        "predicted_slowdown": plan.slowdown,
        "bound": plan.bound,
        "cut_s": cut_s,
        "plan_s": plan_s,
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
    return {"peak_bytes": peak, "equal": equal}


def _time(
    model: nn.Module,
    batch: Any,
    plans: dict[float, mb.Plan],
    rows: dict[float, Any],
    seconds: float,
) -> None:
    """Time the plain step and the step under each plan in turns, on copies."""
    cases: dict[str, Callable[[], None]] = {}
    for name, plan in [("plain", None), *plans.items()]:
        own = copy.deepcopy(model)
        if plan is not None:
            mb.apply(own, plan, verify=False)
        cases[str(name)] = partial(others.run_step, Step(own, batch, None))
    estimates, rounds = in_turns(cases, seconds=seconds)
    for share in plans:
        ratio, quartile = estimates[str(share)].ratio(estimates["plain"])
        rows[share] |= {"slowdown": ratio, "slowdown_quartile": quartile}
        rows[share]["rounds"] = rounds


def _others(
    subject: Subject, found: mb.Profile, model: nn.Module, batch: Any, seconds: float
) -> dict[str, Any]:
    """Measure the other ways, and ask the planner for each one's peak."""
    ways = others.ways(subject)
    rows = others.measure(model, batch, ways, seconds, LIMIT)
    planner = planner_of(found)
    for row in rows.values():
        if "peak_bytes" not in row:
            continue
        row["share"] = _share_of(found, row["peak_bytes"])
        try:
            row["plan_slowdown"] = planner.fastest(row["peak_bytes"]).slowdown
        except mb.BudgetError:
            row["plan_slowdown"] = None
    # The ILP counts the parameters among what its budget is for.
    held = found.graph.static.parameters
    limits = {s: held + _budget_bytes(found, s) for s in others.COMPILE_BUDGETS}
    return rows | others.sac_ilp(subject.make, limits, LIMIT)


def table(name: str, found: dict[str, Any]) -> Table:
    """Return the rows as a table."""
    result = Table(title=f"{name}: {found['plain_peak_bytes']:,} bytes at the peak")
    for head in (
        *("share", "regions", "peak ÷ budget", "predicted ÷ measured peak"),
        *("any", "slowdown predicted", "measured (quartile)", "equal"),
        "planned in s",
    ):
        result.add_column(head, justify="right")
    for share, row in found["rows"].items():
        if "least_share" in row:
            result.add_row(share, f"least {row['least_share']:.3f}")
            continue
        was_run = "peak_bytes" in row
        peak_bytes = row["peak_bytes" if was_run else "predicted_peak_bytes"]
        result.add_row(
            share,
            str(row["regions"]),
            f"{peak_bytes / row['budget_bytes']:.3f}",
            f"{row['predicted_peak_bytes'] / peak_bytes:.4f}" if was_run else "",
            f"{row['bound']:.3f}",
            f"{row['predicted_slowdown']:.3f}",
            f"{row['slowdown']:.3f} ({row['slowdown_quartile']:.3f})"
            if was_run
            else "not run",
            str(row["equal"]) if was_run else "",
            f"{row['plan_s']:.2f}",
        )
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--model", choices=[*SUBJECTS, CHAIN])
    parser.add_argument("--others", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    names = [options.model] if options.model else [*SUBJECTS, CHAIN]
    console = Console()
    console.print(", ".join(f"{key} {value}" for key, value in machine().items()))
    results: dict[str, Any] = {}
    for name in names:
        seconds = options.seconds / len(SUBJECTS if options.model is None else names)
        results[name] = (
            measure_chain() if name == CHAIN else measure(name, seconds, options.others)
        )
        show(console, table(name, results[name]))
        if "others" in results[name]:
            show(console, others.table(name, results[name]["others"]))
    found = verdicts(results)
    for line in found:
        console.print(line, soft_wrap=True)
    if options.model is None:
        # Apart, so that a run without them leaves those of the last run with them.
        rows = {n: r.pop("others") for n, r in results.items() if "others" in r}
        if rows:
            console.print(f"written to {save('planners-others', rows).name}")
        path = save("planners", {**results, "verdicts": found})
        console.print(f"written to {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
