"""Let work on one stream read what a region or its replay has made on another.

The reader waits for the maker, and the allocator is told of the reader: memory that is
freed would otherwise serve the maker's stream while the reader's still reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from membudget._torch_accelerator import lend_to_current_stream
from membudget.engine.replay.tape import Operation, TapeValue


def lend(value: TapeValue, stream: Any) -> None:
    """Let work that is launched now read a value that is in memory.

    Args:
        value: The value.
        stream: The stream on which its region began.
    """
    operation = (value.root or value).operation
    made_on = stream if operation is None else operation.stream or stream
    assert value.tensor is not None
    lend_to_current_stream(value.tensor, made_on)


def lend_inputs(operations: Iterable[Operation], stream: Any) -> None:
    """Let operations that are launched now read what was made before them.

    Args:
        operations: Operations that run on one stream.
        stream: The stream on which the region began; `None` without an accelerator.
    """
    if stream is None:
        return
    for operation in operations:
        for value in operation.inputs():
            if value.tensor is not None:
                lend(value, stream)
