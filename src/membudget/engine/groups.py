"""The group of backwards that share recomputes, as the class that torch names so."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType

from membudget.engine.retention import OPEN_GROUPS, execution_group
from membudget.errors import CheckpointError


class GraphExecGroup:
    """Recompute each region at most once over all backwards run inside.

    As `torch.utils.checkpoint.GraphExecGroup`, except that the backwards may overlap.
    Groups do not nest.
    """

    def __init__(self) -> None:
        """Make a group; enter it with `with`."""
        self._group: AbstractContextManager[None] | None = None

    def __enter__(self) -> GraphExecGroup:
        """Open the group.

        Raises:
            CheckpointError: If a group is open already.
        """
        if OPEN_GROUPS:
            raise CheckpointError(
                "GraphExecGroup contexts cannot be nested; leave the outer one first"
            )
        self._group = execution_group()
        self._group.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the group and free what it held."""
        if self._group is not None:
            self._group.__exit__(kind, error, trace)
            self._group = None
