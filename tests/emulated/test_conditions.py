"""G3, G4: autocast and streams of a device are those of the forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget import policies
from membudget.engine import isolation
from membudget.engine.callees import signature_of
from membudget.engine.options import RegionOptions
from membudget.engine.replay.verified import verified
from tests.emulated.models import DEVICE, each_block, gpt, step, unequal

ENGINES = pytest.mark.parametrize("engine", ["rerun", "replay"])


def casts() -> list[Any]:
    return [
        torch.autocast(DEVICE, torch.bfloat16),
        torch.autocast(DEVICE, torch.float16),
        torch.autocast("cpu", torch.bfloat16),
    ]


def test_g3_a_call_is_verified_anew_under_autocast_of_the_device():
    function, x = torch.sin, torch.ones(2, device=DEVICE)
    options = RegionOptions(keep=policies.matmuls)
    known = [verified(options, function, (x,), {})]
    for cast in casts():
        with cast:
            known.append(verified(options, function, (x,), {}))
    assert len(set(map(id, known))) == 4
    assert verified(options, function, (x,), {}) is known[0]


def test_g3_a_rerun_is_another_call_under_autocast_of_the_device():
    function, x = torch.sin, torch.ones(2, device=DEVICE)
    known = [signature_of(function, (x,), {})[0]]
    for cast in casts():
        with cast:
            known.append(signature_of(function, (x,), {})[0])
    assert len(set(known)) == 4


def under_autocast(model: nn.Module, batch: Tensor) -> Tensor:
    for parameter in model.parameters():
        parameter.grad = None
    with torch.autocast(DEVICE, torch.bfloat16):
        loss: Tensor = model(batch).float().square().mean()
    loss.backward()
    return loss


@ENGINES
def test_g3_a_region_under_autocast_of_the_device_has_the_plain_bits(engine):
    assert unequal(gpt, each_block(engine=engine), run=under_autocast) == ""


def on_side(model: nn.Module, batch: Tensor) -> Tensor:
    """Run the forward on a stream of its own, and the backward from the main one."""
    main, side = torch.accelerator.current_stream(), torch.Stream(device=DEVICE)
    side.wait_stream(main)
    with side:
        loss: Tensor = model(batch).square().mean()
    main.wait_stream(side)
    loss.backward()
    return loss


@ENGINES
def test_g4_a_forward_on_a_side_stream_is_recomputed_there(engine):
    assert unequal(gpt, each_block(engine=engine), run=on_side) == ""


class Sides(nn.Module):
    """Runs half of its work on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.side = torch.Stream(device=DEVICE)
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        main = torch.accelerator.current_stream()
        self.side.wait_stream(main)
        with self.side:
            y = self.one(x).sin().exp()
            x.record_stream(self.side)
            y.record_stream(main)
        z = self.two(x).cos()
        main.wait_stream(self.side)
        return (y * z).tanh()


def sides() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(Sides(), Sides(), nn.Linear(16, 2)).to(DEVICE)
    return model, torch.randn(4, 16, device=DEVICE)


@ENGINES
@pytest.mark.parametrize("run", [step, on_side])
def test_g4_streams_inside_a_region_wait_for_each_other_again(engine, run):
    assert unequal(sides, each_block(engine=engine), run=run) == ""


@ENGINES
def test_g4_a_recompute_ahead_is_ready_on_every_stream(engine):
    import membudget as mb

    def ahead(model: nn.Module, batch: Tensor) -> Tensor:
        with mb.collect_regions() as regions:
            loss: Tensor = model(batch).square().mean()
        with torch.Stream(device=DEVICE):
            regions.recompute()
        loss.backward()
        return loss

    assert unequal(sides, each_block(engine=engine), run=ahead) == ""


def test_g4_memory_that_a_replay_reads_on_a_side_stream_is_not_reused_before():
    """What a third stream made and another read is read there again, not on ours."""
    import membudget as mb

    main = torch.accelerator.current_stream()
    maker, reader = torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)

    def block(x: Tensor) -> Tensor:
        with maker:
            made = mb.name(torch.arange(64.0, device=DEVICE) + 1, "made")
        made.record_stream(reader)
        reader.wait_stream(maker)
        with reader:
            read = made.sin()
        read.record_stream(main)
        main.wait_stream(reader)
        return x * read

    def gradient(call: Any) -> Tensor:
        x = torch.ones(64, device=DEVICE, requires_grad=True)
        torch.accelerator.synchronize()
        call(x).sum().backward()
        with maker:  # The block of `made` is free by now.
            for _ in range(4):
                torch.full((64,), 9.0, device=DEVICE)
        maker.synchronize()
        assert x.grad is not None
        return x.grad.cpu()

    region = mb.checkpoint(keep=mb.policies.named("made"), verify=False)(block)
    assert torch.equal(gradient(region), gradient(block))


@ENGINES
def test_a_backward_pass_inside_a_region_does_not_wait_for_the_region(
    engine, monkeypatch
):
    """It runs on a thread of autograd, for which the region's own thread waits."""

    def never(seconds: float) -> None:
        raise AssertionError("it waited")

    monkeypatch.setattr(isolation.REGISTRY.quiet, "wait", never)

    def penalised(x: Tensor) -> Tensor:
        def inner(y: Tensor) -> Tensor:
            return y.sin().exp()

        y = mb.checkpoint(inner, x, engine=engine).sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        return slope.square()

    found = []
    for wrapped in (penalised, mb.checkpoint(engine=engine)(penalised)):
        x = torch.linspace(-1, 1, 6, device=DEVICE).requires_grad_()
        wrapped(x).sum().backward()
        assert x.grad is not None
        found.append(x.grad)
    assert torch.equal(*found)
