"""What a budget warns of, in sentences."""

from __future__ import annotations

import warnings
from collections import Counter

from torch.nn import Module

from membudget.errors import BudgetWarning
from membudget.loop.history import History

MOST_NAMED = 3
"""How many regions a note names."""

OUT_OF_REACH = (
    "a call of the model ran without a plan, and is not bounded: saved-tensor hooks do "
    "not work there (inside a torch.func transform, or while a CUDA graph is captured)"
)


def warn_of_no_plan(model: Module, why: str) -> None:
    """Warn that a model does not run on fake tensors."""
    warnings.warn(
        f"{type(model).__name__} cannot be recorded on fake tensors ({why}), so there "
        "is no plan: every block is recomputed, and whether that fits is measured, not "
        "predicted",
        BudgetWarning,
        stacklevel=3,
    )


def were_refused(times: int) -> str:
    """Say how often a call was refused, which a loop that catches errors may not."""
    return (
        f"{times} {'calls were' if times > 1 else 'call was'} refused with a "
        "BudgetError, of the model or of an optimizer's step, and did not run"
    )


def exceeded(history: History, peak_bytes: int, is_other: bool = False) -> str:
    """Say of a micro-batch that it took more than was left for it.

    Args:
        history: The situation whose plan served it.
        peak_bytes: What it took.
        is_other: Whether it is of another situation, by numbers or strings.
    """
    then = "the next plan expects that"
    if is_other:
        then = "numbers among its arguments decide something, and count from now on"
    if history.predicted is None:
        then = "there is no plan, and each block is recomputed already"
    return (
        f"a micro-batch of {history.text} took {peak_bytes:,} bytes, "
        f"{history.over_bytes(peak_bytes):,} more than were left for it; {then}"
    )


def found_no_memory(forwards: int) -> str:
    """Say after how many forwards memory ran out."""
    return (
        f"after {forwards} forwards the loss or the backward pass found no memory: the "
        "plan was tightened each time"
    )


def not_followed(differences: Counter[str]) -> str:
    """Say in which regions calls did not follow their plan; empty if all did."""
    named = [f"{n or 'the model'} ({of})" for n, of in differences.most_common() if of]
    if not named:
        return ""
    more = f", and in {len(named) - MOST_NAMED} more" if named[MOST_NAMED:] else ""
    return (
        "calls that ran other operators than planned may have kept less than their "
        f"plan, in {', '.join(named[:MOST_NAMED])}{more}"
    )
