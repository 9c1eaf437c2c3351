"""Private torch APIs that membudget uses, each with the reason for its use.

Only the modules `_torch*` may use torch names that begin with an underscore. If torch
renames a private API, `tests/test_torch_private.py` fails and names it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload as OperatorOverload
from torch._ops import OpOverloadPacket as OperatorPacket
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
)
from torch.utils._pytree import tree_iter, tree_map_only

from membudget._torch_accelerator import is_capturing
from membudget._torch_observing import exclude_observers, is_observing_excluded

# torch names the modules of modes and trees with an underscore, although its own
# documentation refers users to them; operators have no public class.
__all__ = ["OperatorOverload", "OperatorPacket", "tree_iter", "tree_map_only"]

_F = TypeVar("_F", bound=Callable[..., Any])


class DispatchMode(TorchDispatchMode):
    """`TorchDispatchMode` with the type annotations that torch's class lacks."""

    def __init__(self) -> None:
        """Create the mode without activating it."""
        super().__init__()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Any:
        """Push the mode onto the dispatch mode stack."""
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Pop the mode off the dispatch mode stack."""
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]


# `torch.autograd.graph.saved_tensors_hooks` is public, but its context manager costs
# 1.3 µs per region; these are the two calls inside it.
push_saved_tensors_hooks: Callable[[Callable[..., Any], Callable[..., Any]], None] = (
    torch._C._autograd._push_saved_tensors_default_hooks
)
pop_saved_tensors_hooks: Callable[[], None] = (
    torch._C._autograd._pop_saved_tensors_default_hooks
)

# `torch.set_grad_enabled` is a context manager: 1.5 µs where this takes 0.1.
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled

# Identifies the running backward pass, whose unused recomputed tensors are freed when
# it ends.
current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id

# Rises with each new autograd node: separates the saved tensors of one operator from
# those of the next.
node_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr

# The node whose gradient is being computed, to attribute operators of a backward pass.
current_autograd_node: Callable[[], Any] = torch._C._current_autograd_node

# One call instead of one for each device type, in the forward of every region.
is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled

# The meter reads the profiler's events, so no other profiler may be active.
is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled

# False inside `autograd.grad` and `backward(inputs=...)`, in which a reentrant region
# would add gradients to parameters that were not asked for.
is_whole_backward: Callable[[], bool] = torch.autograd._is_checkpoint_valid

# BatchNorm and InstanceNorm have no public base class. Their kernels write running
# statistics without bumping the version counter.
NormalizationWithStatistics: type[torch.nn.Module] = _NormBase

# The classes of scripted code; methods of scripted modules have no public class.
torchscript_types: tuple[type, ...] = (
    torch.jit.ScriptModule,
    torch.jit.ScriptFunction,
    torch._C.ScriptMethod,
)

# A tensor whose storage was exchanged (`p.data = q`) keeps its version, so the
# storage's address must be compared, too.
storage_address: Callable[[Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]

# Every forward reads these lengths; Python has no public way to inspect the stacks.
function_mode_count: Callable[[], int] = torch._C._len_torch_function_stack
dispatch_mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack

# The number of tensors that hold a storage, plus one if it has a Python object. Once
# only the engine's own tensors are left, no other code can write it.
storage_uses: Callable[[int], int] = torch._C._storage_Use_Count


def is_fake(tensor: Any) -> bool:
    """Return whether a tensor is a `FakeTensor`, without importing the class."""
    return type(tensor).__name__ == "FakeTensor"


def new_fake_mode() -> Any:
    """Return a new `FakeTensorMode`, whose tensors have shapes but no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


@contextlib.contextmanager
def without_fake_mode() -> Iterator[None]:
    """Suspend an active `FakeTensorMode`, so that operators compute real values."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        yield


def fake_errors() -> tuple[type[Exception], ...]:
    """Return the exception types raised when code reads a fake tensor's values."""
    from torch._subclasses import fake_tensor as fakes

    return (
        fakes.DataDependentOutputException,
        fakes.DynamicOutputShapeException,
        fakes.UnsupportedOperatorException,
    )


def is_fake_mode_active() -> bool:
    """Return whether a `FakeTensorMode` is active."""
    return any(type(mode).__name__ == "FakeTensorMode" for mode in dispatch_modes())


def hide_from_dynamo(function: Callable[..., Any]) -> None:
    """Keep `torch.compile` from tracing a function and its callees.

    `torch.compiler.disable` wraps the function, which costs 1 µs per call; marking the
    function's code object costs nothing per call.
    """
    from torch._C._dynamo import eval_frame as frames

    skip = frames._FrameAction.SKIP
    strategy = frames._FrameExecStrategy(skip, skip)
    frames.set_code_exec_strategy(function.__code__, strategy)


def constant_to_dynamo(function: _F) -> _F:
    """Mark a function's result as constant for Dynamo, without loading Dynamo."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def torch_wrapping() -> Any:
    """Return torch's `checkpoint_wrapper` module, which needs `torch.distributed`."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

    return checkpoint_wrapper


def is_forward_ad_on() -> bool:
    """Return whether forward-mode AD is active, where `detach` would drop tangents."""
    return torch.autograd.forward_ad._current_level >= 0


def top_saved_tensors_hooks() -> tuple[Any, Any] | None:
    """Return the innermost saved-tensor hooks as (pack, unpack), or `None`."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks or None


@contextlib.contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """Hide the engine's own operators from dispatch modes and observers."""
    excluded = is_observing_excluded()
    exclude_observers(True)
    try:
        with _disable_current_modes():
            yield
    finally:
        exclude_observers(excluded)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Hide the engine's own operators from all modes, including function modes."""
    with torch._C.DisableTorchFunction(), without_dispatch_modes():
        yield


def may_read_bytes() -> bool:
    """Return whether the contents of tensors can be read now.

    Reading is impossible while work is captured into a graph, and
    inside `torch.func` transforms, which wrap tensors.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return not is_capturing()


# The error message set by code that disabled saved-tensor hooks; `None` while they are
# enabled.
why_hooks_are_disabled: Callable[[], str | None] = (
    torch._C._autograd._saved_tensors_hooks_get_disabled_error_message
)


def function_modes() -> tuple[Any, ...]:
    """Return the active `TorchFunctionMode`s, outermost first."""
    return tuple(
        torch._C._get_function_stack_at(i) for i in range(function_mode_count())
    )


def dispatch_modes() -> tuple[Any, ...]:
    """Return the active `TorchDispatchMode`s, outermost first."""
    return tuple(
        torch._C._get_dispatch_stack_at(i) for i in range(dispatch_mode_count())
    )


def is_device_context(mode: Any) -> bool:
    """Return whether a function mode is a `torch.device` used as a context manager."""
    from torch.utils._device import DeviceContext

    return isinstance(mode, DeviceContext)


def set_versions(tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
    """Set the version counters of tensors whose earlier contents were restored."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def is_view_operator(operator: Any) -> bool:
    """Return whether an operator only creates views, and so reads no elements."""
    schema = operator._schema
    return not schema.is_mutable and any(
        argument.alias_info is not None for argument in schema.arguments
    )


def detach_with_version(tensor: Tensor) -> Tensor:
    """Return a detached alias that shares the tensor's version counter.

    Inside a dispatch mode, plain `detach` would give the alias a new version counter.
    """
    key = torch._C.DispatchKey.ADInplaceOrView
    with torch._C._SetExcludeDispatchKeyGuard(key, False):
        return tensor.detach()


# Run operators as a dispatch mode sees them, below autograd and autocast.
BelowAutograd: Any = torch._C._AutoDispatchBelowADInplaceOrView
WithoutAutocast: Any = torch._C._DisableAutocast


# The only way to create a lazily negated view, the counterpart of `conj`.
negative_view: Callable[[Tensor], Tensor] = torch._neg_view


def is_random_operator(operator: Any) -> bool:
    """Return whether an operator draws random numbers from a generator."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def written_arguments(
    operator: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Iterator[Tensor]:
    """Yield the tensors that an operator modifies in place, flattening lists."""
    for position, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for item in value if isinstance(value, list | tuple) else [value]:
            if isinstance(item, Tensor):
                yield item


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the current backward pass ends."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def module_call_codes() -> frozenset[Any]:
    """Return the code of `Module.__call__`, in whose frames `self` is the module."""
    call: Any = torch.nn.Module._call_impl
    return frozenset((call.__code__,))
