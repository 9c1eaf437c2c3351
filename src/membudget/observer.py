"""Observe the operators of this thread as the backend sees them, changing none.

While any `TorchDispatchMode` is active, torch answers yes when it asks whether a tensor
could be a subclass. The backward of `prod`, `cumprod`, `max` or `index`, and some
composite kernels, then use other formulas, whose bits differ from the plain step's. So
an observer avoids the mode stack where it can: a kernel on a dispatch key of our own,
which no formula looks at, calls it. A thread enables the key by including it in its
dispatch state.

    autograd · autocast · views        what the user's call becomes
    dispatch modes · subclasses        the user's own
    ── the observers' key ──────────   the innermost observer, the one around it, ...
    kernels                            CPU, CUDA, ...

From below, an observer sees what modes and subclasses run, not the operators they
receive. To see those it must stand on the mode stack: where a mode is active already
(the plain step then uses the other formulas, too), or where the observer asks for it
(`sees_subclasses`).

Rejected: a mode that leaves the stack while a backward runs inside the forward. It
    would fix those backward passes only, and would have to keep everything that they
    produce.

Rule 1. An observer runs the operator by calling it; the call reaches the observer
    around it, and finally the kernel. Operators that a kernel calls are not observed.
Rule 2. Threads that autograd starts use the observers of the thread that called it.
Rule 3. Higher-order operators that run below autograd are observed like any other.
Rule 4. On the key, `detach` and `alias` are not observed. Their result may become a
    `Parameter` or another subclass (`as_subclass`), which fails if it has been a Python
    object before.
Rule 5. Operators that run while dispatch to Python is disabled (FakeTensorMode
    computing shapes, as `torch.compile` does inside a region) are not observed.
Rule 6. TorchScript's optimiser calls `equal` and `item` on the constants of a traced
    function. torch hands Python these constants as numbers, which no kernel of these
    operators takes, so they are converted to tensors.
"""

from __future__ import annotations

import threading
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
    exclude_observers,
    include_observers,
    inherited_by_autograd,
    is_observing_excluded,
    is_python_excluded,
    observe_operators,
    share_with_autograd,
)


class _Thread(threading.local):
    """The observers of one thread.

    Attributes:
        all: All of them, outermost first.
        stack: Those on the dispatch key.
        depth: How many of these have yet to observe the operator that runs now.
    """

    def __init__(self) -> None:
        self.all: list[Observer] = []
        self.stack: list[Observer] = []
        self.depth = 0


_THREAD = _Thread()


class Observer:
    """Observes each operator that runs inside its `with` block, in this thread.

    Attributes:
        sees_subclasses: Whether it stands on the mode stack, to see the operators on
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
        _THREAD.all.append(self)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Stop observing."""
        _THREAD.all.remove(self)
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None
        else:
            self._leave_key()

    def changes_formulas(self) -> bool:
        """Tell whether it makes autograd use its formulas for tensor subclasses."""
        return self._mode is not None and not self._modes

    def is_innermost(self) -> bool:
        """Tell whether no other observer or mode was entered inside it."""
        on_modes = self._modes + (self._mode is not None)
        return _THREAD.all[-1:] == [self] and dispatch_mode_count() == on_modes

    def _enter_key(self) -> None:
        thread = _THREAD
        observe_operators(_observed)
        self._before = thread.depth, is_observing_excluded()
        if not thread.stack:
            share_with_autograd(thread.stack)
            include_observers(True)
        thread.stack.append(self)
        thread.depth = len(thread.stack)
        exclude_observers(False)

    def _leave_key(self) -> None:
        thread = _THREAD
        thread.stack.remove(self)
        thread.depth, excluded = self._before
        exclude_observers(excluded)
        if not thread.stack:
            include_observers(False)


class _Mode(DispatchMode):
    """Puts an observer on the mode stack."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch's wrapper around the method would cost 1 µs an operator.
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Do not trace into compiled code."""
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


def observers() -> tuple[Observer, ...]:
    """Return the observers of this thread, outermost first."""
    return tuple(_THREAD.all)


def _observed(operator: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Have the innermost observer that has not seen this call run the operator."""
    if operator is EQUAL or operator is ITEM:
        args = _as_tensors(args)
    thread = _THREAD
    depth = thread.depth
    if not depth:
        return _observed_elsewhere(operator, args, kwargs)
    if is_python_excluded():
        return _unobserved(operator, args, kwargs)
    thread.depth = depth - 1
    if depth == 1:
        exclude_observers(True)
    try:
        return thread.stack[depth - 1].observe(operator, args, kwargs)
    finally:
        thread.depth = depth
        if depth == 1:
            exclude_observers(False)


def _as_tensors(args: Any) -> Any:
    """Return arguments with numbers converted to tensors (Rule 6)."""
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
    """Use the observers of the thread that called autograd (Rule 2).

    If the thread has observers of its own, a kernel has reset its dispatch state.
    """
    thread = _THREAD
    inherited = None if thread.stack else inherited_by_autograd()
    if not inherited:
        return _unobserved(operator, args, kwargs)
    own, thread.stack, thread.depth = thread.stack, inherited, len(inherited)
    try:
        return _observed(operator, *args, **kwargs)
    finally:
        thread.stack, thread.depth = own, 0


def _unobserved(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    exclude_observers(True)
    try:
        return operator(*args, **kwargs)
    finally:
        exclude_observers(False)


hide_from_dynamo(_observed)
hide_from_dynamo(_Mode.__torch_dispatch__)
