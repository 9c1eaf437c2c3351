"""What is asked of the accelerator, whichever it is."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from membudget import _torch_accelerator as accelerator
from membudget.errors import CheckpointError
from membudget.scope import Scope
from tests.accelerators import Accelerator, pretend


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    return pretend(monkeypatch)


def test_a_process_that_does_not_use_its_accelerator_has_nothing_there(device):
    device.is_used = False
    assert accelerator.in_use() == ()
    assert accelerator.generators() == ()
    assert accelerator.current_stream() is None
    assert not accelerator.is_capturing()


def test_of_several_devices_those_are_in_use_that_hold_memory(device):
    device.allocators[0].reserved = 0
    assert accelerator.in_use() == (torch.device("cuda:1"),)


def test_a_module_that_cannot_tell_whether_it_is_used_is_if_it_is_available():
    accelerator._asks_whether_in_use.cache_clear()
    assert accelerator._asks_whether_in_use("mps") is torch.mps.is_available


def test_only_a_module_that_can_tell_is_asked_whether_it_captures(device):
    assert not accelerator.is_capturing()
    device.module.is_current_stream_capturing = lambda: True
    assert accelerator.is_capturing()


def test_mps_hides_its_generator(monkeypatch):
    device = pretend(monkeypatch, "mps", devices=1)
    generator = torch.Generator()
    device.module = SimpleNamespace(
        is_available=lambda: True, _get_default_mps_generator=lambda: generator
    )
    assert accelerator.generators() == (generator,)
    assert accelerator.generator_of(torch.device("mps")) is generator


def test_a_backend_without_generators_that_can_be_read_is_an_error(device):
    del device.module.default_generators
    assert accelerator.generators() == ()
    accelerator.check_repeatable([torch.device("cpu"), torch.device("meta")])
    with pytest.raises(CheckpointError, match=r"torch\.cuda has no default_generators"):
        accelerator.check_repeatable([torch.device("cuda:0")])


def test_the_stream_that_is_left_runs_after_the_one_that_was_entered(device):
    side = device.stream("side", device=1)
    with Scope() as scope:
        accelerator.enter_stream(side, scope)
        assert (device.current, device.streams[1]) == (1, side)
        device.asked.append("work")
    assert device.asked == [
        *("side waits for main 0", "on side", "work"),
        *("main 0 waits for side", "on main 1", "on main 0"),
    ]
    assert (device.current, device.streams[1].name) == (0, "main 1")


def test_on_the_current_stream_nobody_waits(device):
    with Scope() as scope:
        accelerator.enter_stream(device.streams[0], scope)
    assert device.asked == []


def test_the_main_device_has_most_of_the_bytes():
    class On(torch.Tensor):
        device = torch.device("cuda:1")

    small, large = torch.zeros(2), torch.zeros(9)
    assert accelerator.main_device([small, large]) == accelerator.HOST
    found = accelerator.main_device([small.as_subclass(On), large])
    assert found == torch.device("cuda:1")


def test_a_thread_that_has_begun_a_backward_pass_is_known_by_its_frame():
    callers = []
    x = torch.ones(1, requires_grad=True)
    y = x.sin()
    y.register_hook(lambda gradient: callers.append(sys._getframe(1).f_code))
    y.backward()
    assert callers == [accelerator._RUN_BACKWARD]
    assert not accelerator.waits_in_backward(threading.get_ident())
    assert not accelerator.waits_in_backward(-1)
