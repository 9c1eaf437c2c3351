"""Copies between device and host, against hand and against what must hold for any."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from membudget.errors import OptionError
from membudget.graph import ModuleCall, StepGraph
from membudget.planner.choice import Choice, is_movable, made_in
from membudget.planner.moved import Host, Moves
from membudget.planner.planner import Planner
from membudget.planner.simulate import live_at_peak, simulate
from tests.planner.drafts import Draft, chain_of, drafts

A, B = 1, 2


def host(
    window: int, memory: int = 1 << 20, rate: float = 4.0, latency_s: float = 0.0
) -> Host:
    return Host(memory, window, rate, rate, latency_s)


def two_saved() -> tuple[StepGraph, Choice]:
    """a = f(x); b = g(a), which saves a; c = h(b), which saves b; 4 bytes, 1 s each."""
    graph = chain_of([4, 4, 4], [1.0, 1.0, 1.0])
    return graph, Choice(0, 3, frozenset({A, B}), offloaded=frozenset({A, B}))


def test_without_a_window_the_device_waits_for_each_copy():
    graph, choice = two_saved()
    found = simulate(graph, [choice], host=host(window=0))
    # An operator reads a while it makes b: the forward releases a after that.
    assert found.alive_bytes == (4, 8, 8, 4, 4, 0)
    assert found.moves == Moves(8, 128, 64, link_s=4.0, wait_s=4.0)
    assert found.seconds == graph.seconds + 4.0


def test_a_window_hides_the_copies_out_and_keeps_what_leaves_last():
    graph, choice = two_saved()
    found = simulate(graph, [choice], host=host(window=4))
    # b is still on its way when it is asked for; only a is copied back, when asked for.
    assert found.alive_bytes == (4, 8, 8, 4, 4, 0)
    assert found.moves == Moves(8, 128, 64, link_s=3.0, wait_s=1.0)


def test_a_window_for_all_of_it_frees_nothing():
    graph, choice = two_saved()
    found = simulate(graph, [choice], host=host(window=8))
    kept = simulate(graph, [replace(choice, offloaded=frozenset())])
    assert found.alive_bytes == kept.alive_bytes
    assert found.moves.wait_s == 0.0


def test_what_is_asked_for_next_is_copied_back_ahead_of_time():
    # One of three may be on its way; the first one asked for is freed before the next.
    graph = chain_of([4] * 5, [1.0] * 5)
    moved = frozenset({1, 2, 3, 4})
    choice = Choice(0, 5, moved, offloaded=moved)
    late = simulate(graph, [choice], host=host(window=4))
    ahead = simulate(graph, [choice], host=host(window=8))
    assert late.moves.wait_s == 3.0
    assert ahead.moves.wait_s == 0.0
    assert max(late.alive_bytes[5:]) == 4
    assert max(ahead.alive_bytes[5:]) == 8


def test_copies_of_one_direction_wait_for_each_other():
    graph, choice = two_saved()
    # Each takes 2 s. That of a ends after 3 s, when b needs its place in the window;
    # that of b ends after 5 s, as b is freed; then a is waited for.
    found = simulate(graph, [choice], host=host(window=4, latency_s=1.0))
    assert found.moves == Moves(8, 128, 64, link_s=6.0, wait_s=1.0 + 2.0)


def test_what_finds_no_room_on_the_host_stays():
    graph, choice = two_saved()
    found = simulate(graph, [choice], host=host(window=0, memory=64))
    assert found.moves == Moves(4, 64, 64, link_s=2.0, wait_s=2.0)
    assert found.alive_bytes == (4, 8, 8, 4, 4, 0)


def test_a_recompute_waits_for_what_it_reads():
    # b is dropped, and recomputed from a, which is on the host by then.
    graph, _ = two_saved()
    choice = Choice(0, 3, frozenset({A}), offloaded=frozenset({A}))
    found = simulate(graph, [choice], host=host(window=0))
    assert found.recomputed == (1,)
    assert found.moves.wait_s == 2.0
    # Both are live when h's backward asks for b, and a from then on.
    assert found.alive_bytes == (4, 8, 8, 8, 4, 0)


def test_a_copy_may_take_the_time_of_a_recompute():
    # With an operator between, b's recompute hides the copy of what comes after it.
    draft = Draft()
    x = draft.outside()
    (a,) = draft.run(x, makes=[4])
    (b,) = draft.run(a, makes=[4], seconds=3.0)
    draft.save(a)
    draft.run(b, makes=[4])
    draft.save(b)
    graph = draft.finish()
    rerun = Choice(0, 3, frozenset({A}), offloaded=frozenset({A}))
    assert simulate(graph, [rerun], host=host(4)).moves.wait_s == 0.0


def test_moving_needs_a_host_and_what_can_be_moved():
    graph, choice = two_saved()
    with pytest.raises(OptionError, match="moves storages to a host, and none is"):
        simulate(graph, [choice])
    with pytest.raises(OptionError, match="that it does not keep"):
        simulate(graph, [replace(choice, kept=frozenset({A}))], host=host(4))
    # Another block saves it.
    first = Choice(0, 1, frozenset({A}), offloaded=frozenset({A}))
    with pytest.raises(OptionError, match="cannot be moved"):
        simulate(graph, [first, Choice(1, 3)], host=host(4))


@st.composite
def moving(draw: st.DrawFn) -> tuple[StepGraph, Choice, Host]:
    """Draw a step, a choice that moves some of what it keeps, and a host."""
    graph = draw(drafts())
    block = Choice(0, graph.backward_start)
    kept = draw(st.sets(st.sampled_from(sorted(made_in(graph, block)) or [0])))
    kept &= made_in(graph, block)
    movable = [s for s in sorted(kept) if is_movable(graph, block, s)]
    moved = {s for s in movable if draw(st.booleans())}
    choice = replace(block, kept=frozenset(kept), offloaded=frozenset(moved))
    room = draw(st.sampled_from([0, 64, 128, 1 << 20]))
    rate = draw(st.sampled_from([0.5, 3.0, 1e9]))
    return graph, choice, host(draw(st.integers(0, 20)), room, rate)


@settings(max_examples=300)
@given(moving())
def test_moving_takes_no_more_of_the_device_than_keeping(drawn):
    graph, choice, where = drawn
    found = simulate(graph, [choice], host=where)
    kept = simulate(graph, [replace(choice, offloaded=frozenset())])
    pairs = zip(found.alive_bytes, kept.alive_bytes, strict=True)
    assert all(moved <= live for moved, live in pairs)
    assert found.peak_bytes <= kept.peak_bytes
    assert found.recomputed == kept.recomputed
    assert found.moves.host_bytes <= where.memory_bytes
    assert found.seconds == pytest.approx(kept.seconds + found.moves.wait_s)
    assert found.moves.wait_s <= found.moves.link_s + 1e-9


@settings(max_examples=100)
@given(moving())
def test_a_window_for_everything_is_no_wait_and_no_byte_less(drawn):
    graph, choice, where = drawn
    wide = replace(where, window_bytes=1 << 20)
    found = simulate(graph, [choice], host=wide)
    kept = simulate(graph, [replace(choice, offloaded=frozenset())])
    assert found.alive_bytes == kept.alive_bytes


@settings(max_examples=100)
@given(moving())
def test_what_is_live_at_the_peak_adds_up_to_it(drawn):
    graph, choice, where = drawn
    found = simulate(graph, [choice], host=where)
    live = live_at_peak(graph, [choice], where)
    total = sum(graph.storages[s].bytes for s in live.storages)
    total += graph.operators[live.operator].workspace_bytes
    assert total == found.peak_bytes


@pytest.mark.parametrize("rate", [0.5, 4.0, 100.0])
def test_a_plan_with_a_host_is_never_slower_than_without(rate: float):
    sizes, seconds = [8, 4, 16, 8, 4, 16, 8, 4] * 2, [1.0, 4.0, 2.0, 1.0] * 4
    graph = chain_of(sizes, seconds, per_call=4)
    whole = replace(graph, calls=(ModuleCall("", 0, len(sizes)), *graph.calls))
    without, moving = Planner(whole), Planner(whole, host=host(32, rate=rate))
    least = without.least_bytes()
    moved = 0
    for budget in range(least, without.plain_peak_bytes, 24):
        found = moving.fastest(budget)
        assert found.peak_bytes <= budget
        assert found.seconds <= without.fastest(budget).seconds + 1e-9
        moved += found.simulation.moves.out_bytes
    assert (moved > 0) == (rate > 1)
