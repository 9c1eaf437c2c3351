"""A second device: memory, streams and generators of its own, and copies between."""

from __future__ import annotations

import pytest
import torch
from torch import nn


def test_each_counts_its_own_memory():
    before = [torch.accelerator.memory_allocated(i) for i in range(2)]
    x = torch.ones(1000, device="emu:1")
    after = [torch.accelerator.memory_allocated(i) for i in range(2)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [0, 4096]
    assert x.device == torch.device("emu:1")


def test_a_copy_between_them_waits_for_both_streams():
    x = torch.ones(1000, device="emu:0") * 3
    y = x.to("emu:1", non_blocking=True)
    assert (y + 1).unique().tolist() == [4.0]
    y.copy_(x * 2)
    x.fill_(0.0)
    assert y.unique().tolist() == [6.0]


def test_operands_of_both_are_refused():
    with pytest.raises(RuntimeError, match="on the same device"):
        torch.mm(torch.ones(2, 2, device="emu:0"), torch.ones(2, 2, device="emu:1"))


def test_the_current_device_is_where_new_tensors_are():
    with torch.get_device_module("emu").device(1):
        assert torch.ones(1, device="emu").device == torch.device("emu:1")
    assert torch.ones(1, device="emu").device == torch.device("emu:0")


def test_each_draws_from_its_own_stream():
    states = [torch.emu.get_rng_state(i) for i in range(2)]  # type: ignore[attr-defined]
    torch.rand(3, device="emu:1")
    now = [torch.emu.get_rng_state(i) for i in range(2)]  # type: ignore[attr-defined]
    assert torch.equal(now[0], states[0])
    assert not torch.equal(now[1], states[1])


def test_a_model_split_over_both_trains_like_one_on_one():
    def trained(second: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        first, last = nn.Linear(4, 4).to("emu:0"), nn.Linear(4, 4).to(second)
        y = last(first(torch.ones(2, 4, device="emu:0")).to(second))
        y.square().sum().backward()
        parameters = [*first.parameters(), *last.parameters()]
        return [p.grad.cpu() for p in parameters if p.grad is not None]

    assert len(trained("emu:1")) == 4
    assert all(map(torch.equal, trained("emu:1"), trained("emu:0")))


def test_a_device_that_is_not_there_is_an_error():
    with pytest.raises(RuntimeError, match="emu has 2 devices, and no emu:5"):
        torch.ones(1, device="emu:5")
