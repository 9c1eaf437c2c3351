"""Spans: regions from the entry of one module to the exit of a later module.

If a parent module calls its blocks in a loop, a span turns several blocks into one
region without editing the parent. A span begins before the forward of its first module
and ends after the forward of its last. Spans run under the replay engine, which does
not re-run functions. If an exception leaves a span open, the parent module closes it.

A context manager entered inside a span and exited outside, or vice versa, would
interleave with the region's own context managers, so leaving the span raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch
from torch.nn import Module, ModuleDict, ModuleList

from membudget._torch import function_mode_count, is_any_autocast_enabled
from membudget.attach import check_can_carry, has_region, put
from membudget.engine import isolation
from membudget.engine.controls import SWITCHES
from membudget.engine.options import RegionOptions, Statistics
from membudget.engine.replay.accelerated import replay_frame
from membudget.engine.replay.frame import ReplayFrame
from membudget.errors import CheckpointError, SelectionError


class Span:
    """One span of a model, and the state of its current call."""

    def __init__(self, name: str, owner: Module, options: RegionOptions):
        """Store the arguments; the region starts in `enter`."""
        self.statistics = Statistics(name)
        self._name = name
        self._owner = owner
        self._options = options
        self._frame: ReplayFrame | None = None
        self._counted = False
        self._surroundings: tuple[Any, ...] = ()

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Start the region, on entry to the first module."""
        if self._frame is not None:
            raise CheckpointError(
                f"span {self._name!r} was entered twice before its end: one module "
                "calls the other, or the last module was not called"
            )
        if not torch.is_grad_enabled() or SWITCHES.disabled:
            return
        self._counted = isolation.enter()
        try:
            # The name tells verified calls of spans with the same parent apart.
            frame = replay_frame(
                self._owner, (self._name, *args), kwargs, self._options, self.statistics
            )
            frame.begin()
        except BaseException:
            self._close()
            raise
        self._frame = frame
        self._surroundings = _surroundings()

    def leave(self) -> None:
        """End the region, on exit from the last module."""
        frame = self._frame
        if frame is None:
            return
        if not frame.is_on_top() or self._surroundings != _surroundings():
            raise CheckpointError(
                f"span {self._name!r} ends in a different context than it began in: a "
                "context manager (autocast, no_grad, a mode, saved-tensor hooks) was "
                "entered inside the span and is left outside, or vice versa. Begin or "
                "end the span elsewhere."
            )
        frame.end()
        self._close()
        self.statistics.count_call(frame.has_saved)
        if SWITCHES.any and SWITCHES.collector is not None:
            SWITCHES.collector(frame)

    def is_open(self) -> bool:
        """Return whether the span has begun and not ended."""
        return self._frame is not None

    def abandon(self) -> None:
        """Close the span after an exception."""
        if self._frame is not None:
            self._frame.abandon()
            self._close()

    def unfinished(self) -> CheckpointError:
        """Return the error for a span whose last module was never called."""
        return CheckpointError(
            f"span {self._name!r} began, and its last module was not called before "
            "their parent returned"
        )

    def _close(self) -> None:
        self._frame = None
        if self._counted:
            isolation.leave()


def _surroundings() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        is_any_autocast_enabled(),
        function_mode_count(),
    )


class _Ends:
    """Begins or ends spans; attached to their first and last modules."""

    kept = ""

    def __init__(self) -> None:
        self.begins: Span | None = None
        self.ends: Span | None = None

    def is_taken(self) -> bool:
        return self.begins is not None or self.ends is not None

    @property
    def statistics(self) -> Statistics | None:
        span = self.ends or self.begins
        return None if span is None else span.statistics

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        if self.begins is not None:
            self.begins.enter(args, kwargs)
        result = function(*args, **kwargs)
        if self.ends is not None:
            self.ends.leave()
        return result


class _Parent:
    """Closes unfinished spans; attached to the module that calls the spans' modules."""

    statistics = None
    kept = ""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        try:
            result = function(*args, **kwargs)
            for span in self.spans:
                if span.is_open():
                    raise span.unfinished()
        finally:
            for span in reversed(self.spans):
                span.abandon()
        return result


def put_spans(
    model: Module, pairs: Sequence[tuple[str, str]], options: RegionOptions
) -> tuple[dict[str, Module], dict[str, Statistics]]:
    """Attach spans; return the modules that were changed and each span's counters.

    Raises:
        SelectionError: If a name is unknown, spans overlap, or a module cannot have a
            region.
    """
    if not pairs:
        raise SelectionError("spans is empty; give pairs of names of modules")
    if options.engine == "rerun" or options.use_reentrant:
        raise SelectionError("spans need the replay engine: leave engine out")
    options = replace(options, engine="replay")
    known = dict(model.named_modules())
    carried: dict[str, _Ends | _Parent] = {}
    statistics: dict[str, Statistics] = {}
    for first, last in pairs:
        for name in (first, last):
            _check(name, known, model)
        parent = _common_parent(first, last)
        while isinstance(known[parent], ModuleList | ModuleDict):
            parent = parent.rpartition(".")[0]  # Module containers are never called.
        _check_free(parent, known[parent])
        span = Span(f"{first}–{last}", known[parent], options)
        _parent(carried, parent).spans.append(span)
        begin, end = _ends(carried, first), _ends(carried, last)
        # A module that ends one span would begin the next before it has ended.
        if begin.is_taken() or end.is_taken():
            raise SelectionError(f"span {first}–{last} overlaps another one")
        begin.begins = end.ends = span
        statistics[f"{first}–{last}"] = span.statistics
    for name, ends in carried.items():
        put(known[name], ends, name)
    return {name: known[name] for name in carried}, statistics


def _check(name: str, known: dict[str, Module], model: Module) -> None:
    if name not in known or not name:
        some = ", ".join(map(repr, [n for n in known if n][:8]))
        raise SelectionError(
            f"{type(model).__name__} has no module {name!r}; it has {some}"
        )
    _check_free(name, known[name])


def _check_free(name: str, module: Module) -> None:
    check_can_carry(name, module)
    if has_region(module):
        text = f"module {name!r}" if name else "the model"
        raise SelectionError(f"{text} already has a region; remove it first")


def _common_parent(first: str, last: str) -> str:
    """Return the name of the innermost module that contains two given modules.

    Example:
        >>> _common_parent("h.0", "h.3"), _common_parent("a.x", "b.y")
        ('h', '')
    """
    pairs = zip(first.split(".")[:-1], last.split(".")[:-1], strict=False)
    return ".".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _ends(carried: dict[str, _Ends | _Parent], name: str) -> _Ends:
    found = carried.setdefault(name, _Ends())
    if not isinstance(found, _Ends):
        raise SelectionError(f"module {name!r} is in a span and holds another")
    return found


def _parent(carried: dict[str, _Ends | _Parent], name: str) -> _Parent:
    found = carried.setdefault(name, _Parent())
    if not isinstance(found, _Parent):
        raise SelectionError(f"module {name!r} holds a span and is in another")
    return found
