"""Offloading where several streams compute: each waits for what it reads."""

from __future__ import annotations

from typing import Any

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


def test_what_another_stream_has_saved_from_a_write_is_waited_for():
    """The host is full, so that it is copied on the device before the write."""
    side, written = torch.Stream("emu"), []

    def region(x: Tensor) -> Tensor:
        y = x * 2
        z = y.neg()
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            y.add_(1)
        written.append(y)
        return z.sin().exp()

    def is_doubled(candidate: policies.Candidate) -> bool:
        return str(candidate.operator).startswith("aten.mul.")

    off = mb.offload("64", window=0, smallest=1)
    keep = policies.offloaded(is_doubled, off)
    x = torch.linspace(-1, 1, 1024, device="emu").requires_grad_()
    mb.checkpoint(region, x, engine="replay", keep=keep).sum().backward()
    found, x.grad = x.grad, None
    region(x).sum().backward()
    assert found is not None
    assert x.grad is not None
    assert torch.equal(found.cpu(), x.grad.cpu())
    assert off.status().full_bytes == 4096
