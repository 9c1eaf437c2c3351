"""G2: the device is measured, and the host beside it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.errors import BudgetError
from membudget.memory import DevicePeak
from membudget.profile import cost
from membudget.state.identity import digest
from membudget.step import Step
from membudget.trial import try_steps
from tests.emulated import emu
from tests.emulated.limited import Trained, limited
from tests.emulated.models import DEVICE, cnn, gpt, step
from tests.situations import Notes


@pytest.fixture(autouse=True)
def device() -> None:
    emu.configure(segment_bytes=512)


def true_peak(run: Callable[[], object]) -> int:
    """Return what the device's allocator counts, beyond what was there."""
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_stats()["requested_bytes.all.current"]
    run()
    torch.accelerator.synchronize()
    return int(torch.accelerator.memory_stats()["requested_bytes.all.peak"]) - before


def forgetful(model: nn.Module, batch: Tensor) -> Callable[[], object]:
    """Return a step that leaves no gradients."""

    def run() -> None:
        step(model, batch)
        model.zero_grad()

    return run


@pytest.mark.parametrize("made", [gpt, cnn])
def test_g2_peak_measures_the_device_that_a_closure_uses(made):
    run = forgetful(*made())
    run()
    found = mb.peak(run)
    assert (found.device, found.peak_bytes) == ("emu:0", true_peak(run))
    assert found.host_bytes < found.peak_bytes


def test_g2_a_call_on_the_host_is_measured_there():
    x = torch.zeros(1000)
    found = mb.peak(lambda: x.sin().exp().sum())
    assert (found.device, found.peak_bytes) == ("cpu", 2 * x.nbytes)


def test_g2_profile_predicts_what_the_device_s_allocator_counts():
    model, batch = gpt()
    found = mb.profile(model, batch)
    run = forgetful(model, batch)
    run()
    assert found.peak_bytes == true_peak(lambda: model(batch).sum().backward())


def test_g2_a_profile_counts_what_kernels_allocate_for_themselves():
    graph = mb.profile(*gpt(), fake=False).graph
    # Where everything is masked, composed of operators of the device.
    takes = {o.name for o in graph.operators if o.workspace_bytes}
    assert takes == {"aten._safe_softmax.default"}


def measured(fitted: mb.Fitted) -> DevicePeak:
    """Return what the device took in the last step that `fit` measured."""
    memory = fitted.attempts[-1].memory
    assert memory is not None
    (taken,) = memory.devices
    return taken


def loss(output: Tensor, batch: Tensor) -> Tensor:
    """Return the loss that `step` computes."""
    return output.float().square().mean()


@pytest.mark.parametrize("share", ["70%", "85%"])
def test_g2_fit_bounds_what_the_process_reserves_on_the_device(share):
    model, batch = cnn(6)
    with mb.fit(model, batch, share, loss, measure="none") as fitted:
        assert fitted.plan.regions
        assert fitted.peak_bytes <= fitted.plan.budget_bytes
        taken = measured(fitted)
        assert taken.reserved_bytes == fitted.peak_bytes
        budget = fitted.plan.budget_bytes + taken.before_bytes
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        step(model, batch)
        torch.accelerator.synchronize()
        assert torch.accelerator.max_memory_reserved() <= budget
        lines = fitted.report()
    for word in ("requested", "allocated", "reserved", "fragmentation", "host"):
        assert word in lines


def test_g2_a_fitted_step_trains_where_the_plain_one_runs_out_of_memory():
    model, batch = cnn(6)
    with mb.fit(model, batch, "55%", loss, measure="none") as fitted:
        taken = measured(fitted)
        limit = fitted.plan.budget_bytes + taken.before_bytes

        def train() -> None:
            torch.accelerator.empty_cache()
            emu.configure(segment_bytes=512, limit_bytes=limit)
            for _ in range(5):
                step(model, batch)
                model.zero_grad()
            torch.accelerator.synchronize()

        train()
        emu.configure(segment_bytes=512)
    with pytest.raises(torch.OutOfMemoryError, match="memory"):
        train()


def test_g2_no_later_step_reserves_more_than_fit_measured():
    emu.configure(segment_bytes=4096)
    model, batch = cnn(6)
    optimizer = torch.optim.AdamW(model.parameters())
    options: dict[str, Any] = {"optimizer": optimizer, "measure": "none"}
    with mb.fit(model, batch, "100%", loss, **options) as fitted:
        total = measured(fitted).before_bytes + fitted.peak_bytes
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    first_step = 0
    for _ in range(5):
        optimizer.zero_grad()
        loss(model(batch), batch).backward()
        torch.accelerator.synchronize()
        first_step = first_step or torch.accelerator.max_memory_reserved()
        optimizer.step()
    assert first_step < torch.accelerator.max_memory_reserved() <= total


def test_g2_the_last_loss_lives_until_the_next_is_made_as_in_a_loop():
    model, batch = cnn(2)
    made, in_forward, in_backward = Notes(), Notes(), Notes()

    def noting(output: Tensor, batch: Tensor) -> Tensor:
        last = made.items[-1] if made.items else lambda: None
        in_forward(last() is not None)
        found = loss(output, batch)
        found.register_hook(lambda _: in_backward(last() is not None))
        made(weakref.ref(found))
        return found

    mb.fit(model, batch, "100%", noting, measure="none").remove()
    assert in_forward.items[-3:] == [False, True, True]
    assert in_backward.items[-3:] == [False, False, False]


def test_g2_fingerprints_are_on_the_host_whatever_the_default_device():
    x = torch.ones(3, device=DEVICE)
    before = torch.accelerator.memory_allocated()
    with torch.device(DEVICE):
        copy = digest(x)
    assert torch.accelerator.memory_allocated() == before
    assert {part.device.type for part in copy.parts} == {"cpu"}


def test_g2_the_host_s_tensors_are_none_of_a_device_s_bytes():
    class OnBoth(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(DEVICE)) * torch.ones(1000).sum()

    model = OnBoth(nn.Linear(8, 8)).to(DEVICE)
    for fake in (False, True):
        graph = mb.profile(model, torch.randn(4000, 8), fake=fake).graph
        assert graph.static.inputs == 0
        assert max(s.bytes for s in graph.storages) == 4000 * 8 * 4
        assert not any(o.workspace_bytes for o in graph.operators)
        sizes = [s.bytes for s in graph.storages]
        assert 4000 not in sizes


def test_g2_the_optimizer_s_temporaries_are_those_of_its_device():
    model, batch = cnn(2)
    sizes = [p.nbytes for p in model.parameters()]
    found = mb.profile(model, batch, optimizer=torch.optim.AdamW)
    graph = found.graph
    made = [s for s in graph.storages if s.birth >= graph.optimizer_start and s.bytes]
    assert graph.static.optimizer == 2 * sum(sizes)  # Its counters are on the host.
    # All parameters are updated at once, as one by one on a CPU.
    assert [s.bytes for s in made] == sizes
    assert max(s.birth for s in made) < min(s.death for s in made)


def test_g2_a_budget_in_bytes_counts_what_else_the_process_holds():
    model, batch = cnn(6)
    with mb.fit(model, batch, "70%", measure="none") as fitted:
        total = fitted.plan.budget_bytes + measured(fitted).before_bytes
    other = torch.empty(1 << 16, dtype=torch.uint8, device=DEVICE)
    with mb.fit(model, batch, total + other.nbytes, measure="none") as fitted:
        assert fitted.plan.budget_bytes <= total
        assert fitted.plan.regions


def test_g2_a_trial_measures_the_device():
    model, batch = cnn(4)
    with mb.fit(model, batch, "80%", measure="none") as fitted:
        trial = try_steps(fitted, Step(model, batch, None), 1)
    # The allocator may find other blocks than in the step that `fit` measured.
    assert fitted.peak_bytes <= trial.peak_bytes <= 1.2 * fitted.peak_bytes
    assert fitted.peak_bytes > 10_000


def test_g2_a_plan_that_fits_if_free_blocks_go_back_is_taken_and_says_so():
    with limited():
        module = torch.get_device_module("emu")
        trained = Trained("recommender")
        with pytest.raises(BudgetError, match="smallest plan needs") as raised:
            trained.fit(2)
        with trained.fit(raised.value.least_bytes) as fitted:
            (last,) = fitted.attempts[-1:]
            assert last.peak_bytes <= fitted.plan.budget_bytes < last.unlimited_bytes
            assert "reserved where the device has more" in fitted.report()
            assert fitted.audit().equal
        assert module.get_per_process_memory_fraction() == 1


@pytest.mark.parametrize("segment_bytes", [0, 512, 4096, 2 << 20])
@pytest.mark.parametrize("made", [gpt, cnn])
def test_g2_what_the_plain_step_reserves_is_enough_for_it(made, segment_bytes):
    emu.configure(segment_bytes=segment_bytes)
    model, batch = made()
    with mb.fit(model, batch, "100%", measure="none") as fitted:
        assert fitted.plan.regions == ()
        assert fitted.peak_bytes == fitted.plan.budget_bytes


def test_g4_without_a_budget_a_step_gets_what_the_device_has_free():
    model, batch = cnn(6)
    torch.accelerator.empty_cache()
    plain = mb.fit(model, batch, "100%", measure="none")
    taken = measured(plain)
    plain.remove()
    limit = taken.before_bytes + taken.reserved_bytes
    emu.configure(segment_bytes=512, limit_bytes=2 * limit)
    with mb.fit(model, batch, measure="none") as fitted:
        assert fitted.plan.regions == ()
        assert fitted.plan.budget_bytes < 2 * limit - taken.before_bytes


def test_g4_a_clock_waits_for_what_was_launched():
    from membudget.profile.cost import step_clock

    x = torch.ones(4, device=DEVICE)
    clock = step_clock()
    y = x.sin()
    clock()
    event = torch.accelerator.current_stream().record_event()
    clock()
    assert event.query()
    assert y.shape == (4,)


def test_g4_the_seconds_of_steps_are_those_of_the_device(monkeypatch):
    model, batch = gpt()
    monkeypatch.setattr(cost, "time", SimpleNamespace(perf_counter=emu.host_seconds))
    emu.configure(segment_bytes=512, kernel_s={"addmm": 1e-2})
    with mb.fit(model, batch, "100%", measure="none") as fitted:
        trial = try_steps(fitted, Step(model, batch, None), 3)
    assert len(set(map(round_off, trial.plain_seconds))) == 1
    assert min(trial.plain_seconds + trial.planned_seconds) > 2e-2


def round_off(seconds: float) -> float:
    return round(seconds, 9)


def test_g2_garbage_that_is_freed_in_a_call_does_not_lower_its_peak():
    holder: list[object] = [torch.empty(1 << 16, device=DEVICE)]
    holder.append(holder)
    del holder

    def collecting() -> Tensor:
        gc.collect()
        return torch.empty(1 << 10, device=DEVICE)

    assert mb.peak(collecting).peak_bytes == 4 << 10
