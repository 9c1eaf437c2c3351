"""Which window a plan takes, and in which order it expects storages to be asked for."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings

from membudget.graph import ModuleCall, StepGraph
from membudget.planner.choice import Choice
from membudget.planner.ledger import Ledger
from membudget.planner.mover import MOST_SHARE, NARROWEST, Mover
from membudget.planner.planner import Planner
from membudget.planner.schedule import Simulator
from membudget.planner.search import never
from membudget.planner.simulate import AskedOrders, simulate
from membudget.planner.step_events import StepEvents
from tests.planner.drafts import chain_of
from tests.planner.test_moved import host, moving


def long_chain() -> StepGraph:
    graph = chain_of([8] * 16, [4.0] * 16, per_call=4)
    return replace(graph, calls=(ModuleCall("", 0, 16), *graph.calls))


def test_a_wider_window_is_taken_where_it_hides_copies_and_has_room(monkeypatch):
    where = host(8, rate=3.0)
    wide = Planner(long_chain(), host=where).fastest(64)
    monkeypatch.setattr(Mover, "_windows", lambda *_: [where.window_bytes])
    fixed = Planner(long_chain(), host=where).fastest(64)
    assert wide.host is not None
    assert where.window_bytes < wide.host.window_bytes <= MOST_SHARE * 64
    assert wide.seconds < 0.9 * fixed.seconds


def test_where_no_window_fits_the_device_waits_for_each_copy(monkeypatch):
    graph = long_chain()
    monkeypatch.setattr(Mover, "_windows", lambda *_: [1 << 20])
    mover = Mover(Simulator(graph), host(1 << 20))
    least_bytes = Planner(graph).least_bytes()
    found = mover.schedules([], least_bytes, quickly=True, is_late=never)
    windows = {s.host.window_bytes for s in found if s.host is not None}
    assert windows == {NARROWEST}
    assert all(s.peak_bytes <= least_bytes for s in found)


@settings(max_examples=100)
@given(moving())
def test_moving_more_of_what_is_kept_changes_no_order(drawn):
    graph, choice, _ = drawn
    kept = AskedOrders(graph).of([choice])
    moved = StepEvents(Ledger(graph), [choice]).asked(choice.offloaded)
    assert [storage for storage in kept if storage in choice.offloaded] == moved


@settings(max_examples=50)
@given(moving())
def test_orders_that_are_known_change_no_simulation(drawn):
    graph, choice, where = drawn
    orders = AskedOrders(graph)
    for moved in (choice.offloaded, frozenset[int](), choice.offloaded):
        again: Choice = replace(choice, offloaded=moved)
        found = simulate(graph, [again], host=where, orders=orders)
        assert found == simulate(graph, [again], host=where)
