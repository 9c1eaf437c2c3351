"""The names of `torch.utils.checkpoint`, with their signatures and meanings.

Change the import and keep the code:

    from membudget.compat import checkpoint, checkpoint_sequential

Two things are deliberately other. `use_reentrant` left out warns, as in torch, and then
uses the default engine rather than the reentrant one, which loses gradients in silence.
And wrappers do not wrap: `checkpoint_wrapper` returns the very module it was given,
with a region on it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch.nn import Module
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from membudget.carrier import put_region
from membudget.engine import sequential
from membudget.engine.options import checked_options
from membudget.engine.region import run_region
from membudget.engine.retention import OPEN_GROUPS, execution_group
from membudget.engine.selective import create_selective_checkpoint_contexts
from membudget.engine.switches import (
    disable_checkpointing,
    is_recomputing,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
)
from membudget.errors import CheckpointError

__all__ = [
    "CheckpointError",
    "CheckpointPolicy",
    "GraphExecGroup",
    "SelectiveCheckpointContext",
    "apply_activation_checkpointing",
    "checkpoint",
    "checkpoint_sequential",
    "checkpoint_wrapper",
    "create_selective_checkpoint_contexts",
    "disable_checkpointing",
    "is_recomputing",
    "noop_context_fn",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
]

ContextFn = Callable[
    [], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
]


def noop_context_fn() -> tuple[
    AbstractContextManager[Any], AbstractContextManager[Any]
]:
    """Return two contexts that do nothing: the default of `context_fn`."""
    return nullcontext(), nullcontext()


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: ContextFn = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    **kwargs: Any,
) -> Any:
    """Run a region; the arguments are those of `torch.utils.checkpoint.checkpoint`.

    Args:
        function: What to run.
        *args: Its arguments.
        use_reentrant: Say which variant; left out, it warns and takes the default.
        context_fn: Returns the contexts of the forward and of the recompute.
        determinism_check: `"default"` or `"none"`, and our `"values"`.
        debug: Note operators, for the message of a mismatch.
        early_stop: End a recompute when what is needed is there.
        **kwargs: Keywords of the function, and `preserve_rng_state`.

    Returns:
        What `function` returns.
    """
    if use_reentrant is None:
        _warn_use_reentrant("checkpoint")
    if torch.compiler.is_compiling():
        from torch.utils.checkpoint import checkpoint as torch_checkpoint

        return torch_checkpoint(
            function, *args, use_reentrant=False, context_fn=context_fn, **kwargs
        )
    options = checked_options(
        {
            "use_reentrant": bool(use_reentrant),
            "context_fn": None if context_fn is noop_context_fn else context_fn,
            "determinism_check": determinism_check,
            "debug": debug,
            "early_stop": early_stop,
            "preserve_rng_state": kwargs.pop("preserve_rng_state", True),
        }
    )
    return run_region(function, args, kwargs, options)


def checkpoint_sequential(
    functions: torch.nn.Sequential | Sequence[Callable[..., Any]],
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Run a chain in segments; as `torch.utils.checkpoint.checkpoint_sequential`.

    Args:
        functions: The layers.
        segments: How many segments; they are even, which torch's are not.
        input: What the first layer takes.
        use_reentrant: Say which variant; left out, it warns and takes the default.
        **kwargs: `preserve_rng_state`, and options of `membudget.checkpoint`.

    Returns:
        What the last layer returns.
    """
    if use_reentrant is None:
        _warn_use_reentrant("checkpoint_sequential")
    return sequential.checkpoint_sequential(
        functions, segments, input, use_reentrant=bool(use_reentrant), **kwargs
    )


def _warn_use_reentrant(name: str) -> None:
    warnings.warn(
        f"{name}: pass use_reentrant explicitly. It was left out, and membudget uses "
        "use_reentrant=False, where torch would use the reentrant variant.",
        stacklevel=3,
    )


class GraphExecGroup:
    """Recompute each region at most once over all backwards run inside.

    As `torch.utils.checkpoint.GraphExecGroup`, except that the backwards may overlap.
    Groups do not nest.
    """

    def __init__(self) -> None:
        """Make a group; enter it with `with`."""
        self._group: AbstractContextManager[None] | None = None

    def __enter__(self) -> GraphExecGroup:
        """Open the group.

        Raises:
            CheckpointError: If a group is open already.
        """
        if OPEN_GROUPS:
            raise CheckpointError(
                "GraphExecGroup contexts cannot be nested; leave the outer one first"
            )
        self._group = execution_group()
        self._group.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the group and free what it held."""
        if self._group is not None:
            self._group.__exit__(kind, error, trace)
            self._group = None


def checkpoint_wrapper(
    module: Module,
    checkpoint_impl: Any = None,
    checkpoint_fn: Callable[..., Any] | None = None,
    **checkpoint_fn_kwargs: Any,
) -> Module:
    """Put a region on `module` and return the module itself.

    As torch's `checkpoint_wrapper`, without the wrapper: names and `isinstance` hold.

    Args:
        module: The module.
        checkpoint_impl: torch's `CheckpointImpl`; `REENTRANT` selects the classic
            variant.
        checkpoint_fn: Not supported: a region is membudget's.
        **checkpoint_fn_kwargs: Options of the region.

    Returns:
        `module`.
    """
    if checkpoint_fn is not None:
        raise CheckpointError(
            "checkpoint_wrapper takes no checkpoint_fn: the region is membudget's. "
            "Pass the region's options instead."
        )
    if getattr(checkpoint_impl, "name", None) == "REENTRANT":
        checkpoint_fn_kwargs["use_reentrant"] = True
    put_region(module, checked_options(checkpoint_fn_kwargs), type(module).__name__)
    return module


def apply_activation_checkpointing(
    model: Module,
    checkpoint_wrapper_fn: Callable[[Module], Module] = checkpoint_wrapper,
    check_fn: Callable[[Module], bool] = lambda _: True,
    auto_wrap_policy: Callable[..., bool] | None = None,
) -> None:
    """Put regions on the submodules of `model` for which `check_fn` says so.

    Args:
        model: The model, changed in place; it gets no region itself.
        checkpoint_wrapper_fn: Puts a region on one module and returns what shall
            stand in its place.
        check_fn: Asked with each submodule.
        auto_wrap_policy: FSDP's form of the same question; it wins over `check_fn`.
    """
    if auto_wrap_policy is not None:
        check_fn = functools.partial(_asked, auto_wrap_policy)
    chosen = [m for m in model.modules() if m is not model and check_fn(m)]
    replaced = {id(m): checkpoint_wrapper_fn(m) for m in chosen}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if replaced.get(id(child), child) is not child:
                setattr(parent, name, replaced[id(child)])


def _asked(policy: Callable[..., bool], module: Module) -> bool:
    return policy(module=module, recurse=False, nonwrapped_numel=0)
