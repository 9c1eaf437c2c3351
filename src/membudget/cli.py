"""The command line: `membudget audit TARGET`, `membudget profile TARGET`.

torch is imported by the command that needs it, not here: `membudget --help` must answer
at once.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from membudget.errors import MembudgetError, OptionError
from membudget.sizes import format_bytes, parse_bytes
from membudget.target import load_target, optimizer_named, with_sizes, without_memory

if TYPE_CHECKING:
    from membudget.profile.sweep import Sweep

OK, DIFFERENT, FAILED = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: What stands after `membudget`; by default those of the process.

    Returns:
        0 if all is well, 1 if the audit found a difference, 2 if the command could not
        be carried out.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return OK
    try:
        return int(options.run(options))
    except MembudgetError as error:
        print(f"membudget: {error}", file=sys.stderr)
        return FAILED
    except Exception:
        # Python would exit with 1, which stands for a difference that was found.
        traceback.print_exc()
        return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="membudget",
        description="Train PyTorch models in the memory that you have.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_audit(commands)
    _add_profile(commands)
    return parser


def _add_audit(commands: Any) -> None:
    parser = commands.add_parser(
        "audit",
        help="compare a step under regions with the plain step, bit for bit",
        description="Run one training step plain and one under regions, from the same "
        "state, and compare loss, gradients, buffers and random streams bit for bit.",
    )
    _add_target(parser)
    add = parser.add_argument
    add(
        "--names",
        metavar="GLOB",
        action="append",
        help="the modules that get a region, such as 'h.*'; may be repeated; default: "
        "the children of the longest list of modules",
    )
    add("--every", metavar="N", type=int, default=1, help="take every n-th of them")
    add("--json", metavar="FILE", help="write the report there, too")
    parser.set_defaults(run=_audit)


def _add_profile(commands: Any) -> None:
    parser = commands.add_parser(
        "profile",
        help="tell what a training step keeps, what it costs, and where its peak lies",
        description="Record one training step: what each module keeps and costs, what "
        "is alive at the peak, and what would lower it.",
    )
    _add_target(parser)
    add = parser.add_argument
    add(
        "--fake",
        action="store_true",
        help="run without memory: the model is made on the meta device",
    )
    add("--device", metavar="NAME", help="estimate times for it: h100, l4, cpu, ...")
    add("--optimizer", metavar="NAME", help="count its state: adamw, adam, sgd, ...")
    add(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="call the function with it; may be repeated",
    )
    add("--batch", metavar="N", type=int, help="short for --set batch=N")
    add("--sweep", metavar="NAME=N,N,...", help="profile each of these sizes")
    add("--budget", metavar="BYTES", help="such as 8GiB: tell what fits into it")
    add("--json", metavar="FILE", help="write the profile, or the sweep, there, too")
    parser.set_defaults(run=_profile)


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="file.py:function; the function returns (model, batch) or "
        "(model, batch, loss_fn)",
    )


def _audit(options: argparse.Namespace) -> int:
    make = load_target(options.target)
    from membudget.audit import audit
    from membudget.profile.sweep import call_make

    model, batch, loss = call_make(make, {})
    report = audit(model, batch, loss, names=options.names, every=options.every)
    print(report)
    if options.json:
        _write_json(Path(options.json), report.to_dict())
    return OK if report.equal else DIFFERENT


def _profile(options: argparse.Namespace) -> int:
    # What is mistyped should be known before a model is made.
    budget = None if options.budget is None else parse_bytes(options.budget)
    chosen = _chosen_sizes(options)
    name, sizes = _swept_sizes(options.sweep, chosen) if options.sweep else ("", [])
    make = load_target(options.target)
    from membudget.profile import profile, sweep
    from membudget.profile.sweep import call_make

    keywords: dict[str, Any] = {
        "fake": True if options.fake else None,
        "device": options.device,
        "optimizer": None
        if options.optimizer is None
        else optimizer_named(options.optimizer),
    }
    if options.fake:
        make = without_memory(make)
    if name:
        keywords[name] = sizes
        found = sweep(with_sizes(make, chosen), **keywords)
        print(found)
        if budget is not None:
            print(_largest(found, budget))
        if options.json:
            _write_json(Path(options.json), found.to_dict())
        return OK
    step = profile(*call_make(make, chosen), **keywords)
    print(step)
    if budget is not None:
        fits = "fits" if step.total_peak_bytes <= budget else "does NOT fit"
        print(f"\n{format_bytes(step.total_peak_bytes)} {fits} {format_bytes(budget)}")
    if options.json:
        step.to_json(options.json)
    return OK


def _chosen_sizes(options: argparse.Namespace) -> dict[str, Any]:
    """Return what `--set` and `--batch` say."""
    chosen = {}
    for text in options.set:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise OptionError(f"--set takes NAME=VALUE, such as batch=4; got {text!r}")
        try:
            chosen[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            chosen[name] = value  # A word.
    if options.batch is not None:
        chosen["batch"] = options.batch
    return chosen


def _swept_sizes(text: str, chosen: dict[str, Any]) -> tuple[str, list[int]]:
    """Read `batch=1,2,4`."""
    name, _, values = text.partition("=")
    try:
        sizes = [int(value) for value in values.split(",")]
    except ValueError:
        sizes = []
    if not sizes or not name.isidentifier():
        raise OptionError(
            f"--sweep takes NAME=N,N,..., such as batch=1,2,4; got {text!r}"
        )
    if name in ("fake", "device", "optimizer"):
        raise OptionError(f"a size cannot be called {name!r}, which is an option")
    if name in chosen:
        raise OptionError(f"{name} is swept, so it cannot be set to {chosen[name]!r}")
    return name, sizes


def _largest(sweep: Sweep, budget: int) -> str:
    found = sweep.largest(budget)
    if not found.size:
        return f"\nno {sweep.name} fits {format_bytes(budget)}"
    if found.is_extrapolated:
        how = "beyond what was measured"
    elif any(found.size == point.size for point in sweep.points):
        how = "as measured"
    else:
        how = "between what was measured"
    return (
        f"\nlargest {sweep.name} in {format_bytes(budget)}: {found.size}, with "
        f"{format_bytes(found.total_bytes)}, {how}"
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    # By way of a second file, so that half a write does not clobber an older report.
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(json.dumps(content, indent=2) + "\n")
        partial.replace(path)
    except OSError as error:
        raise OptionError(f"the report cannot be written: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
