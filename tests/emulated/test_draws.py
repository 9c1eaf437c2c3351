"""G1, G5: what a device draws is drawn again, whoever recomputes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.engine import isolation
from membudget.errors import CheckpointError
from membudget.state.snapshot import State
from tests.emulated import emu
from tests.emulated.models import DEVICE, cnn, each_block, gpt, unequal

WAYS = pytest.mark.parametrize(
    "options",
    [
        {"engine": "rerun"},
        {"engine": "replay"},
        {"engine": "replay", "keep": mb.policies.matmuls},
        {"use_reentrant": True},
    ],
    ids=["rerun", "replay", "keep", "reentrant"],
)


@WAYS
@pytest.mark.parametrize("made", [gpt, cnn])
def test_g1_a_region_draws_on_the_device_what_its_forward_drew(made, options):
    batch = made()[1].requires_grad_()  # Which the reentrant variant needs.
    assert unequal(lambda: (made()[0], batch), each_block(**options)) == ""


def test_g5_without_guards_a_region_draws_what_its_forward_drew():
    assert unequal(gpt, each_block(guards=False)) == ""


def test_g1_a_region_leaves_another_device_s_stream_where_it_was():
    emu.configure()
    model, batch = gpt()
    each_block(engine="rerun")(model)
    loss = model(batch).square().mean()
    torch.emu.manual_seed_all(3)  # type: ignore[attr-defined]
    drawn = [torch.rand(2, device="emu:1")]
    loss.backward()
    drawn.append(torch.rand(2, device="emu:1"))
    torch.emu.manual_seed_all(3)  # type: ignore[attr-defined]
    again = [torch.rand(2, device="emu:1") for _ in range(2)]
    assert [d.tolist() for d in drawn] == [d.tolist() for d in again]


@pytest.mark.parametrize("engine", ["rerun", "replay"])
def test_g1_each_draw_is_isolated_where_several_threads_run_regions(
    engine, monkeypatch
):
    monkeypatch.setattr(isolation, "is_shared", lambda: True)
    assert unequal(gpt, each_block(engine=engine)) == ""


@pytest.mark.parametrize("engine", ["rerun", "replay"])
def test_g1_a_generator_of_one_s_own_on_the_device_draws_again(engine):
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8, device=DEVICE)
            self.generator = torch.Generator(device=DEVICE).manual_seed(3)

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.rand(x.shape, device=DEVICE, generator=self.generator)
            return self.linear(x) * noise

    def made() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(Noisy(), Noisy(), nn.Linear(8, 2, device=DEVICE))
        return model, torch.randn(3, 8, device=DEVICE)

    assert unequal(made, each_block(engine=engine)) == ""


def test_g1_a_snapshot_holds_the_stream_of_each_device():
    state = State([])
    assert {"torch emu:0", "torch CPU"} <= state.stream_states().keys()
    first = torch.rand(3, device=DEVICE).cpu()
    state.restore()
    assert torch.equal(torch.rand(3, device=DEVICE).cpu(), first)


def test_g1_an_audit_names_the_stream_of_the_device():
    def draws_once(x: Tensor) -> Tensor:
        return x * torch.rand_like(x)

    def draws_twice(x: Tensor) -> Tensor:
        torch.rand(1, device=DEVICE)
        return x.detach() * 0 + draws_once(x)

    x = torch.ones(3, device=DEVICE)
    report = mb.audit(
        plain=lambda: draws_once(x), budgeted=lambda: draws_twice(x), modules=()
    )
    assert not report.equal
    assert "torch emu:0" in {d.name for d in report.differences}


@pytest.mark.parametrize("options", [{"engine": "rerun"}, {"guards": False}])
def test_g1_a_device_whose_generator_cannot_be_read_is_an_error(options, monkeypatch):
    monkeypatch.setattr(torch.get_device_module(DEVICE), "default_generators", ())
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    with pytest.raises(CheckpointError, match="generator of emu:0 cannot be read"):
        mb.checkpoint(torch.sin, x, **options)
    options = {**options, "preserve_rng_state": False}
    mb.checkpoint(torch.sin, x, **options).sum().backward()
    assert x.grad is not None


def test_g1_a_replay_refuses_only_what_draws_from_such_a_generator(monkeypatch):
    monkeypatch.setattr(torch.get_device_module(DEVICE), "default_generators", ())
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    with pytest.raises(CheckpointError, match="generator of emu:0 cannot be read"):
        mb.checkpoint(lambda x: x * torch.rand_like(x), x, engine="replay")
    mb.checkpoint(lambda x: x.sin().exp(), x, engine="replay").sum().backward()
    assert x.grad is not None


def test_g1_fit_trains_to_the_plain_step_s_bits_on_the_device():
    def wrap(model: nn.Module) -> None:
        fitted = mb.fit(model, cnn(6)[1], "70%", measure="none")
        assert fitted.plan.regions

    emu.configure(segment_bytes=512)
    assert unequal(lambda: cnn(6), wrap) == ""
