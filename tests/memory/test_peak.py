"""The meter is exact and repeatable."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.profiler import profile

import membudget as mb
from membudget.errors import OptionError
from membudget.memory import peak_on
from membudget.memory.peak import Change, Events, _from_events
from tests.accelerators import GIVEN_BYTES, Accelerator, pretend

FLOAT_BYTES = 4


def test_a_chain_needs_two_tensors_at_a_time():
    x = torch.zeros(1000)
    measured = mb.peak(lambda: x.sin().exp().sqrt().sum())
    assert measured.peak_bytes == 2 * x.nbytes
    assert measured.end_bytes == FLOAT_BYTES


def test_views_and_in_place_operators_allocate_nothing():
    x = torch.zeros(1000)
    measured = mb.peak(lambda: x.view(10, 100).t()[:5].neg_())
    assert measured.peak_bytes == 0
    assert measured.timeline == ()


def test_memory_from_before_the_call_is_not_counted():
    held = [torch.zeros(1000)]
    measured = mb.peak(held.clear)
    assert measured.peak_bytes == 0
    assert measured.end_bytes == 0


@pytest.mark.cpu_only("an allocator of a device names no operator")
def test_the_operator_at_the_peak_is_named():
    x = torch.zeros(100, 100)
    assert mb.peak(lambda: (x + 1).exp().sum()).operator == "aten::exp"


def test_a_backward_in_autograd_s_thread_is_counted():
    x = torch.zeros(1000, requires_grad=True)

    def step() -> None:
        x.sin().exp().sum().backward()

    # exp saves its output, and sin its input; the gradient of exp is made beside the
    # output, and the gradient of x beside that.
    first = mb.peak(step)
    assert first.end_bytes == x.nbytes
    x.grad = None
    assert mb.peak(step).peak_bytes == first.peak_bytes


def test_a_training_step_repeats_to_the_byte():
    layers = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.GELU())]
    model, batch = nn.Sequential(*layers), torch.randn(8, 32)

    def step() -> None:
        model(batch).sum().backward()
        model.zero_grad(set_to_none=True)

    peaks = {mb.peak(step).peak_bytes for _ in range(5)}
    assert len(peaks) == 1
    assert mb.peak(step).end_bytes == 0


def test_the_result_of_the_function_is_returned():
    measured = mb.peak(lambda a, *, b: a + b, 1, b=2)
    assert measured.result == 3


def test_an_exception_propagates_and_stops_the_profiler():
    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        mb.peak(fail)
    assert mb.peak(torch.zeros, 10).end_bytes == 40


def test_a_running_profiler_is_rejected():
    with profile(), pytest.raises(mb.OptionError, match="a profiler is running"):
        mb.peak(torch.zeros, 10)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 500)), max_size=30))
def test_the_peak_is_that_of_the_program_that_ran(program):
    """Allocate a tensor, or free the oldest; the most held at once is the peak."""
    sizes: list[int] = []
    most = alive = 0
    for allocate, size in program:
        if allocate:
            sizes.append(size)
        elif sizes:
            sizes.pop(0)
        alive = sum(sizes) * FLOAT_BYTES
        most = max(most, alive)

    def run() -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        for allocate, size in program:
            if allocate:
                tensors.append(torch.empty(size))
            elif tensors:
                tensors.pop(0)
        return tensors

    measured = mb.peak(run)
    assert measured.peak_bytes == most
    assert measured.end_bytes == alive


@pytest.mark.cuda
def test_a_cuda_device_is_measured_by_its_allocator():
    x = torch.zeros(1000, device="cuda")
    measured = mb.peak(lambda x: x.sin().exp(), x)
    assert measured.peak_bytes == 2 * x.nbytes
    assert measured.end_bytes == x.nbytes


@dataclass
class Ran:
    """An operator, as the profiler notes it."""

    operator: str
    thread: int
    start: int
    end: int

    def name(self) -> str:
        return self.operator

    def start_thread_id(self) -> int:
        return self.thread

    def start_ns(self) -> int:
        return self.start

    def end_ns(self) -> int:
        return self.end


def at_the_peak(ran: list[Ran], *, thread: int, moment: int) -> str:
    """Return the operator that is named for an allocation."""
    changes = [Change(0, 5, 1), Change(moment, 20, thread), Change(99, -20, thread)]
    return _from_events(Events(changes, ran), None).operator


def test_the_operator_at_the_peak_is_the_innermost_of_the_thread_that_allocates():
    ran = [
        Ran("outer", thread=1, start=10, end=50),
        Ran("inner", thread=1, start=20, end=30),
        Ran("later", thread=1, start=60, end=70),
        Ran("elsewhere", thread=2, start=25, end=28),
    ]
    assert at_the_peak(ran, thread=1, moment=26) == "inner"
    assert at_the_peak(ran, thread=1, moment=20) == "inner"
    assert at_the_peak(ran, thread=1, moment=30) == "inner"
    assert at_the_peak(ran, thread=1, moment=40) == "outer"
    assert at_the_peak(ran, thread=2, moment=26) == "elsewhere"
    assert at_the_peak(ran, thread=2, moment=40) == ""
    assert at_the_peak(ran, thread=3, moment=26) == ""
    assert at_the_peak(ran, thread=1, moment=55) == ""


def test_the_peak_is_the_first_of_equal_ones_and_the_timeline_is_every_sum():
    changes = [Change(t, b, 1) for t, b in enumerate((4, 6, -6, 6, -3, -9))]
    ran = [Ran(str(t), 1, t, t) for t in range(6)]
    found = _from_events(Events(changes, ran), "result")
    assert (found.peak_bytes, found.operator) == (10, "1")
    assert found.timeline == (4, 10, 4, 10, 7, -2)
    assert (found.end_bytes, found.reserved_bytes, found.result) == (-2, 0, "result")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    return pretend(monkeypatch)


def test_a_device_is_measured_by_its_allocator_s_statistics(device):
    allocator = device.allocators[1]
    allocator.allocate(900, 2048)
    allocator.allocate(-900, 0)

    def function(x: object, *, scale: int) -> int:
        device.asked.append("call")
        allocator.allocate(500, 1024)
        allocator.allocate(-300, 0)
        return scale

    found = mb.peak(function, 1, scale=3)
    before = [f"{ask} {{}}" for ask in ("synchronize", "reset", "stats")]
    before.insert(1, "empty cache")
    assert device.asked == [
        *(ask.format(index) for index in range(2) for ask in before),
        *("call", "synchronize 0", "stats 0", "synchronize 1", "stats 1"),
    ]
    assert (found.device, found.peak_bytes, found.end_bytes) == ("cuda:1", 500, 200)
    assert (found.reserved_bytes, found.bounded_bytes) == (1024, 1024)
    assert (found.operator, found.timeline, found.result) == ("", (), 3)


def test_bytes_reserved_before_the_call_are_not_counted(device):
    found = mb.peak(lambda: device.allocators[0].allocate(500, 0))
    assert (found.peak_bytes, found.reserved_bytes) == (500, 0)
    (taken,) = found.devices
    assert (taken.before_bytes, taken.fragmented_bytes) == (GIVEN_BYTES, 0)


def test_the_device_on_which_most_is_allocated_is_the_one(device):
    def both() -> None:
        device.allocators[0].allocate(300, 1024)
        device.allocators[1].allocate(500, 0)
        device.allocators[0].allocate(-300, 0)

    found = mb.peak(both)
    assert (found.device, found.peak_bytes) == ("cuda:1", 500)
    assert [taken.device for taken in found.devices] == ["cuda:0", "cuda:1"]
    assert found.devices[0].fragmented_bytes == 1024 - 300
    found = peak_on(torch.device("cuda:0"), both)
    assert (found.device, found.peak_bytes) == ("cuda:0", 300)
    assert found.reserved_bytes == 1024


def test_the_host_is_measured_beside_a_device(device):
    def both() -> torch.Tensor:
        device.allocators[0].allocate(300, 1024)
        return torch.zeros(1000)

    found = mb.peak(both)
    assert (found.device, found.peak_bytes, found.host_bytes) == ("cuda:0", 300, 4000)
    found = mb.peak(lambda: torch.zeros(1000))
    assert (found.device, found.peak_bytes, found.host_bytes) == ("cpu", 4000, 4000)
    assert (found.devices, found.bounded_bytes) == ((), 4000)
    found = peak_on(torch.device("cuda:0"), lambda: torch.zeros(1000))
    assert (found.device, found.peak_bytes, found.host_bytes) == ("cuda:0", 0, 4000)


def test_an_accelerator_that_the_call_uses_first_is_measured(device):
    device.is_used = False
    for allocator in device.allocators:
        allocator.allocate(-100, -GIVEN_BYTES)
        allocator.reset_peak()

    def first() -> None:
        device.is_used = True
        device.allocators[0].allocate(300, 512)

    found = mb.peak(first)
    assert (found.device, found.peak_bytes) == ("cuda:0", 300)
    assert found.reserved_bytes == 512


def test_an_allocator_without_statistics_is_refused(device, monkeypatch):
    def fail(device: torch.device) -> None:
        raise RuntimeError("not implemented for it")

    monkeypatch.setattr(torch.accelerator, "memory_stats", fail)
    with pytest.raises(OptionError, match="allocator of cuda:0 keeps no statistics"):
        mb.peak(lambda: None)
