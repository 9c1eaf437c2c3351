"""Virtual time: what a schedule takes, from given costs, to the digit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.emulated import emu

MEGABYTE = 1_000_000


def timed(run: Callable[[], object]) -> float:
    """Return the virtual milliseconds between two events around `run`."""
    start, end = (torch.Event("emu", enable_timing=True) for _ in range(2))
    torch.accelerator.synchronize()
    start.record()
    run()
    end.record()
    torch.accelerator.synchronize()
    return float(start.elapsed_time(end))


def copies_and_products(n: int, *, overlap: bool) -> float:
    host = torch.zeros(MEGABYTE // 4).pin_memory()
    a = torch.ones(8, 8, device="emu")
    main = torch.accelerator.current_stream()
    side = torch.Stream("emu") if overlap else main

    def run() -> None:
        for _ in range(n):
            with side:
                host.to("emu", non_blocking=True)
            torch.mm(a, a)
        main.wait_stream(side)

    return timed(run)


def test_copies_beside_kernels_take_the_time_of_the_longer():
    emu.configure(kernel_s={"mm": 1e-3}, link_bytes_per_s=1e9, launch_s=0)
    assert copies_and_products(8, overlap=False) == 16.0
    assert copies_and_products(8, overlap=True) == 8.0
    assert copies_and_products(8, overlap=True) == 8.0


@pytest.mark.parametrize(
    ("kernel_s", "launch_s", "ms"),
    [(3e-6, 1e-6, 0.031), (1e-6, 3e-6, 0.031), (2e-6, 0.0, 0.02), (0.0, 2e-6, 0.02)],
)
def test_a_step_takes_the_longer_of_its_kernels_and_its_launches(
    kernel_s: float, launch_s: float, ms: float
):
    emu.configure(kernel_s={"mm": kernel_s}, launch_s=launch_s)
    a = torch.ones(8, 8, device="emu")

    def run() -> None:
        for _ in range(10):
            torch.mm(a, a)

    assert timed(run) == ms


def test_a_copy_costs_its_bytes_and_the_latency_of_the_link():
    emu.configure(link_bytes_per_s=1e9, link_latency_s=5e-4, launch_s=0)
    host = torch.zeros(MEGABYTE // 4).pin_memory()
    x = torch.zeros(MEGABYTE // 4, device="emu")
    assert timed(lambda: x.copy_(host, non_blocking=True)) == 1.5


def test_the_directions_of_the_link_do_not_wait_for_each_other():
    emu.configure(link_bytes_per_s=1e9, launch_s=0)
    up, down = (torch.zeros(MEGABYTE // 4).pin_memory() for _ in range(2))
    x, y = (torch.zeros(MEGABYTE // 4, device="emu") for _ in range(2))
    streams = [torch.Stream("emu") for _ in range(2)]
    main = torch.accelerator.current_stream()

    def run(second_up: bool) -> None:
        for stream in streams:
            stream.wait_stream(main)
        with streams[0]:
            x.copy_(up, non_blocking=True)
        with streams[1]:
            if second_up:
                y.copy_(down, non_blocking=True)
            else:
                down.copy_(y, non_blocking=True)
        for stream in streams:
            main.wait_stream(stream)

    assert timed(lambda: run(second_up=False)) == 1.0
    assert timed(lambda: run(second_up=True)) == 2.0


def test_a_wait_moves_the_hosts_clock_and_a_launch_moves_it_by_its_cost():
    emu.configure(kernel_s={"mm": 1e-3}, launch_s=1e-6)
    a = torch.ones(8, 8, device="emu")
    torch.accelerator.synchronize()
    begin = emu.counters()["host_time_ps"]
    torch.mm(a, a)
    assert emu.counters()["host_time_ps"] - begin == 1_000_000
    torch.accelerator.synchronize()
    assert emu.counters()["host_time_ps"] - begin == 1_001_000_000


def test_a_step_takes_the_same_virtual_time_again():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1)).to("emu")
    x = torch.ones(2, 8, device="emu")
    model(x).sum().backward()  # Which makes the gradients.

    def step() -> None:
        model(x).sum().backward()

    taken = {timed(step) for _ in range(3)}
    assert len(taken) == 1
    assert taken.pop() > 0


def test_a_thread_takes_the_time_that_its_work_costs():
    emu.configure(mode="threads", kernel_s={"mm": 1e-3})
    a = torch.ones(8, 8, device="emu")
    assert timed(lambda: torch.mm(a, a)) >= 1.0
