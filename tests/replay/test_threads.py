"""Replay regions and threads.

Recording is a matter of one thread: its modes and hooks are its own. The graph that a
recording leaves may be replayed in another thread, or in several at once. What all
threads share is torch's generator, which a replay borrows.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import membudget as mb
from tests import devices
from tests.behaviours.steps import Block, Region, differences, plain, region_with
from tests.keeps import VERIFIES
from tests.seconds import DEADLOCK_S

KEEPS = {
    "nothing": mb.policies.nothing,
    "matmuls": mb.policies.matmuls,
    "everything": mb.policies.everything,
}
every_region = pytest.mark.parametrize(
    "region",
    [
        pytest.param(
            region_with(engine="replay", keep=keep, verify=verify),
            id=f"{name}-{verify}",
        )
        for (name, keep), verify in itertools.product(KEEPS.items(), VERIFIES)
    ],
)
several_threads = pytest.mark.parametrize("threads", [2, 4])


@pytest.fixture
def short_turns() -> Iterator[None]:
    """Let threads take turns after a few operators, not after milliseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


# In a new thread, products run on all cores until something asks how many threads torch
# may use; with another number the plain run, too, rounds otherwise.
_heed_thread_count = torch.get_num_threads


def elsewhere(function: Callable[[], Any]) -> Any:
    """Run `function` in another thread and return its result."""
    with ThreadPoolExecutor(1, initializer=_heed_thread_count) as pool:
        return pool.submit(devices.elsewhere(function)).result()


def here(function: Callable[[], Any]) -> Any:
    """Run `function` in this thread."""
    return function()


PLACES = {"here": here, "elsewhere": elsewhere}


def at_once(function: Callable[[int], Any], threads: int) -> list[Any]:
    """Run `function` with 0, 1, ... in as many threads, which begin together."""
    start = threading.Barrier(threads)

    def run(i: int) -> Any:
        start.wait(DEADLOCK_S)
        return function(i)

    with ThreadPoolExecutor(threads, initializer=_heed_thread_count) as pool:
        return list(pool.map(devices.elsewhere(run), range(threads)))


class Noisy(nn.Module):
    """A layer with dropout that draws from a generator of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = devices.generator().manual_seed(seed)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).tanh()
        mask = torch.rand(hidden.shape, generator=self.generator) < 0.7
        return x + self.down(hidden * mask / 0.7)


class Model(nn.Module):
    """Two layers, and what they are trained on."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = Noisy(seed), Noisy(seed + 100)
        self.x = torch.randn(4, 8)

    def train_with(self, region: Region, steps: int) -> list[Tensor]:
        """Train; return all that came of it."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        found = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = region(self.second, region(self.first, self.x)).square().sum()
            loss.backward()
            found += [loss.detach(), *(_gradient(p) for p in self.parameters())]
            optimizer.step()
        layers = (self.first, self.second)
        streams = [layer.generator.get_state() for layer in layers]
        return [*found, *(p.detach() for p in self.parameters()), *streams]


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.clone()


@every_region
@several_threads
@pytest.mark.usefixtures("short_turns")
def test_models_trained_at_once_equal_each_trained_alone(
    region: Region, threads: int
) -> None:
    expected = [Model(seed).train_with(plain, 5) for seed in range(threads)]
    models = [Model(seed) for seed in range(threads)]

    found = at_once(lambda i: models[i].train_with(region, 5), threads)

    for ours, theirs in zip(found, expected, strict=True):
        assert all(itertools.starmap(torch.equal, zip(ours, theirs, strict=True)))


@every_region
@several_threads
@pytest.mark.usefixtures("short_turns")
def test_dropout_at_once_from_the_shared_stream_comes_back_in_each_thread(
    region: Region, threads: int
) -> None:
    # Which thread draws first is chance, so the mask is read from the output.
    def is_right(i: int) -> bool:
        for _ in range(30):
            x = torch.linspace(1.0, 2.0, 64).requires_grad_()
            y = region(lambda x: F.dropout(x.sin(), 0.5).exp(), x)
            (found,) = torch.autograd.grad(y.sum(), x)
            scale = (y != 1.0) * 2.0
            (expected,) = torch.autograd.grad((x.sin() * scale).exp().sum(), x)
            if not torch.equal(found, expected):
                return False
        return True

    assert all(at_once(is_right, threads))


@every_region
@pytest.mark.parametrize("forward", PLACES)
@pytest.mark.parametrize("backward", PLACES)
def test_forward_and_backward_may_run_in_different_threads(
    region: Region, forward: str, backward: str
) -> None:
    def step(region: Region) -> Any:
        model, x = Block(dropout=0.3), torch.randn(2, 5, 8, requires_grad=True)

        def chain() -> Tensor:
            return region(model, region(model, x)).square().sum()

        loss = PLACES[forward](chain)
        PLACES[backward](loss.backward)
        return loss, model, x, torch.rand(2)

    assert differences(step, region) == []


@every_region
def test_a_new_thread_replays_with_the_number_of_threads_that_was_set(
    region: Region,
) -> None:
    def step(region: Region) -> Any:
        layer, x = nn.Linear(8, 24), torch.randn(10, 8, requires_grad=True)
        loss = region(lambda x: layer(x).tanh(), x).sum()
        # Plain, the products of the backward would run on all cores there.
        backward = threading.Thread(target=loss.backward)
        if region is plain:
            backward.run()
        else:
            backward.start()
            backward.join()
        return loss, layer, x

    assert differences(step, region) == []


@every_region
def test_settings_of_the_forward_come_back_in_another_thread(region: Region) -> None:
    def step(region: Region) -> Any:
        model, x = Block(dropout=0.3), torch.randn(2, 5, 8, requires_grad=True)
        with torch.autocast(devices.device_type(), torch.bfloat16):
            loss = region(model, x).float().square().sum()

        def backward() -> None:
            with torch.no_grad():
                loss.backward()

        elsewhere(backward)
        return loss, model, x

    assert differences(step, region) == []


@every_region
@pytest.mark.parametrize("multithreading", [True, False])
@pytest.mark.usefixtures("short_turns")
def test_several_threads_may_go_backward_through_one_region(
    region: Region, multithreading: bool
) -> None:
    torch.manual_seed(0)
    model, x = Block(dropout=0.3), torch.randn(2, 5, 8, requires_grad=True)
    torch.manual_seed(1)
    y = model(x)
    wanted = [torch.randn_like(y) for _ in range(4)]
    expected = [torch.autograd.grad(y, x, v, retain_graph=True)[0] for v in wanted]
    torch.manual_seed(1)
    y = region(model, x)

    def backward(i: int) -> Tensor:
        with torch.autograd.set_multithreading_enabled(multithreading):
            return torch.autograd.grad(y, x, wanted[i], retain_graph=True)[0]

    found = at_once(backward, 4)

    assert all(itertools.starmap(torch.equal, zip(found, expected, strict=True)))


@every_region
@pytest.mark.usefixtures("short_turns")
def test_several_threads_may_call_one_module_at_once(region: Region) -> None:
    torch.manual_seed(0)
    model = Block()
    inputs = [torch.randn(2, 5, 8, requires_grad=True) for _ in range(4)]

    def gradients(region: Region, i: int) -> tuple[Tensor, ...]:
        loss = region(model, region(model, inputs[i])).square().sum()
        return torch.autograd.grad(loss, [inputs[i], *model.parameters()])

    expected = [gradients(plain, i) for i in range(4)]

    found = at_once(lambda i: gradients(region, i), 4)

    for ours, theirs in zip(found, expected, strict=True):
        assert all(itertools.starmap(torch.equal, zip(ours, theirs, strict=True)))


@every_region
@pytest.mark.usefixtures("short_turns")
def test_a_backward_may_run_while_the_next_forward_records(region: Region) -> None:
    def step(region: Region) -> Any:
        model = Model(0)
        xs = [torch.randn(4, 8, requires_grad=True) for _ in range(10)]
        losses = []
        with ThreadPoolExecutor(1, initializer=_heed_thread_count) as pool:
            pending = None
            for x in xs:
                loss = region(model.second, region(model.first, x)).square().sum()
                losses.append(loss)
                if pending is not None:
                    pending.result()
                pending = pool.submit(loss.backward)
        return losses, xs, model, model.first.generator, model.second.generator

    assert differences(step, region) == []
