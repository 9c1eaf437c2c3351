"""Offloading where several streams or devices compute: each waits for what it reads."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import membudget as mb
from membudget import policies
from tests.emulated import emu


def test_a_stream_that_waits_for_one_operator_alone_reads_what_that_has_saved():
    emu.configure(link_bytes_per_s=1e6)
    off, side = mb.offload("1MiB", window=0, smallest=1), torch.Stream("emu")
    x = torch.linspace(-1, 1, 1024, device="emu").requires_grad_()
    with off:
        y = x.exp()
        saved_by: Any = y.grad_fn
        made = torch.accelerator.current_stream().record_event()
        for _ in range(4):  # Their copies are waited for, and not by the other stream.
            y = y.tanh()
    with side:
        side.wait_event(made)
        found = saved_by._saved_result.cpu()
    assert torch.equal(found, x.detach().exp().cpu())


def is_doubled(candidate: policies.Candidate) -> bool:
    return str(candidate.operator).startswith("aten.mul.")


@pytest.mark.parametrize(
    ("host", "writes_elsewhere"), [("64", True), ("1MiB", False), ("1MiB", True)]
)
def test_a_region_writes_to_what_it_offloads_once_that_was_copied(
    host: str, writes_elsewhere: bool
):
    """On a host without room, what is written to is copied on the device."""
    emu.configure(link_bytes_per_s=1e6)
    side, written = torch.Stream("emu"), []

    def region(x: Tensor) -> Tensor:
        y = x * 2
        z = y.neg()
        side.wait_stream(torch.accelerator.current_stream())
        with side if writes_elsewhere else nullcontext():
            y.add_(1)
        written.append(y)
        return z.sin().exp()

    off = mb.offload(host, window="1MiB", smallest=1, first=0)
    keep = policies.offloaded(is_doubled, off)
    x = torch.linspace(-1, 1, 1024, device="emu").requires_grad_()
    mb.checkpoint(region, x, engine="replay", keep=keep).sum().backward()
    found, x.grad = x.grad, None
    region(x).sum().backward()
    assert found is not None
    assert x.grad is not None
    assert torch.equal(found.cpu(), x.grad.cpu())
    assert off.status().full_bytes == (4096 if host == "64" else 0)


def test_a_block_of_the_host_is_not_written_before_another_device_has_read_it():
    emu.configure(link_bytes_per_s=1e6)
    off = mb.offload("4KiB", window=0, smallest=1)  # All that one graph saves.

    def slopes(i: int, around: Any) -> Tensor:
        numbers = torch.linspace(-1, 1, 256, device=f"emu:{i % 2}")
        x = (numbers * (i + 1)).requires_grad_()
        with around:
            y = x
            for _ in range(4):
                y = y.tanh()
            loss = y.sum()
        loss.item()  # The copies out are made, and nobody waits for those back.
        loss.backward()
        assert x.grad is not None
        return x.grad

    expected = [slopes(i, nullcontext()).cpu() for i in range(6)]
    for _ in range(2):
        found = [slopes(i, off) for i in range(6)]
        for i in reversed(range(6)):
            assert torch.equal(found[i].cpu(), expected[i])
