"""`checkpoint`: run a function without keeping its activations in memory.

A region is a call whose saved tensors are dropped in the forward and recomputed in the
backward pass. The rerun engine follows the rules below, which tests cite by number; the
rules of the replay engine are in `replay`.

Rule 1. Saved tensors belong to the innermost region. A region's inputs are saved
    tensors of the surrounding code: outer regions drop them, offloaders move them.
Rule 2. A recompute runs the function once and stops as soon as all tensors that are
    still needed are available. If no saved tensor is needed, nothing is recomputed.
Rule 3. The region drops a recomputed tensor when autograd unpacks it. Memory therefore
    falls as the backward pass proceeds, and each further unpack (a second backward with
    `retain_graph`, `ctx.saved_tensors` read twice) causes another recompute with the
    same result. Inside `execution_group`, recomputed tensors stay in memory.
Rule 4. Recomputed tensors that a backward pass did not use are freed at its end.
Rule 5. A recompute sees the state that the forward saw: arguments (including
    containers), random streams, autocast, modes, settings, context variables, training
    flags, and the buffers that the forward updated.
Rule 6. A recompute leaves no trace: random streams, buffers with their version
    counters, flags and settings are the same afterwards, even if the recompute fails.
Rule 7. A function may itself run a backward pass: `autograd.grad` and `backward` get
    the same tensors as without a region, and a recompute adds nothing to the
    parameters' gradients. In the first few calls to a function, and in all calls if it
    runs a backward pass, saved tensors stay in memory until the forward ends, so that
    nothing is recomputed while the forward is running.
Rule 8. If a tensor was changed after the forward, the recompute raises when it reads
    that tensor. Changes are detected by version and storage (`.data =`), even in
    arguments that went through saved-tensor hooks around the region. A change made by
    `.data.add_(...)`, which bypasses the version, is detected only where values are
    compared (Rule 12).
Rule 9. If a recomputed tensor differs from the saved one, an error says where, and why.
Rule 10. A region keeps nothing alive that plain autograd would not: no graph of its
    inputs, no reference cycle of its own. A region is freed with its autograd graph.
Rule 11. An exception raised by the function propagates unchanged, from the forward and
    from the recompute. A note is added if the region caused the exception: the function
    forbids saved-tensor hooks, or only its recompute raised.
Rule 12. The 1st, 2nd, 4th, 8th, ... call with a given signature (see `calls`) is
    verified by comparing the bytes of recomputed and saved tensors, and the bytes,
    before and after the forward, of everything the function can reach. A large buffer
    that was written to without a version bump is restored from then on, as small
    buffers always are; any other difference raises an error, and with `engine="auto"`
    the function is replayed from its next call on. A difference that begins between two
    verified calls goes undetected until the next verified call;
    `determinism_check="values"` compares the bytes of all calls. With
    `verify="fingerprints"` only the calls before the first backward pass are verified,
    because later ones must stay within a plan's bytes; with a share of calls, these and
    some later ones (see `sampling`). Nothing is verified with
    `verify=False`, without guards, with `determinism_check="none"` or with
    `preserve_rng_state=False`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, overload

import torch
from torch.compiler import is_compiling

from membudget.engine import isolation
from membudget.engine.calls import calls_of
from membudget.engine.controls import SWITCHES
from membudget.engine.messages import note_refused_hooks
from membudget.engine.options import (
    DEFAULTS,
    ContextPair,
    RegionOptions,
    Statistics,
    checked_options,
    take_options,
)
from membudget.engine.reentrant import run_reentrant
from membudget.engine.replay.accelerated import replay_frame
from membudget.engine.replay.frame import ReplayFrame
from membudget.engine.rerun_extension import new_frame
from membudget.engine.rerun_frame import RerunFrame
from membudget.engine.surroundings import Surroundings
from membudget.engine.torch_form import (
    checkpoint_in_compiled_code,
    policy_of,
    run_compiled,
)
from membudget.errors import CheckpointError

T = TypeVar("T")


@overload
def checkpoint(function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T: ...


@overload
def checkpoint(
    function: None = None, /, **options: Any
) -> Callable[[Callable[..., T]], Callable[..., T]]: ...


def checkpoint(
    function: Callable[..., Any] | None = None, /, *args: Any, **kwargs: Any
) -> Any:
    """Run `function(*args, **kwargs)` without keeping its activations.

    Tensors that autograd would save are dropped, and recomputed when a backward pass
    needs them. Loss, gradients, buffers and random streams equal those of the plain
    call bit for bit; the rules are at the top of this module. `checkpoint` is a drop-in
    replacement for `torch.utils.checkpoint.checkpoint`.

    Options of the region are not passed on to the function. To pass the function a
    keyword argument named like an option, give the options in a separate call:
    `checkpoint(early_stop=False)(function)(x, early_stop=x)`.

    Args:
        function: Any callable: a module, a method, a lambda.
        *args: Positional arguments of the function. Tensors may be nested in lists,
            tuples, dicts, sets and dataclasses.
        **kwargs: Keyword arguments of the function, and options of the region:
            `use_reentrant`, `context_fn`, `determinism_check`, `debug`, `early_stop`,
            `preserve_rng_state`, `guards`, `engine`, `keep`, `verify`, `strict`,
            `offload`; see `RegionOptions`.

    Returns:
        The result of `function`; without a function, a decorator.

    Raises:
        OptionError: An option has an invalid value.
        ChangedSinceForwardError: In the backward pass, if a tensor that the function
            read was changed after the forward (Rule 8).
        RecomputeMismatchError: In the backward pass, if the recompute differs from the
            forward (Rule 9).

    Besides its inputs, a region keeps 5 KiB of memory for the state of the CPU's random
    generator (outside torch's allocator), and a copy of the small buffers it can reach.

    Example:
        >>> import membudget as mb, torch
        >>> x = torch.linspace(0, 1, 4, requires_grad=True)
        >>> y = mb.checkpoint(lambda x: x.sin().exp(), x)
        >>> (gradient,) = torch.autograd.grad(y.sum(), x)
        >>> (plain,) = torch.autograd.grad(x.sin().exp().sum(), x)
        >>> torch.equal(gradient, plain)
        True
    """
    if is_compiling():
        return checkpoint_in_compiled_code(function, args, kwargs)
    options = take_options(kwargs)
    if function is None:
        checked_options(kwargs)  # Rejects the rest as unknown options.
        return lambda wrapped: _curried(wrapped, options)
    return run_region(function, args, kwargs, options)


def run_region(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: RegionOptions = DEFAULTS,
    statistics: Statistics | None = None,
) -> Any:
    """Run one region with validated options, which are not part of `kwargs`."""
    if is_compiling():
        label = "" if statistics is None else statistics.label
        return run_compiled(
            function, args, kwargs, options.keep, options.context_fn, label
        )
    switched = SWITCHES.any
    if not torch.is_grad_enabled() or (switched and SWITCHES.disabled):
        return function(*args, **kwargs)
    if switched:
        options = _switched(options)
    if options.use_reentrant:
        return run_reentrant(function, args, kwargs, options, statistics)
    if options.context_fn is not None:
        options = _with_contexts(options, options.context_fn())
    counted = options.guards and isolation.enter()
    try:
        frame = _frame(function, args, kwargs, options, statistics)
        result = frame.run(args, kwargs)
    except RuntimeError as error:
        note_refused_hooks(error, function, statistics)
        raise
    finally:
        if counted:
            isolation.leave()
    if statistics is not None:
        statistics.count_call(frame.has_saved)
    if switched and SWITCHES.collector is not None:
        SWITCHES.collector(frame)
    return result


def _frame(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: RegionOptions,
    statistics: Statistics | None,
) -> RerunFrame | ReplayFrame:
    """Create a `RerunFrame` or a `ReplayFrame`, depending on options and function."""
    if not options.always_replays:
        calls = None
        if options.verifies:
            calls = calls_of(function, args, kwargs, options.share)
        if calls is None or not (calls.owner.replays and options.may_replay):
            frame = new_frame(function, args, kwargs, options, statistics, calls)
            # Replay runs the Python once, so it has no side effects to undo.
            if not frame.surroundings.needs_repair:
                return frame
            if not options.may_replay:
                frame.options = _for_rerun(options, frame.surroundings)
                return frame
    return replay_frame(function, args, kwargs, options, statistics)


def _for_rerun(options: RegionOptions, surroundings: Surroundings) -> RegionOptions:
    """Compare fingerprints in all calls if the function can reach TorchScript code.

    Raises:
        CheckpointError: The region holds uninitialised parameters of a lazy module.
    """
    if surroundings.is_lazy:
        raise CheckpointError(
            "a region holds parameters that a lazy module has not initialised yet: "
            "its first forward draws them, which a rerun would not do again. Run one "
            "forward outside of every region first, or leave engine='rerun' out."
        )
    if surroundings.runs_torchscript and options.determinism_check == "default":
        return replace(options, determinism_check="values")
    return options


def _with_contexts(options: RegionOptions, contexts: ContextPair) -> RegionOptions:
    """Add a `context_fn` result to the options, as `keep` if it wraps a policy."""
    policy = policy_of(contexts)
    if policy is not None:
        return replace(options, context_fn=None, debug=False, keep=policy)
    return replace(options, context_fn=lambda: contexts)


def _switched(options: RegionOptions) -> RegionOptions:
    changed: dict[str, Any] = {}
    if SWITCHES.early_stop is not None:
        changed["early_stop"] = SWITCHES.early_stop
    # The classic variant rejects `debug`.
    if SWITCHES.debug is not None and not options.use_reentrant:
        changed["debug"] = SWITCHES.debug
    return replace(options, **changed) if changed else options


def _curried(function: Callable[..., T], options: RegionOptions) -> Callable[..., T]:
    def region(*args: Any, **kwargs: Any) -> Any:
        return run_region(function, args, kwargs, options)

    return region
