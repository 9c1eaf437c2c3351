"""The seconds of operators add up to measured blocks, or to a roofline."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from membudget.graph import StaticBytes, StepGraph, Value
from membudget.profile import DEVICES, Device, profile
from membudget.profile.cost import (
    flops_of,
    level,
    roofline,
    roofline_of_optimizer,
    share_out,
    step_clock,
)
from membudget.profile.events import TimerEvents
from tests.accelerators import pretend
from tests.planner.drafts import operator
from tests.seconds import PROCESSOR

FAKE = pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])


def graph_of(*seconds: float) -> StepGraph:
    operators = tuple(operator("forward", s) for s in seconds)
    static = StaticBytes(0, 0, 0, 0)
    return StepGraph(operators, (), (), (), (), 0, len(operators), static)


def events(
    *noted: tuple[str, float], faults: tuple[int, ...] | None = None
) -> TimerEvents:
    made = TimerEvents(lambda: 0)
    made.faults = list(faults or [0 for _ in noted])
    made.labels = [(label, "") for label, _ in noted]
    made.readings = [reading for _, reading in noted]
    return made


def test_the_operators_of_a_block_add_up_to_its_median():
    graph = graph_of(1.0, 3.0, 2.0, 2.0, 2.0)
    recorded = events(("start", 0), ("enter", 2), ("end", 5))
    runs = [
        events(("start", 10.0), ("enter", 10.0 + first), ("end", 10.0 + first + 6.0))
        for first in (8.0, 100.0, 4.0)
    ]

    shared = share_out(graph, recorded, runs)

    assert [o.seconds for o in shared.operators] == [2.0, 6.0, 2.0, 2.0, 2.0]


def test_runs_with_more_page_faults_between_two_events_are_left_out_there():
    graph = graph_of(1.0, 1.0)
    recorded = events(("start", 0), ("enter", 1), ("end", 2))
    runs = [
        events(("start", 0), ("enter", 2), ("end", 6), faults=(70, 70, 170)),
        events(("start", 0), ("enter", 9), ("end", 10), faults=(0, 4000, 4000)),
        events(("start", 0), ("enter", 4), ("end", 7), faults=(7, 200, 200)),
        events(("start", 0), ("enter", 9), ("end", 12), faults=(0, 4000, 4000)),
    ]

    shared = share_out(graph, recorded, runs)

    assert [o.seconds for o in shared.operators] == [3.0, 3.0]


def test_a_run_that_took_another_path_is_left_out():
    graph = graph_of(1.0, 1.0)
    recorded = events(("start", 0), ("enter", 1), ("end", 2))
    same = events(("start", 0.0), ("enter", 3.0), ("end", 4.0))
    other = events(("start", 0.0), ("leave", 50.0), ("end", 90.0))

    shared = share_out(graph, recorded, [other, same, other])

    assert [o.seconds for o in shared.operators] == [3.0, 1.0]


def test_a_model_with_another_path_in_each_step_is_timed_as_a_whole():
    graph = graph_of(1.0, 3.0)
    recorded = events(("start", 0), ("enter", 1), ("end", 2))
    runs = [
        events(("start", 0.0), ("leave", 1.0), ("end", total))
        for total in (8.0, 2.0, 80.0)
    ]

    shared = share_out(graph, recorded, runs)

    assert [o.seconds for o in shared.operators] == [2.0, 6.0]


class Rotates(nn.Module):
    """A model that calls another one of its blocks in each step."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(blocks))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.blocks[self.calls % len(self.blocks)](x)
        return y


# A step to warm up, fifteen with a stopwatch, then the recorded one.
@pytest.mark.parametrize(
    ("blocks", "says"),
    [
        (1, []),
        (
            2,
            ["8 of 15 timed runs took another path through the model than the"],
        ),
        (20, ["every timed run took another path through the model than the"]),
    ],
)
def test_a_profile_says_which_timed_runs_took_another_path(blocks, says):
    found = profile(Rotates(blocks), torch.randn(2, 4))

    assert len(found.notes) == len(says)
    for note, beginning in zip(found.notes, says, strict=True):
        assert note.startswith(beginning)
        assert note[:60] in found.report()
    assert found.graph.seconds > 0


def test_operators_that_took_no_time_get_none():
    graph = graph_of(0.0, 0.0)

    shared = share_out(
        graph, events(("start", 0), ("end", 2)), [events(("start", 0.0), ("end", 3.0))]
    )

    assert all(math.isfinite(o.seconds) for o in shared.operators)


def test_every_phase_of_the_step_has_measured_seconds():
    found = profile(nn.Sequential(nn.Linear(64, 64), nn.GELU()), torch.randn(64, 64))

    assert found.cost == "measured"
    assert found.graph.seconds > 0
    assert all(o.seconds >= 0 for o in found.graph.operators)


@FAKE
def test_a_device_s_seconds_are_its_roofline(fake):
    device = DEVICES["h100"]
    model = nn.Linear(64, 64)

    found = profile(model, torch.randn(32, 64), fake=fake, device="h100")

    assert found.cost == device.name
    for o in found.graph.operators:
        moved = o.read_bytes + o.written_bytes
        rate, speed = device.flops_per_s["float32"], device.bytes_per_s
        assert o.seconds == max(o.flops / rate, moved / speed)


def test_each_dtype_uses_its_own_rate():
    device = DEVICES["a100"]
    model = nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16, device="meta")
    x = torch.empty(8192, 2048, dtype=torch.bfloat16, device="meta")

    graph = profile(model, x, device=device).graph

    product = next(o for o in graph.operators if o.flops)
    assert product.seconds == product.flops / device.flops_per_s["bfloat16"]


def test_a_note_says_that_the_optimizer_s_seconds_are_estimated():
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    says = "the optimizer's step was not run"

    found = profile(model, x, optimizer=torch.optim.SGD)
    assert [note for note in found.notes if note.startswith(says)]
    assert profile(model, x).notes == ()


def test_only_the_optimizer_s_seconds_are_this_processor_s():
    graph = profile(
        nn.Linear(4, 4), torch.ones(2, 4), optimizer=torch.optim.SGD, fake=True
    ).graph
    marked = replace(
        graph, operators=tuple(replace(o, seconds=7.0) for o in graph.operators)
    )
    found = roofline_of_optimizer(marked).operators
    first = graph.optimizer_start
    assert 0 < first < len(found)
    assert [o.seconds for o in found[:first]] == [7.0] * first
    for o in found[first:]:
        moved = o.read_bytes + o.written_bytes
        assert o.seconds == PROCESSOR.seconds(o.flops, moved, "float32")


def test_an_operator_computes_in_the_dtype_of_its_output_or_else_of_its_input():
    def dtype(inputs: list[str], outputs: list[str]) -> str:
        values = tuple(Value(0, 1, (1,), name, 0, 0) for name in (*inputs, *outputs))
        count = len(inputs)
        made = replace(
            operator("forward", 0.0),
            inputs=tuple(range(count)),
            outputs=tuple(range(count, count + len(outputs))),
            flops=10,
        )
        graph = replace(graph_of(0.0), operators=(made,), values=values)
        rates = {"float32": 1.0, "float16": 2.0, "bfloat16": 5.0}
        seconds = roofline(graph, Device("mine", rates, 1.0, 1.0)).operators[0].seconds
        return {10.0: "float32", 5.0: "float16", 2.0: "bfloat16"}[seconds]

    assert dtype(["float32"], ["float16", "float32"]) == "float16"
    assert dtype(["bfloat16", "float32"], []) == "bfloat16"
    assert dtype([], []) == "float32"


@pytest.mark.parametrize("is_used", [False, True])
def test_a_clock_waits_for_kernels_where_there_may_be_any(is_used, monkeypatch):
    device = pretend(monkeypatch)
    device.is_used = is_used
    clock = step_clock()
    assert clock() <= clock()
    assert device.asked == ["synchronize 0", "synchronize 1"] * (2 * is_used)


@pytest.mark.cpu_only("a device computes while its thread waits")
def test_steps_of_one_thread_are_timed_by_what_they_compute(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert step_clock() is time.process_time
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert step_clock() is time.perf_counter


def test_the_same_call_of_an_operator_takes_the_same_time():
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(8, 4), nn.Tanh())
    graph = profile(model, torch.ones(2, 8)).graph
    noisy = tuple(replace(o, seconds=1.0 + i) for i, o in enumerate(graph.operators))
    found = level(replace(graph, operators=noisy))
    assert found.seconds == pytest.approx(sum(o.seconds for o in noisy))
    both = zip(found.operators, noisy, strict=True)
    forward = [pair for pair in both if pair[0].phase == "forward"]
    for name in ("addmm", "tanh"):
        of = [(o.seconds, before.seconds) for o, before in forward if name in o.name]
        assert of[0][0] == of[1][0] == of[2][0] == of[1][1]
        assert of[3][0] == of[3][1]  # The shapes of the last one are others.


def test_an_operator_without_a_formula_takes_no_operations():
    x = torch.ones(2)
    assert flops_of(torch.ops.aten.sin.default, (x,), {}, x) == 0
