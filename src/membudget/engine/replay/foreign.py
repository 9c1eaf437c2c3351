"""Operators that are not torch's own, and may not keep to their schemas.

A kernel behind `torch.library` may write memory that it does not declare, or draw from
NumPy's stream. So its first replay runs on copies of its arguments: an operator that
has written one is *faulty*, runs on copies for the rest of the step, and its outputs
are kept from the next recording on. The random streams are where they were after each
replay; an operator that moved one in the forward, and did not say so, is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from membudget._torch import tree_iter, tree_map_only, without_dispatch_modes
from membudget.scope import Scope
from membudget.state.bits import fingerprint
from membudget.state.rng import bring_back, global_sources, note

FAULTY: set[Any] = set()
"""Operators that wrote an argument that they do not declare."""

_TRUSTED: set[Any] = set()


def call_noting_draws(
    operator: Any, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, bool]:
    """Run an operator; tell, too, whether it moved a random stream."""
    before = note(global_sources())
    output = operator(*args, **kwargs)
    after = note(global_sources())
    moved = any(a[1] is not b[1] for a, b in zip(before, after, strict=True))
    return output, moved


def call_again(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Replay an operator, and leave what it must not touch as it was."""
    with Scope() as scope:
        bring_back(note(global_sources()), scope)
        if operator in _TRUSTED:
            return operator(*args, **kwargs)
        return _call_on_copies(operator, args, kwargs)


@torch.no_grad()
def _call_on_copies(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if operator._schema.is_mutable:
        return operator(*args, **kwargs)  # What it declares is a copy already.
    copies = tree_map_only(Tensor, _copy, (args, kwargs))
    output = operator(*copies[0], **copies[1])
    if operator not in FAULTY:
        with without_dispatch_modes():
            same = [_bits((args, kwargs)) == _bits(copies)]
        (_TRUSTED if all(same) else FAULTY).add(operator)
    return output


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.preserve_format)


def _bits(arguments: Any) -> list[Any]:
    return [fingerprint(t) for t in tree_iter(arguments) if isinstance(t, Tensor)]
