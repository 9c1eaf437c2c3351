"""Row B13: code inside of a region that forbids saved-tensor hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.func import grad, jacrev, vjp, vmap

import membudget as mb
from tests.behaviours.steps import plain

ENGINES = ["auto", "rerun", "replay"]


def by_hand(x: Tensor) -> Tensor:
    with disable_saved_tensors_hooks("not with me"):
        return x.sin().exp()


FORBIDDING: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "grad": (grad(lambda x: x.sin().sum()), "saved tensor hooks"),
    "jacrev": (jacrev(torch.sin), "saved tensor hooks"),
    "vjp": (lambda x: vjp(torch.sin, x)[1](x), "saved tensor hooks"),
    "by hand": (by_hand, "not with me"),
}


class Inner(nn.Module):
    """Calls what forbids hooks."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def note_of(error: BaseException) -> str:
    (note,) = error.__notes__
    return str(note)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", FORBIDDING)
def test_row_b13_the_error_is_the_libraries_and_its_note_names_the_function(
    name: str, engine: str
):
    function, text = FORBIDDING[name]

    def wrapping(x: Tensor) -> Any:
        return function(x)

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match=text) as caught:
        mb.checkpoint(wrapping, x, engine=engine)

    assert type(caught.value) is RuntimeError
    assert text in str(caught.value)
    assert "wrapping" in note_of(caught.value)
    assert "torch.autograd.grad" in note_of(caught.value)


def test_row_b13_the_note_names_the_module_by_its_path():
    model = nn.Sequential(nn.Linear(3, 3), Inner(by_hand))
    mb.apply(model, names="1")

    with pytest.raises(RuntimeError, match="not with me") as caught:
        model(torch.ones(2, 3))

    assert "region 1:" in note_of(caught.value)


def test_row_b13_of_nested_regions_the_innermost_is_named_alone():
    def outer(x: Tensor) -> Any:
        return mb.checkpoint(by_hand, x)

    with pytest.raises(RuntimeError, match="not with me") as caught:
        mb.checkpoint(outer, torch.ones(3, requires_grad=True))

    assert "by_hand" in note_of(caught.value)


@pytest.mark.parametrize("engine", ENGINES)
def test_row_b13_a_region_where_hooks_are_forbidden_is_named_too(engine: str):
    x = torch.ones(3, requires_grad=True)
    with (
        pytest.raises(RuntimeError, match="nowhere") as caught,
        disable_saved_tensors_hooks("nowhere"),
    ):
        mb.checkpoint(torch.sin, x, engine=engine)

    assert "sin" in note_of(caught.value)


@pytest.mark.parametrize("engine", ENGINES)
def test_row_b13_another_error_gets_no_note(engine: str):
    def fails(x: Tensor) -> Tensor:
        raise RuntimeError("saved tensor hooks are not to blame")

    with pytest.raises(RuntimeError, match="not to blame") as caught:
        mb.checkpoint(fails, torch.ones(3, requires_grad=True), engine=engine)

    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("engine", ENGINES)
def test_row_b13_transforms_that_need_no_hooks_work_inside(engine: str):
    w = torch.linspace(0.1, 1, 4, requires_grad=True)

    def function(x: Tensor) -> Any:
        return vmap(lambda row: (row * w).sin().sum())(x)

    def gradients(region: Any) -> list[Tensor]:
        found: list[Tensor] = []
        for _ in range(3):
            x = torch.linspace(0, 1, 12).view(3, 4).requires_grad_()
            w.grad = None
            region(function, x).sum().backward()
            assert x.grad is not None
            assert w.grad is not None
            found += [x.grad, w.grad]
        return found

    def region(*args: Any) -> Any:
        return mb.checkpoint(*args, engine=engine)

    assert all(map(torch.equal, gradients(region), gradients(plain)))
