"""Command-line interface, and the commands `membudget audit` and `membudget profile`.

The planning commands (`plan`, `fit`, `tradeoff`, `diff`) are in `cli_plan`. Each
command imports torch only when it runs, so that `membudget --help` responds at once.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from membudget.cli_options import (
    DIFFERENT,
    FAILED,
    OK,
    add_profiling,
    add_target,
    chosen_sizes,
    load_target,
    profiling_of,
    with_sizes,
    write_json,
)
from membudget.cli_plan import add_planning
from membudget.errors import MembudgetError, OptionError
from membudget.text import format_bytes, parse_bytes

if TYPE_CHECKING:
    from membudget.profile import Sweep

__all__ = ["DIFFERENT", "FAILED", "OK", "main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one `membudget` command.

    Returns:
        Exit code: 0 on success, 1 if results differ or exceed the budget, 2 on errors.
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
        # Python would exit with 1, which means that a difference was found.
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
    add_planning(commands)
    _add_native(commands)
    return parser


def _add_audit(commands: Any) -> None:
    parser = commands.add_parser(
        "audit",
        help="compare a step under regions with the plain step, bit for bit",
        description="Run one training step plain and one under regions, from the same "
        "state, and compare loss, gradients, buffers and random streams bit for bit.",
    )
    add_target(parser)
    add = parser.add_argument
    add(
        "--names",
        metavar="GLOB",
        action="append",
        help="modules that get a region, such as 'h.*'; repeatable (default: the "
        "children of the longest list of modules)",
    )
    add("--every", metavar="N", type=int, default=1, help="take every n-th of them")
    add("--json", metavar="FILE", help="also write the report as JSON")
    parser.set_defaults(run=_audit)


def _add_profile(commands: Any) -> None:
    parser = commands.add_parser(
        "profile",
        help="show what a training step keeps and costs, and where its peak is",
        description="Record one training step: what each module keeps and costs, what "
        "is live at the peak, and what would lower it.",
    )
    add_target(parser)
    add_profiling(parser)
    add = parser.add_argument
    add("--sweep", metavar="NAME=N,N,...", help="profile each of these sizes")
    add("--budget", metavar="BYTES", help="say whether the step fits in, say, 8GiB")
    add("--json", metavar="FILE", help="also write the profile or sweep as JSON")
    parser.set_defaults(run=_profile)


def _add_native(commands: Any) -> None:
    parser = commands.add_parser(
        "native",
        help="build the recorder in C++ that replay regions use",
        description="Compile the recorder in C++ into the cache folder "
        "(MEMBUDGET_CACHE), ahead of the first region that would.",
    )
    parser.set_defaults(run=_native)
    parser = commands.add_parser(
        "info",
        help="show versions, and which recorder replay regions use",
        description="Show the versions of membudget, torch and Python, and which "
        "recorder replay regions use.",
    )
    parser.set_defaults(run=_info)


def _native(options: argparse.Namespace) -> int:
    from membudget.engine.native.library import RECORDER

    # A build that failed before is tried again.
    built = RECORDER.build(again=RECORDER.find() is None)
    print(f"The recorder in C++ is {built}")
    return OK


def _info(options: argparse.Namespace) -> int:
    import platform
    from importlib.metadata import version

    from membudget.engine import native

    print(f"membudget {version('membudget')}")
    print(f"torch {version('torch')}, Python {platform.python_version()}")
    print(f"replay recorder: {native.status()}")
    return OK


def _audit(options: argparse.Namespace) -> int:
    make = load_target(options.target)
    from membudget.audit import audit
    from membudget.batch import call_make

    model, batch, loss = call_make(make, {})
    report = audit(model, batch, loss, names=options.names, every=options.every)
    print(report)
    if options.json:
        write_json(Path(options.json), report.to_dict())
    return OK if report.equal else DIFFERENT


def _profile(options: argparse.Namespace) -> int:
    # Reject typing errors before building a model.
    budget = None if options.budget is None else parse_bytes(options.budget)
    chosen = chosen_sizes(options)
    name, sizes = _swept_sizes(options.sweep, chosen) if options.sweep else ("", [])
    make = load_target(options.target)
    from membudget.batch import call_make
    from membudget.profile import profile, sweep

    keywords = profiling_of(options)
    if options.fake:
        from membudget.profile.fake import without_memory

        make = without_memory(make)
    if name:
        keywords[name] = sizes
        found = sweep(with_sizes(make, chosen), **keywords)
        print(found)
        if budget is not None:
            print(_largest(found, budget))
        if options.json:
            write_json(Path(options.json), found.to_dict())
        return OK
    step = profile(*call_make(make, chosen), **keywords)
    print(step)
    if budget is not None:
        fits = "fits" if step.total_peak_bytes <= budget else "does NOT fit"
        print(f"\n{format_bytes(step.total_peak_bytes)} {fits} {format_bytes(budget)}")
    if options.json:
        step.to_json(options.json)
    return OK


def _swept_sizes(text: str, chosen: dict[str, Any]) -> tuple[str, list[int]]:
    """Parse a `--sweep` value, such as `batch=1,2,4`, into its name and sizes."""
    name, _, values = text.partition("=")
    try:
        sizes = [int(value) for value in values.split(",")]
    except ValueError:
        sizes = []
    if not sizes or not name.isidentifier():
        raise OptionError(
            f"--sweep takes NAME=N,N,..., such as batch=1,2,4; got {text!r}"
        )
    if name in ("fake", "device", "optimizer", "cache"):
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


if __name__ == "__main__":
    sys.exit(main())
