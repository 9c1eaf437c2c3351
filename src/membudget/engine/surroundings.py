"""Everything a call of a region depends on, noted before it and brought back later.

This is Rules 5 and 6 in one object, shared by both variants of rerun: the arguments,
the random sources, the ambient state, and what the function can reach.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from membudget._torch import set_grad_enabled
from membudget.engine import isolation
from membudget.engine.ambient import Ambient, AutocastOnly
from membudget.engine.arguments import HeldArguments
from membudget.engine.isolation import RandomLog
from membudget.engine.options import RegionOptions
from membudget.engine.randomness import (
    Drawn,
    global_sources,
    private_sources,
    torch_sources,
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
        random_log: The random operators, where several threads run regions.
    """

    __slots__ = (
        "_ambient",
        "_drawn",
        "_function",
        "arguments",
        "random_log",
        "reads",
        "trainable",
    )

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
        self._drawn: Drawn | None = None
        self.reads: Reads | None = None
        self.trainable = True
        self.random_log: RandomLog | None = None
        if options.preserve_rng_state and isolation.is_shared():
            self.random_log = RandomLog()
        if options.guards:
            self._note_everything(options)
        else:
            self._ambient: AutocastOnly = AutocastOnly()
            if options.preserve_rng_state and self.random_log is None:
                self._drawn = Drawn(torch_sources(self.arguments.cuda_devices))

    def _note_everything(self, options: RegionOptions) -> None:
        self._ambient = Ambient()
        reached = reach(self._function, self.arguments.others)
        self.trainable = any(t.requires_grad for t in reached.tensors)
        self.reads = Reads(reached)
        if options.preserve_rng_state:
            torch_too = self.random_log is None
            sources = global_sources(torch_too)
            if reached.generators:
                sources += private_sources(reached.generators, torch_too)
            self._drawn = Drawn(sources)

    def finish(self) -> None:
        """Note, after the function ran, what it changed itself."""
        if self.reads is None:
            return
        self.reads.finish()
        for held in self.arguments.tensors:
            held.note_forward_end()

    def run_in_context(self, body: Callable[..., None], *args: Any) -> None:
        """Call `body(*args)` with the context variables of the forward."""
        if type(self._ambient) is Ambient:
            # A copy, because one context cannot be entered twice at a time.
            self._ambient.context.copy().run(body, *args)
        else:
            body(*args)

    def enter_ambient(self, scope: Scope) -> None:
        """Bring back random sources, modes and settings until `scope` ends."""
        self._ambient.enter(scope)
        if self.random_log is not None:
            scope.enter_context(self.random_log.player())
        elif self._drawn is not None and isolation.is_shared():
            # This forward ran before there were several threads.
            scope.enter_context(isolation.OPERATOR_LOCK)
        if self._drawn is not None:
            self._drawn.enter(scope)
        scope.callback(set_grad_enabled, torch.is_grad_enabled())
        set_grad_enabled(True)

    def enter_state(
        self, scope: Scope, hide_gradients: bool = False
    ) -> dict[int, str] | None:
        """Bring back buffers, attributes and flags until `scope` ends.

        Args:
            scope: Where undoing is registered.
            hide_gradients: Whether the function runs a backward of its own, whose
                gradients must not be added to those of the parameters again.

        Returns:
            Names of what was changed since the forward, by the address of its storage.
        """
        if self.reads is None:
            return None
        return self.reads.enter(scope, self._function, self.arguments, hide_gradients)
