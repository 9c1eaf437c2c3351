"""What a rank did, when, and in how many bytes."""

from __future__ import annotations

import pytest
import torch

from membudget.pipeline.event_log import EventLog, LoggedReceive
from membudget.planner.pipeline_order import PipelineAction

FORWARD = PipelineAction("forward", 0, 0)
BACKWARD = PipelineAction("backward", 0, 0)

pytestmark = pytest.mark.cpu_only("counts bytes of the CPU")


def log(meter: bool = False) -> EventLog:
    made = EventLog(3, torch.device("cpu"), meter)
    made.begin_step()
    return made


def test_an_action_noted_twice_in_a_row_is_one_event() -> None:
    made = log(meter=True)
    tensors = []
    for _ in range(2):
        with made.noted(FORWARD):
            tensors.append(torch.zeros(256))
    with made.noted(BACKWARD):
        tensors.clear()
    assert [event.action for event in made.events] == [FORWARD, BACKWARD]
    assert [event.rank for event in made.events] == [3, 3]
    forward, backward = made.bytes
    assert forward.after_bytes - forward.before_bytes == 2048
    assert backward.after_bytes - backward.before_bytes == -2048


def test_the_peak_is_that_of_the_action() -> None:
    made = log(meter=True)
    with made.noted(FORWARD):
        torch.zeros(512)
    (forward,) = made.bytes
    assert forward.peak_bytes - forward.before_bytes == 2048
    assert forward.after_bytes == forward.before_bytes


def test_a_new_step_forgets_the_one_before() -> None:
    made = log()
    with made.noted(FORWARD):
        pass
    made.begin_step()
    assert (made.events, made.bytes) == ([], [])


def test_waiting_for_a_receive_is_an_event() -> None:
    made, waited = log(), []

    class Work:
        def wait(self) -> None:
            waited.append(len(made.events))

    LoggedReceive(Work(), lambda: made.noted(FORWARD._replace(kind="wait"))).wait()
    assert waited == [0]
    assert [event.action.kind for event in made.events] == ["wait"]
