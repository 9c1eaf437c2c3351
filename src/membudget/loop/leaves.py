"""Leaves that stand in for a model's parameters while a call of it is recorded.

Whoever wants to know when a gradient is complete hangs a hook on the node of autograd
that accumulates it: DistributedDataParallel, Megatron, an optimizer that steps within
the backward pass. A recorded backward pass must not run such a hook, which would send a
gradient that is none. So it ends at other leaves, which share the parameters' memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.nn import Module, Parameter

from membudget._torch_modules import without_gradient_hooks
from membudget.sharding import is_fully_sharded
from membudget.state.identity import is_leaf


class LeavesOf:
    """The stand-ins of a model's parameters.

    Attributes:
        by_name: The stand-ins, as `functional_call` takes them; tied ones are one.
    """

    def __init__(self, model: Module):
        """Make them; what is no leaf itself (`functional_call`) has one, too."""
        named = dict(model.named_parameters(remove_duplicate=False))
        if is_fully_sharded(model):
            named = {}  # FSDP puts others in their place; see `shards`.
        self._parameters = {id(p): p for p in named.values()}
        self._leaves = {key: _leaf(p) for key, p in self._parameters.items()}
        self.by_name = {name: self._leaves[id(p)] for name, p in named.items()}
        self._gradients = {
            key: parameter.grad
            for key, parameter in self._parameters.items()
            if is_leaf(parameter)
        }

    def of(self, parameter: Tensor) -> Tensor:
        """Return what stands in for a parameter."""
        return self._leaves.get(id(parameter), parameter)

    def begin(self) -> None:
        """Give each the gradient that its parameter had when this was made."""
        for key, gradient in self._gradients.items():
            self._leaves[key].grad = gradient

    @contextmanager
    def gradients_kept(self) -> Iterator[None]:
        """Run a backward pass; hand the gradients over to the parameters."""
        # A module may hold its parameters in a list, too, as RNNs do: they are used
        # themselves.
        with without_gradient_hooks(self._parameters.values()):
            yield
        for key in self._gradients:
            leaf = self._leaves[key]
            if leaf.grad is not None:
                self._parameters[key].grad, leaf.grad = leaf.grad, None


def _leaf(parameter: Tensor) -> Tensor:
    return Parameter(parameter.detach(), parameter.requires_grad)
