"""What code consists of: classes, functions, and what their code names.

A function in words is its compiled code, its defaults, what it closed over, and what it
names: globals of its file, and names in modules that are among them. Names after a dot
belong to any object, so more is described than is used, but nothing that is used by
name is missed. Of an installed package, the version is described, and when the file was
written, in place of the code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

from membudget.errors import MembudgetError

Parts = tuple[str, list[Any]]
"""An object in words, and the objects inside of it, which are described next."""

_INSTALLED = {"site-packages", "dist-packages"}
_UNORDERED = "_use_default_values"
"""The names of defaults that a model of diffusers has, in the order of a set."""

_STANDARD = os.path.dirname(os.__file__)


class IndescribableError(MembudgetError):
    """An object cannot be described; the message says why."""


def class_parts(kind: type) -> Parts:
    """Return a class in words, its bases and functions."""
    text = f"class {name_of(kind)}"
    package = _package_of(str(kind.__module__))
    if package and _is_found(kind):
        return f"{text} {package}", []
    own = {
        name: value
        for name, value in sorted(vars(kind).items())
        if not name.startswith("__") or isinstance(value, FunctionType | classmethod)
    }
    return text, [*kind.__bases__, *flat(own.items())]


def _is_found(kind: type) -> bool:
    """Return whether a class is where it says, and was not made when it was needed."""
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is kind


def function_parts(function: FunctionType) -> Parts:
    """Return a function in words, its code, and what that finds when it runs.

    Raises:
        IndescribableError: If `torch.compile` made the function.
    """
    code, text = function.__code__, f"function {name_of(function)}"
    if "_torchdynamo_orig_callable" in vars(function):
        raise IndescribableError(f"{function.__qualname__} is compiled")
    cells = [_content(cell) for cell in function.__closure__ or ()]
    parts = [function.__defaults__, function.__kwdefaults__, *cells]
    # A wrapper bears the name of what it wraps; its code does not.
    package = _package_of(str(function.__globals__.get("__name__")))
    if package:
        is_made = "<locals>" in code.co_qualname
        text += f" {package} {code.co_qualname} {code.co_firstlineno}"
        return text, parts if is_made else []
    return text, [code, *parts, *_named(function), *attributes_of(function)]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # Nothing was assigned to the variable yet.
        return None


def _named(function: FunctionType) -> list[Any]:
    """Return what a function's code names of its file, and of modules named there."""
    names = sorted(set(_names(function.__code__)))
    spaces = [function.__globals__]
    found: list[Any] = []
    for space in spaces:
        for name in names:
            value = space.get(name)
            if not isinstance(value, ModuleType):
                found += [name, value] if name in space else []
            elif not _package_of(str(vars(value).get("__name__"))):
                is_new = all(vars(value) is not known for known in spaces)
                spaces += [vars(value)] if is_new else []
    return found


def _names(code: CodeType) -> Iterator[str]:
    yield from (name for name in code.co_names if not name.startswith("__"))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def code_parts(code: CodeType) -> Parts:
    """Return compiled code in words, and its constants."""
    # Lines count, because profiles name them.
    facts = code.co_firstlineno, code.co_linetable, code.co_flags, code.co_argcount
    names = code.co_names, code.co_varnames, code.co_freevars
    return f"code {code.co_code!r} {facts} {names}", [*code.co_consts]


def attributes_of(value: Any) -> list[Any]:
    """Return names and values of an object's attributes, also of those in slots."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        for name, slot in vars(kind).items():
            is_slot = isinstance(slot, MemberDescriptorType)
            if is_slot and not is_built_in(root_of(kind)) and hasattr(value, name):
                found[name] = getattr(value, name)
    return flat(sorted(found.items()))


def flat(pairs: Iterable[tuple[Any, Any]]) -> list[Any]:
    """Return names and values one after the other, without those of no fixed order."""
    return [part for pair in pairs if pair[0] != _UNORDERED for part in pair]


def name_of(of: Any) -> str:
    """Return the full name of a class or function."""
    return f"{of.__module__}.{of.__qualname__}"


def root_of(kind: type) -> str:
    """Return the package or file that a class belongs to."""
    return str(kind.__module__).partition(".")[0]


@cache
def is_built_in(root: str) -> bool:
    """Return whether a package is torch, NumPy, or of the standard library."""
    if root in sys.stdlib_module_names - {"__main__"}:
        # A file of the user's may be called `test.py` or `profile.py`.
        file = getattr(sys.modules.get(root), "__file__", None)
        return file is None or file.startswith(_STANDARD)
    return root in ("torch", "numpy")


@cache
def _package_of(module: str) -> str:
    """Return the package that a file was installed with; empty for the user's own."""
    root = module.partition(".")[0]
    if is_built_in(root) or root == "membudget":
        return root
    path = Path(getattr(sys.modules.get(module), "__file__", None) or ".")
    if not _INSTALLED.intersection(path.parts):
        return ""
    version = getattr(sys.modules.get(root), "__version__", "")
    with suppress(OSError):  # Such as a file in an archive.
        facts = path.stat()
        version = f"{version} {facts.st_size} {facts.st_mtime_ns}"
    return f"{root} {version}"
