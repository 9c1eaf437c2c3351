"""The casts of a model's parameters that autocast caches for as long as it is on.

Regions drop their references to them, but not the cache: they live until the loop
leaves autocast, or until they are dropped before the next forward.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module

from membudget._torch import is_any_autocast_enabled, without_dispatch_modes
from membudget._torch_modules import own_parameters
from membudget.sharding import is_fully_sharded
from membudget.state.autocast import clear_casts
from membudget.state.identity import is_leaf, version_of
from membudget.step import device_of_model

GATHERED = ""
"""The name, in recordings, of parameters that FSDP gathers."""


class CachedCasts:
    """The casts of one model's parameters.

    Attributes:
        direct_reads: How often a parameter is read beside its cast in one forward.
        are_there: Whether those of an earlier call are cached, so that the one that is
            about to run makes none.
    """

    def __init__(self, model: Module):
        """Store the model, whose parameters may have been cast before."""
        self._model = model
        self.direct_reads = 0
        self.are_there = False
        self._versions = -1
        self._probe: Tensor | None = None
        self._probed = -1

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
        self.are_there = self._has_cached()

    def _has_cached(self) -> bool:
        """Return whether autocast still has what it cached in the call before.

        It does not say what it has cached. But it caches the cast of a number of ours
        along with those of the parameters, and drops all together.
        """
        if not (is_any_autocast_enabled() and torch.is_autocast_cache_enabled()):
            return False
        if self._probe is None:
            on = device_of_model(self._model)
            self._probe = torch.ones(1, 1, device=on, requires_grad=True)
        # The user's hooks are for the model's tensors.
        hooks = saved_tensors_hooks(Tensor.detach, Tensor.detach)
        with without_dispatch_modes(), torch.enable_grad(), hooks:
            node = torch.mm(self._probe, self._probe).grad_fn
        cast = None if node is None else node.next_functions[0][0]
        if cast is None or not cast.name().startswith("ToCopy"):
            return False  # Autocast is on for another device.
        before, self._probed = self._probed, cast._sequence_nr()
        return self._probed == before

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
