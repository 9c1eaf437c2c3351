"""`checkpoint`: run a function as a region.

A region is a call whose saved tensors are dropped in the forward and recomputed in the
backward pass. These are the rules of the rerun engine; tests cite their numbers. The
rules of the other engine are in `replay`.

Rule 1. Saved tensors belong to the innermost region. The inputs of a region are saved
    tensors of whatever surrounds it: an outer region drops them, an offloader moves
    them.
Rule 2. A recompute runs the function once and stops when the last live handle is
    served. If nothing was saved, or no handle is live, nothing is recomputed.
Rule 3. A recomputed tensor leaves its handle when autograd takes it. So memory falls as
    the backward pass proceeds, and each further unpack (a second backward with
    `retain_graph`, `ctx.saved_tensors` read twice) recomputes again, correctly each
    time. Inside `execution_group` it stays.
Rule 4. Recomputed tensors that a backward pass did not use are freed when it ends.
Rule 5. A recompute sees what the forward saw: arguments and the containers among them,
    random streams, autocast, modes, settings, context variables, training flags, and
    the buffers that the forward advanced.
Rule 6. A recompute leaves no trace: afterwards, streams, buffers with their version
    counters, flags and settings are what they were before, also if it fails.
Rule 7. A function may differentiate inside: `autograd.grad` and `backward` see the same
    tensors, and a recompute adds nothing to the parameters' gradients. What such a
    function saves stays in memory until its forward ends, so that nothing is recomputed
    in the middle; the first calls of a function show whether it differentiates.
Rule 8. If something was changed since the forward, the recompute raises once it reads
    it. Every source is checked by version and storage (`.data =`), including arguments
    that went through saved-tensor hooks around the region. A change by
    `.data.add_(...)`, which bypasses the version on purpose, is found where values are
    compared (Rule 12).
Rule 9. A recomputed tensor that differs from the saved one raises; the error says where
    and why.
Rule 10. A region holds nothing that autograd does not hold: no graph of its inputs, no
    reference cycle of its own. When the graph dies, so does the region.
Rule 11. An exception of the function passes through unchanged, from the forward and
    from the recompute. It gets a note if the region caused it: the function forbids
    saved-tensor hooks, or its recompute raised what its forward did not.
Rule 12. The first call of each signature is verified, and calls number 2, 4, 8, ...
    (see `calls`): the bytes of recomputed and saved tensors are compared, and the bytes
    of everything the function reaches before and after its forward. A large buffer that
    was written behind its version counter is restored from then on, as small ones
    always are. Any other difference raises, and with engine `"auto"` the function is
    replayed from its next call on. A difference that begins between two verified calls
    goes unnoticed until the next; `determinism_check="values"` compares the bytes of
    all calls. Nothing is verified with `verify=False`, without guards, with
    `determinism_check="none"` or with `preserve_rng_state=False`.
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
from membudget.engine.replay.frame import ReplayFrame
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

    What autograd would save inside is dropped, and recomputed when a backward pass
    needs it. Loss, gradients, buffers and random streams equal those of the plain call
    bit for bit; the rules are at the top of this module. It is a drop-in for
    `torch.utils.checkpoint.checkpoint`.

    The options below are taken out of `kwargs`. To pass a keyword of the same name to
    the function, give the options first and the function after:
    `checkpoint(early_stop=False)(function)(x, early_stop=x)`.

    Args:
        function: Any callable: a module, a method, a lambda.
        *args: Its arguments. Tensors may be nested in lists, tuples, dicts, sets and
            dataclasses.
        **kwargs: Its keyword arguments, and options of the region: `use_reentrant`,
            `context_fn`, `determinism_check`, `debug`, `early_stop`,
            `preserve_rng_state`, `guards`, `engine`, `keep`, `verify`, `strict`; see
            `RegionOptions`.

    Returns:
        What `function` returns; without a function, a decorator.

    Raises:
        OptionError: An option has an invalid value.
        ChangedSinceForwardError: In the backward, if something that the function read
            was changed in between (Rule 8).
        RecomputeMismatchError: In the backward, if the recompute differs from the
            forward (Rule 9).

    Memory that the region keeps besides its inputs: 5 KiB for the state of the CPU's
    generator (outside torch's allocator), and a copy of the small buffers that it can
    reach.

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
    return _run_eagerly(function, args, kwargs, options, None)


def run_region(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: RegionOptions = DEFAULTS,
    statistics: Statistics | None = None,
) -> Any:
    """Run one region with options that have been validated, not among `kwargs`."""
    if is_compiling():
        label = "" if statistics is None else statistics.label
        return run_compiled(
            function, args, kwargs, options.keep, options.context_fn, label
        )
    return _run_eagerly(function, args, kwargs, options, statistics)


def _run_eagerly(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: RegionOptions,
    statistics: Statistics | None,
) -> Any:
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    switched = SWITCHES.any
    if switched:
        if SWITCHES.disabled:
            return function(*args, **kwargs)
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
    """Create the frame of the engine that the options and the function select."""
    if not options.always_replays:
        calls = calls_of(function, args, kwargs) if options.verifies else None
        if calls is None or not (calls.owner.replays and options.may_replay):
            frame = RerunFrame(function, args, kwargs, options, statistics, calls)
            if not frame.surroundings.needs_repair:
                return frame
            if not options.may_replay:
                frame.options = _for_rerun(options, frame.surroundings)
                return frame
    return ReplayFrame(function, args, kwargs, options, statistics)


def _for_rerun(options: RegionOptions, surroundings: Surroundings) -> RegionOptions:
    """Return the options for a rerun that was requested where replay would be safer.

    Raises:
        CheckpointError: No rerun can be correct.
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
    """Turn the contexts of selective checkpointing into a policy."""
    policy = policy_of(contexts)
    if policy is not None:
        return replace(options, context_fn=None, debug=False, keep=policy)
    return replace(options, context_fn=lambda: contexts)


def _switched(options: RegionOptions) -> RegionOptions:
    changed: dict[str, Any] = {}
    if SWITCHES.early_stop is not None:
        changed["early_stop"] = SWITCHES.early_stop
    if SWITCHES.debug is not None and not options.use_reentrant:
        changed["debug"] = SWITCHES.debug
    return replace(options, **changed)


def _curried(function: Callable[..., T], options: RegionOptions) -> Callable[..., T]:
    def region(*args: Any, **kwargs: Any) -> Any:
        return run_region(function, args, kwargs, options)

    return region
