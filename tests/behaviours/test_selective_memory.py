"""Behaviours 88 and 89: a policy keeps the bytes that it names, and not for longer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import membudget as mb
from membudget.compat import create_selective_checkpoint_contexts
from tests.garbage import no_collector

aten = torch.ops.aten

pytestmark = pytest.mark.filterwarnings("ignore:the policy of a selective region")


def keeping(policy: Any) -> Callable[[], Any]:
    """Return the `context_fn` of a policy."""
    return functools.partial(create_selective_checkpoint_contexts, policy)


def keep_none(context: Any, operator: Any, *args: Any, **kwargs: Any) -> bool:
    return False


def leaf(n: int) -> Tensor:
    return torch.linspace(-1.0, 1.0, n * n).reshape(n, n).requires_grad_()


class Living(TorchDispatchMode):
    """The storages that operators make out of `given`, for as long as they live."""

    def __init__(self, given: Tensor) -> None:
        super().__init__()
        self.given = given.untyped_storage()._cdata
        self.made: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in [result] if isinstance(result, Tensor) else result:
            storage = tensor.untyped_storage()
            if storage._cdata == self.given:  # A view of what was given.
                continue
            self.made.append((StorageWeakRef(storage), storage.nbytes()))
        return result

    def living_bytes(self) -> int:
        """Return the bytes that are alive, each storage counted once."""
        return sum({ref.cdata: n for ref, n in self.made if not ref.expired()}.values())


def layers(x: Tensor) -> Tensor:
    """Two products that the operator after each needs, and a small result."""
    y = (x @ x).sin().exp()
    return (y @ x).cos().exp().amax(1)


N = 16
PRODUCT_BYTES = N * N * 4


@pytest.mark.parametrize(
    ("policy", "products"),
    [(keep_none, 0), ([aten.mm.default], 2), ([aten.sin.default], 1)],
)
def test_b88_exactly_the_bytes_that_are_named_are_kept(
    policy: Any, products: int
) -> None:
    x = leaf(N)
    with no_collector():
        with Living(x) as living:
            y = mb.checkpoint(layers, x, context_fn=keeping(policy))
        output_bytes = y.untyped_storage().nbytes()
        assert living.living_bytes() == products * PRODUCT_BYTES + output_bytes


def test_b89_what_is_kept_dies_in_the_backward() -> None:
    x = leaf(N)
    with no_collector():
        with Living(x) as living:
            y = mb.checkpoint(layers, x, context_fn=keeping([aten.mm.default]))
        y.sum().backward()
        del y
        x.grad = None
        assert living.living_bytes() == 0


def test_b89_what_is_kept_dies_with_a_graph_that_nobody_uses() -> None:
    x = leaf(N)
    with no_collector():
        with Living(x) as living:
            y = mb.checkpoint(layers, x, context_fn=keeping([aten.mm.default]))
        del y
        assert living.living_bytes() == 0
