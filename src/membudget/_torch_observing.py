"""Private torch APIs for observing operators without a dispatch mode.

`membudget.observer` explains the technique; `_torch` has the other private torch APIs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

# Observers are called on this dispatch key: below autograd, modes and subclasses, above
# the kernels. No tensor has it; torch reserves it for fake tensors in C++, which
# torch 2.13 does not have yet. `isTensorSubclassLike`, which selects formulas, ignores
# it.
_OBSERVERS: Any = torch._C._dispatch_key_parse("Fake")
_set_included: Any = torch._C._dispatch_tls_set_dispatch_key_included
_set_excluded: Any = torch._C._dispatch_tls_set_dispatch_key_excluded
include_observers: Callable[[bool], None] = partial(_set_included, _OBSERVERS)
exclude_observers: Callable[[bool], None] = partial(_set_excluded, _OBSERVERS)
is_observing_excluded: Callable[[], bool] = partial(
    torch._C._dispatch_tls_is_dispatch_key_excluded, _OBSERVERS
)

# Excluded while code must reach the kernels, as FakeTensorMode does for shapes.
is_python_excluded: Callable[[], bool] = partial(
    torch._C._dispatch_tls_is_dispatch_key_excluded, torch._C.DispatchKey.Python
)

# Operators that return a Python value, not a tensor.
EQUAL: Any = torch.ops.aten.equal.default
ITEM: Any = torch.ops.aten._local_scalar_dense.default

# Only observers on the mode stack see these (Rule 4 of `observer`).
_FALLTHROUGH = frozenset(("aten::detach", "aten::alias"))

# Kernels live as long as the library objects that registered them.
_LIBRARIES: dict[str, Any] = {}
_OBSERVED: set[Any] = set()


def observe_operators(kernel: Callable[..., Any]) -> None:
    """Route operators of observed threads to `kernel(operator, args, kwargs)`.

    Each call registers `kernel` for operators defined since the last call. A fallback
    kernel alone is not enough: torch (2.13) looks up each operator's own kernel if a
    mode is active or a tensor subclass is passed, and ignores fallbacks. The fallback
    kernel serves operators that C++ extensions define between two registrations.
    Registering all operators takes about 100 ms; checking that none is new, 0.3 µs.
    """
    if _defined() == _KNOWN[0]:
        return
    with _LOCK:  # Threads that begin together would register the same kernels.
        known = _defined()
        if known != _KNOWN[0]:
            _observe_new(kernel)
            _KNOWN[0] = known


def _defined() -> tuple[int, ...]:
    """Return counts that grow when operators are defined."""
    return (
        len(torch._ops._higher_order_ops),
        len(torch.library._defs),
        len(torch.ops.loaded_libraries),
    )


def _observe_new(kernel: Callable[..., Any]) -> None:
    """Register `kernel` for the operators that have none of ours."""

    def called(operator: Any, /, *args: Any, **kwargs: Any) -> Any:
        return kernel(operator, args, kwargs)

    if not _LIBRARIES:
        _library("_").fallback(called, "Fake")
    names = [
        name for name in torch._C._dispatch_get_all_op_names() if name not in _OBSERVED
    ]
    for name in names:
        _OBSERVED.add(name)
        _observe_operator(name, kernel)
    for cover in _COVERS:
        cover([name for name in names if name not in _FALLTHROUGH])
    for operator in list(torch._ops._higher_order_ops.values()):
        if operator not in _OBSERVED:
            _OBSERVED.add(operator)
            operator.py_impl(_OBSERVERS)(partial(called, operator))


_LOCK = threading.RLock()
_KNOWN: list[tuple[int, ...]] = [()]
_COVERS: list[Callable[[list[str]], None]] = []


def cover_kernels(cover: Callable[[list[str]], None]) -> None:
    """Call `cover` with the names of the observed operators, now and later."""
    _COVERS[:] = [cover]
    cover([n for n in _OBSERVED if isinstance(n, str) and n not in _FALLTHROUGH])


def _library(namespace: str) -> Any:
    library = _LIBRARIES.get(namespace)
    if library is None:
        library = _LIBRARIES[namespace] = torch.library.Library(namespace, "IMPL")
    return library


def _observe_operator(name: str, kernel: Callable[..., Any]) -> None:
    namespace, _, rest = name.partition("::")
    if name in _FALLTHROUGH:
        _library(namespace).impl(rest, torch.library.fallthrough_kernel, "Fake")
        return
    operator: Any = None

    def observed(*args: Any, **kwargs: Any) -> Any:
        nonlocal operator
        if operator is None:  # Looking up all operators takes 0.5 s.
            operator = operator_of(name)
        return kernel(operator, args, kwargs)

    # `Library.impl` checks for a duplicate kernel, which takes 100 µs each.
    _library(namespace).m.impl(rest, "Fake", observed, False)


def operator_of(name: str) -> Any:
    """Return the overload with a name such as `aten::add.Tensor`."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    operators = getattr(getattr(torch.ops, namespace), packet)
    return getattr(operators, overload or "default")


_take_back: Any = getattr(torch._C, "_remove_obj_from_tls", None)

# Autograd's device threads inherit these objects with the dispatch keys.
SHARED = "membudget.observers"


def share_with_autograd(value: Any, name: str = SHARED) -> None:
    """Share an object with the threads that run this thread's backward pass.

    `None` ends that. A thread that still shares an object when it ends takes Python's
    lock to let go of it; if the interpreter is ending, too, that aborts the process
    (pytorch/pytorch#117762). Before torch 2.13, objects cannot be taken back.
    """
    if value is not None or _take_back is None:
        torch._C._stash_obj_in_tls(name, value)
    elif torch._C._is_key_in_tls(name):
        _take_back(name)


def inherited_by_autograd(name: str = SHARED) -> Any:
    """Return what this thread, or the one that called autograd, shares, or `None`."""
    if not torch._C._is_key_in_tls(name):
        return None
    return torch._C._get_obj_in_tls(name)
