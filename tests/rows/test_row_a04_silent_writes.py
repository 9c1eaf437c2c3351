"""Row A4: memory that a forward writes behind the version counters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.errors import ChangedSinceForwardError
from tests.behaviours.steps import plain

Region = Callable[..., Any]
Model = TypeVar("Model", bound=nn.Module)
LARGE = 300  # Codes of 64 numbers: more than 64 KiB.


class Quantiser(nn.Module):
    """A codebook that its own forward moves, as vector-quantising layers write it."""

    def __init__(self, codes: int, by_numpy: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.register_buffer("codes", torch.randn(codes, 64))
        self.codes: Tensor
        self.by_numpy = by_numpy
        self.is_moving = True

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x).sin()
        nearest = torch.cdist(h, self.codes).argmin(1)
        code = self.codes[nearest]
        if self.is_moving and self.by_numpy:
            self.codes.numpy()[:] *= 0.99
        elif self.is_moving:
            self.codes.data.mul_(0.99)
            self.codes.data[nearest] += 0.01 * h.detach()
        return (h + (code - h).detach()).tanh().sum() + (h - code).square().mean()


class Clamped(nn.Module):
    """Writes a parameter in its forward, as weight clipping does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.is_clipping = True

    def forward(self, x: Tensor) -> Tensor:
        if self.is_clipping:
            self.second.weight.data.mul_(1.01)
        return torch.tanh(self.second(self.first(x).sin()))


def facts(module: nn.Module) -> list[Tensor]:
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return [t.clone() for t in (*gradients, *module.state_dict().values())]


def step(module: nn.Module, x: Tensor, region: Region) -> list[Tensor]:
    module.zero_grad()
    region(module, x).sum().backward()
    return facts(module)


def are_equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def rerun(*args: Any) -> Any:
    return mb.checkpoint(*args, engine="rerun")


def built(make: Callable[[], Model]) -> Model:
    torch.manual_seed(0)
    return make()


@pytest.mark.parametrize("by_numpy", [False, True])
@pytest.mark.parametrize("codes", [200, LARGE])
@pytest.mark.parametrize("region", [mb.checkpoint, rerun])
def test_row_a04_a_codebook_of_any_size_is_advanced_once_a_step(
    region: Region, codes: int, by_numpy: bool
):
    x = torch.ones(8, 64)
    one, other = (built(lambda: Quantiser(codes, by_numpy)) for _ in range(2))

    for _ in range(5):
        assert are_equal(step(one, x, region), step(other, x, plain))


def test_row_a04_a_silent_write_that_begins_later_is_found_in_a_call_that_is_sampled():
    x = torch.ones(8, 64)
    one, other = (built(lambda: Quantiser(LARGE)) for _ in range(2))

    for number in range(1, 8):
        for module in (one, other):
            module.is_moving = number >= 4
        assert are_equal(step(one, x, rerun), step(other, x, plain)), number


def test_row_a04_a_parameter_that_the_forward_writes_is_refused_by_name():
    module, x = built(Clamped), torch.ones(2, 4)

    for _ in range(2):
        with pytest.raises(
            ChangedSinceForwardError,
            match=r"(?s)'second.weight'.*engine=\"replay\"",
        ) as caught:
            step(module, x, rerun)
        caught.match("behind the version counters")
        assert caught.value.by_region
        assert caught.value.names == ("parameter 'second.weight'",)


def test_row_a04_by_default_the_function_is_replayed_from_its_next_call_on():
    module, other, x = built(Clamped), built(Clamped), torch.ones(2, 4)
    with pytest.raises(ChangedSinceForwardError, match="run the step again"):
        step(module, x, mb.checkpoint)
    other(x)  # The forward that failed has written the parameter once, no more.

    for _ in range(3):
        assert are_equal(step(module, x, mb.checkpoint), step(other, x, plain))


def test_row_a04_another_module_of_the_class_goes_on_being_rerun():
    first, second, x = built(Clamped), built(Clamped), torch.ones(2, 4)
    second.is_clipping = False
    with pytest.raises(ChangedSinceForwardError, match="run the step again"):
        step(first, x, mb.checkpoint)

    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    second.first.register_forward_hook(count)
    step(second, x, mb.checkpoint)
    assert calls == 2


@pytest.mark.parametrize(
    "options", [{"verify": False}, {"guards": False}, {"determinism_check": "none"}]
)
def test_row_a04_nothing_is_looked_for_where_verification_is_off(
    options: dict[str, Any],
):
    module, x = built(Clamped), torch.ones(2, 4)
    mb.checkpoint(module, x, engine="rerun", **options).sum().backward()


def test_row_a04_memory_that_is_freed_or_opaque_is_passed_over():
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    opaque = torch.eye(4).to_sparse()
    holder = {"freed": freed, "opaque": opaque, "none": torch.empty(4, device="meta")}

    def function(x: Tensor) -> Tensor:
        assert holder
        return x.sin().exp()

    x = torch.linspace(0, 1, 4, requires_grad=True)
    mb.checkpoint(function, x).sum().backward()
    found, x.grad = x.grad, None
    function(x).sum().backward()

    assert found is not None
    assert x.grad is not None
    assert torch.equal(found, x.grad)
