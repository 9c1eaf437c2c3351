"""A stack of undo functions, for the hot path of a recompute.

`contextlib.ExitStack` also runs undo functions, but its exception handling costs 6 µs
per recompute, while a whole region should cost 30 µs. Random generators, modes and
settings are restored in the same way whether or not the recompute raised an error.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any


class Scope(list[tuple[Callable[..., Any], tuple[Any, ...]]]):
    """Runs its undo functions on exit, in reverse order, even if one of them raises.

    Example:
        >>> with Scope() as scope:
        ...     scope.callback(print, "undone last")
        ...     scope.callback(print, "undone first")
        undone first
        undone last
    """

    __slots__ = ()

    def __enter__(self) -> Scope:
        """Return the scope itself."""
        return self

    def callback(self, function: Callable[..., Any], *args: Any) -> None:
        """Call `function(*args)` when the scope ends."""
        self.append((function, args))

    def enter_context(self, context: AbstractContextManager[Any]) -> None:
        """Enter a context manager now, and exit it when the scope ends."""
        context.__enter__()
        self.append((context.__exit__, (None, None, None)))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Run all undo functions, newest first."""
        self.close()

    def close(self) -> None:
        """Run all undo functions, newest first."""
        while self:
            function, args = self.pop()
            try:
                function(*args)
            except BaseException:  # Undo the rest before raising.
                self.close()
                raise
