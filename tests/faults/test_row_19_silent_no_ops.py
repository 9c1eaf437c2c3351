"""Row 19: is it on? Checkpointing that does nothing, and does not say so.

Frameworks look at `module.training` to decide: a model in `eval()` whose adapters are
trained gets no region at all, and one in training mode pays for regions under
`no_grad`. A selection that matches no module passes in silence. Ours looks at whether
gradients are needed, counts what ran, and refuses an empty selection.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

import membudget as mb
from tests.faults.implementations import torch_fails

BLOCKS = 4


class Block(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def counts(applied: Any) -> tuple[list[int], list[int]]:
    regions = applied.status().regions
    return [r.forwards for r in regions], [r.recomputes for r in regions]


def test_row19_regions_run_in_eval_mode_when_gradients_are_needed() -> None:
    model = make_model().eval()
    applied = mb.apply(model, blocks=Block)
    model(torch.ones(2, 4)).sum().backward()

    assert counts(applied) == ([1] * BLOCKS, [1] * BLOCKS)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_row19_no_region_runs_without_grad(guard: type[torch.no_grad]) -> None:
    model = make_model().train()
    applied = mb.apply(model, blocks=Block)
    with guard():
        model(torch.ones(2, 4))

    assert counts(applied) == ([0] * BLOCKS, [0] * BLOCKS)


def test_row19_status_prints_a_line_for_each_region() -> None:
    model = make_model()
    applied = mb.apply(model, blocks=Block)
    model(torch.ones(2, 4)).sum().backward()
    status = applied.status()

    assert [region.name for region in status.regions] == ["0", "1", "2", "3"]
    assert "recompute" in str(status)
    assert len(str(status).splitlines()) >= BLOCKS


@pytest.mark.parametrize(
    "selection",
    [
        {"blocks": nn.Conv2d},
        {"names": "layers.*"},
        {"names": ["first", "second"]},
        {"where": lambda _name, _module: False},
    ],
    ids=["blocks", "names", "list of names", "where"],
)
def test_row19_selection_that_matches_nothing_raises(
    selection: dict[str, Any],
) -> None:
    with pytest.raises(mb.SelectionError, match="match"):
        mb.apply(make_model(), **selection)


@torch_fails
def test_row19_torch_wraps_nothing_in_silence() -> None:
    model = make_model()
    names = [name for name, _ in model.named_modules()]
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, nn.Conv2d))

    assert [name for name, _ in model.named_modules()] == names
