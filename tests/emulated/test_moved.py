"""What is simulated of plans that move tensors to the host, against the device."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import membudget as mb
from membudget.host import measured_rates
from membudget.planner.moved import Host
from membudget.planner.planner import Planner
from membudget.planner.schedule import Schedule
from membudget.planning import make_plan
from membudget.profile import Profile
from membudget.profile.devices import Device
from tests.emulated import emu

DEVICE = Device("emu", {"float32": 1e12}, 2e10, 1e9)

UNLIKE = {
    *("add", "add_", "clone", "empty", "ones_like", "stack"),
    *("native_dropout", "native_dropout_backward"),
}
"""The device launches these under other names, or at other times than the graph says:
they take no time here."""

Step = tuple[nn.Module, Tensor]


def mlp() -> Step:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    return nn.Sequential(*(block() for _ in range(8))), torch.randn(2048, 64)


class Block(nn.Module):
    """Attention and MLP, written out."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        weights = F.dropout((q @ k.transpose(-1, -2)).softmax(-1), 0.1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


def gpt() -> Step:
    return nn.Sequential(*(Block() for _ in range(4))), torch.randn(8, 128, 64)


class Residual(nn.Module):
    """Two convolutions with BatchNorm around a residual sum."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + x)


def cnn() -> Step:
    body = (Residual(16) for _ in range(5))
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *body), torch.randn(
        4, 3, 32, 32
    )


MODELS = {"mlp": mlp, "gpt": gpt, "cnn": cnn}


def loss_of(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean()


@dataclass
class Rig:
    """A model on the device, whose kernels take what its profile says."""

    model: nn.Module
    batch: Tensor
    profile: Profile
    kernel_s: dict[str, float]

    @classmethod
    def of(cls, name: str) -> Rig:
        torch.manual_seed(0)
        emu.configure(segment_bytes=0, launch_s=0)
        made, batch = MODELS[name]()
        model, batch = made.to("emu"), batch.to("emu")
        profile = mb.profile(model, batch, loss_of, device=DEVICE)
        times = defaultdict(list)
        graph = profile.graph
        for operator in graph.operators:
            times[kernel_of(operator.name)].append(operator.seconds)
        mean_s = {n: sum(of) / len(of) for n, of in times.items() if n not in UNLIKE}
        operators = tuple(
            replace(o, seconds=0 if o.is_view else mean_s.get(kernel_of(o.name), 0))
            for o in graph.operators
        )
        profile = replace(profile, graph=replace(graph, operators=operators))
        return cls(model, batch, profile, mean_s)

    def connect(
        self, link: float, mode: emu.Mode = "lazy", slower: float = 1.0
    ) -> Host:
        """Let copies of all that is saved take so many times the forward's time.

        The device may be slower than the profile says, and its link by as much.
        """
        graph = self.profile.graph
        saved = [graph.storages[s] for s in graph.saved_on]
        sizes = [s.bytes for s in saved if s.birth >= 0]
        forward = graph.operators[: graph.backward_start]
        rate = sum(sizes) / sum(o.seconds for o in forward) / link
        emu.configure(
            mode=mode,
            segment_bytes=0,
            launch_s=0,
            kernel_s={name: slower * s for name, s in self.kernel_s.items()},
            flops_per_s=1e30,
            bytes_per_s=1e30,
            link_bytes_per_s=rate / slower,
        )
        return Host(1 << 30, 2 * max(sizes), rate, rate)

    def planned(self, budget: float, host: Host | None) -> Schedule:
        limit = int(budget * self.profile.peak_bytes)
        return Planner(self.profile.graph, host=host).fastest(limit)

    def under(self, schedule: Schedule) -> tuple[float, int]:
        """Return the time of a step under a schedule, and its peak."""
        plan = make_plan(self.profile, schedule, self.model, 1 << 30)
        applied = mb.apply(self.model, plan, verify=False)
        found = self.measured()
        applied.remove()
        return found

    def measured(
        self, around: AbstractContextManager[Any] | None = None, steps: int = 3
    ) -> tuple[float, int]:
        """Return the time of the last of some steps, and its peak."""
        start, end = (torch.Event("emu", enable_timing=True) for _ in range(2))
        for _ in range(steps):
            self.model.zero_grad()
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
            before = torch.accelerator.memory_allocated()
            start.record()
            with around or nullcontext():
                loss = loss_of(self.model(self.batch), self.batch)
            loss.backward()
            end.record()
            torch.accelerator.synchronize()
        peak_bytes = torch.accelerator.max_memory_allocated() - before
        return float(start.elapsed_time(end)) / 1e3, peak_bytes

    def gradients(self) -> list[Tensor]:
        """Return the gradients of a step from one state."""
        torch.manual_seed(1)
        self.model.zero_grad()
        loss_of(self.model(self.batch), self.batch).backward()
        return [p.grad.cpu() for p in self.model.parameters() if p.grad is not None]


def kernel_of(operator: str) -> str:
    return operator.split(".")[1]


@pytest.fixture(params=MODELS)
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig.of(request.param)


def test_the_plain_step_takes_what_the_profile_says(rig):
    rig.connect(1.0)
    seconds, peak_bytes = rig.measured()
    assert seconds == pytest.approx(rig.profile.graph.seconds, rel=1e-6)
    assert peak_bytes == pytest.approx(rig.profile.peak_bytes, rel=0.001)


@pytest.mark.parametrize("link", [0.5, 2.0])
def test_a_plan_takes_the_time_and_the_bytes_that_are_simulated(rig, link):
    host = rig.connect(link)
    schedule = rig.planned(0.5, host)
    moves = schedule.simulation.moves
    assert moves.out_bytes > 0
    seconds, peak_bytes = rig.under(schedule)
    assert seconds == pytest.approx(schedule.simulation.seconds, rel=0.05)
    assert peak_bytes == pytest.approx(schedule.peak_bytes, rel=0.001)
    assert peak_bytes <= 0.5 * rig.profile.peak_bytes


@pytest.mark.slow
def test_threads_that_sleep_take_the_time_that_is_simulated():
    rig, link = Rig.of("mlp"), 3.0
    schedule = rig.planned(0.3, rig.connect(link))
    assert schedule.simulation.moves.out_bytes > 0
    plan = make_plan(rig.profile, schedule, rig.model, 1 << 30)
    slower = 4.0 / rig.profile.graph.seconds  # A plain step sleeps for 4 s.
    rig.connect(link, "threads", slower)
    applied = mb.apply(rig.model, plan, verify=False)
    for _ in range(2):  # In the first step, no order is known.
        rig.model.zero_grad()
        torch.accelerator.synchronize()
        begin_s = time.perf_counter()
        loss_of(rig.model(rig.batch), rig.batch).backward()
        torch.accelerator.synchronize()
        took_s = time.perf_counter() - begin_s
    applied.remove()
    assert took_s == pytest.approx(slower * schedule.simulation.seconds, rel=0.15)


def pure_offload_s(rig: Rig, limit_bytes: int) -> float:
    """Return the shortest step of those whose every saved tensor may be moved."""
    fitting = []
    for window in (0, 1 / 32, 1 / 16, 1 / 8, 1 / 4):
        size = int(window * rig.profile.peak_bytes)
        seconds, peak_bytes = rig.measured(mb.offload(1 << 30, window=size, smallest=1))
        if peak_bytes <= limit_bytes:
            fitting.append(seconds)
    return min(fitting, default=float("inf"))


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("mlp", 0.3),
        pytest.param("gpt", 0.3, marks=pytest.mark.slow),
        pytest.param("cnn", 0.35, marks=pytest.mark.slow),
    ],
)
def test_the_mix_is_faster_than_both_ways_alone(name, budget):
    rig = Rig.of(name)
    host = rig.connect(2.0)
    limit_bytes = int(budget * rig.profile.peak_bytes)
    mixed_s, peak_bytes = rig.under(rig.planned(budget, host))
    recomputed_s, _ = rig.under(rig.planned(budget, None))
    offloaded_s = pure_offload_s(rig, limit_bytes)
    better_s = min(recomputed_s, offloaded_s)
    # Regions hold copies of the running statistics that they change; `fit` meters that.
    copied_bytes = sum(buffer.nbytes for buffer in rig.model.buffers())
    assert peak_bytes <= limit_bytes + copied_bytes
    assert better_s - mixed_s >= 0.1 * rig.profile.graph.seconds


def equal(first: Iterable[Tensor], second: Iterable[Tensor]) -> bool:
    return all(map(torch.equal, first, second))


def test_gradients_under_a_plan_that_moves_are_those_of_the_plain_step(rig):
    expected = rig.gradients()
    host = rig.connect(2.0)
    schedule = rig.planned(0.5, host)
    assert any(choice.offloaded for choice in schedule.choices)
    plan = make_plan(rig.profile, schedule, rig.model, 1 << 30)
    applied = mb.apply(rig.model, mb.Plan.from_json(plan.to_json()))
    assert all(equal(rig.gradients(), expected) for _ in range(3))
    applied.remove()


def test_host_memory_that_is_too_small_is_never_exceeded(rig):
    host = rig.connect(1.0)
    small = replace(host, memory_bytes=rig.profile.peak_bytes // 8)
    schedule = rig.planned(0.7, small)
    assert schedule.simulation.moves.host_bytes <= small.memory_bytes
    plan = make_plan(rig.profile, schedule, rig.model, 1 << 30)
    assert plan.host.host_bytes <= small.memory_bytes
    _, peak_bytes = rig.under(schedule)
    assert peak_bytes <= 0.7 * rig.profile.peak_bytes


def test_the_link_is_measured():
    emu.configure(link_bytes_per_s=2e9, link_latency_s=1e-4, launch_s=0)
    measured_rates.cache_clear()
    found = measured_rates(torch.device("emu", 0))
    measured_rates.cache_clear()
    assert found == pytest.approx((2e9, 2e9, 1e-4), rel=0.01)


def test_fit_moves_what_it_may_within_the_budget():
    rig = Rig.of("mlp")
    emu.configure(segment_bytes=0, launch_s=0, link_bytes_per_s=3e9)
    options: dict[str, Any] = {"device": DEVICE, "measure": "none"}
    with mb.fit(rig.model, rig.batch, "50%", loss_of, host="1GiB", **options) as moved:
        assert moved.plan.host.moved_bytes > 0
        assert moved.peak_bytes <= moved.plan.budget_bytes
        assert "moves to the host" in moved.report()
        faster_s = moved.plan.slowdown
    with mb.fit(rig.model, rig.batch, "50%", loss_of, **options) as kept:
        assert kept.plan.host.moved_bytes == 0
        assert kept.plan.slowdown > faster_s
