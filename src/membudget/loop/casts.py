"""The casts of a model's parameters that autocast caches for as long as it is on.

Regions drop their references to them, but not the cache: they live until the loop
leaves autocast, or until they are dropped before the next forward.
"""

from __future__ import annotations

import torch
from torch.nn import Module

from membudget._torch import is_any_autocast_enabled
from membudget._torch_modules import own_parameters
from membudget.sharding import is_fully_sharded
from membudget.state.autocast import clear_casts
from membudget.state.identity import is_leaf, version_of

GATHERED = ""
"""The name, in recordings, of parameters that FSDP gathers."""


class CachedCasts:
    """The casts of one model's parameters.

    Attributes:
        direct_reads: How often a parameter is read beside its cast in one forward.
    """

    def __init__(self, model: Module):
        """Store the model, whose parameters may have been cast before."""
        self._model = model
        self.direct_reads = 0
        self._versions = -1

    def clear(self, is_awaited: bool, together: int) -> None:
        """Drop what autocast cached in an earlier micro-batch.

        With it, other operators would run than were recorded. The casts stay where the
        bits depend on it: if an earlier forward that shares them has yet to run
        backward, whose gradients would be added in another precision; if they are of
        older weights than the model has, which the plain loop would use; or if a
        parameter's gradient is the sum of more than two, as with tied weights: casts
        made anew would change their order.

        Args:
            is_awaited: Whether a forward has yet to run backward.
            together: How many forwards run before one backward pass.
        """
        versions = sum(map(version_of, own_parameters(self._model.modules())))
        in_order = 1 + together * self.direct_reads <= 2
        if not is_awaited and versions == self._versions and in_order:
            clear_casts()
        self._versions = versions

    def names(self) -> frozenset[str]:
        """Return the names of the parameters whose casts are cached now, if any are.

        Autocast that the model enters itself drops them when the model leaves it.
        """
        if not (is_any_autocast_enabled() and torch.is_autocast_cache_enabled()):
            return frozenset()
        named = self._model.named_parameters()
        found = {n for n, p in named if p.requires_grad and is_leaf(p)}
        return frozenset(
            found | ({GATHERED} if is_fully_sharded(self._model) else set())
        )
