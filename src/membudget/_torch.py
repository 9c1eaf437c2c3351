"""The private names of torch that membudget needs, each with the reason.

Nothing else in the package may touch a name of torch that begins with an underscore;
`tests/test_torch_private.py` fails with the name when torch renames one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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

# Modes and trees live in modules that torch names with an underscore, though its own
# documentation sends users there; operators have no public class.
__all__ = ["OperatorOverload", "OperatorPacket", "tree_iter", "tree_map_only"]

_F = TypeVar("_F", bound=Callable[..., Any])


class DispatchMode(TorchDispatchMode):
    """A `TorchDispatchMode` with types."""

    def __init__(self) -> None:
        """Prepare the mode; `with` enters it."""
        super().__init__()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Any:
        """Push the mode."""
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Pop the mode."""
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]


# `torch.autograd.graph.saved_tensors_hooks` is public but costs 1.3 µs a region in
# its context manager; these are the two calls inside it.
push_saved_tensors_hooks: Callable[[Callable[..., Any], Callable[..., Any]], None] = (
    torch._C._autograd._push_saved_tensors_default_hooks
)
pop_saved_tensors_hooks: Callable[[], None] = (
    torch._C._autograd._pop_saved_tensors_default_hooks
)

# `torch.set_grad_enabled` is a context manager: 1.5 µs where this takes 0.1.
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled

# Says which backward is running, so that what it leaves over is freed when it ends.
current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id

# Rises with each autograd node that is made: tells one operator's saved tensors from
# another's.
node_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr

# Whose gradient an operator of a backward belongs to.
current_autograd_node: Callable[[], Any] = torch._C._current_autograd_node

# One call instead of one for each device type, in the forward of every region.
is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled

# The meter reads the profiler's events, and must not share them with another profiler.
is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled

# False inside `autograd.grad` and `backward(inputs=...)`, in which a reentrant region
# would add gradients to parameters that nobody asked for.
is_whole_backward: Callable[[], bool] = torch.autograd._is_checkpoint_valid

# BatchNorm and InstanceNorm, whose kernels write running statistics without moving the
# version counter, have no public base class.
NormalizationWithStatistics: type[torch.nn.Module] = _NormBase

# What TorchScript runs. A method of a scripted module has no public class.
torchscript_types: tuple[type, ...] = (
    torch.jit.ScriptModule,
    torch.jit.ScriptFunction,
    torch._C.ScriptMethod,
)

# Operators whose result Python reads.
EQUAL: Any = torch.ops.aten.equal.default
ITEM: Any = torch.ops.aten._local_scalar_dense.default

# A tensor whose storage was exchanged (`p.data = q`) keeps its version, so the
# storage's address must be compared too.
storage_address: Callable[[Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]

# The lengths are asked for in every forward; Python has no public way to see a stack.
function_mode_count: Callable[[], int] = torch._C._len_torch_function_stack
dispatch_mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack

# By how many tensors a storage is held, and one more where Python has an object of it:
# when only the engine's own are left, nobody can write it any more.
storage_uses: Callable[[int], int] = torch._C._storage_Use_Count


def is_fake(tensor: Any) -> bool:
    """Tell whether a tensor is one of `FakeTensorMode`, whose class is private."""
    return type(tensor).__name__ == "FakeTensor"


def fake_mode_of(tensor: Any) -> Any:
    """Return the mode that made a fake tensor; `None` for any other."""
    return tensor.fake_mode if is_fake(tensor) else None


def new_fake_mode() -> Any:
    """Return a new mode in which tensors have shapes and no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


@contextlib.contextmanager
def without_fake_mode() -> Iterator[None]:
    """Run operators for real inside of a fake mode."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        yield


def fake_errors() -> tuple[type[Exception], ...]:
    """Return the errors of code that asks a fake tensor for its values."""
    from torch._subclasses import fake_tensor as fakes

    return (
        fakes.DataDependentOutputException,
        fakes.DynamicOutputShapeException,
        fakes.UnsupportedOperatorException,
    )


def is_fake_mode_active() -> bool:
    """Tell whether a factory makes fake tensors now."""
    return any(type(mode).__name__ == "FakeTensorMode" for mode in dispatch_modes())


def hide_from_dynamo(function: Callable[..., Any]) -> None:
    """Let `torch.compile` trace neither a function nor what it calls.

    `torch.compiler.disable` wraps the function, which costs 1 µs a call; this marks its
    code, which costs nothing.
    """
    from torch._C._dynamo import eval_frame as frames

    skip = frames._FrameAction.SKIP
    strategy = frames._FrameExecStrategy(skip, skip)
    frames.set_code_exec_strategy(function.__code__, strategy)


def constant_to_dynamo(function: _F) -> _F:
    """Do as `torch.compiler.assume_constant_result`, which imports all of Dynamo."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def torch_wrapping() -> Any:
    """Return the module of `checkpoint_wrapper`: torch may lack `torch.distributed`."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

    return checkpoint_wrapper


def is_forward_ad_on() -> bool:
    """Tell whether a `forward_ad.dual_level` is open: `detach` would drop tangents."""
    return torch.autograd.forward_ad._current_level >= 0


def top_saved_tensors_hooks() -> tuple[Any, Any] | None:
    """Return the innermost (pack, unpack) pair, through which a region packs inputs."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks or None


# Observers are called on this dispatch key: below autograd, modes and subclasses,
# above the kernels. No tensor carries it; torch reserves it for fake tensors in
# C++, which 2.13 does not have yet. `isTensorSubclassLike`, by which formulas are
# chosen, does not look at it.
_OBSERVERS: Any = torch._C._dispatch_key_parse("Fake")
_set_included: Any = torch._C._dispatch_tls_set_dispatch_key_included
_set_excluded: Any = torch._C._dispatch_tls_set_dispatch_key_excluded
include_observers: Callable[[bool], None] = partial(_set_included, _OBSERVERS)
exclude_observers: Callable[[bool], None] = partial(_set_excluded, _OBSERVERS)
is_observing_excluded: Callable[[], bool] = partial(
    torch._C._dispatch_tls_is_dispatch_key_excluded, _OBSERVERS
)

# Excluded where code wants the kernels themselves, as FakeTensorMode does for shapes.
is_python_excluded: Callable[[], bool] = partial(
    torch._C._dispatch_tls_is_dispatch_key_excluded, torch._C.DispatchKey.Python
)

# Kernels live for as long as the library objects that registered them.
_LIBRARIES: dict[str, Any] = {}
_OBSERVED: set[Any] = set()


def observe_operators(kernel: Callable[..., Any]) -> None:
    """Call `kernel(operator, *args, **kwargs)` for what an observed thread runs.

    What has become known since the last call is taken in. A fallback would do for all
    operators, but torch (2.13) looks up the kernel of each where a mode is on or a
    subclass is given, and finds no fallback. It stays for operators that a C++
    extension registers later. Takes some 100 ms the first time, and then 0.3 µs.
    """
    known = (
        len(torch._ops._higher_order_ops),
        len(torch.library._defs),
        len(torch.ops.loaded_libraries),
    )
    if known == _KNOWN[0]:
        return
    if not _LIBRARIES:
        _library("_").fallback(kernel, "Fake")
    for name in torch._C._dispatch_get_all_op_names():
        if name not in _OBSERVED:
            _OBSERVED.add(name)
            _observe_operator(name, kernel)
    for operator in list(torch._ops._higher_order_ops.values()):
        if operator not in _OBSERVED:
            _OBSERVED.add(operator)
            operator.py_impl(_OBSERVERS)(partial(kernel, operator))
    _KNOWN[0] = known


_KNOWN: list[tuple[int, ...]] = [()]


def _library(namespace: str) -> Any:
    library = _LIBRARIES.get(namespace)
    if library is None:
        library = _LIBRARIES[namespace] = torch.library.Library(namespace, "IMPL")
    return library


def _observe_operator(name: str, kernel: Callable[..., Any]) -> None:
    namespace, _, rest = name.partition("::")
    if name in ("aten::detach", "aten::alias"):
        _library(namespace).impl(rest, torch.library.fallthrough_kernel, "Fake")
        return
    operator: Any = None

    def observed(*args: Any, **kwargs: Any) -> Any:
        nonlocal operator
        if operator is None:  # Looking up all would take half a second.
            packet, _, overload = rest.partition(".")
            operators = getattr(getattr(torch.ops, namespace), packet)
            operator = getattr(operators, overload or "default")
        return kernel(operator, *args, **kwargs)

    # `Library.impl` checks for a second kernel of ours, which takes 100 µs each.
    _library(namespace).m.impl(rest, "Fake", observed, False)


# The threads of autograd's devices inherit these objects with the dispatch keys.
_SHARED = "membudget.observers"


def share_with_autograd(observers: Any) -> None:
    """Let threads that autograd starts for this one find `observers`."""
    torch._C._stash_obj_in_tls(_SHARED, observers)


def inherited_by_autograd() -> Any:
    """Return what the thread that called autograd shared; `None` if nothing."""
    if not torch._C._is_key_in_tls(_SHARED):
        return None
    return torch._C._get_obj_in_tls(_SHARED)


@contextlib.contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """Run the engine's own operators past every mode and observer: no user's code."""
    excluded = is_observing_excluded()
    exclude_observers(True)
    try:
        with _disable_current_modes():
            yield
    finally:
        exclude_observers(excluded)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Do the same past every function mode, too."""
    with torch._C.DisableTorchFunction(), without_dispatch_modes():
        yield


def may_read_bytes() -> bool:
    """Tell whether the bytes of tensors can be read now.

    A graph of CUDA that is being captured must not wait for the device, and inside of a
    transform of `torch.func` tensors are wrapped.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return not (
        torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    )


# What whoever forbids saved-tensor hooks says; `None` while they may be used.
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
    """Tell whether a function mode is `torch.device(...)` used as a context."""
    from torch.utils._device import DeviceContext

    return isinstance(mode, DeviceContext)


def set_versions(tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
    """Set version counters, after a buffer was put back to what it held before."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def is_view_operator(operator: Any) -> bool:
    """Tell whether an operator only makes views: it reads no element."""
    schema = operator._schema
    return not schema.is_mutable and any(
        argument.alias_info is not None for argument in schema.arguments
    )


def with_version(make_alias: Callable[[], Tensor]) -> Tensor:
    """Return an alias that shares the version, also from inside a dispatch mode.

    Below autograd, `detach` alone would give the alias a version counter of its own.
    """
    with torch._C._SetExcludeDispatchKeyGuard(
        torch._C.DispatchKey.ADInplaceOrView, False
    ):
        return make_alias()


def detach_with_version(tensor: Tensor) -> Tensor:
    """Return a detached alias that shares the version."""
    return with_version(tensor.detach)


# Operators run as a dispatch mode saw them: autograd and autocast are done by then.
BelowAutograd: Any = torch._C._AutoDispatchBelowADInplaceOrView
WithoutAutocast: Any = torch._C._DisableAutocast


def is_mutable_operator(operator: Any) -> bool:
    """Tell whether an operator writes any of its operands."""
    return bool(operator._schema.is_mutable)


def is_random_operator(operator: Any) -> bool:
    """Tell whether an operator draws from a generator."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def written_arguments(
    operator: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Iterator[Tensor]:
    """Yield the operands that an operator writes in place, lists flattened."""
    for position, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for item in value if isinstance(value, list | tuple) else [value]:
            if isinstance(item, Tensor):
                yield item


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward that is running has ended."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def module_call_codes() -> frozenset[Any]:
    """Return the code objects in whose Python frames `self` is the running module."""
    call: Any = torch.nn.Module._call_impl
    return frozenset((call.__code__,))
