"""Regions inside `torch.compile`, which torch's own checkpoint runs.

Dynamo knows that function and turns its body into a graph, of which the partitioner
runs again what is tagged so. Compiled code has no Python state to repair: random
numbers and buffers are inputs and outputs of the graph. So of a region's options only
what is kept means anything here, and that reaches torch by contexts.

Dynamo traces these functions. It makes no object of ours into a constant, and
`context_fn` must be one. So `_number_of` runs for real, while Dynamo traces, and gives
each set of contexts a number, which is a constant.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch.nn import Module
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from membudget._torch import constant_to_dynamo
from membudget.engine.mismatch import module_names
from membudget.engine.options import OPTION_NAMES, ContextPair
from membudget.engine.policy import Policy, as_policy, reads_names
from membudget.engine.selective import TorchPolicy, contexts_of
from membudget.errors import OptionError


def checkpoint_in_compiled_code(
    function: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a region whose options stand among the keywords of the call.

    Args:
        function: What the region calls; `None` returns a decorator.
        args: Its positional arguments.
        kwargs: Its keyword arguments, and options of the region.

    Returns:
        What `function` returns.
    """
    keep, context_fn = kwargs.get("keep"), kwargs.get("context_fn")
    kwargs = {k: v for k, v in kwargs.items() if k not in OPTION_NAMES}
    if function is not None:
        return run_compiled(function, args, kwargs, keep, context_fn)

    def decorated(wrapped: Callable[..., Any]) -> Callable[..., Any]:
        def region(*args: Any, **kwargs: Any) -> Any:
            return run_compiled(wrapped, args, kwargs, keep, context_fn)

        return region

    return decorated


def run_compiled(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    keep: Any,
    context_fn: Callable[[], ContextPair] | None,
    label: str = "",
) -> Any:
    """Run a region through torch's checkpoint, which Dynamo turns into a graph.

    Args:
        function: The function of the region.
        args: Its positional arguments.
        kwargs: Its keyword arguments, without options.
        keep: Which outputs to keep; see `RegionOptions`.
        context_fn: As in `torch.utils.checkpoint`.
        label: The region's name in the model.

    Returns:
        What `function` returns.
    """
    if keep is not None:
        owner = function.__self__ if isinstance(function, MethodType) else function
        if not isinstance(owner, Module):
            owner = None
        context_fn = functools.partial(_contexts, _number_of(keep, owner, label))
    if context_fn is None or context_fn is noop_context_fn:
        return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
    return torch_checkpoint(
        function, *args, use_reentrant=False, context_fn=context_fn, **kwargs
    )


# What compiled code keeps, by number: a policy and the names of the region's modules.
_KEPT: list[tuple[Policy, dict[str, str]]] = []


@constant_to_dynamo
def _number_of(keep: Any, owner: Module | None, label: str) -> int:
    try:
        hash(keep)
    except AttributeError:  # Dynamo has not made the object that it traces.
        raise OptionError(
            "a policy was made inside a function that torch.compile traces: make it "
            "outside, as a global or an attribute, and name it inside"
        ) from None
    except TypeError:  # A list of globs.
        pass
    policy = as_policy(keep)
    if reads_names(policy):
        warnings.warn(
            "membudget.name does nothing inside torch.compile, so no tensor is kept by "
            "its name there: keep by operator or by submodule",
            stacklevel=2,
        )
    names = {} if owner is None else module_names(owner, label)
    _KEPT.append((policy, {str(key): name for key, name in names.items()}))
    return len(_KEPT) - 1


def _contexts(number: int) -> ContextPair:
    """Return the contexts that keep what has a number; called once for each trace."""
    return contexts_of(TorchPolicy(*_KEPT[number]))
