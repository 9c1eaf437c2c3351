"""Random programs over streams and devices have the plain bits under every engine."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import membudget as mb
from tests.emulated import emu
from tests.emulated.programs import Program, Region, draw, plain, run
from tests.emulated.world import MOVE

# Torch says it of the plain step.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The AccumulateGrad node's stream:UserWarning"
)

SEEDS = range(40)
OPTIONS: dict[str, dict[str, Any]] = {
    "rerun": {"engine": "rerun"},
    "unguarded": {"engine": "rerun", "guards": False},
    "replay": {"engine": "replay"},
    "keep": {"engine": "replay"},
    "unverified": {"engine": "replay", "verify": False},
    "fingerprints": {"engine": "replay", "verify": "fingerprints"},
}
# What `guards=False` leaves to the user.
UNGUARDED = {"noise", "counted", MOVE}


def keeps_some(seed: int, candidate: mb.policies.Candidate) -> bool:
    return random.Random(seed * 1000 + candidate.index).random() < 0.4


def nested(function: Region, argument: Tensor) -> Any:
    inner = functools.partial(mb.checkpoint, function)
    return mb.checkpoint(inner, argument, engine="replay")


def mixed(function: Any, argument: Tensor) -> Any:
    (_, part), engines = function.args, ("rerun", "replay")
    return mb.checkpoint(function, argument, engine=engines[len(part.lines) % 2])


@functools.cache
def few_blocks() -> mb.Offload:
    """Return host memory that all programs share: each block is soon used again."""
    return mb.offload("1KiB", window=256, smallest=1, first=0)


def engine(name: str, seed: int) -> Region:
    if name == "offload":
        chosen = functools.partial(keeps_some, seed)
        moved = mb.policies.offloaded(chosen, few_blocks())
        return functools.partial(mb.checkpoint, engine="replay", keep=moved)
    if name == "inputs":
        return functools.partial(mb.checkpoint, engine="rerun", offload=few_blocks())
    if name == "keep":
        keep = functools.partial(keeps_some, seed)
        return functools.partial(mb.checkpoint, **OPTIONS[name], keep=keep)
    if name in OPTIONS:
        return functools.partial(mb.checkpoint, **OPTIONS[name])
    return {"nested": nested, "mixed": mixed}[name]


@functools.cache
def expected(seed: int) -> tuple[Program, dict[str, Tensor]]:
    program = draw(seed)
    return program, plain(program)


def unequal(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def test_a_plain_program_waits_for_all_that_it_reads():
    found = {seed: expected(seed)[1] for seed in SEEDS}
    emu.configure(mode="eager")
    assert [seed for seed in SEEDS if unequal(found[seed], plain(draw(seed)))] == []


def is_offered(name: str, program: Program) -> bool:
    return name != "unguarded" or program.operators.isdisjoint(UNGUARDED)


@pytest.mark.parametrize("name", [*OPTIONS, "nested", "mixed", "offload", "inputs"])
def test_a_program_over_streams_and_devices_has_the_plain_bits(name: str):
    drawn = [(seed, *expected(seed)) for seed in SEEDS]
    wrong = {
        seed: found
        for seed, program, plainly in drawn
        if is_offered(name, program)
        and (found := unequal(plainly, run(program, engine(name, seed))))
    }
    assert wrong == {}
