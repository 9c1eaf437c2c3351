"""Collectives in a model's own forward: in no region, and not sent by a recording.

Each rank plans for itself, so no other one answers what it recomputes or records.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from membudget._torch import DispatchMode, is_fake, tree_iter
from membudget.errors import OptionError

OWN_COLLECTIVES = ("c10d.", "_c10d_functional.")
"""How the names of the operators begin by which a module's own code communicates."""


class SendingError(OptionError):
    """A call of the model would send numbers to other ranks while it is recorded."""


@contextmanager
def nothing_sent(model: Module) -> Iterator[None]:
    """Record a call of a model, whose collectives of fake tensors send nothing.

    Integers are real in a recording, because models read them, such as the number of
    tokens that another rank sends.

    Raises:
        SendingError: If the model runs a collective of real tensors.
    """
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    found = _Sending()
    try:
        with found:
            yield
    except Exception as error:
        if not found.refused:
            raise
        raise SendingError(
            f"{type(model).__name__} waits for other ranks in its forward, or sends "
            f"them integers ({found.refused}), and no rank can record that alone. Give "
            "regions by a rule to those of its blocks that do not, as in "
            "apply(model, blocks=Block)"
        ) from error


class _Sending(DispatchMode):
    """Refuses collectives of real tensors.

    Attributes:
        refused: Name of the collective that was refused; empty if none was.
    """

    refused = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(func)
        if name.startswith(OWN_COLLECTIVES) and _is_real(args, kwargs):
            self.refused = name
            raise OptionError(f"{name} would be sent")
        return func(*args, **(kwargs or {}))


def _is_real(args: Any, kwargs: Any) -> bool:
    tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
    return not any(is_fake(t) or t.is_meta for t in tensors)
