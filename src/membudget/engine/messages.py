"""Build a region's error messages: what changed or differs, where, and likely causes.

A *mismatch* message names the first saved tensor that differs, the line that recomputed
it, and probable causes. Each suggested cause rests on an observed fact: a list that
grew during the forward, a dtype that changed, a disabled guard. With `debug=True`, a
mismatch message also lists the operators of both runs around the first difference.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import MethodType, TracebackType
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from membudget._torch import why_hooks_are_disabled
from membudget.callsite import CallSite, running_module
from membudget.engine.options import RegionOptions, Statistics
from membudget.engine.reach import reach
from membudget.errors import (
    ChangedSinceForwardError,
    CheckpointError,
    RecomputeMismatchError,
)
from membudget.state.identity import address_of

MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an "
    "inplace operation"
)


def overwritten_error(what: str) -> ChangedSinceForwardError:
    """Return the error for a tensor that was written to after autograd saved it."""
    return ChangedSinceForwardError(
        f"{MODIFIED}: {what} in a region was changed. Use the out-of-place operator, "
        "or change a clone.",
        [what],
    )


def changed_error(names: list[str]) -> ChangedSinceForwardError:
    """Return the error for tensors that other code changed after the forward."""
    return ChangedSinceForwardError(
        f"{' and '.join(names)} was changed after the forward of a region that reads "
        "it, and before its recompute, so its gradients would be wrong. (Plain "
        f"autograd: {MODIFIED}.) Change it after the backward, or pass the region a "
        "copy (`tensor.clone()`).",
        names,
    )


def rewritten_error(name: str) -> ChangedSinceForwardError:
    """Return the error for a tensor that the region itself modifies in place."""
    return ChangedSinceForwardError(
        f"{name} is changed in place by the region itself, so a recompute cannot start "
        "from the content that the forward started from. Pass the region a copy "
        "(`tensor.clone()`), avoid the in-place operator (`inplace=False`), or "
        "make the tensor a buffer of a module that the region calls: buffers are "
        "restored before a recompute.",
        [name],
        by_region=True,
    )


def silently_written_error(
    names: list[str], by_recompute: bool = False
) -> ChangedSinceForwardError:
    """Return the error for tensors that the region writes to without a version bump.

    If `by_recompute` is set, a recompute has already repeated the write.
    """
    again = "has written" if by_recompute else "would write"
    return ChangedSinceForwardError(
        "A region writes memory behind the version counters (`.data`, NumPy, a kernel "
        f"such as batch_norm's): {', '.join(names)}. A recompute starts from the "
        f"content that the forward left, and {again} it again. Move the "
        "write out of the region, or make the tensor a buffer of a module that the "
        "region calls: buffers are restored before a recompute.",
        names,
        by_region=True,
    )


def mismatch_error(
    index: int | None,
    site: CallSite | None,
    saved: str,
    recomputed: str,
    causes: Sequence[str],
    traces: str = "",
) -> RecomputeMismatchError:
    """Return the error for a recompute that differs from its forward.

    Args:
        index: Index of the first differing tensor; `None` if the tensor counts differ.
        site: Operator and line that recomputed the tensor; `None` if unknown.
        saved: Description of the tensor or tensor count that the forward saved.
        recomputed: Description of the recomputed tensor or tensor count.
        causes: Probable causes, the most likely first.
        traces: Operators of both runs as text; empty without `debug=True`.
    """
    what = "the number of tensors" if index is None else f"saved tensor {index}"
    lines = [
        f"the recompute of a region did not repeat its forward: {what} differs.",
        f"  saved in the forward: {saved}",
        f"  recomputed: {recomputed}",
    ]
    facts: dict[str, str] = {}
    if site is not None:
        path, operator, line = site.module_path, site.operator, site.line
        facts = {"module_path": path, "operator": operator, "line": line}
        where = f"module {path!r}, " if path else ""
        lines.append(f"  where: {where}{operator} at {line}")
    lines += [f"  likely cause: {cause}" for cause in causes]
    lines.append(
        traces
        or "  To see the operators of both runs, give the region debug=True or use "
        "set_checkpoint_debug_enabled(True)."
    )
    return RecomputeMismatchError(
        "\n".join(lines),
        index=index,
        saved=saved,
        recomputed=recomputed,
        causes=causes,
        **facts,
    )


def names_of(function: Any, others: list[Any]) -> dict[int, str]:
    """Return names of objects that `function` reaches, keyed by `id` and address."""
    reached = reach(function, others, names=True)
    known = dict(reached.names or {})
    for tensor in reached.tensors:
        known.setdefault(address_of(tensor), known[id(tensor)])
    return known


def name_of(tensor: Tensor, names: dict[int, str]) -> str:
    """Return a tensor's name for error messages, or its shape if it has no name."""
    kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor"
    # A detached alias shares only the storage with the tensor that has a name.
    name = names.get(id(tensor)) or names.get(address_of(tensor))
    return f"{kind} {name!r}" if name else f"a {kind} of shape {tuple(tensor.shape)}"


def module_names(function: Any, label: str = "") -> Mapping[int, str]:
    """Return the path of every module that `function` can reach, keyed by `id`."""
    reached = reach(function, names=True)
    return {
        key: ".".join(filter(None, (label, path)))
        for key, path in reached.module_names.items()
    }


def module_path_in(function: Any, label: str) -> Callable[[], str]:
    """Return what returns the path of the module of `function` that runs now."""
    names: dict[int, str] = {}

    def module_path() -> str:
        if not names:
            names.update(module_names(function, label))
        return running_module(names)

    return module_path


def likely_causes(
    function: Any,
    grown: Sequence[tuple[Any, int, int]],
    options: RegionOptions,
    saved: Any,
    made: Any,
) -> list[str]:
    """Return hints on the cause of a mismatch, the most probable first.

    `grown` lists containers that grew during the forward, with their lengths before and
    after; `saved` and `made` are the metadata of the first tensors that differ, if any.
    """
    names = reach(function, names=True).names or {} if grown else {}
    causes = [
        f"the {type(container).__name__} {names.get(id(container), '?')!r} grew from "
        f"{before} to {after} while the forward ran (a cache?): pass it as an "
        "argument, whose lists a recompute restores, or do not fill it here"
        for container, before, after in grown
    ]
    if saved is not None and made is not None:
        if saved[1] != made[1]:
            causes.append(
                f"the dtype changed from {saved[1]} to {made[1]}: code that casts by a "
                "flag of its own, or state that another dtype was stored in"
            )
        elif saved[2] != made[2]:
            causes.append(f"the device changed from {saved[2]} to {made[2]}")
        elif saved[0] != made[0] and "torch._dynamo" in sys.modules:
            causes.append(
                "the shape changed; if the region calls compiled code that was "
                "compiled again in between, name its varying sizes with "
                "torch._dynamo.mark_dynamic"
            )
        elif saved[0] == made[0] and saved[3] != made[3]:
            causes.append("only the memory layout differs: hooks that drop strides")
    if reach(function).runs_torchscript:
        causes.append(
            "TorchScript recompiles code after its first runs, so a rerun may save "
            "other tensors than the forward: omit engine='rerun'"
        )
    if not options.guards:
        causes.append("guards=False: only torch's guarantees hold in this region")
    if not options.preserve_rng_state:
        causes.append("preserve_rng_state=False: random numbers were drawn anew")
    causes.append(
        "Python state that the forward advanced and that nothing restores (a "
        "counter, a cache, an iterator, the environment, the clock), or a branch on "
        "it; guard such code with membudget.is_recomputing()"
    )
    return causes


def note_refused_hooks(
    error: RuntimeError, function: Any, statistics: Statistics | None
) -> None:
    """Name the region in errors raised by code that forbids saved-tensor hooks.

    `torch.func.grad` and `torch.autograd.graph.disable_saved_tensors_hooks` raise if
    saved-tensor hooks are active, with a message from autograd or from the user.
    """
    label = statistics.label if statistics is not None else ""
    notes = getattr(error, "__notes__", ())
    if _is_of_hooks(error) and not any(note.startswith(_REFUSED) for note in notes):
        name = getattr(function, "__qualname__", type(function).__qualname__)
        error.add_note(
            f"{_REFUSED} {label or repr(name)}: a region takes what autograd "
            "saves by saved-tensor hooks, which torch.func.grad, vjp, jacrev, hessian "
            "and torch.autograd.graph.disable_saved_tensors_hooks forbid. Keep such "
            "code out of the region, or differentiate with torch.autograd.grad."
        )


_REFUSED = "Raised in the region"


def _is_of_hooks(error: RuntimeError) -> bool:
    if why_hooks_are_disabled() is not None:
        return str(error) == why_hooks_are_disabled()
    trace = error.__traceback__
    last: TracebackType | None = None
    while trace is not None:
        last, trace = trace, trace.tb_next
    # By code object, because the message may be the user's.
    disable: Any = torch.autograd.graph.disable_saved_tensors_hooks
    return last is not None and last.tb_frame.f_code is disable.__wrapped__.__code__


def inexact_inside_error() -> CheckpointError:
    """Return the error of a region with subclasses that differentiates inside."""
    return CheckpointError(
        "a replay region in which tensor subclasses live differentiates inside: while "
        "it is recorded, autograd takes other formulas than in the plain step. Give "
        'the region engine="rerun".'
    )


def freed_error() -> CheckpointError:
    """Return the error of a replay that needs a parameter without memory."""
    return CheckpointError(
        "a replay needs a parameter whose memory FSDP has freed: it gathers "
        "the parameter only for the backward of its own module. Put the region "
        "inside that module, or keep the module's outputs."
    )


def weakly(function: Callable[..., Any]) -> Callable[[], Any]:
    """Return a weak reference to a region's function, used to name tensors in errors.

    A strong reference could form a cycle: the autograd graph owns the reference, and
    the function may own the graph.
    """
    owner = function.__self__ if isinstance(function, MethodType) else function
    try:
        return ref(owner)
    except TypeError:
        return lambda: None
