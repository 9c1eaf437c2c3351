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
from membudget.memory.peak import Change, Events, _from_events

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


class OnDevice(torch.Tensor):
    """A tensor that says it lies on a CUDA device."""

    is_cuda = True
    device = torch.device("cuda:1")


class Allocator:
    """Counts as the allocator of a CUDA device does."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.current = self.peak = 100
        self.reserved = self.reserved_peak = 4096

    def allocate(self, requested: int, reserved: int) -> None:
        self.current += requested
        self.reserved += reserved
        self.peak = max(self.peak, self.current)
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def synchronize(self, device: torch.device) -> None:
        self.asked.append(f"synchronize {device}")

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.asked.append(f"reset {device}")
        self.peak, self.reserved_peak = self.current, self.reserved

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        self.asked.append(f"stats {device}")
        return {
            "requested_bytes.all.current": self.current,
            "requested_bytes.all.peak": self.peak,
            "reserved_bytes.all.current": self.reserved,
            "reserved_bytes.all.peak": self.reserved_peak,
        }


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    fake = Allocator()
    for name in ("synchronize", "reset_peak_memory_stats", "memory_stats"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


@pytest.fixture
def on_device() -> torch.Tensor:
    return torch.zeros(2).as_subclass(OnDevice)


def test_a_device_is_measured_by_its_allocator_s_statistics(allocator, on_device):
    allocator.allocate(900, 2048)
    allocator.allocate(-900, 0)

    def function(x: object, *, scale: int) -> int:
        allocator.asked.append("call")
        allocator.allocate(500, 1024)
        allocator.allocate(-300, 0)
        return scale

    found = mb.peak(function, on_device, scale=3)
    device = "cuda:1"
    assert allocator.asked == [
        *(f"synchronize {device}", f"reset {device}", f"stats {device}", "call"),
        *(f"synchronize {device}", f"stats {device}"),
    ]
    assert (found.peak_bytes, found.end_bytes) == (500, 200)
    assert found.reserved_bytes == 1024 - 500
    assert (found.operator, found.timeline, found.result) == ("", (), 3)


def test_bytes_reserved_before_the_call_are_not_counted(allocator, on_device):
    found = mb.peak(lambda x: allocator.allocate(500, 0), on_device)
    assert (found.peak_bytes, found.reserved_bytes) == (500, 0)


def test_a_device_without_requested_bytes_reports_zero(monkeypatch, on_device):
    asked = {"reserved_bytes.all.current": 0, "reserved_bytes.all.peak": 64}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: asked)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    found = mb.peak(lambda x: None, on_device)
    assert (found.peak_bytes, found.end_bytes) == (0, 0)
    assert found.reserved_bytes == 64


def test_the_device_is_that_of_a_tensor_wherever_it_is_given(allocator, on_device):
    model = nn.Module()
    model.register_buffer("held", on_device)
    owner = type("Owner", (), {"method": lambda self: None})()

    def measured(function: object, *args: object, **kwargs: object) -> bool:
        allocator.asked.clear()
        mb.peak(function, *args, **kwargs)  # type: ignore[arg-type]
        return bool(allocator.asked)

    def ignore(*args: object, **kwargs: object) -> None: ...

    assert measured(ignore, [{"x": on_device}])
    assert measured(ignore, x=on_device)
    assert measured(ignore, model)
    assert measured(on_device.numel)
    assert not measured(ignore, torch.zeros(2), nn.Linear(1, 1))
    assert not measured(owner.method)
