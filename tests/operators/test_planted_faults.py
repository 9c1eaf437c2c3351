"""The operator tables find faults: each of these is planted, and must be reported."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from membudget.engine.native import RERUN
from membudget.engine.replay.extension import EXTENSION
from membudget.engine.replay.frame import ReplayFrame
from membudget.state.rng import Source
from tests.operators.checks import SHARE_COMPARISON, as_they_come
from tests.operators.database import differentiable_operators
from tests.operators.variants import Extent, variants_of

pytestmark = as_they_come

EXTENT = Extent({torch.float32: 8}, formed=1)


def differing(name: str) -> list[str]:
    """Return what the table reports of an operator."""
    operators = {info.full_name: info for info in differentiable_operators()}
    variants = variants_of(operators[name], EXTENT)
    return SHARE_COMPARISON.of(variants).differing


def plant(monkeypatch: pytest.MonkeyPatch, name: str, fault: Any) -> None:
    """Replace a function wherever the engines have it."""
    engines = [m for n, m in sys.modules.items() if n.startswith("membudget.engine")]
    having = [module for module in engines if name in vars(module)]
    assert having
    for module in having:
        monkeypatch.setattr(module, name, fault)


def test_a_forgotten_version_check_is_found(monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch, "version_of", lambda tensor: 0)
    found = differing("exp")
    # A rerun in C++ compares versions by itself; `run.py test` runs both.
    assert RERUN or any("written since, rerun: gradients" in line for line in found)
    assert any("written since, replay: gradients" in line for line in found)


def test_a_mode_left_on_in_an_inner_backward_is_found(monkeypatch: pytest.MonkeyPatch):
    run = ReplayFrame.run

    def run_under_a_mode(self: ReplayFrame, *given: Any) -> Any:
        with _Bystander():
            return run(self, *given)

    monkeypatch.setattr(ReplayFrame, "run", run_under_a_mode)
    found = differing("prod")
    assert any("inner gradient, replay: " in line for line in found)


def test_a_random_state_that_is_not_put_back_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Source, "bring_back", lambda self, noted: None)
    found = differing("nn.functional.dropout")
    assert any("twice, rerun: " in line for line in found)
    # The recorder in C++ puts back states by itself; `run.py test` runs both.
    assert EXTENSION or any("twice, replay: " in line for line in found)


class _Bystander(TorchDispatchMode):
    """A mode that does nothing; it is enough for autograd to take other formulas."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def test_the_bystander_changes_the_bits_of_plain_itself():
    x = torch.linspace(-9, 9, 125).reshape(5, 5, 5).requires_grad_()
    gradients = [torch.autograd.grad(x.prod(1).sum(), x)[0]]
    with _Bystander():
        gradients += torch.autograd.grad(x.prod(1).sum(), x)
    assert not torch.equal(*gradients)
