"""Policies for a replay region, and the modes of `fit` that need no planner.

Policies compose with `|`, `&`, `~`:

>>> import membudget as mb
>>> keep = mb.policies.matmuls | mb.policies.attention

The modes are the ways to checkpoint that people know by a name:

* `none`: no region.
* `full`: each block keeps nothing.
* `selective`: each block keeps the outputs of its matrix products, convolutions and
  attention, and recomputes the cheap rest.
* `every_n`, such as `every_2`: each n-th block, the first among them, keeps nothing.

Their blocks are those of `planner.blocks`, each of which saves at most a quarter of the
activations if it can be cut so; blocks that save nothing of what they make, such as an
embedding, are passed over. What must not run again, such as a routing decision, is kept
in every mode.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter

import torch

from membudget.engine.policy import (
    Candidate,
    Policy,
    everything,
    inside,
    named,
    nothing,
    operators,
)
from membudget.errors import OptionError
from membudget.graph import ModuleCall, Operator, StepGraph
from membudget.planner.blocks import module_blocks
from membudget.planner.choice import Block, Choice, made_in, saved_storages
from membudget.planner.costs import Overheads
from membudget.planner.schedule import Schedule, Simulator

__all__ = [
    "Candidate",
    "Policy",
    "attention",
    "convolutions",
    "everything",
    "inside",
    "matmuls",
    "named",
    "nothing",
    "operators",
]


matmuls = operators(
    *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "addr"),
    *("_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "_int_mm"),
    *("linear", "mkldnn_linear", "_addmm_activation"),
)


convolutions = operators(
    *("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution"),
    *("convolution_overrideable", "_slow_conv2d_forward", "conv_depthwise3d"),
    *("cudnn_convolution_transpose", "miopen_convolution"),
)


attention = operators(
    *("_scaled_dot_product_flash_attention", "_flash_attention_forward"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_efficient_attention_forward"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    *("_scaled_dot_product_attention_math_for_mps", "_cudnn_attention_forward"),
    "_scaled_dot_product_fused_attention_overrideable",
)


AUTO = "auto"
"""The mode in which the planner chooses."""

MODES = (AUTO, "none", "full", "selective", "every_2", "every_3")
"""The modes, for an error; any other number may stand in place of the last."""

BLOCK_SHARE = 1 / 4
"""The largest share of what is saved that a block of a mode has."""

_EVERY = re.compile(r"every_([1-9]\d{0,5})")
_DEAR = matmuls | convolutions | attention


def check_mode(mode: str) -> None:
    """Refuse what is no mode.

    Raises:
        OptionError: If it is none; it names those that there are.
    """
    is_known = isinstance(mode, str) and (mode in MODES or _EVERY.fullmatch(mode))
    if not is_known:
        known = ", ".join(map(repr, MODES))
        raise OptionError(
            f"there is no mode {mode!r}; the modes are {known} and so on, for every "
            "n-th block"
        )


def schedule_of_mode(mode: str, graph: StepGraph, overheads: Overheads) -> Schedule:
    """Return the regions of a mode other than `auto`, and what comes of them.

    Raises:
        OptionError: If there is no such mode.
    """
    check_mode(mode)
    keeps = _keeps_dear if mode == "selective" else _keeps_nothing
    calls = _calls(mode, graph)
    choices = tuple(_choice(graph, call, keeps) for call in calls)
    schedule = Simulator(graph).schedule(calls, choices)
    overhead_s = sum(overheads.recording_s(graph, choice) for choice in choices)
    overhead_s += overheads.again_s(graph, schedule.simulation.recomputed)
    return replace(schedule, overhead_s=overhead_s)


def _calls(mode: str, graph: StepGraph) -> tuple[ModuleCall, ...]:
    if mode == "none":
        return ()
    every = _EVERY.fullmatch(mode)
    step = 1 if every is None else int(every[1])
    calls = module_blocks(graph, BLOCK_SHARE)
    blocks = [call for call in calls if _saves_its_own(graph, call)]
    return tuple(blocks[::step])


def _saves_its_own(graph: StepGraph, call: ModuleCall) -> bool:
    """Tell whether autograd keeps, for the call, something that the call makes."""
    block = Block(call.start, call.end)
    return not made_in(graph, block).isdisjoint(saved_storages(graph, block))


def _choice(
    graph: StepGraph, call: ModuleCall, keeps: Callable[[Operator], bool]
) -> Choice:
    block = Block(call.start, call.end)
    kept = frozenset(
        storage
        for storage in made_in(graph, block)
        if keeps(graph.operators[graph.storages[storage].birth])
    )
    return Choice(block.start, block.end, kept)


def _keeps_nothing(operator: Operator) -> bool:
    return operator.must_keep


def _keeps_dear(operator: Operator) -> bool:
    return operator.must_keep or _is_dear(operator.name)


def _is_dear(name: str) -> bool:
    """Tell whether an operator is a matrix product, a convolution or attention.

    Example:
        >>> _is_dear("aten.addmm.default"), _is_dear("aten.gelu.default")
        (True, False)
        >>> _is_dear("nowhere.to_be.found")
        False
    """
    try:
        return bool(_DEAR.by_operator(attrgetter(name)(torch.ops)))
    except AttributeError:  # It was profiled elsewhere, or has no overloads.
        return False
