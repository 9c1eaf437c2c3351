"""Row B7: traced and scripted code inside a region.

TorchScript's executor compiles a graph by what its first runs have seen, and then
differentiates parts of it by formulas of its own. So a run that is one more than plain
has may save other tensors: the default engine replays such a region, and a rerun that
somebody asks for compares every value. Each step here is one of several in a row, on
classes that no other test has run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget import compat
from tests.behaviours.steps import region_with

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]

Module = Callable[[], nn.Module]


def smooth() -> nn.Module:
    class Smooth(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

        def forward(self, x):
            y = self.norm(self.linear(x)).sin() * torch.sigmoid(x)
            return y + torch.tanh(x) / (1 + x * x)

    return Smooth()


def dropping() -> nn.Module:
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)

        def forward(self, x):
            return self.dropout(self.linear(x)).sin() * 2

    return Dropping()


def branching() -> nn.Module:
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            for _ in range(3):
                if bool(x.sum() > -100):
                    x = self.linear(x).tanh() * x
            return x

    return Branching()


def normalising() -> nn.Module:
    class Normalising(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x):
            return self.norm(self.linear(x)).relu_() * 3

    return Normalising()


def products() -> nn.Module:
    class Products(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            y = self.linear(x).sigmoid()
            return y * y.sum() + x.prod(dim=1, keepdim=True)

    return Products()


def script(make: Module) -> nn.Module:
    return torch.jit.script(make())


def trace(make: Module) -> nn.Module:
    return torch.jit.trace(make(), torch.ones(2, 4), check_trace=False)


class Net(nn.Module):
    """A net of the user's own class around it."""

    def __init__(self, inner: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.linear(x)).tanh()


def calling(make: Module) -> nn.Module:
    """Return a module of Python that calls a scripted function."""

    def gelu(x, y):
        return x * 0.5 * (1.0 + torch.erf(x / 1.41421)) * y.exp()

    scripted = torch.jit.script(gelu)
    return Net(lambda x: scripted(x, x.sin()))


def method(make: Module) -> nn.Module:
    """Return a net that calls a method of a scripted module."""
    scripted = torch.jit.script(make())
    net = Net(scripted.forward)
    net.scripted = scripted
    return net


def steps(make: Callable[[], nn.Module], region: Callable[..., Tensor]) -> list[Any]:
    """Return loss, gradients, buffers and stream of six steps, of two batch sizes."""
    torch.manual_seed(0)
    net, facts = make(), []
    for number in range(6):
        torch.manual_seed(number)
        x = torch.randn(3 if number < 4 else 5, 4, requires_grad=True)
        loss = region(net, x).square().sum()
        net.zero_grad()
        loss.backward()
        gradients = [
            x.grad,
            *(p.grad.clone() for p in net.parameters() if p.grad is not None),
        ]
        buffers = [buffer.clone() for buffer in net.buffers()]
        facts += [loss.detach(), *gradients, *buffers, torch.get_rng_state()]
    return facts


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def plain(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    return function(*args)


MODULES = [smooth, dropping, branching, normalising, products]
COMPILED = [script, trace]
ENGINES = {
    "auto": mb.checkpoint,
    "replay": region_with(engine="replay"),
    "replay, unverified": region_with(engine="replay", verify=False),
    "keep": region_with(keep=mb.policies.matmuls),
    "compat": functools.partial(compat.checkpoint, use_reentrant=False),
}
every_engine = pytest.mark.parametrize("region", ENGINES.values(), ids=ENGINES)


@every_engine
@pytest.mark.parametrize("compiled", [script, trace])
@pytest.mark.parametrize("make", MODULES)
def test_row_b7_torchscript_in_a_region_is_plain_in_each_of_its_runs(
    make, compiled, region
) -> None:
    def made() -> nn.Module:
        return Net(compiled(make))

    assert equal(steps(made, region), steps(made, plain))


@every_engine
@pytest.mark.parametrize("compiled", [calling, method])
def test_row_b7_scripted_functions_and_methods_are_found(compiled, region) -> None:
    def made() -> nn.Module:
        return Net(compiled(smooth))

    assert equal(steps(made, region), steps(made, plain))


@every_engine
def test_row_b7_a_scripted_module_is_a_region(region) -> None:
    def made() -> nn.Module:
        return script(smooth)

    assert equal(steps(made, region), steps(made, plain))


@pytest.mark.parametrize("options", [{}, {"early_stop": False}, {"debug": True}])
@pytest.mark.parametrize("compiled", [script, trace, calling])
@pytest.mark.parametrize("make", MODULES)
def test_row_b7_a_rerun_of_torchscript_is_plain_or_raises(
    make, compiled, options
) -> None:
    def made() -> nn.Module:
        return Net(compiled(make))

    region = region_with(engine="rerun", **options)
    try:
        found = steps(made, region)
    except mb.RecomputeMismatchError:
        return
    assert equal(found, steps(made, plain))


def test_row_b7_a_rerun_of_torchscript_says_what_to_do() -> None:
    with pytest.raises(mb.RecomputeMismatchError, match="omit engine='rerun'"):
        steps(lambda: Net(script(smooth)), region_with(engine="rerun"))


def test_row_b7_regions_on_a_model_with_torchscript_train_as_plain() -> None:
    def made(budgeted: bool) -> nn.Module:
        blocks = [Net(script(smooth)), Net(trace(products)), Net(calling(smooth))]
        model = nn.Sequential(*blocks)
        if budgeted:
            mb.apply(model, blocks=Net)
        return model

    expected = steps(lambda: made(False), plain)
    assert equal(steps(lambda: made(True), plain), expected)
