"""The command line: `membudget audit TARGET`.

torch is imported by the command that needs it, not here: `membudget --help` must answer
at once.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from membudget.errors import MembudgetError, OptionError

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
    audit = commands.add_parser(
        "audit",
        help="compare a step under regions with the plain step, bit for bit",
        description="Run one training step plain and one under regions, from the same "
        "state, and compare loss, gradients, buffers and random streams bit for bit.",
    )
    audit.add_argument(
        "target",
        metavar="TARGET",
        help="file.py:function; the function returns (model, batch) or "
        "(model, batch, loss_fn)",
    )
    audit.add_argument(
        "--names",
        metavar="GLOB",
        action="append",
        help="the modules that get a region, such as 'h.*'; may be repeated; default: "
        "the children of the longest list of modules",
    )
    audit.add_argument(
        "--every", metavar="N", type=int, default=1, help="take every n-th of them"
    )
    audit.add_argument("--json", metavar="FILE", help="write the report there, too")
    audit.set_defaults(run=_audit)
    return parser


def _audit(options: argparse.Namespace) -> int:
    made = load_target(options.target)()
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise OptionError(
            f"{options.target} must return (model, batch) or (model, batch, loss_fn); "
            f"it returned a {type(made).__name__}"
        )
    from membudget.audit import audit

    model, batch, *loss = made
    report = audit(
        model,
        batch,
        loss[0] if loss else None,
        names=options.names,
        every=options.every,
    )
    print(report)
    if options.json:
        _write_json(Path(options.json), report.to_dict())
    return OK if report.equal else DIFFERENT


def load_target(target: str) -> Callable[[], Any]:
    """Return the function that `file.py:function` names.

    Args:
        target: The path of a Python file, a colon, and the name of a function in it.

    Returns:
        The function. The file was run as a module of its own; code under
        `if __name__ == "__main__"` was not.

    Raises:
        OptionError: If there is no such file or function.
    """
    path_text, _, name = target.rpartition(":")
    path = Path(path_text)
    if not path_text or not name:
        raise OptionError(f"TARGET is file.py:function; got {target!r}")
    if not path.is_file():
        raise OptionError(f"there is no file {path_text!r}, named by TARGET {target!r}")
    spec = spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise OptionError(f"{path_text!r} is not a Python file")
    module = module_from_spec(spec)
    # As Python does for a script, so that the file finds its neighbours; and under its
    # name, so that classes of the file can be pickled.
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise OptionError(f"{path_text!r} has no function {name!r}")
    return function  # type: ignore[no-any-return]


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
