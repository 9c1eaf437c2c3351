"""The planning commands: `membudget plan`, `fit`, `tradeoff` and `diff`.

This module must not import torch; each command imports torch only when it runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from membudget.cli_options import (
    DIFFERENT,
    OK,
    add_mesh,
    add_profiling,
    add_target,
    chosen_sizes,
    load_target,
    mesh_of,
    profiling_of,
    write_json,
)
from membudget.errors import OptionError, PlanError
from membudget.progress import stage
from membudget.text import format_bytes

if TYPE_CHECKING:
    from membudget.audit import AuditReport
    from membudget.fitted import Fitted
    from membudget.planner.plan import Plan
    from membudget.trial import Trial


def add_planning(commands: Any) -> None:
    """Add the planning commands to the parser."""
    _add_plan(commands)
    _add_fit(commands)
    _add_tradeoff(commands)
    _add_diff(commands)


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="find the fastest plan that fits a budget; nothing is applied",
        description="Profile one training step, and find what each region of the model "
        "should keep so that the step fits a budget.",
    )
    add_target(parser)
    _add_budget(parser)
    add_profiling(parser)
    add_mesh(parser)
    parser.set_defaults(run=_plan)


def _add_fit(commands: Any) -> None:
    parser = commands.add_parser(
        "fit",
        help="fit a step into a budget, and measure it beside the plain step",
        description="Plan, apply the plan, run steps, and print predictions beside "
        "measurements. The exit code is 1 if the budget is exceeded, or if the step "
        "differs from the plain one in any bit.",
    )
    add_target(parser)
    _add_budget(parser)
    parser.add_argument(
        "--steps",
        metavar="N",
        type=int,
        default=20,
        help="number of steps to run (default: 20)",
    )
    parser.add_argument(
        "--seconds",
        metavar="S",
        type=float,
        help="stop looking for faster plans after S seconds",
    )
    add_profiling(
        parser,
        "profile on tensors without memory, for a plain step that does not fit: no "
        "plain step runs, so there is no measured slowdown and no audit",
    )
    parser.set_defaults(run=_fit)


def _add_tradeoff(commands: Any) -> None:
    parser = commands.add_parser(
        "tradeoff",
        help="show the slowdown at each of many budgets",
        description="Profile one training step and plan it for many budgets, from the "
        "smallest feasible one to the peak of the plain step.",
    )
    add_target(parser)
    add = parser.add_argument
    add(
        "--budgets",
        metavar="N",
        type=int,
        default=20,
        help="number of budgets (default: 20)",
    )
    add("--png", metavar="FILE", help="plot the curve to a file, with matplotlib")
    add("--json", metavar="FILE", help="also write the curve as JSON")
    add_profiling(parser)
    parser.set_defaults(run=_tradeoff)


def _add_diff(commands: Any) -> None:
    parser = commands.add_parser(
        "diff",
        help="show how two plans differ",
        description="Compare two plans: budgets, predictions, regions, and what each "
        "region keeps. The exit code is 1 if they differ.",
    )
    parser.add_argument("first", metavar="A.json", help="a plan")
    parser.add_argument("second", metavar="B.json", help="another plan")
    parser.set_defaults(run=_diff)


def _add_budget(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--budget",
        metavar="BYTES",
        required=True,
        help="8GiB: a total, including parameters and optimizer state; 40%%: a share "
        "of what the plain step adds at its peak; '40%% of activations': all parameter "
        "gradients plus 40%% of the rest",
    )
    parser.add_argument(
        "--mode",
        metavar="NAME",
        default="auto",
        help="auto: plan (the default); none: no regions; full: every block "
        "recomputes everything; selective: every block keeps matrix products, "
        "convolutions and attention; attention: every block keeps attention alone; "
        "every_2, every_3, ...: every n-th block recomputes everything",
    )
    parser.add_argument(
        "--host",
        metavar="BYTES",
        help="host memory that tensors may be moved to, such as 64GiB; needs a model "
        "on an accelerator, or --device, whose link is then assumed",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write the plan to a file"
    )


def _plan(options: argparse.Namespace) -> int:
    _check_asked(options)
    mesh = mesh_of(options)
    model, batch, loss = _made(options, on_meta=options.fake or bool(mesh))
    from membudget.host import asked_host
    from membudget.planning import plan_for
    from membudget.profile import profile
    from membudget.report.kind_text import kind_lines
    from membudget.report.plan_text import described
    from membudget.step import device_of_model

    device = device_of_model(model)
    given = asked_host(options.host, "auto", device, options.device)
    found = profile(model, batch, loss, **profiling_of(options), **mesh)
    plan = plan_for(found, model, options.budget, options.mode, given)
    print("\n".join([described(plan), *kind_lines(found.graph)]))
    _write_plan(options.output, plan)
    return OK


def _fit(options: argparse.Namespace) -> int:
    _check_asked(options)
    if options.steps < 1:
        raise OptionError(f"--steps must be at least 1; got {options.steps}")
    model, batch, loss = _made(options, on_meta=False)
    from membudget.fit import fit
    from membudget.step import Step
    from membudget.trial import try_steps

    keywords = {
        **profiling_of(options),
        "fake": options.fake,
        "mode": options.mode,
        "seconds": options.seconds,
        "measure": "none",  # `try_steps` measures more steps.
        "host": options.host,
    }
    with fit(model, batch, options.budget, loss, **keywords) as fitted:
        step = Step(model, batch, loss)
        with stage(f"running {options.steps} steps"):
            trial = try_steps(fitted, step, options.steps, plain=not options.fake)
        print(fitted.report())
        # Without regions the two steps are the same code.
        can_differ = bool(fitted.plan.regions) and not options.fake
        with stage("comparing with the plain step"):
            audited = fitted.audit() if can_differ else None
    print(f"\n{_beside(options, fitted, trial)}\n\n{_verdict(options, audited)}")
    _write_plan(options.output, fitted.plan)
    is_over = trial.peak_bytes > fitted.plan.budget_bytes
    differs = audited is not None and not audited.equal
    return DIFFERENT if is_over or differs else OK


def _beside(options: argparse.Namespace, fitted: Fitted, trial: Trial) -> str:
    """Return a table of the predicted and measured peak and slowdown of a plan."""
    from membudget.report import rendered

    plan = fitted.plan
    slowdown = "·" if trial.slowdown is None else f"{trial.slowdown:.3f}"
    rows = [
        ("peak", format_bytes(plan.peak_bytes), format_bytes(trial.peak_bytes)),
        ("peak, bytes", f"{plan.peak_bytes:,}", f"{trial.peak_bytes:,}"),
        ("slowdown", f"{plan.slowdown:.3f}", slowdown),
    ]
    kept = "kept" if trial.peak_bytes <= plan.budget_bytes else "NOT kept"
    steps = "1 step" if options.steps == 1 else f"{options.steps} steps"
    return (
        f"{rendered(('', 'predicted', 'measured'), rows)}\n"
        f"{steps}, plan {len(fitted.attempts)}; the budget of {plan.budget_bytes:,} "
        f"bytes is {kept}"
    )


def _verdict(options: argparse.Namespace, audited: AuditReport | None) -> str:
    if audited is not None:
        return str(audited)
    if options.fake:
        return "audit: not run, because --fake says that the plain step does not fit"
    return "audit: not needed, the step is the plain one"


def _tradeoff(options: argparse.Namespace) -> int:
    from membudget.tradeoff import check_can_draw, tradeoff

    if options.budgets < 2:
        raise OptionError(f"--budgets must be at least 2; got {options.budgets}")
    if options.png:
        check_can_draw()
    model, batch, loss = _made(options, on_meta=options.fake)
    from membudget.profile import profile

    found = profile(model, batch, loss, **profiling_of(options))
    with stage("planning each budget"):
        curve = tradeoff(found, options.budgets)
    print(curve)
    if options.png:
        curve.save_png(options.png)
    if options.json:
        write_json(Path(options.json), curve.to_dict())
    return OK


def _diff(options: argparse.Namespace) -> int:
    from membudget.report.plan_text import differences

    first, second = _read_plan(options.first), _read_plan(options.second)
    found = differences(first, second)
    if not found:
        print("the plans are equal")
        return OK
    print(f"{options.first} (first) and {options.second} (second) differ:")
    for line in found:
        print(f"  {line}")
    return DIFFERENT


def _read_plan(path: str) -> Plan:
    from membudget.planner.plan import Plan

    try:
        return Plan.from_json(Path(path))
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


def _write_plan(path: str | None, plan: Plan) -> None:
    if path is not None:
        plan.to_json(path)


def _made(options: argparse.Namespace, on_meta: bool) -> tuple[Any, Any, Any]:
    """Call TARGET; return a model, a batch, and a loss function or `None`."""
    chosen = chosen_sizes(options)
    make = load_target(options.target)
    from membudget.batch import call_make
    from membudget.profile.fake import without_memory

    return call_make(without_memory(make) if on_meta else make, chosen)


def _check_asked(options: argparse.Namespace) -> None:
    """Reject an invalid budget or mode before a model is built."""
    from membudget.allowance import check_budget
    from membudget.modes import check_mode

    check_budget(options.budget)
    check_mode(options.mode)
