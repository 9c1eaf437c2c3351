"""Command-line options of several commands, and the loader of the TARGET function.

This module must not import torch; each command imports torch only when it runs.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Callable
from functools import cache, partial, wraps
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from membudget.errors import OptionError
from membudget.text import write_whole

OK, DIFFERENT, FAILED = 0, 1, 2


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add the positional TARGET argument to a command's parser."""
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="file.py:function; the function returns (model, batch) or "
        "(model, batch, loss_fn)",
    )


def add_profiling(
    parser: argparse.ArgumentParser,
    fake: str = "run on tensors without memory; the model is built on the meta device",
) -> None:
    """Add the profiling options to a command's parser."""
    add = parser.add_argument
    add("--fake", action="store_true", help=fake)
    add(
        "--device",
        metavar="NAME",
        help="estimate times for a device: h100, l4, cpu, ...",
    )
    add("--optimizer", metavar="NAME", help="count its state: adamw, adam, sgd, ...")
    add(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="pass a keyword to the function; repeatable",
    )
    add("--batch", metavar="N", type=int, help="short for --set batch=N")
    add("--cache", metavar="FOLDER", help="store profiles there, and reuse them")


def add_mesh(parser: argparse.ArgumentParser) -> None:
    """Add the options of a mesh of processes to a command's parser."""
    add = parser.add_argument
    add(
        "--mesh",
        metavar="NAME=N,...",
        help="plan one rank of a cluster, without memory and without the other ranks: "
        "dp_shard=8,tp=2 shards by fully_shard over 8 processes, by the model's "
        "tp_plan over 2; --batch is of one rank",
    )
    add(
        "--parallelize",
        metavar="NAME",
        help="function of TARGET's file that shards the model in place instead, given "
        "the model and a DeviceMesh",
    )


def mesh_of(options: argparse.Namespace) -> dict[str, Any]:
    """Convert parsed options into the keyword arguments of `profile` for a mesh.

    Raises:
        OptionError: If the mesh is not written as NAME=N,... .
    """
    if options.mesh is None:
        if options.parallelize is not None:
            raise OptionError("--parallelize goes with --mesh, such as dp_shard=8")
        return {}
    sizes: dict[str, int] = {}
    for text in options.mesh.split(","):
        name, _, size = text.partition("=")
        if not name.isidentifier() or not size.isdigit():
            raise OptionError(
                f"--mesh takes NAME=N,..., such as dp_shard=8,tp=2; got {text!r}"
            )
        sizes[name] = int(size)
    found: dict[str, Any] = {"mesh": sizes}
    if options.parallelize is not None:
        path = options.target.rpartition(":")[0]
        found["parallelize"] = load_target(f"{path}:{options.parallelize}")
    return found


def profiling_of(options: argparse.Namespace) -> dict[str, Any]:
    """Convert parsed options into keyword arguments of `profile`."""
    from membudget.profile.devices import optimizer_named

    name = options.optimizer
    return {
        "fake": True if options.fake else None,
        "device": options.device,
        "cache": options.cache,
        "optimizer": None if name is None else optimizer_named(name),
    }


def chosen_sizes(options: argparse.Namespace) -> dict[str, Any]:
    """Return the values of `--set` and `--batch` as keyword arguments for TARGET.

    Raises:
        OptionError: If a value of `--set` does not have the form NAME=VALUE, or the
            batch is empty.
    """
    chosen = {}
    for text in options.set:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise OptionError(f"--set takes NAME=VALUE, such as batch=4; got {text!r}")
        try:
            chosen[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            chosen[name] = value  # Not a Python literal: a plain string.
    if options.batch is not None:
        if options.batch < 1:
            raise OptionError(f"--batch must be at least 1; got {options.batch}")
        chosen["batch"] = options.batch
    return chosen


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a report as JSON; raise `OptionError` if the file cannot be written."""
    write_whole(path, json.dumps(content, indent=2) + "\n", "the report")


def load_target(target: str) -> Callable[..., Any]:
    """Import the file named in `file.py:function` and return the function."""
    path_text, _, name = target.rpartition(":")
    path = Path(path_text)
    if not path_text or not name:
        raise OptionError(f"TARGET is file.py:function; got {target!r}")
    if not path.is_file():
        raise OptionError(f"there is no file {path_text!r}, named by TARGET {target!r}")
    function = getattr(_module_of(path.absolute()), name, None)
    if not callable(function):
        raise OptionError(f"{path_text!r} has no function {name!r}")
    return function  # type: ignore[no-any-return]


@cache
def _module_of(path: Path) -> ModuleType:
    """Import a file once, so that all functions taken from it share its classes."""
    spec = spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise OptionError(f"{path.name!r} is not a Python file")
    module = module_from_spec(spec)
    # Let the file import its neighbours, as a script can; register it, so that its
    # classes can be pickled.
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def with_sizes(make: Callable[..., Any], chosen: dict[str, Any]) -> Callable[..., Any]:
    """Return a function that calls `make` with the chosen keyword arguments."""
    if not chosen:
        return make
    bound = partial(make, **chosen)

    @wraps(make)
    def made(**sizes: Any) -> Any:
        return bound(**sizes)

    return made
