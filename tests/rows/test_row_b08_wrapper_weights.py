"""Row B8: weights that are wrappers with a `__torch_dispatch__` of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import membudget as mb
from tests.behaviours.steps import plain


class Wrapped(Tensor):
    """A weight that is unwrapped by every operator."""

    content: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        make: Any = torch.Tensor._make_wrapper_subclass
        wrapped: Wrapped = make(cls, inner.shape, dtype=inner.dtype)
        return wrapped

    def __init__(self, inner: Tensor) -> None:
        self.content = inner

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def unwrap(value: Any) -> Any:
            return value.content if isinstance(value, Wrapped) else value

        return func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))


class Layer(nn.Module):
    """Multiplies by a weight that is no parameter."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.first(x).sin(), self.weight).tanh()


class SparseLayer(nn.Module):
    """Multiplies by a sparse buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.register_buffer("weight", torch.eye(4).to_sparse())
        self.weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.weight, self.first(x).sin().t()).tanh()


def gradients(module: nn.Module, region: Any) -> list[Tensor]:
    found = []
    for _ in range(3):
        module.zero_grad()
        loss = region(module, torch.linspace(0, 1, 8).view(2, 4)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        found += [p.grad.clone() for p in module.parameters() if p.grad is not None]
    return found


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "sparse":
        return SparseLayer()
    weight = torch.randn(4, 4)
    return Layer(Wrapped(weight) if kind == "wrapper" else weight)


@pytest.mark.parametrize("kind", ["plain", "wrapper", "sparse"])
@pytest.mark.parametrize("engine", ["rerun", "auto"])
def test_row_b08_a_weight_that_nobody_changed_is_not_refused(engine: str, kind: str):
    def region(*args: Any) -> Any:
        return mb.checkpoint(*args, engine=engine)

    expected, found = gradients(made(kind), plain), gradients(made(kind), region)

    assert len(found) == len(expected) == 6
    assert all(map(torch.equal, found, expected))
