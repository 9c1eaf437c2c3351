"""What code consists of: classes, functions, and what their code names.

A function in words is its compiled code, its defaults, what it closed over, and what it
names: globals of its file, and names in modules that are among them. Names after a dot
belong to any object, so more is described than is used, but nothing that is used by
name is missed. Of an installed package, the version is described, and when the file was
written, in place of the code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

from membudget.errors import MembudgetError
from membudget.state.packages import is_built_in, package_of, root_of

Parts = tuple[str, list[Any]]
"""An object in words, and the objects inside of it, which are described next."""

_UNORDERED = "_use_default_values"
"""The names of defaults that a model of diffusers has, in the order of a set."""


class IndescribableError(MembudgetError):
    """An object cannot be described; the message says why."""


def class_parts(kind: type) -> Parts:
    """Return a class in words, its bases and functions."""
    text = f"class {name_of(kind)}"
    package = package_of(str(kind.__module__))
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
    cells = [content_of(cell) for cell in function.__closure__ or ()]
    parts = [function.__defaults__, function.__kwdefaults__, *cells]
    # A wrapper bears the name of what it wraps; its code does not.
    package = package_of(str(function.__globals__.get("__name__")))
    if package:
        is_made = "<locals>" in code.co_qualname
        text += f" {package} {code.co_qualname} {code.co_firstlineno}"
        return text, parts if is_made else []
    return text, [code, *parts, *_named(function), *attributes_of(function)]


def content_of(cell: Any, unbound: Any = None) -> Any:
    """Return what a variable of a closure holds; `unbound` before it is assigned."""
    try:
        return cell.cell_contents
    except ValueError:
        return unbound


def _named(function: FunctionType) -> list[Any]:
    """Return what a function's code names of its file, and of modules named there."""
    names = sorted(n for n in names_of(function.__code__) if not n.startswith("__"))
    spaces = [function.__globals__]
    found: list[Any] = []
    for space in spaces:
        for name in names:
            value = space.get(name)
            if not isinstance(value, ModuleType):
                found += [name, value] if name in space else []
            elif not package_of(str(vars(value).get("__name__"))):
                is_new = all(vars(value) is not known for known in spaces)
                spaces += [vars(value)] if is_new else []
    return found


def names_of(code: CodeType) -> set[str]:
    """Return the globals and attributes that code names, functions inside included."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= names_of(constant)
    return names


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
