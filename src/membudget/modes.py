"""Modes of `fit` that need no planner: the well-known checkpointing rules.

* `none`: no regions, so that nothing is recomputed.
* `full`: every block recomputes everything.
* `selective`: every block keeps the outputs of matrix products, convolutions and
  attention, and recomputes everything else, which is cheap.
* `attention`: every block keeps the outputs of attention kernels, and recomputes
  everything else. Attention that a model writes out, in products and a softmax, has no
  such kernel: nothing is kept of it.
* `every_n`, such as `every_2`: every n-th block recomputes everything.

A block is a module call that saves at most a quarter of the activation bytes, as far
as the model's module tree permits. A block gets no region if autograd saves no tensor
that the block computes, as for an embedding layer. Outputs that must not be recomputed,
such as routing decisions, are always kept.
"""

from __future__ import annotations

import re
from operator import attrgetter

import torch

from membudget.errors import OptionError
from membudget.graph import ModuleCall, StepGraph
from membudget.planner.blocks import module_blocks
from membudget.planner.choice import RERUN, Block, Choice, made_in, storages_saved_in
from membudget.planner.overheads import Overheads
from membudget.planner.schedule import Schedule, Simulator
from membudget.planner.second_run import communicates
from membudget.policies import Policy, attention, convolutions, matmuls, nothing

AUTO = "auto"
"""The mode that searches for a plan."""

MODES = (AUTO, "none", "full", "selective", "attention", "every_2", "every_3")
"""Modes listed in error messages; `every_n` is valid for every n."""

BLOCK_SHARE = 1 / 4
"""Largest share of the saved bytes that one block may have."""

_EVERY = re.compile(r"every_([1-9]\d{0,5})")
_KEPT = {"selective": matmuls | convolutions | attention, "attention": attention}
"""The operators whose outputs a mode keeps; the other modes keep none."""


def check_mode(mode: str) -> None:
    """Raise an `OptionError` that lists the valid modes if `mode` is unknown."""
    is_known = isinstance(mode, str) and (mode in MODES or _EVERY.fullmatch(mode))
    if not is_known:
        named = ", ".join(map(repr, MODES))
        raise OptionError(
            f"there is no mode {mode!r}; the modes are {named} and so on, for every "
            "n-th block"
        )


def schedule_of_mode(mode: str, graph: StepGraph, overheads: Overheads) -> Schedule:
    """Return the schedule that a rule, such as `full` or `every_2`, prescribes."""
    check_mode(mode)
    calls = _calls(mode, graph)
    policy = _KEPT.get(mode, nothing)
    choices = tuple(_choice(graph, call, policy) for call in calls)
    simulator = Simulator(graph, overheads)
    return simulator.with_plain_times(simulator.schedule(calls, choices))


def _calls(mode: str, graph: StepGraph) -> tuple[ModuleCall, ...]:
    if mode == "none":
        return ()
    every = _EVERY.fullmatch(mode)
    step = 1 if every is None else int(every[1])
    calls = module_blocks(graph, BLOCK_SHARE)
    blocks = [call for call in calls if _saves_its_own(graph, call)]
    return tuple(blocks[::step])


def _saves_its_own(graph: StepGraph, call: ModuleCall) -> bool:
    """Return whether autograd saves any tensor that a module call computes."""
    block = Block(call.start, call.end)
    saved = storages_saved_in(graph, block).values()
    return not made_in(graph, block).isdisjoint(saved)


def _choice(graph: StepGraph, call: ModuleCall, policy: Policy) -> Choice:
    block = Block(call.start, call.end)
    operators = graph.operators[call.start : call.end]
    if policy is nothing and any(map(communicates, operators)):
        return Choice(call.start, call.end, engine=RERUN)
    kept = set()
    for storage in made_in(graph, block):
        operator = graph.operators[graph.storages[storage].birth]
        if operator.must_keep or _keeps(policy, operator.name):
            kept.add(storage)
    return Choice(call.start, call.end, frozenset(kept))


def _keeps(policy: Policy, name: str) -> bool:
    """Return whether a policy keeps the outputs of a recorded operator.

    Example:
        >>> _keeps(matmuls, "aten.addmm.default"), _keeps(matmuls, "aten.gelu.default")
        (True, False)
        >>> _keeps(matmuls, "nowhere.to_be.found")
        False
    """
    try:
        return bool(policy.by_operator(attrgetter(name)(torch.ops)))
    except AttributeError:  # Not registered on this machine, or without overloads.
        return False
