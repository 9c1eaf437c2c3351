"""The device's random streams are its own: a seed and an offset."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor


def stream() -> Tensor:
    return torch.emu.get_rng_state()  # type: ignore[attr-defined]


def restore(state: Tensor) -> None:
    torch.emu.set_rng_state(state)  # type: ignore[attr-defined]


def test_a_draw_moves_the_devices_stream_and_not_the_cpus():
    here, there = torch.get_rng_state(), stream()
    torch.rand(3, device="emu")
    assert torch.equal(torch.get_rng_state(), here)
    assert not torch.equal(stream(), there)
    there = stream()
    torch.rand(3)
    assert torch.equal(stream(), there)


def test_a_state_of_16_bytes_brings_the_same_draws_back():
    x = torch.ones(1000, device="emu")
    state = stream()
    assert state.numel() == 16
    first, second = F.dropout(x), F.dropout(x)
    restore(state)
    assert torch.equal(F.dropout(x), first)
    assert not torch.equal(first, second)


def test_dropout_keeps_the_share_it_is_told_and_its_backward_has_the_same_mask():
    x = torch.ones(10_000, device="emu", requires_grad=True)
    y = F.dropout(x, 0.25)
    assert float((y > 0).float().mean()) == pytest.approx(0.75, abs=0.02)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())


def test_torchs_seed_seeds_the_device():
    torch.manual_seed(3)
    first = torch.randn(4, device="emu")
    torch.manual_seed(3)
    assert torch.equal(torch.randn(4, device="emu"), first)


def test_a_generator_of_the_device_draws_apart_from_the_default_one():
    state = stream()
    first, second = (torch.Generator("emu").manual_seed(5) for _ in range(2))
    x = torch.randn(4, device="emu", generator=first)
    assert torch.equal(torch.randn(4, device="emu", generator=second), x)
    assert torch.equal(first.get_state(), second.get_state())
    assert torch.equal(stream(), state)
    with pytest.raises(RuntimeError, match="Expected a generator of emu"):
        torch.randn(4, device="emu", generator=torch.Generator())


def test_draws_do_not_depend_on_the_order_in_which_streams_run():
    side = torch.Stream("emu")
    state = stream()
    a = torch.rand(4, device="emu")
    with side:
        b = torch.rand(4, device="emu")
    side.synchronize()
    found = (b.tolist(), a.tolist())
    restore(state)
    assert torch.rand(4, device="emu").tolist() == found[1]
    assert torch.rand(4, device="emu").tolist() == found[0]


@pytest.mark.parametrize("name", ["randperm", "randint", "normal", "multinomial"])
def test_every_draw_is_of_the_devices_stream(name: str):
    def draw() -> Tensor:
        if name == "randperm":
            return torch.randperm(50, device="emu")
        if name == "randint":
            return torch.randint(1000, (50,), device="emu")
        if name == "normal":
            return torch.normal(0.0, 1.0, (50,), device="emu")
        return torch.multinomial(torch.ones(50, device="emu"), 20)

    here, state = torch.get_rng_state(), stream()
    first = draw()
    restore(state)
    assert torch.equal(draw(), first)
    assert torch.equal(torch.get_rng_state(), here)
