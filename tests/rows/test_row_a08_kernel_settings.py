"""Row A8: the settings that choose kernels are not what they were in the forward.

A convolution of oneDNN and a native one, a sum in one thread and in two, a subnormal
number and the zero that it is flushed to: the recompute must find the settings of the
forward, or it computes other bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import membudget as mb

Function = Callable[[Tensor], Tensor]
Region = Callable[[Function, Tensor], Tensor]
Setting = Callable[[], AbstractContextManager[Any]]

REGIONS: dict[str, Region] = {
    "rerun": partial(mb.checkpoint, engine="rerun"),
    "replay": partial(mb.checkpoint, engine="replay"),
    "keep": partial(mb.checkpoint, keep=mb.policies.matmuls),
    "reentrant": partial(mb.checkpoint, use_reentrant=True),
}


@contextlib.contextmanager
def changed(get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Any:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def attribute(module: Any, name: str, value: Any) -> Setting:
    return partial(
        changed, partial(getattr, module, name), partial(setattr, module, name), value
    )


@contextlib.contextmanager
def flushing() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor flushes no subnormal numbers")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def convolutions(x: Tensor) -> Tensor:
    weight = torch.linspace(-1, 1, 36).view(4, 1, 3, 3)
    hidden = nn.functional.conv2d(x.view(-1, 1, 16, 16), weight)
    return nn.functional.conv2d(hidden.tanh(), weight.view(1, 4, 3, 3)).sin()


def products(x: Tensor) -> Tensor:
    return (x @ x.T).sin() @ x


def subnormal(x: Tensor) -> Tensor:
    return (x * 1e-38 * 0.01 * 1e38).sin() * x


def sums(x: Tensor) -> Tensor:
    return (x.repeat(32, 32).exp().sum() * x).sin()


def attention(x: Tensor) -> Tensor:
    x = x.view(1, 4, 64, 16).bfloat16()
    with sdpa_kernel(SDPBackend.MATH):
        return nn.functional.scaled_dot_product_attention(x, x, x).sin()


def encoder(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
    with torch.no_grad():
        gate = layer(x.view(4, 64, 16).detach())
    return (gate * x.view(4, 64, 16)).sin() * gate


def uninitialized(x: Tensor) -> Tensor:
    return (x * x.new_empty(x.shape).isnan()).sin()


backends: Any = torch.backends
SETTINGS: dict[str, tuple[Setting, Function]] = {
    "mkldnn": (attribute(backends.mkldnn, "enabled", False), convolutions),
    "mkldnn, matmul in bfloat16": (
        attribute(backends.mkldnn.matmul, "fp32_precision", "bf16"),
        products,
    ),
    "all in bfloat16": (lambda: backends.flags(fp32_precision="bf16"), products),
    "medium precision": (
        lambda: changed(
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
            "medium",
        ),
        products,
    ),
    "flush_denormal": (flushing, subnormal),
    "threads": (
        lambda: changed(torch.get_num_threads, torch.set_num_threads, 3),
        sums,
    ),
    "half precision sums of attention": (
        lambda: changed(
            backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
            backends.cuda.allow_fp16_bf16_reduction_math_sdp,
            True,
        ),
        attention,
    ),
    "fast path of attention": (
        lambda: changed(
            backends.mha.get_fastpath_enabled, backends.mha.set_fastpath_enabled, False
        ),
        encoder,
    ),
    "deterministic algorithms": (deterministic, uninitialized),
}
NOTHING: Setting = contextlib.nullcontext


def plain(function: Function, x: Tensor) -> Tensor:
    return function(x)


def step(
    region: Region, function: Function, forward: Setting, backward: Setting
) -> tuple[Tensor, Tensor]:
    """Return output and gradient of one step; what it finds set is set again after."""
    x = torch.linspace(-2, 2, 4096).view(16, 256).requires_grad_()
    with forward():
        y = region(function, x)
    with backward():
        y.float().square().sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def are_equal(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> bool:
    return all(
        torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))
        for ours, theirs in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("name", SETTINGS)
def test_row_a08_the_recompute_chooses_the_kernels_of_the_forward(
    name: str, region: str
) -> None:
    setting, function = SETTINGS[name]
    arounds = [(setting, NOTHING), (NOTHING, setting)]
    if function is uninitialized:
        del arounds[1]  # Without the setting, memory holds whatever was there.
    for around in arounds:
        found = step(REGIONS[region], function, *around)
        assert are_equal(found, step(plain, function, *around))


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.filterwarnings("ignore::membudget.errors.UnrepeatableWarning")
def test_row_a08_a_setting_may_be_changed_inside_the_region(
    name: str, region: str
) -> None:
    setting, function = SETTINGS[name]

    def inside(x: Tensor) -> Tensor:
        with setting():
            return function(x)

    found = step(REGIONS[region], inside, NOTHING, NOTHING)
    assert are_equal(found, step(plain, inside, NOTHING, NOTHING))


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("name", SETTINGS)
def test_row_a08_settings_around_the_backward_are_there_after_it(
    name: str, region: str
) -> None:
    setting, function = SETTINGS[name]
    if function is uninitialized:
        function = torch.sin  # Without the setting, memory holds whatever was there.
    x = torch.linspace(-2, 2, 4096).view(16, 256).requires_grad_()
    y = REGIONS[region](function, x)
    with setting():
        before = function(x)
        y.float().sum().backward()
        assert are_equal((function(x).detach(),), (before.detach(),))


def test_row_a08_a_region_runs_under_a_precision_that_only_new_names_tell() -> None:
    # torch.get_float32_matmul_precision() raises where backends differ.
    with attribute(backends.mkldnn.matmul, "fp32_precision", "bf16")():
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            torch.get_float32_matmul_precision()
        found = step(mb.checkpoint, products, NOTHING, NOTHING)
        assert are_equal(found, step(plain, products, NOTHING, NOTHING))
