"""What probably made a recompute differ from its forward.

Asked only when a region has failed. Each hint is drawn from a fact: a list that grew
while the forward ran, a dtype that changed, a guard that was switched off.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import CodeType, TracebackType
from typing import Any

import torch

from membudget._torch import why_hooks_are_disabled
from membudget.engine.options import RegionOptions
from membudget.engine.reach import reach
from membudget.engine.reads import Reads
from membudget.engine.statistics import Statistics


def module_names(function: Any, label: str = "") -> Mapping[int, str]:
    """Return the path of every module that `function` reaches, by its identity."""
    reached = reach(function, names=True)
    return {
        key: ".".join(filter(None, (label, path)))
        for key, path in reached.module_names.items()
    }


def likely_causes(
    function: Any,
    reads: Reads | None,
    options: RegionOptions,
    saved: Any,
    made: Any,
) -> list[str]:
    """Return hints, the likeliest first.

    Args:
        function: The region's function.
        reads: What it reached; `None` without guards.
        options: The region's options.
        saved: Metadata of the saved tensor, if a pair is at hand.
        made: Metadata of the recomputed one.
    """
    causes = _grown(function, reads)
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
            "TorchScript compiles code anew once it has run, so that a rerun may do "
            "something else than the forward: leave engine='rerun' out"
        )
    if not options.guards:
        causes.append("guards=False: only torch's guarantees hold in this region")
    if not options.preserve_rng_state:
        causes.append("preserve_rng_state=False: random numbers were drawn anew")
    causes.append(
        "Python state that the forward advanced and that nothing brings back (a "
        "counter, a cache, an iterator, the environment, the clock), or a branch on "
        "it; guard such code with membudget.is_recomputing()"
    )
    return causes


def _grown(function: Any, reads: Reads | None) -> list[str]:
    if reads is None:
        return []
    grown = reads.grown()
    if not grown:
        return []
    names = reach(function, names=True).names or {}
    return [
        f"the {type(container).__name__} {names.get(id(container), '?')!r} grew from "
        f"{before} to {after} while the forward ran (a cache?): pass it as an "
        "argument, whose lists are seen again as they were, or do not fill it here"
        for container, before, after in grown
    ]


def note_refused_hooks(
    error: RuntimeError, function: Any, statistics: Statistics | None
) -> None:
    """Name the region in an error of code that forbids saved-tensor hooks.

    `torch.func.grad` and `torch.autograd.graph.disable_saved_tensors_hooks` raise where
    hooks are active, with a text of autograd's or of the user's own.

    Args:
        error: What came out of the region.
        function: The region's function.
        statistics: Of the region, if somebody counts: they have its name.
    """
    label = statistics.label if statistics is not None else ""
    notes = getattr(error, "__notes__", ())
    if _is_of_hooks(error) and not any(note.startswith(_REFUSED) for note in notes):
        error.add_note(
            f"{_REFUSED} {label or _title(function)}: a region takes what autograd "
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
    return last is not None and last.tb_frame.f_code is _disabling_code()


def _disabling_code() -> CodeType:
    disable: Any = torch.autograd.graph.disable_saved_tensors_hooks
    code: CodeType = disable.__wrapped__.__code__
    return code


def _title(function: Any) -> str:
    name = getattr(function, "__qualname__", None)
    return repr(name or type(function).__qualname__)
