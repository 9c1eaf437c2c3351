"""Hold a value of the tape in host memory, where a policy offloads it.

The copy begins when the operator that made the value has run. The region may write to
the tensor afterwards: the value stays what it was.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from membudget._torch_accelerator import enter_stream
from membudget.offload import Held
from membudget.scope import Scope


class Offloaded:
    """The content of a value, held by an `Offload`."""

    __slots__ = ("_held", "_is_apart", "_stream")

    is_unpacked_once = False

    def __init__(self, held: Held, stream: Any):
        """Note what is held, and the stream that it is to be ready for."""
        self._held = held
        self._is_apart = False
        self._stream = stream

    def unpacked(self) -> tuple[Tensor, bool]:
        """Return the tensor, on its stream; also, that it is what it was.

        Raises:
            ChangedSinceForwardError: If it was written to after the region.
        """
        with Scope() as scope:
            if self._stream is not None:
                enter_stream(self._stream, scope)
            return self._held.restored(), False

    def settle(self) -> None:
        """Detect writes from the end of the region on, where they would be read."""
        if not self._is_apart:
            self._held.check_from_now()

    def before_write(self) -> None:
        """Let work that is launched now write to the tensor."""
        self._held.before_write()
        self._is_apart = True
