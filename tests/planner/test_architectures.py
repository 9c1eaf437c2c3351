"""Known networks: their figures, and the planner's answers against proven optima."""

from __future__ import annotations

from functools import cache

import pytest
from _pytest.mark import ParameterSet

from membudget.errors import BudgetError
from membudget.graph import StepGraph
from membudget.planner.bound import least_seconds
from membudget.planner.planner import Planner
from membudget.planner.simulate import simulate
from membudget.planner.timeline import timeline
from tests.oracles.exact import Exact, exact
from tests.planner.architectures import (
    ARCHITECTURES,
    mobilenet,
    resnet50,
    segnet,
    vgg16,
    vgg19,
)
from tests.planner.layers import FLOAT_BYTES
from tests.seconds import DEADLOCK_S

names = pytest.mark.parametrize("name", ARCHITECTURES)


@cache
def graph_of(name: str) -> StepGraph:
    return ARCHITECTURES[name]()


# Their figures: multiplications of a picture of 224 x 224, and parameters, in
# thousands, without the biases of convolutions that no normalization follows.


@pytest.mark.parametrize(
    ("network", "multiplications", "parameters"),
    [
        (vgg16, 15_470_264, 138_353),
        (vgg19, 19_632_062, 143_662),
        (resnet50, 4_089_184, 25_557),
        (mobilenet, 568_740, 4_232),
    ],
)
def test_arithmetic_and_parameters_are_those_of_the_papers(
    network, multiplications, parameters
):
    graph = network(batch=1)
    forward = graph.operators[: graph.backward_start]
    assert sum(operator.flops for operator in forward) // 2000 == multiplications
    assert round(graph.static.parameters / FLOAT_BYTES / 1000) == parameters


def test_segnet_has_as_many_parameters_as_in_its_paper():
    assert round(segnet(batch=1).static.parameters / FLOAT_BYTES / 1e6, 1) == 29.4


@names
def test_the_backward_takes_twice_the_arithmetic_of_the_forward(name):
    graph = graph_of(name)
    forward = sum(o.flops for o in graph.operators[: graph.backward_start])
    assert graph.flops == 3 * forward


@names
def test_gradients_of_parameters_stay_to_the_end_of_the_step(name):
    graph = graph_of(name)
    gradients = [s for s in graph.storages if s.kind == "gradient"]
    assert sum(storage.bytes for storage in gradients) == graph.static.parameters
    assert {storage.death for storage in gradients} == {len(graph.operators)}


@names
def test_what_the_backward_reads_is_there(name):
    graph = graph_of(name)
    for moment, operator in enumerate(graph.operators):
        for value in operator.inputs:
            storage = graph.storages[graph.values[value].storage]
            assert storage.birth < moment < storage.death


@names
def test_without_regions_the_step_is_the_plain_one(name):
    graph = graph_of(name)
    found = simulate(graph, [])
    assert found.peak_bytes == timeline(graph).peak_bytes
    assert found.seconds == graph.seconds


@names
def test_twice_the_batch_takes_twice_the_activations(name):
    one, two = ARCHITECTURES[name](1), ARCHITECTURES[name](2)  # type: ignore[call-arg]
    for before, after in zip(one.storages, two.storages, strict=True):
        if before.kind == "activation" and before.bytes > FLOAT_BYTES:
            assert after.bytes == 2 * before.bytes


# The planner's answers. At the lowest budget of VGG, the backward of two convolutions
# of the whole picture holds more than the budget, whatever is dropped.

SHARES = (0.9, 0.8, 0.6, 0.5)
LIMIT_S = DEADLOCK_S
CLOSE = 1.003
"""An answer is at most so many times as slow as a proven optimum."""

QUICK = ("vgg16", "vgg19")
FURTHER = {("unet", 0.6), ("unet", 0.5)}
"""Reached by the integer programme alone: next to the least memory, beside skips."""


@cache
def best_of(name: str, share: float) -> Exact:
    graph = graph_of(name)
    return exact(graph, budget_of(graph, share), LIMIT_S)


def budget_of(graph: StepGraph, share: float) -> int:
    return int(share * timeline(graph).peak_bytes)


def case(name: str, share: float, *marks: pytest.MarkDecorator) -> ParameterSet:
    if name not in QUICK:
        marks = (*marks, pytest.mark.slow)
    return pytest.param(name, share, id=f"{name}-{share:.0%}", marks=marks)


every = [case(name, share) for name in ARCHITECTURES for share in SHARES]
near = [
    case(name, share)
    for name in ARCHITECTURES
    for share in SHARES
    if (name, share) not in FURTHER
]


def check_answer(name: str, share: float) -> None:
    graph, best = graph_of(name), best_of(name, share)
    budget = budget_of(graph, share)
    if best.status == "infeasible":
        with pytest.raises(BudgetError, match="no plan fits in"):
            Planner(graph).fastest(budget)
        return
    found = Planner(graph).fastest(budget)
    assert found.simulation.peak_bytes <= budget
    if best.status == "optimal":
        assert found.seconds <= CLOSE * (graph.seconds + best.seconds)
    else:
        # Equal schedules may sum up their seconds in another order.
        assert found.seconds <= (1 + 1e-9) * (graph.seconds + best.seconds)


@pytest.mark.parametrize(("name", "share"), near)
def test_the_answer_without_a_search_is_close_to_the_optimum(name, share):
    check_answer(name, share)


@pytest.mark.parametrize(("name", "share"), every)
def test_the_optimum_lies_above_every_bound(name, share):
    graph, best = graph_of(name), best_of(name, share)
    assert best.bound_s <= best.seconds
    any_schedule_s = least_seconds(graph, budget_of(graph, share))
    assert any_schedule_s <= graph.seconds + best.seconds


def test_vgg19_at_80_percent_makes_single_outputs_again_as_late_as_it_can():
    """Beside what its first convolutions hold there is room for little.

    The optimum makes three outputs again, of a pooling, of the first convolution and of
    its rectifier, each when it is asked for; a plan by modules makes more.
    """
    graph, best = graph_of("vgg19"), best_of("vgg19", 0.8)
    assert best.status == "optimal"
    assert best.simulation is not None
    names = [graph.operators[index].name for index in best.simulation.recomputed]
    assert names == ["pool.forward", "conv.forward", "relu.forward"]
    check_answer("vgg19", 0.8)
