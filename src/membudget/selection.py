"""Select the modules that get regions: by class, name or predicate, or by default.

A pattern matches a module's dotted name part by part: `*` matches any characters within
one part, `**` any number of parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase

from torch.jit import ScriptModule
from torch.nn import Module, ModuleDict, ModuleList, Sequential

from membudget.errors import OptionError, SelectionError
from membudget.text import dotted


def select_modules(
    model: Module,
    blocks: type[Module] | tuple[type[Module], ...] | None,
    names: str | Iterable[str] | None,
    where: Callable[[str, Module], bool] | None,
    every: int = 1,
) -> dict[str, Module]:
    """Return the modules that match all given criteria, keyed by name, in model order.

    Raises:
        SelectionError: If no criterion is given, or nothing matches.
        OptionError: If `every` is less than 1.
    """
    if every < 1:
        raise OptionError(f"every must be at least 1; got {every}")
    if blocks is None and names is None and where is None:
        raise SelectionError(
            "say which modules get a region: blocks=BlockClass, names='h.*' or "
            "where=lambda name, module: ..."
        )
    patterns = [names] if isinstance(names, str) else names and list(names)
    matching = {
        name: module
        for name, module in model.named_modules()
        if (blocks is None or isinstance(module, blocks))
        and (patterns is None or any(_matches(name, p) for p in patterns))
        and (where is None or where(name, module))
    }
    if not matching:
        asked = {"blocks": blocks, "names": patterns, "where": where}
        given = ", ".join(f"{k}={v!r}" for k, v in asked.items() if v is not None)
        some = [name for name, _ in model.named_modules() if name][:8]
        raise SelectionError(
            f"no module of {type(model).__name__} matches {given}. It has "
            f"{', '.join(map(repr, some)) or 'no submodules'}"
            f"{' and more' if len(some) == 8 else ''}."
        )
    return dict(list(matching.items())[::every])


def _matches(name: str, pattern: str) -> bool:
    """Return whether a dotted name matches a pattern, part by part.

    Example:
        >>> _matches("h.0", "h.*"), _matches("h.0.mlp", "h.*")
        (True, False)
        >>> _matches("a.b.c", "**.c")
        True
    """
    return bool(name) and _parts_match(name.split("."), pattern.split("."))


def _parts_match(parts: list[str], patterns: list[str]) -> bool:
    if not patterns:
        return not parts
    if patterns[0] == "**":
        return any(_parts_match(parts[i:], patterns[1:]) for i in range(len(parts) + 1))
    return (
        bool(parts)
        and fnmatchcase(parts[0], patterns[0])
        and _parts_match(parts[1:], patterns[1:])
    )


def default_names(model: Module) -> list[str]:
    """Return the names of the modules that get a region by default.

    By default, the children of the model's longest `ModuleList` or `Sequential` (the
    outermost of equally long ones) get regions. If all modules in a list share one
    class, they are not searched for longer lists. A child without a `forward`, such as
    an inner `ModuleList`, is replaced by its children. In a model without `ModuleList`
    and `Sequential`, each direct child with parameters gets a region. Modules of
    TorchScript get none.

    Raises:
        SelectionError: If the model has no such module.

    Example:
        >>> from torch.nn import Linear, Sequential
        >>> body = Sequential(*(Linear(4, 4) for _ in range(3)))
        >>> default_names(Sequential(body, Linear(4, 1)))
        ['0.0', '0.1', '0.2']
    """
    lists = list(_lists(model, ""))
    if lists:
        name, longest = max(lists, key=lambda item: len(item[1]))
        names = list(_callable_children(longest, name))
    else:
        names = [
            name
            for name, child in model.named_children()
            if any(True for _ in child.parameters())
            and not isinstance(child, ScriptModule)
        ]
    if not names:
        raise SelectionError(
            f"{type(model).__name__} has no ModuleList, no Sequential and no child "
            f"with parameters, outside of TorchScript, so there is nothing to put a "
            f"region on by default. Say which modules get one: blocks=BlockClass, "
            f"names='h.*' or where=..."
        )
    return names


def _lists(module: Module, name: str) -> Iterator[tuple[str, ModuleList | Sequential]]:
    """Yield each `ModuleList` or `Sequential` that may hold blocks, outermost first."""
    if isinstance(module, ModuleList | Sequential) and len(module):
        yield name, module
        kinds = {type(child) for child in module.children()}
        if len(module) > 1 and len(kinds) == 1:
            return
    for key, child in module.named_children():
        yield from _lists(child, dotted(name, key))


def _callable_children(module: Module, name: str) -> Iterator[str]:
    for key, child in module.named_children():
        if isinstance(child, ModuleList | ModuleDict):
            yield from _callable_children(child, dotted(name, key))
        elif not isinstance(child, ScriptModule):  # Its class cannot be changed.
            yield dotted(name, key)
