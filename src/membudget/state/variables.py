"""Put back the variables that a step's code changed, wherever they are.

A forward may draw from a generator that a closure holds, count in a global variable,
fill a table on a class, or call a function with an `lru_cache`. No object of the step
holds such variables; its code names them:

    code of                          names
    the model's classes and hooks    functions, which name others in turn
    each of these                    globals, variables closed over, defaults,
                                     attributes of functions, of classes and of files

Code of Python, torch and NumPy refers to no state of the user's. Of installed packages,
only what functions name directly is looked at, and the functions they call.

Not put back: what lies deeper, the contents of tensors that no object of the step
holds, and how far generators made by `yield`, and other iterators than those of lists,
tuples, ranges and `itertools.count`, have come.
"""

from __future__ import annotations

import copy
import dis
import functools
import itertools
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch.nn import Module

from membudget._torch_modules import parametrized_cache
from membudget.state.code import content_of, names_of
from membudget.state.packages import is_installed, is_library
from membudget.state.snapshot import State
from membudget.state.walk import OF_TORCH, SIMPLE

MOST_ARRAY_BYTES = 1 << 24
"""A larger array of NumPy's is taken for data, which no step changes."""

DEEPEST = 2
"""Functions of installed packages that lead to another one of them."""

_ABSENT: Any = object()
_Cached = type(functools.lru_cache(names_of))
_ITERATORS: tuple[Any, ...] = (
    *(type(iter(())), type(iter([])), type(iter(range(0)))),
    itertools.count,
)
_GLOBALS = {"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME"}

_names_of = functools.lru_cache(4096)(names_of)


@functools.lru_cache(4096)
def _globals_of(code: CodeType) -> frozenset[str]:
    """Return the globals that code reads or binds, functions inside included."""
    found = {str(i.argval) for i in dis.get_instructions(code) if i.opname in _GLOBALS}
    inside = [c for c in code.co_consts if isinstance(c, CodeType)]
    return frozenset(found).union(*map(_globals_of, inside))


@contextmanager
def variables_kept(roots: Iterable[Any], is_fake: bool) -> Iterator[None]:
    """Put back, on exit, what variables held that the code of `roots` can change.

    Args:
        roots: Modules and functions whose code runs inside.
        is_fake: Whether it runs on fake tensors. It then fills other caches than those
            of the user's functions, which would keep fake tensors.
    """
    found = _Variables()
    for root in roots:
        found.visit(root)
    cache = parametrized_cache()
    state = State([("", [cache, *found.objects.values()])], contents=False)
    try:
        state.restore()
        cache.clear()
        found.stand_in(is_fake)
        yield
    finally:
        try:
            found.put_back()
        finally:
            state.restore()
            state.restore_gradients()


class _Variables:
    """The variables that code names, and the objects that they hold.

    Attributes:
        objects: What variables hold that has contents of its own, by `id`.
    """

    def __init__(self) -> None:
        """Know of no variable yet."""
        self.objects: dict[int, Any] = {}
        # By holder and name: a namespace, a cell or a class, and what it held.
        self._held: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        self._classes: dict[type, set[str]] = {}
        self._arrays: list[tuple[Any, Any]] = []
        self._seen: dict[int, Any] = {}  # Held, so that no `id` is used again.

    # What is found.

    def visit(self, value: Any, depth: int = 0, is_own: bool = True) -> None:
        """Find the variables to which a value leads."""
        if isinstance(value, SIMPLE) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        parts = _parts_of(value)
        for part in parts:
            self.visit(part, depth, is_own)
        if isinstance(value, FunctionType):
            self._function(value, depth)
        elif isinstance(value, type):
            self._class(value, depth)
        elif isinstance(value, Module):
            self._modules(value)
        elif not parts:
            self._object(value, is_own)

    def _object(self, value: Any, is_own: bool) -> None:
        if is_array(value):
            if value.nbytes <= MOST_ARRAY_BYTES and value.flags.writeable:
                self._arrays.append((value, value.copy()))
        elif (is_own or type(value) in _PLAIN) and not isinstance(value, ModuleType):
            self.objects[id(value)] = value

    def _modules(self, root: Module) -> None:
        for module in root.modules():
            self._seen[id(module)] = module
            self._class(type(module), 0)
            for name, value in list(vars(module).items()):
                if name.endswith("_hooks"):
                    for hook in list((value or {}).values()):
                        self.visit(hook)
                elif name not in OF_TORCH:
                    self._hold(vars(module), name, value)
                    if callable(value) or is_array(value):
                        self.visit(value)

    def _class(self, kind: type, depth: int) -> None:
        for base in kind.__mro__:
            if base in self._classes or is_library(base.__module__):
                continue
            is_own = not is_installed(base.__module__)
            named = {n: v for n, v in vars(base).items() if not n.startswith("__")}
            self._classes[base] = {*vars(base)} if is_own else set()
            for name, value in vars(base).items():
                inner = getattr(value, "__func__", getattr(value, "fget", value))
                if isinstance(inner, FunctionType | _Cached):
                    self.visit(inner, depth, is_own)
                if name in named and (is_own or isinstance(value, _Cached)):
                    self._hold(base, name, value)
                    self.visit(value, depth, is_own)

    def _function(self, function: FunctionType, depth: int) -> None:
        file = function.__globals__.get("__name__")
        # Not `__module__`, which a wrapper takes over from what it wraps.
        if is_library(file) or (is_installed(file) and depth > DEEPEST):
            return
        is_own = not is_installed(file)
        held = [
            *(function.__defaults__ or ()),
            *(function.__kwdefaults__ or {}).values(),
        ]
        for cell in function.__closure__ or ():
            held.append(content := _get(cell, "cell_contents"))
            self._hold(cell, "cell_contents", content)
        if is_own:  # It may get its first attribute.
            self.objects[id(vars(function))] = vars(function)
        for value in (*held, *vars(function).values()):
            self.visit(value, depth + 1, is_own)
        self._globals(function, depth, is_own)

    def _globals(self, function: FunctionType, depth: int, is_own: bool) -> None:
        """Find what a function names of its file, and of files of the user's."""
        space, code = function.__globals__, function.__code__
        # Disassembling takes long, and packages call no data set `data`.
        names = _globals_of(code) if is_own else _names_of(code)
        named = [(space, name) for name in names]
        for space, name in named:
            value = space.get(name, _ABSENT)
            if isinstance(value, ModuleType):
                # An attribute of anything may be one of the file.
                attributes = vars(value).keys() & _names_of(code)
                if space is function.__globals__ and not is_installed(value.__name__):
                    named += [(vars(value), attribute) for attribute in attributes]
            elif is_own or isinstance(value, _Cached):
                self._hold(space, name, value)
            if value is not _ABSENT:
                self.visit(value, depth + 1, is_own)

    def _hold(self, holder: Any, name: str, value: Any) -> None:
        self._held.setdefault((id(holder), name), (holder, name, value))

    # While the step runs, and after it.

    def stand_in(self, is_fake: bool) -> None:
        """Let iterators, and the caches of functions, be those of the step alone."""
        for holder, name, value in self._held.values():
            if isinstance(value, _ITERATORS):
                with suppress(TypeError):
                    _put(holder, name, copy.copy(value))
            elif is_fake and isinstance(value, _Cached):
                most = value.cache_parameters()
                _put(holder, name, functools.lru_cache(**most)(value.__wrapped__))

    def put_back(self) -> None:
        """Bind all names as they were, and delete those that were not there."""
        for holder, name, value in self._held.values():
            if _get(holder, name) is not value:
                _put(holder, name, value)
        for array, content in self._arrays:
            array[...] = content
        for kind, names in self._classes.items():
            for name in vars(kind).keys() - names if names else ():
                if not name.startswith("__"):
                    delattr(kind, name)


_PLAIN = (dict, list, set, deque)
"""Containers of which installed packages may make caches."""


def _parts_of(callable_: Any) -> tuple[Any, ...]:
    """Return what a callable that is no function calls, and with what."""
    if isinstance(callable_, _Cached):
        return (callable_.__wrapped__,)
    if isinstance(callable_, MethodType):
        return callable_.__self__, callable_.__func__
    if isinstance(callable_, functools.partial):
        return callable_.func, *callable_.args, *callable_.keywords.values()
    return ()


def is_array(value: Any) -> bool:
    """Return whether a value is an array of NumPy's, which need not be there."""
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _get(holder: Any, name: str) -> Any:
    if isinstance(holder, dict):
        return holder.get(name, _ABSENT)
    if isinstance(holder, CellType):
        return content_of(holder, _ABSENT)
    return vars(holder).get(name, _ABSENT)


def _put(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder.pop(name, None) if value is _ABSENT else holder.update({name: value})
    elif value is _ABSENT:
        delattr(holder, name)
    else:
        setattr(holder, name, value)
