"""Regions inside `torch.compile`, run by torch's own checkpoint.

Dynamo knows `torch.utils.checkpoint` and turns a region's body into a graph, of which
the partitioner recomputes the parts so tagged. Compiled code has no Python state to
restore: random numbers and buffers are inputs and outputs of the graph. So of a
region's options only what to keep applies, and it reaches torch through `context_fn`.

Dynamo traces these functions. It requires `context_fn` to be a constant, and treats
none of our objects as one. So `_number_of`, which really runs while Dynamo traces,
gives each pair of contexts a number, and a number is a constant.
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
    """Run a region whose options are among the keywords of the call.

    Args:
        function: The region's function; `None` returns a decorator.
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
        function: The region's function.
        args: Its positional arguments.
        kwargs: Its keyword arguments, without options.
        keep: What to keep; see `RegionOptions`.
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


# By number: a policy, and the names of the region's modules.
_KEPT: list[tuple[Policy, dict[str, str]]] = []


@constant_to_dynamo
def _number_of(keep: Any, owner: Module | None, label: str) -> int:
    try:
        hash(keep)
    # Dynamo traces the object's construction and has not run it.
    except AttributeError:
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
    """Return the contexts with a number; called once per trace."""
    return contexts_of(TorchPolicy(*_KEPT[number]))
