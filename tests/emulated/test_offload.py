"""Offloading on a device with streams: bytes, virtual time, races, and no memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

import membudget as mb
from tests.emulated import emu

SIZE = 1 << 16
LAYERS = 12


def plain() -> AbstractContextManager[Any]:
    return nullcontext()


def chain(around: AbstractContextManager[Any]) -> tuple[int, int]:
    """Run a chain of layers that save what they return; return the peaks, in layers.

    Returns:
        The peak of the forward, and of the backward pass.
    """
    x = torch.ones(SIZE // 4, device="emu", requires_grad=True)
    before = torch.accelerator.memory_allocated()

    def most() -> int:
        torch.accelerator.synchronize()
        found = torch.accelerator.max_memory_allocated() - before
        torch.accelerator.reset_peak_memory_stats()
        return found // SIZE  # The loss has four bytes.

    most()
    with around:
        y = x
        for _ in range(LAYERS):
            y = y.tanh()
        loss = y.sum()
    del y
    forward = most()
    loss.backward()
    return forward, most()


@pytest.mark.parametrize("link_bytes_per_s", [1e7, 1e9, 1e15])
@pytest.mark.parametrize("layers", [0, 2, 4, 8])
def test_the_device_holds_the_window_and_what_the_operator_that_runs_uses(
    layers: int, link_bytes_per_s: float
):
    emu.configure(
        segment_bytes=0, link_bytes_per_s=link_bytes_per_s, bytes_per_s=1e9, launch_s=0
    )
    assert chain(plain()) == (LAYERS, LAYERS + 1)
    off = mb.offload(LAYERS * SIZE, window=layers * SIZE, smallest=SIZE)
    chain(off)
    # Its input and its output; one gradient becomes another.
    assert chain(off) == (layers + 2, max(layers, 1) + 2)
    assert chain(off) == (layers + 2, max(layers, 1) + 2)
    assert off.status().most_host_bytes <= LAYERS * SIZE


class Mixer(nn.Module):
    """Layers that save what others save, too, in another order than they ask for it."""

    def __init__(self, layers: int = 6, width: int = 32) -> None:
        super().__init__()
        make = nn.TransformerEncoderLayer
        self.layers = nn.ModuleList(
            make(width, 4, 4 * width, 0.1, batch_first=True) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


Make = Callable[[], AbstractContextManager[Any]]


def milliseconds(make: Make, link_bytes_per_s: float, steps: int = 3) -> float:
    """Return the virtual time of the last of some steps of a model."""
    emu.configure(
        link_bytes_per_s=link_bytes_per_s, flops_per_s=1e10, bytes_per_s=1e9, launch_s=0
    )
    torch.manual_seed(0)
    model, x = Mixer().to("emu"), torch.randn(4, 32, 32, device="emu")
    start, end = (torch.Event("emu", enable_timing=True) for _ in range(2))
    for _ in range(steps):
        model.zero_grad()
        torch.accelerator.synchronize()
        start.record()
        with make():
            loss = model(x).square().mean()
        loss.backward()
        end.record()
        torch.accelerator.synchronize()
    return float(start.elapsed_time(end))


def offloading(window: float) -> tuple[Make, mb.Offload]:
    off = mb.offload("8MiB", window=int(window), smallest=1024)
    return (lambda: off), off


def bytes_of_a_step() -> int:
    make, off = offloading(0)
    milliseconds(make, 1e9, steps=1)
    return off.status().out_bytes


def test_copies_hide_behind_as_much_work():
    whole = bytes_of_a_step()
    plain_ms = milliseconds(plain, 1e9)
    # A step has two thirds of its work behind it: to copy out takes one part of three.
    link = whole / (plain_ms / 3) * 1e3
    slow_ms = milliseconds(offloading(0)[0], link)
    hidden_ms = milliseconds(offloading(whole / 4)[0], link)
    torchs_ms = milliseconds(lambda: save_on_cpu(True, "emu"), link)
    assert slow_ms > 1.5 * plain_ms
    assert torchs_ms > 1.5 * plain_ms
    assert hidden_ms < 1.02 * plain_ms


def test_a_known_order_is_faster_than_the_first_step():
    whole = bytes_of_a_step()
    plain_ms = milliseconds(plain, 1e9)
    link = whole / (plain_ms / 3) * 1e3
    first_ms = milliseconds(offloading(whole / 8)[0], link, steps=1)
    later_ms = milliseconds(offloading(whole / 8)[0], link)
    assert later_ms - plain_ms < 0.6 * (first_ms - plain_ms)


def gradients(around: AbstractContextManager[Any], steps: int = 2) -> list[Tensor]:
    torch.manual_seed(0)
    model, x = Mixer(3, 16).to("emu"), torch.randn(2, 8, 16, device="emu")
    for _ in range(steps):
        model.zero_grad()
        with around:
            loss = model(x).square().mean()
        loss.backward()
    return [p.grad.cpu() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("mode", ["eager", "lazy", "threads"])
@settings(max_examples=8, deadline=None)
@given(
    window=st.integers(0, 1 << 16),
    link=st.sampled_from([1e7, 1e8, 1e9, 1e12]),
    latency_s=st.sampled_from([0.0, 1e-5, 1e-4]),
    kernels=st.dictionaries(
        st.sampled_from(["mm", "addmm", "bmm", "native_layer_norm", "add", "relu"]),
        st.sampled_from([0.0, 1e-6, 1e-4]),
    ),
)
def test_no_race_is_lost_whatever_things_take(
    mode: emu.Mode,
    window: int,
    link: float,
    latency_s: float,
    kernels: dict[str, float],
):
    emu.configure()
    expected = gradients(plain())
    emu.configure(
        mode=mode, link_bytes_per_s=link, link_latency_s=latency_s, kernel_s=kernels
    )
    off = mb.offload("1MiB", window=window, smallest=1)
    assert all(map(torch.equal, gradients(off), expected))


def test_a_block_is_not_written_while_it_is_still_read():
    """The host's memory suffices for one graph; each is loaded late, and slowly."""
    emu.configure()
    expected = gradients(plain(), steps=4)
    off = mb.offload("64KiB", window="1MiB", smallest=256)
    gradients(off, steps=1)
    emu.configure(link_bytes_per_s=1e6)
    assert all(map(torch.equal, gradients(off, steps=4), expected))


def test_what_was_loaded_and_never_asked_for_is_freed_after_it_has_arrived():
    # Room for one tensor that is kept, and one that is loaded ahead.
    off = mb.offload("1MiB", window=512, smallest=1)
    x = torch.ones(64, device="emu", requires_grad=True)
    for number in range(3):
        emu.configure(segment_bytes=0, link_bytes_per_s=1e9 if number < 2 else 1e4)
        with off:
            y = (x * 2).sin()
            z = y.exp() * y.cos()
            loss = z.sum()
        if number < 2:
            loss.backward()
        else:
            torch.autograd.grad(
                loss, y
            )  # What `sin` saved is loaded, and not asked for.
        del y, z, loss
        with off:
            pass
        filled = [torch.full((64,), 3.0, device="emu") for _ in range(8)]
        torch.accelerator.synchronize()
        assert all(torch.equal(f.cpu(), torch.full((64,), 3.0)) for f in filled)


def test_a_step_without_memory_leaves_nothing_and_runs_again():
    emu.configure(segment_bytes=0)
    expected = gradients(plain(), steps=1)
    off = mb.offload("1MiB", window=1 << 14, smallest=256)
    gradients(off)
    failed = 0
    for fail_at in range(1, 300, 6):
        emu.configure(segment_bytes=0, fail_at=fail_at)
        try:
            found = gradients(off, steps=1)
        except torch.OutOfMemoryError:
            failed += 1
            emu.configure(segment_bytes=0)
            found = gradients(off, steps=1)
        assert all(map(torch.equal, found, expected)), fail_at
    assert failed > 20
    emu.configure(segment_bytes=0)
    del found
    gc.collect()
    with off:
        pass
    torch.accelerator.synchronize()
    assert off._slab is not None
    assert off._slab.used_bytes == 0


def test_two_devices_share_the_hosts_memory():
    emu.configure(link_bytes_per_s=1e7)
    first, second = (Mixer(2, 16).to(f"emu:{n}") for n in range(2))

    def step(around: AbstractContextManager[Any]) -> list[Tensor]:
        torch.manual_seed(0)
        for model in (first, second):
            model.zero_grad()
        x = torch.ones(2, 8, 16, device="emu:0")
        with around:
            loss = second(first(x).to("emu:1")).square().mean()
        loss.backward()
        both = [*first.parameters(), *second.parameters()]
        return [p.grad.cpu() for p in both if p.grad is not None]

    expected = step(plain())
    off = mb.offload("1MiB", window=1 << 14, smallest=1)
    for _ in range(3):
        assert all(map(torch.equal, step(off), expected))
    assert len(off._lanes) == 2


def test_another_stream_than_that_of_the_forward_may_run_the_backward_pass():
    emu.configure(link_bytes_per_s=1e6)
    expected = gradients(plain(), steps=1)
    off = mb.offload("1MiB", window=1 << 14, smallest=1)
    side = torch.Stream("emu")
    for _ in range(3):
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            found = gradients(off, steps=1)
        assert all(map(torch.equal, found, expected))
