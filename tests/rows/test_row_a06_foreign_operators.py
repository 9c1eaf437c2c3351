"""Row A6: operators that are not torch's own may not keep to their schemas."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

import membudget as mb
from membudget.engine.replay import execute

NAMESPACE = "membudget_rows"


@pytest.fixture(scope="module")
def operators() -> Iterator[None]:
    """Define operators that hide what they do."""
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define("counts(Tensor x, Tensor seen) -> Tensor")
    library.define("noisy(Tensor x) -> Tensor")

    def counts(x: Tensor, seen: Tensor) -> Tensor:
        seen.detach().numpy()[:] += 1.0
        return x * 2

    def noisy(x: Tensor) -> Tensor:
        return x * float(np.random.rand())  # noqa: NPY002

    for name, kernel in (("counts", counts), ("noisy", noisy)):
        library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_autograd(
        f"{NAMESPACE}::counts", lambda ctx, g: (g * 2, None), lib=library
    )
    yield
    execute.FAULTY.clear()
    library._destroy()


def counted(x: Tensor) -> Tensor:
    seen = torch.zeros(3)
    y = getattr(torch.ops, NAMESPACE).counts(x.sin(), seen)
    return (y * seen).exp()


@pytest.mark.filterwarnings("ignore::membudget.UnrepeatableWarning")
def test_row_a06_verification_writes_nothing_that_an_operator_hides(operators: None):
    def step(region: bool) -> tuple[Tensor, Tensor]:
        x = torch.ones(3, requires_grad=True)
        y = mb.checkpoint(engine="replay")(counted)(x) if region else counted(x)
        y.sum().backward()
        assert x.grad is not None
        return y.detach(), x.grad

    wanted = step(False)
    for _ in range(3):
        assert all(map(torch.equal, step(True), wanted))


@pytest.mark.parametrize("verify", [True, False, "fingerprints"])
def test_row_a06_an_operator_that_draws_unseen_is_kept_and_draws_once(
    operators: None, verify: object
):
    def function(x: Tensor) -> Tensor:
        factor = getattr(torch.ops, NAMESPACE).noisy(x.detach())
        return (x * factor).sin()

    def step(region: bool) -> tuple[Tensor, Tensor, float]:
        np.random.seed(3)  # noqa: NPY002
        x = torch.ones(3, requires_grad=True)
        call = mb.checkpoint(engine="replay", verify=verify)(function)
        y = (call if region else function)(x)
        y.sum().backward()
        assert x.grad is not None
        return y.detach(), x.grad, float(np.random.rand())  # noqa: NPY002

    wanted = step(False)
    for _ in range(2):
        found = step(True)
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[1], wanted[1])
        assert found[2] == wanted[2]
