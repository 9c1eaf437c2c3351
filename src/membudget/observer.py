"""Observe the operators that reach the backend in a thread, without changing them.

While any `TorchDispatchMode` is active, torch treats every tensor as a possible
subclass, so that the backward passes of `prod`, `cumprod`, `max` and `index`, and some
composite kernels, use other formulas, whose results differ bitwise from the plain
step's. To keep autograd's formulas unchanged, an observer avoids the mode stack where
possible and is called by a kernel on a dedicated dispatch key, which no formula checks.
A thread enables the observers' dispatch key in its thread-local dispatch state.

    autograd · autocast · views        what the user's call becomes
    dispatch modes · subclasses        the user's own
    ── the observers' key ──────────   the innermost observer, the one around it, ...
    kernels                            CPU, CUDA, ...

An observer on its dispatch key sees the operators that modes and tensor subclasses
call, not the calls that they intercept. An observer joins the mode stack only if a mode
is active already (the plain step then uses subclass formulas, too) or if the observer
sets `sees_subclasses` to see the calls that subclasses intercept.

Rejected: observing through a dispatch mode that leaves the mode stack during backward
    passes inside the forward; only in such passes would formulas match the plain
    step's, and all results of such passes, being unobserved, would have to be kept.

Rule 1. An observer runs the operator by calling it; the call passes through the
    enclosing observers to the kernel. Operators that a kernel calls are not observed.
Rule 2. Threads that autograd starts use the observers of the thread that called
    autograd. Those that such a thread enters see each operator before them.
Rule 3. Higher-order operators that run below autograd are observed like any other.
Rule 4. Only observers on the mode stack see `detach` and `alias`. The result of
    `detach` may become a `Parameter` or another subclass (`as_subclass`), which fails
    if Python has already wrapped the tensor in an object.
Rule 5. Operators that run while dispatch to Python is disabled (for example, while
    `FakeTensorMode` computes shapes for `torch.compile`) are not observed.
Rule 6. TorchScript's optimiser calls `equal` and `item` on the constants of a traced
    function. Python receives these constants as numbers, which the kernels of `equal`
    and `item` do not accept, so the constants are converted to tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from membudget._torch import (
    DispatchMode,
    dispatch_mode_count,
    hide_from_dynamo,
)
from membudget._torch_observing import (
    EQUAL,
    ITEM,
    cover_kernels,
    exclude_observers,
    include_observers,
    inherited_by_autograd,
    is_observing_excluded,
    is_python_excluded,
    observe_operators,
    share_with_autograd,
)


class _Thread:
    """The observers of one thread.

    Attributes:
        all: All observers of the thread, outermost first.
        stack: Observers called through the dispatch key, outermost first.
        inherited: Of autograd's thread, the observers that those of its own joined.
        depth: Number of observers in `stack` that have yet to see the current operator.
        may_end: Whether the thread may end before the process does.
    """

    __slots__ = ("all", "depth", "inherited", "may_end", "stack")

    def __init__(self) -> None:
        self.all: list[Observer] = []
        self.stack: list[Observer] = []
        self.inherited: list[Observer] = []
        self.depth = 0
        self.may_end = threading.get_ident() != threading.main_thread().ident


class _Local(threading.local):
    """Holds the thread's observers: one slow look-up for each operator."""

    def __init__(self) -> None:
        self.thread = _Thread()


OBSERVERS = _Local()


class Observer:
    """Observes every operator that the current thread runs inside a `with` block.

    Attributes:
        sees_subclasses: Whether to observe from the mode stack, to see operators on
            tensor subclasses as user code calls them.
    """

    sees_subclasses = False
    _mode: _Mode | None = None
    _modes = 0
    _before: tuple[int, bool]

    def observe(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run one operator and return its result."""
        raise NotImplementedError

    def __enter__(self) -> Any:
        """Start observing."""
        self._modes = dispatch_mode_count()
        if self._modes or self.sees_subclasses:
            self._mode = _Mode(self)
            self._mode.__enter__()
        else:
            self._enter_key()
        OBSERVERS.thread.all.append(self)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Stop observing."""
        OBSERVERS.thread.all.remove(self)
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None
        else:
            self._leave_key()

    def changes_formulas(self) -> bool:
        """Return whether the observer makes autograd use tensor-subclass formulas."""
        return self._mode is not None and not self._modes

    def is_innermost(self) -> bool:
        """Return whether no other observer or mode was entered inside this one."""
        on_modes = self._modes + (self._mode is not None)
        return OBSERVERS.thread.all[-1:] == [self] and dispatch_mode_count() == on_modes

    def _enter_key(self) -> None:
        thread = OBSERVERS.thread
        observe_operators(observed)
        self._before = thread.depth, is_observing_excluded()
        if not thread.stack:
            shared = inherited_by_autograd()
            if shared is not thread.stack:  # By reference, so once is enough.
                thread.inherited = shared or []
                thread.stack.extend(thread.inherited)
                share_with_autograd(thread.stack)
            include_observers(True)
        thread.stack.append(self)
        thread.depth = len(thread.stack)
        _watch(thread)
        exclude_observers(False)

    def _leave_key(self) -> None:
        thread = OBSERVERS.thread
        thread.stack.remove(self)
        thread.depth, excluded = self._before
        _watch(thread)
        exclude_observers(excluded)
        if thread.inherited and thread.stack == thread.inherited:
            share_with_autograd(thread.inherited)
            thread.stack, thread.inherited = [], []
        elif not thread.stack:
            include_observers(False)
            if thread.may_end:
                share_with_autograd(None)


def _watch(thread: _Thread) -> None:
    """Tell the C++ recorder which observer comes next, if it is the only one."""
    for watch in _WATCHES:
        watch(thread.stack[0] if thread.depth == len(thread.stack) == 1 else None)


_WATCHES: list[Callable[[Observer | None], None]] = []


class _Mode(DispatchMode):
    """Dispatch mode that puts an observer on the mode stack."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch's wrapper around the method would cost 1 µs an operator.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return `True`, so that the mode does not see operators in compiled code."""
        return True

    def __init__(self, observer: Observer):
        super().__init__()
        self._observe = observer.observe

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is EQUAL or func is ITEM:
            args = _as_tensors(args)
        return self._observe(func, args, kwargs or {})


def accelerate(
    watch: Callable[[Observer | None], None], cover: Callable[[list[str]], None]
) -> None:
    """Let kernels in C++ cover those of the observers.

    Args:
        watch: Called with the observer that sees the next operator of the thread if no
            other observer does; with `None` otherwise.
        cover: Called with the names of operators whose Python kernels were registered.
    """
    _WATCHES[:] = [watch]
    cover_kernels(cover)


def observers() -> tuple[Observer, ...]:
    """Return the observers of this thread, outermost first."""
    return tuple(OBSERVERS.thread.all)


def observed(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Pass an operator call to the innermost observer that has not seen it yet."""
    if operator is EQUAL or operator is ITEM:
        args = _as_tensors(args)
    thread = OBSERVERS.thread
    depth = thread.depth
    if not depth:
        return _observed_elsewhere(operator, args, kwargs)
    if is_python_excluded():
        return _unobserved(operator, args, kwargs)
    thread.depth = depth - 1
    if depth == 1:  # The outermost observer calls the kernel itself.
        exclude_observers(True)
    try:
        return thread.stack[depth - 1].observe(operator, args, kwargs)
    finally:
        thread.depth = depth
        if depth == 1:
            exclude_observers(False)


def _as_tensors(args: Any) -> Any:
    """Convert numbers among the arguments to tensors (Rule 6)."""
    if all(isinstance(argument, Tensor) for argument in args):
        return args
    excluded = is_observing_excluded()
    exclude_observers(True)
    try:
        return tuple(
            a if isinstance(a, Tensor) else torch.tensor(a, device="cpu") for a in args
        )
    finally:
        exclude_observers(excluded)


def _observed_elsewhere(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Pass a call to the observers of the thread that called autograd (Rule 2).

    If the current thread has observers, the call comes from inside a kernel that reset
    the thread's dispatch state; such a call is not observed.
    """
    thread = OBSERVERS.thread
    inherited = None if thread.stack else inherited_by_autograd()
    if not inherited:
        return _unobserved(operator, args, kwargs)
    own, thread.stack, thread.depth = thread.stack, inherited, len(inherited)
    try:
        return observed(operator, args, kwargs)
    finally:
        thread.stack, thread.depth = own, 0


def _unobserved(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    exclude_observers(True)
    try:
        return operator(*args, **kwargs)
    finally:
        exclude_observers(False)


hide_from_dynamo(observed)
hide_from_dynamo(_Mode.__torch_dispatch__)
