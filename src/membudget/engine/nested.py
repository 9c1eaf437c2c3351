"""Nested tensors that a region must keep, because no recompute makes them again.

The ragged size of a jagged tensor is a symbol that torch ties to the *object* that
holds the offsets: the same offsets made again are another symbol, with which nothing of
the first forward may be combined. So a jagged tensor is kept where its offsets came
with no other jagged tensor; whatever is computed of that one has its offsets, and is
recomputed. A strided nested tensor is kept, too: torch tells of none of its sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from membudget._torch import tree_iter
from membudget.engine.arguments import HeldArguments


def must_keep(nested: Tensor, arguments: HeldArguments) -> bool:
    """Tell whether a nested tensor that a rerun region saves has to be kept.

    Args:
        nested: The tensor.
        arguments: The region's arguments.
    """
    return nested.layout is not torch.jagged or has_own_offsets(
        nested, arguments.rebuild()
    )


def has_own_offsets(nested: Tensor, given: Any) -> bool:
    """Tell whether a tensor is jagged by other offsets than all those given are."""
    offsets = _offsets_of(nested)
    return offsets is not None and not any(
        isinstance(t, Tensor) and _offsets_of(t) is offsets for t in tree_iter(given)
    )


def _offsets_of(tensor: Any) -> Tensor | None:
    """Return the object that holds the offsets of a jagged tensor; `None` of others."""
    if not tensor.is_nested or tensor.layout is not torch.jagged:
        return None
    offsets: Tensor = tensor.offsets()
    return offsets
