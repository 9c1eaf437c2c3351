"""Row B7: `compat.checkpoint` runs inside compiled code, as torch's does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpointing
from torch import Tensor

from membudget import compat
from tests.compiled import MARKS, every_backend, leaf, smooth

pytestmark = MARKS


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "reentrant": {"use_reentrant": True},
    "no-op contexts": {"context_fn": torch_checkpointing.noop_context_fn},
    "our no-op contexts": {"context_fn": compat.noop_context_fn},
    "all options": {
        "determinism_check": "none",
        "debug": True,
        "early_stop": False,
        "preserve_rng_state": False,
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("fullgraph", [False, True])
@every_backend
def test_row_b7_compat_checkpoint_is_compiled(backend, fullgraph, options) -> None:
    options = {"use_reentrant": False, **options}

    def run(x: Tensor) -> Tensor:
        return compat.checkpoint(smooth, x.cos(), **options).exp()

    compiled = torch.compile(run, backend=backend, fullgraph=fullgraph)
    gradients = []
    for function in (lambda x: smooth(x.cos()).exp(), compiled):
        x = leaf()
        y = function(x)
        y.sum().backward()
        gradients.append([y, x.grad])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@every_backend
def test_row_b7_compat_checkpoint_sequential_is_compiled(backend) -> None:
    layers: list[Any] = [torch.sin, torch.exp, smooth]

    def run(x: Tensor) -> Tensor:
        return compat.checkpoint_sequential(layers, 2, x, use_reentrant=False)

    gradients: list[Any] = []
    compiled = torch.compile(run, backend=backend, fullgraph=True)
    for function in (lambda x: smooth(x.sin().exp()), compiled):
        x = leaf()
        function(x).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_row_b7_use_reentrant_left_out_warns_in_compiled_code_too() -> None:
    run = torch.compile(lambda x: compat.checkpoint(smooth, x), backend="eager")
    with pytest.warns(UserWarning, match="pass use_reentrant explicitly"):
        run(leaf())
