"""Blocks that rerun: which may, what they run, and what is live meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from membudget.graph import ModuleCall, StepGraph
from membudget.planner.choice import RERUN, Block, Choice, saved_in
from membudget.planner.overheads import Overheads
from membudget.planner.schedule import Simulator
from membudget.planner.second_run import (
    SMALL_BUFFER_BYTES,
    may_rerun,
    rerun_operators,
)
from membudget.planner.simulate import simulate
from membudget.planner.timeline import timeline
from membudget.state.snapshot import is_small
from tests.planner.drafts import Draft, chain_of


def chain(*sizes: int) -> tuple[Draft, list[int]]:
    """Return a chain of operators, each of which saves what it reads and makes."""
    draft, value = Draft(), None
    value = draft.outside()
    made = []
    for size in sizes:
        (after,) = draft.run(value, makes=[size])
        draft.save(value, after)
        made.append(after)
        value = after
    return draft, made


def asked_again(graph: StepGraph, moment: int) -> StepGraph:
    """Return the step with its last saved tensor unpacked at one more op index."""
    *others, last = graph.saved
    asked = tuple(sorted({*last.asked, moment}))
    return replace(graph, saved=(*others, replace(last, asked=asked)))


def test_a_rerun_stops_before_an_operator_whose_inputs_are_saved_last():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[4])
    draft.run(a, makes=[4])
    draft.save(a)
    graph, block = draft.finish(), Block(0, 2)
    assert list(rerun_operators(graph, block, saved_in(graph, block))) == [0]


def test_a_rerun_runs_the_operator_whose_output_is_saved_last():
    draft, _ = chain(4, 4)
    graph, block = draft.finish(), Block(0, 2)
    assert list(rerun_operators(graph, block, saved_in(graph, block))) == [0, 1]


def test_a_rerun_runs_no_more_once_autograd_has_freed_what_was_saved_last():
    draft, _ = chain(4, 4)
    graph, block = draft.finish(), Block(0, 2)
    held = saved_in(graph, block)[:2]
    assert list(rerun_operators(graph, block, held)) == [0]


def test_the_first_tensor_that_is_unpacked_makes_all_of_them_live():
    graph = chain(2, 3, 4)[0].finish()
    found = simulate(graph, [Choice(0, 3, engine=RERUN)])
    assert found.replayed == ()
    assert found.recomputed == found.reran == (0, 1, 2)
    assert found.seconds == graph.seconds + 3.0
    # In the forward each is freed; in the first operator of the backward all are live.
    assert found.alive_bytes[1] < timeline(graph).alive_bytes[2]
    assert found.alive_bytes[graph.backward_start] == 2 + 3 + 4


def test_what_a_function_releases_and_does_not_save_is_live_in_a_rerun_only_briefly():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[100])
    (b,) = draft.run(a, makes=[1])
    draft.save(b)
    (c,) = draft.run(b, makes=[1])
    draft.save(c)
    graph = draft.finish()
    found = simulate(graph, [Choice(0, 3, engine=RERUN)])
    turn = graph.backward_start
    assert found.alive_bytes[turn] <= 3
    assert found.peak_bytes >= 101


def test_two_blocks_that_rerun_one_after_the_other_need_less_than_one():
    graph = chain_of([4] * 6, [1.0] * 6, per_call=3)
    both = [Choice(0, 3, engine=RERUN), Choice(3, 6, engine=RERUN)]
    found = simulate(graph, both)
    assert found.peak_bytes < simulate(graph, [Choice(0, 6, engine=RERUN)]).peak_bytes
    # Nothing saves what the last operator of a block makes.
    assert found.reran == (3, 4, 0, 1)


def test_inputs_of_a_block_that_reruns_are_live_until_its_backward_has_ended():
    draft = Draft()
    (x,) = draft.run(draft.outside(), makes=[50])
    (a,) = draft.run(x, makes=[1])
    (b,) = draft.run(a, makes=[1])
    draft.save(b)
    graph = draft.finish()
    storage = graph.values[x].storage
    assert graph.storages[storage].death <= 2
    found = simulate(graph, [Choice(1, 3, engine=RERUN)])
    assert found.alive_bytes[graph.backward_start] >= 50


def test_an_argument_that_no_operator_reads_is_live_until_then_too():
    draft = Draft()
    (x,) = draft.run(draft.outside(), makes=[50])
    (a,) = draft.run(draft.outside(), makes=[1])
    draft.save(a)
    alone = draft.finish()
    called = replace(alone, calls=(ModuleCall("m", 1, 2, (x,)),))
    reruns = [Choice(1, 2, engine=RERUN)]
    turn = alone.backward_start
    assert simulate(alone, reruns).alive_bytes[turn] < 50
    assert simulate(called, reruns).alive_bytes[turn] >= 50


def test_regions_hold_copies_of_buffers_up_to_the_size_that_plans_count():
    assert is_small(torch.empty(SMALL_BUFFER_BYTES, dtype=torch.uint8))
    assert not is_small(torch.empty(SMALL_BUFFER_BYTES + 1, dtype=torch.uint8))


@pytest.mark.parametrize("size", [8, SMALL_BUFFER_BYTES + 1])
def test_a_region_copies_the_buffers_that_it_reads_and_holds_small_copies(size):
    draft = Draft()
    (a,) = draft.run(draft.outside(size, "buffer"), makes=[1])
    draft.save(a)
    found = simulate(draft.finish(), [Choice(0, 1, engine=RERUN)])
    held = size if size <= SMALL_BUFFER_BYTES else 0
    forward, backward = found.alive_bytes
    assert forward == 1 + size
    assert backward == 1 + held
    # While the block runs again, the contents of now are put aside.
    assert found.peak_bytes == max(1 + size, 1 + 2 * held)


def test_an_operator_that_a_rerun_runs_pays_nothing_for_being_recorded():
    graph = chain(2, 3, 4)[0].finish()
    prices = Overheads(again_s=0.5, rerun_region_s=0.25, rerun_saved_s=0.125)
    simulator = Simulator(graph, prices)
    choice = Choice(0, 3, engine=RERUN)
    found = simulator.schedule((), [choice])
    forward_s = 3 * 0.5  # Added to each forward operator of the simulator's graph.
    assert found.simulation.seconds == graph.seconds + forward_s + 3.0
    assert found.overhead_s == 0.25 + 0.125 * len(saved_in(graph, choice))
    assert simulator.rerun_s(choice) == 3.0


def test_a_block_with_a_decision_is_not_rerun():
    draft = Draft()
    draft.save(*draft.run(draft.outside(), makes=[4], must_keep=True))
    assert not may_rerun(draft.finish(), Block(0, 1))


def test_a_block_that_writes_to_older_memory_is_not_rerun():
    draft = Draft()
    (a,) = draft.run(draft.outside(), makes=[4])
    draft.save(*draft.run(writes=[a]))
    graph = draft.finish()
    assert not may_rerun(graph, Block(1, 2))
    assert may_rerun(graph, Block(0, 2))


def test_a_block_whose_tensors_are_unpacked_in_the_forward_or_twice_is_not_rerun():
    draft, _ = chain(4, 4)
    draft.run(draft.outside(), makes=[1])
    graph = draft.finish()
    block = Block(0, 2)
    assert may_rerun(graph, block)
    assert not may_rerun(asked_again(graph, 2), block)
    last = len(graph.operators) - 1
    assert not may_rerun(asked_again(graph, last), block)


@pytest.mark.parametrize("block", [Block(0, 0), Block(2, 3)])
def test_a_block_of_which_nothing_is_unpacked_is_not_rerun(block):
    draft, _ = chain(4, 4)
    draft.run(draft.outside(), makes=[1])
    assert not may_rerun(draft.finish(), block)
