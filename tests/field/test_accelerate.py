"""A loop of accelerate's under a budget, with `prepare` before it or inside of it."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import membudget as mb
from membudget.attach import has_region
from membudget.memory.counting import Counted
from tests.field.case import Case, seed_everything
from tests.field.counting_allocator import restarted, so_far
from tests.field.registry import CASES
from tests.field.vision_operators import import_torchvision

pytestmark = [
    pytest.mark.field,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*:UserWarning:accelerate"),
]

BEFORE, INSIDE = ("llama", "bert", "t5", "gpt2"), ("llama", "bert", "gpt2")
STEPS, ACCUMULATION, SHARE = 3, 2, 0.8


def accelerator() -> Any:
    import_torchvision()
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)  # One process holds one precision.
    GradientState._reset_state()
    return Accelerator(
        mixed_precision="bf16", gradient_accumulation_steps=ACCUMULATION, cpu=True
    )


def train(accelerator: Any, model: Any, optimizer: Any, batches: list[Any]) -> None:
    """Train as accelerate's documentation does."""
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            del loss
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def trained(
    name: str, limit: int | None, is_prepared_before: bool
) -> tuple[list[torch.Tensor], int, Any]:
    """Train by accelerate; return the weights, the peak, and what was fitted."""
    gc.collect()
    before = restarted()
    if limit is not None:  # Whatever lives already counts, too.
        limit += Counted(torch.device("cpu")).live_bytes()
    made, prepares = CASES[name].make(), accelerator()
    model = made.model
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seed_everything(1)
    batches = [made.batch(n % 3 == 2) for n in range(STEPS * ACCUMULATION)]
    around: Any = nullcontext()
    if is_prepared_before:
        model, optimizer = prepares.prepare(model, optimizer)
    if limit is not None:
        around = mb.budget(model, limit, optimizer=optimizer)
    with around as fitted:
        if not is_prepared_before:
            model, optimizer = prepares.prepare(model, optimizer)
        train(prepares, model, optimizer, batches)
    most = so_far() - before
    assert not any(has_region(module) for module in made.model.modules())
    with torch.no_grad():
        model(**batches[0])  # It still runs, whatever was put around its forward.
    weights = [p.detach() for p in made.model.state_dict().values()]
    return weights, most, fitted


@pytest.mark.parametrize(
    ("architecture", "is_prepared_before"),
    [
        *((CASES[name], True) for name in BEFORE),
        *((CASES[name], False) for name in INSIDE),
    ],
)
def test_an_accelerated_loop_keeps_its_budget_and_its_weights(
    architecture: Case, is_prepared_before
):
    name = architecture.name
    plain, plain_bytes, _ = trained(name, None, is_prepared_before)
    limit = int(SHARE * plain_bytes)
    for _ in range(6):
        try:
            found, peak_bytes, fitted = trained(name, limit, is_prepared_before)
            break
        except mb.BudgetError as error:
            limit += error.least_bytes - error.asked_bytes
    else:
        pytest.fail("six budgets were refused")
    assert all(map(torch.equal, plain, found))
    assert peak_bytes <= limit < 0.95 * plain_bytes
    assert sum(s.uses for s in fitted.status().situations) == STEPS * ACCUMULATION
