"""What an error says about a recompute that differs from its forward.

The message names the first saved tensor that differs, where it was recomputed, and
probable causes. Each hint follows from a fact: a list that grew while the forward ran,
a dtype that changed, a guard that was disabled. With `debug=True`, the message also
lists the operators of both runs around the first difference.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor

from membudget._torch import tree_iter, why_hooks_are_disabled
from membudget.callsite import CallSite, is_internal
from membudget.engine.options import RegionOptions, Statistics
from membudget.engine.reach import reach
from membudget.engine.reads import Reads
from membudget.errors import RecomputeMismatchError
from membudget.observer import Observer


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
        index: The first saved tensor that differs; `None` if their number does.
        site: Where the recompute was; `None` if it had ended.
        saved: What the forward saved.
        recomputed: What the recompute produced.
        causes: Probable causes.
        traces: The operators of both runs, with `debug=True`.
    """
    what = "the number of tensors" if index is None else f"saved tensor {index}"
    lines = [
        f"the recompute of a region did not repeat its forward: {what} differs.",
        f"  saved in the forward: {saved}",
        f"  made by the recompute: {recomputed}",
    ]
    facts = {"module_path": "", "operator": "", "line": ""}
    if site is not None:
        facts = {
            "module_path": site.module_path,
            "operator": site.operator,
            "line": site.line,
        }
        where = f"module {site.module_path!r}, " if site.module_path else ""
        lines.append(f"  where: {where}{site.operator} at {site.line}")
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


def module_names(function: Any, label: str = "") -> Mapping[int, str]:
    """Return the path of every module that `function` reaches, by `id`."""
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
    """Return hints, the most probable first.

    Args:
        function: The region's function.
        reads: What it reached; `None` without guards.
        options: The region's options.
        saved: Metadata of the saved tensor, if one pair differs.
        made: Metadata of the recomputed tensor.
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
    """Name the region in an error raised by code that forbids saved-tensor hooks.

    `torch.func.grad` and `torch.autograd.graph.disable_saved_tensors_hooks` raise where
    hooks are active, with autograd's message or the user's own.

    Args:
        error: The error that the region raised.
        function: The region's function.
        statistics: The region's counters, if any; they know its name.
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


_BEFORE = 4

_AFTER = 4

_STACK = 3


class Trace(Observer):
    """Records every operator that runs inside.

    Attributes:
        operators: Each operator as text, in order.
        stacks: The user's stack at each operator, innermost line first.
    """

    def __init__(self) -> None:
        """Start with an empty list."""
        self.operators: list[str] = []
        self.stacks: list[str] = []

    def observe(self, operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Record the operator and run it."""
        operands = ", ".join(
            f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
            for t in tree_iter((args, kwargs))
            if isinstance(t, Tensor)
        )
        self.operators.append(f"{operator}({operands})")
        self.stacks.append(_user_stack())
        return operator(*args, **kwargs)


def _user_stack() -> str:
    lines: list[str] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(lines) < _STACK:
        if not is_internal(frame.f_code):
            name = os.path.basename(frame.f_code.co_filename)
            lines.append(f"{name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(lines)


def side_by_side(forward: Trace, recompute: Trace) -> str:
    """Return both traces around the first operator that differs."""
    first = _first_difference(forward.operators, recompute.operators)
    return "\n".join(
        [
            *_excerpt("operators of the forward", forward, first),
            *_excerpt("operators of the recompute", recompute, first),
        ]
    )


def _first_difference(a: Sequence[str], b: Sequence[str]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def _excerpt(title: str, trace: Trace, first: int) -> list[str]:
    start = max(0, first - _BEFORE)
    end = min(len(trace.operators), first + _AFTER)
    lines = [f"  {title} ({len(trace.operators)} in all, from number {start}):"]
    for i in range(start, end):
        mark = ">" if i == first else " "
        lines.append(f"  {mark} {i:4d} {trace.operators[i]}  [{trace.stacks[i]}]")
    return lines
