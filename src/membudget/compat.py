"""Drop-in replacements for the public names of `torch.utils.checkpoint`.

To migrate from torch, change only the import:

    from membudget.compat import checkpoint, checkpoint_sequential

If `use_reentrant` is omitted, `checkpoint` warns, as in torch, but then uses the
default engine instead of the reentrant variant, which can silently lose gradients.
Unlike torch's `checkpoint_wrapper`, membudget's adds no wrapper module. With
`use_reentrant=True`, and only then, gradients may differ from the plain step's in the
last bits, as in torch: the reentrant variant accumulates gradients in a different order
(see `engine.reentrant`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import Module
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    DefaultDeviceType,
    SelectiveCheckpointContext,
    check_backward_validity,
    detach_variable,
    get_device_states,
    noop_context_fn,
    set_device_states,
)

from membudget._torch import torch_wrapping
from membudget.attach import carried_by, put_region
from membudget.engine import sequential
from membudget.engine.controls import (
    disable_checkpointing,
    is_recomputing,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
)
from membudget.engine.groups import GraphExecGroup
from membudget.engine.options import ContextPair, checked_options
from membudget.engine.region import run_region
from membudget.engine.torch_form import (
    checkpoint_in_compiled_code,
    create_selective_checkpoint_contexts,
)
from membudget.errors import CheckpointError, OptionTypeError
from membudget.offload import shared_offload
from membudget.offloaded_module import OffloadedModule, offload_module

__all__ = [
    "SAC_IGNORED_OPS",
    "ActivationWrapper",
    "CheckpointError",
    "CheckpointFunction",
    "CheckpointImpl",
    "CheckpointPolicy",
    "CheckpointWrapper",
    "DefaultDeviceType",
    "GraphExecGroup",
    "OffloadWrapper",
    "SelectiveCheckpointContext",
    "apply_activation_checkpointing",
    "check_backward_validity",
    "checkpoint",
    "checkpoint_sequential",
    "checkpoint_wrapper",
    "create_selective_checkpoint_contexts",
    "detach_variable",
    "disable_checkpointing",
    "get_device_states",
    "is_recomputing",
    "noop_context_fn",
    "offload_wrapper",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
    "set_device_states",
]

# Torch's own classes, for code that tests whether a module was wrapped.
ActivationWrapper: Any
CheckpointImpl: Any
CheckpointWrapper: Any
OffloadWrapper: Any


def __getattr__(name: str) -> Any:
    """Load a name that exists only if torch was built with `torch.distributed`."""
    if name in __annotations__:
        return getattr(torch_wrapping(), name)
    raise AttributeError(f"module 'membudget.compat' has no attribute {name!r}")


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], ContextPair] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    **kwargs: Any,
) -> Any:
    """Run a function as a region, with the signature of torch's `checkpoint`.

    Args:
        function: Function whose activations are dropped and recomputed.
        *args: Positional arguments of the function.
        use_reentrant: Selects the reentrant variant; `None` warns and means `False`.
        context_fn: Returns a context manager for the forward and one for the recompute.
        determinism_check: `"default"` or `"none"` as in torch; `"values"` also compares
            the bytes of recomputed tensors.
        debug: Whether to record operators, for more detailed mismatch errors.
        early_stop: Whether to stop a recompute once all needed tensors are computed.
        **kwargs: Keyword arguments of the function, and `preserve_rng_state`.

    Returns:
        The function's return value.
    """
    if use_reentrant is None:
        _warn_use_reentrant("checkpoint")
    if torch.compiler.is_compiling():
        return checkpoint_in_compiled_code(
            function, args, {"context_fn": context_fn, **kwargs}
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
    """Run a chain of layers in segments, like torch's `checkpoint_sequential`.

    Args:
        functions: Layers of the chain, in order.
        segments: Number of segments, which are evenly sized, unlike in torch.
        input: Input of the first layer.
        use_reentrant: Selects the reentrant variant; `None` warns and means `False`.
        **kwargs: `preserve_rng_state` and other options of `membudget.checkpoint`.

    Returns:
        The output of the last layer.

    Raises:
        OptionTypeError: If `use_reentrant` is neither a bool nor `None`.
    """
    if use_reentrant is not None and not isinstance(use_reentrant, int):
        raise OptionTypeError(
            "use_reentrant, the fourth argument of checkpoint_sequential, must be a "
            f"bool; got {type(use_reentrant).__name__}. A chain with several inputs is "
            "run by membudget.checkpoint_sequential(functions, segments, *inputs)."
        )
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


class CheckpointFunction:
    """Counterpart of torch's `CheckpointFunction`, which runs a reentrant region."""

    @staticmethod
    def apply(run_function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """Run a function as a reentrant region."""
        options = {"use_reentrant": True, "preserve_rng_state": preserve}
        return run_region(run_function, args, {}, checked_options(options))


def checkpoint_wrapper(
    module: Module,
    checkpoint_impl: Any = None,
    checkpoint_fn: Callable[..., Any] | None = None,
    **checkpoint_fn_kwargs: Any,
) -> Module:
    """Attach a region to `module` and return the module itself.

    Unlike in torch, no wrapper module is added, so parameter names and `isinstance`
    checks stay valid.

    Args:
        module: Module that gets the region, modified in place.
        checkpoint_impl: Torch's `CheckpointImpl`; `REENTRANT` selects the reentrant
            variant.
        checkpoint_fn: Not supported, because membudget runs the region itself.
        **checkpoint_fn_kwargs: Options of the region; see `membudget.checkpoint`.

    Returns:
        `module`.
    """
    if isinstance(carried_by(module), OffloadedModule):
        raise CheckpointError(
            "offload_wrapper inside of checkpoint_wrapper leaves nothing to recompute: "
            "write offload_wrapper(checkpoint_wrapper(module))"
        )
    if checkpoint_fn is not None:
        raise CheckpointError(
            "checkpoint_wrapper takes no checkpoint_fn: the region is membudget's. "
            "Pass the region's options instead."
        )
    if getattr(checkpoint_impl, "name", None) == "REENTRANT":
        checkpoint_fn_kwargs["use_reentrant"] = True
    put_region(module, checked_options(checkpoint_fn_kwargs), type(module).__name__)
    return module


def offload_wrapper(module: Module) -> Module:
    """Offload what autograd saves in each call of `module`; return the module itself.

    Around `checkpoint_wrapper`, the inputs of the region are offloaded. All modules
    share host memory: at most half of what the host has, allocated as it is needed.
    """
    offload_module(module, shared_offload())
    return module


def apply_activation_checkpointing(
    model: Module,
    checkpoint_wrapper_fn: Callable[..., Module] = checkpoint_wrapper,
    check_fn: Callable[[Module], bool] = lambda _: True,
    auto_wrap_policy: Any = None,
) -> None:
    """Attach regions to the submodules of `model` that `check_fn` selects.

    Torch's own code traverses the model, so policies select what they do in torch.

    Args:
        model: Model to modify in place; the root module gets no region.
        checkpoint_wrapper_fn: Called with each selected module; returns the module that
            replaces it.
        check_fn: Predicate that selects submodules.
        auto_wrap_policy: FSDP wrapping policy, a function or an object; overrides
            `check_fn`.

    Warns:
        UserWarning: If no module is selected.
    """
    selected = 0

    def wrap(module: Module, **options: Any) -> Module:
        nonlocal selected
        selected += 1
        return checkpoint_wrapper_fn(module, **options)

    # Given a class, torch skips modules that are instances of that class already.
    is_class = isinstance(checkpoint_wrapper_fn, type)
    torch_wrapping().apply_activation_checkpointing(
        model, checkpoint_wrapper_fn if is_class else wrap, check_fn, auto_wrap_policy
    )
    if not selected and not is_class:
        warnings.warn(
            "apply_activation_checkpointing selected no submodule of "
            f"{type(model).__name__}, so nothing is checkpointed: look at "
            f"{'check_fn' if auto_wrap_policy is None else 'auto_wrap_policy'}",
            stacklevel=2,
        )
