"""Everything a call of a region depends on, noted before it and brought back later.

This is Rules 5 and 6 in one object, shared by both variants of rerun: the arguments,
the random sources, the ambient state, and what the function can reach.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from membudget._torch import set_grad_enabled
from membudget.engine.ambient import Ambient, AutocastOnly
from membudget.engine.arguments import HeldArguments
from membudget.engine.options import RegionOptions
from membudget.engine.randomness import (
    Drawn,
    DrawnFromTorch,
    global_sources,
    private_sources,
)
from membudget.engine.reach import reach
from membudget.engine.reads import Reads
from membudget.engine.scope import Scope


class Surroundings:
    """What one call of a region saw.

    Attributes:
        arguments: Its arguments.
        reads: What else it could read; `None` without guards.
        trainable: Whether it can reach a tensor that requires a gradient.
    """

    __slots__ = ("_ambient", "_drawn", "_function", "arguments", "reads", "trainable")

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: RegionOptions,
    ):
        """Note everything; the function has not run yet."""
        self._function = function
        self.arguments = HeldArguments(args, kwargs)
        self._drawn: Drawn | DrawnFromTorch | None = None
        self.reads: Reads | None = None
        self.trainable = True
        if options.guards:
            self._note_everything(options)
        else:
            self._ambient = AutocastOnly()
            if options.preserve_rng_state:
                self._drawn = DrawnFromTorch(self.arguments.cuda_devices)

    def _note_everything(self, options: RegionOptions) -> None:
        self._ambient = Ambient()
        reached = reach(self._function)
        self.trainable = any(t.requires_grad for t in reached.tensors)
        self.reads = Reads(reached)
        if options.preserve_rng_state:
            sources = global_sources()
            if reached.generators:
                sources += private_sources(reached.generators)
            self._drawn = Drawn(sources)

    def finish(self) -> None:
        """Note, after the function ran, what it drew and what it changed itself."""
        if self.reads is None:
            return
        self.reads.finish()
        for held in self.arguments.tensors:
            held.note_forward_end()
        if self._drawn is not None:
            self._drawn.finish()

    def state_addresses(self) -> frozenset[int]:
        """Return where the storages lie that a recompute writes and puts back."""
        return self.reads.state_addresses() if self.reads is not None else frozenset()

    def run_in_context(self, body: Callable[[], None]) -> None:
        """Call `body` with the context variables of the forward."""
        if isinstance(self._ambient, Ambient):
            # A copy, because one context cannot be entered twice at a time.
            self._ambient.context.copy().run(body)
        else:
            body()

    def enter_ambient(self, scope: Scope) -> None:
        """Bring back random sources, modes and settings until `scope` ends."""
        self._ambient.enter(scope)
        if self._drawn is not None:
            self._drawn.enter(scope)
        scope.callback(set_grad_enabled, torch.is_grad_enabled())
        set_grad_enabled(True)

    def enter_state(self, scope: Scope, hide_gradients: bool = False) -> None:
        """Bring back buffers and flags until `scope` ends; see `Reads.enter`."""
        if self.reads is not None:
            self.reads.enter(
                scope, self._function, self.arguments.tensors, hide_gradients
            )
