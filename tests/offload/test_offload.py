"""What `offload` moves, where it may not, and what it says."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import membudget as mb
from membudget.errors import ChangedSinceForwardError
from tests.devices import default_device, is_cpu

WIDTH = 64
BYTES = 16 * WIDTH * 4
"""Of a batch."""


def chain(layers: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    parts = (
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1))
        for _ in range(layers)
    )
    return nn.Sequential(*parts)


def batch() -> Tensor:
    return torch.randn(16, WIDTH)


def gradients(
    model: nn.Module, off: mb.Offload | None, x: Tensor, steps: int = 1
) -> list[Tensor]:
    torch.manual_seed(1)
    for _ in range(steps):
        model.zero_grad()
        if off is None:
            loss = model(x).square().sum()
        else:
            with off:
                loss = model(x).square().sum()
        loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) > 0 and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("window", [0, 2 * BYTES, 6 * BYTES, "1GiB"])
def test_several_steps_are_the_plain_ones(window: int | str) -> None:
    model, x = chain(), batch()
    off = mb.offload("1MiB", window=window, smallest=1)
    assert same(gradients(model, off, x, 4), gradients(model, None, x, 4))
    status = off.status()
    assert status.most_host_bytes <= status.host_bytes == 1 << 20
    assert status.out_bytes
    if window == 6 * BYTES:
        assert status.first_bytes
        assert status.ahead_bytes


def test_a_storage_is_copied_once_for_all_its_views() -> None:
    x = batch().requires_grad_()
    with mb.offload("1MiB", smallest=1) as off:
        y = x * 2
        loss = (y.sin() + y.t().cos().t() + y[:, :8].exp().sum()).sum()
    loss.backward()
    assert off.status().out_bytes <= 3 * BYTES  # `y`, and what `exp` returns.


def test_parameters_and_small_tensors_stay() -> None:
    model, x = nn.Linear(WIDTH, WIDTH), batch()
    with mb.offload("1MiB", smallest=BYTES + 1) as off:
        model(x.requires_grad_()).sum().backward()
    assert off.status().out_bytes == 0


def test_a_full_host_keeps_the_rest_on_the_device() -> None:
    model, x = chain(), batch()
    off = mb.offload(2 * BYTES, smallest=BYTES, window=0)
    assert same(gradients(model, off, x, 3), gradients(model, None, x, 3))
    status = off.status()
    assert status.most_host_bytes <= 2 * BYTES
    assert status.full_bytes


def test_what_lives_anyway_is_copied_in_the_first_step_alone() -> None:
    x = batch()
    factor = batch().requires_grad_()
    off = mb.offload("1MiB", smallest=1, window=0)
    sent = []
    for _ in range(3):
        with off:
            loss = (factor * x).sum()  # Both live on.
        loss.backward()
        sent.append(off.status().out_bytes)
    assert sent == [BYTES] * 3
    assert off.status().late_bytes == 0


def test_another_step_in_between_changes_nothing() -> None:
    model = chain()
    long, short = torch.randn(32, WIDTH), batch()
    off = mb.offload("1MiB", smallest=1, window=4 * BYTES)
    for x in (long, short, long, short, short, long):
        assert same(gradients(model, off, x), gradients(model, None, x))


@pytest.mark.parametrize("write", [Tensor.sin_, lambda t: t[0].zero_()])
def test_a_write_after_saving_is_an_error_as_in_the_plain_step(
    write: Callable[[Tensor], object],
) -> None:
    x = batch().requires_grad_()
    with mb.offload("1MiB", smallest=1):
        y = x * 2
        z = y.sin()
    write(y.detach())
    with pytest.raises(ChangedSinceForwardError, match="modified by an inplace"):
        z.sum().backward()


def test_a_write_to_a_small_tensor_is_an_error_too() -> None:
    x = batch().requires_grad_()
    with mb.offload("1MiB"):
        y = x * 2
        z = y.sin()
    y.detach().zero_()
    with pytest.raises(ChangedSinceForwardError, match="modified by an inplace"):
        z.sum().backward()


def test_layouts_come_back_as_they_were() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3),
    )
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(
                memory_format=torch.channels_last
            )
    x = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    expected = gradients(model, None, x)
    assert same(gradients(model, mb.offload("1MiB", smallest=1), x), expected)


def test_an_expanded_tensor_takes_the_bytes_of_its_storage() -> None:
    scale = torch.rand(1, WIDTH)
    x = batch().requires_grad_()
    with mb.offload("1MiB", smallest=1) as off:
        (x * scale.mul(2).expand(16, WIDTH)).sum().backward()
    assert off.status().out_bytes <= BYTES + scale.nbytes


def test_a_graph_that_is_dropped_gives_its_blocks_back() -> None:
    model, x = chain(), batch()
    once = mb.offload("1MiB", smallest=BYTES, window=0)
    expected = [g.clone() for g in gradients(model, once, x)]
    off = mb.offload(once.status().out_bytes, smallest=BYTES, window=0)
    for _ in range(3):
        with off:
            model(x).sum()  # No backward pass.
    assert same(gradients(model, off, x), expected)
    assert off.status().full_bytes == 0


def test_a_retained_graph_is_loaded_again() -> None:
    model, x = chain(), batch()
    off = mb.offload("1MiB", smallest=1, window=3 * BYTES)
    for _ in range(3):
        model.zero_grad()
        torch.manual_seed(1)
        with off:
            loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert same(found, [p.grad for p in model.parameters() if p.grad is not None])


def test_graphs_may_be_alive_side_by_side() -> None:
    model, x = chain(), batch()
    expected = [2 * g for g in gradients(model, None, x)]
    off = mb.offload("1MiB", smallest=1, window=3 * BYTES)
    for _ in range(3):
        model.zero_grad()
        losses = []
        for _ in range(2):
            torch.manual_seed(1)
            with off:
                losses.append(model(x).square().sum())
        for loss in losses:
            loss.backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert same(found, expected)


def test_threads_may_share_one() -> None:
    off = mb.offload("8MiB", smallest=1, window=4 * BYTES)
    device = default_device()

    def train(number: int, use: mb.Offload | None) -> list[Tensor]:
        x = torch.linspace(0, 1 + number, 16 * WIDTH, device=device).view(16, WIDTH)
        model = models[number]
        for _ in range(3):
            model.zero_grad()
            if use is None:
                model(x).square().sum().backward()
            else:
                with use:
                    loss = model(x).square().sum()
                loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    models = [chain().eval() for _ in range(4)]
    expected = [[g.clone() for g in train(n, None)] for n in range(4)]
    found: dict[int, list[Tensor]] = {}
    threads = [
        threading.Thread(target=lambda n=n: found.update({n: train(n, off)}))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(found[n], expected[n]) for n in range(4))


def test_the_gates_of_an_lstm_are_written_one_by_one() -> None:
    torch.manual_seed(0)
    model, x = nn.LSTM(8, 8, 2), torch.randn(5, 3, 8, requires_grad=True)

    def gradient(off: mb.Offload | None) -> Tensor:
        def forward() -> Tensor:
            output = model(x)[0]
            (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            return output.sum() + slope.square().sum()

        if off is None:
            loss = forward()
        else:
            with off:
                loss = forward()
        return torch.autograd.grad(loss, x)[0]

    assert torch.equal(gradient(mb.offload("1MiB", smallest=1)), gradient(None))


def test_autocast_and_attention_are_the_plain_ones() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, 0.1, batch_first=True)
    x = torch.randn(2, 16, WIDTH)

    def step(off: mb.Offload | None) -> list[Tensor]:
        with (
            torch.autocast(default_device().type, torch.bfloat16),
            sdpa_kernel(SDPBackend.MATH),
        ):
            return gradients(layer, off, x, 2)

    assert same(step(mb.offload("4MiB", smallest=1)), step(None))


def test_options_that_are_no_bytes_are_refused() -> None:
    with pytest.raises(mb.OptionError, match="host must be a number of bytes above 0"):
        mb.offload(0)
    with pytest.raises(
        mb.OptionError, match="is a number of bytes, such as '8GiB'; got 'much'"
    ):
        mb.offload("1GiB", window="much")


def test_the_status_names_what_happened() -> None:
    off = mb.offload("1MiB", smallest=1, window=4 * BYTES)
    gradients(chain(), off, batch(), 3)
    text = str(off.status())
    assert "copied to the host" in text
    assert "kept: needed first" in text
    assert is_cpu() or "back, ahead of time" in text


@pytest.mark.parametrize("use", [mb.Offload.used_bytes, mb.Offload.__exit__])
def test_a_device_may_be_used_first_while_others_are_tidied(
    use: Callable[..., object],
) -> None:
    off = mb.offload("1MiB")
    if use is mb.Offload.__exit__:
        off.__enter__()
    lane = off._lane_of(default_device())

    def tidy() -> None:  # As a thread of autograd may at any time.
        off._lane_of(torch.device("cpu", 1))

    lane.tidy = tidy  # type: ignore[method-assign]
    use(off, *(() if use is mb.Offload.used_bytes else (None, None, None)))
    assert len(off._lanes) == 2
