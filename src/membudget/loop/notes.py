"""What a budget warns of, in sentences."""

from __future__ import annotations

from collections import Counter

from torch.nn import Module

from membudget.loop.history import History

MOST_NAMED = 3
"""How many regions a note names."""

OUT_OF_REACH = (
    "the model was called where regions cannot take what autograd saves, in a "
    "transform of torch.func or the capture of a graph: it ran without a plan, and "
    "nothing bounds what that takes"
)


def unrecordable(model: Module, why: str) -> str:
    """Say of a model that it does not run on fake tensors."""
    return (
        f"{type(model).__name__} cannot be recorded without memory ({why}), so no plan "
        "is made: every block is recomputed, and whether that is within the budget is "
        "measured, not known before"
    )


def exceeded(history: History, peak_bytes: int) -> str:
    """Say of a micro-batch that it took more than was left for it."""
    beyond = peak_bytes - history.limit_bytes
    return (
        f"a micro-batch of {history.text} took {peak_bytes:,} bytes, {beyond:,} more "
        "than were left for it; the next plan expects that"
    )


def not_followed(differences: Counter[str]) -> str:
    """Say in which regions calls did not follow their plan; empty if all did."""
    named = [f"{n or 'the model'} ({of})" for n, of in differences.most_common() if of]
    if not named:
        return ""
    more = f", and in {len(named) - MOST_NAMED} more" if named[MOST_NAMED:] else ""
    return (
        "calls that ran other operators than planned kept nothing from there on, in "
        f"{', '.join(named[:MOST_NAMED])}{more}"
    )
