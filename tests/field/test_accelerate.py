"""A loop of accelerate's under a budget, with `prepare` before it or inside of it."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

import membudget as mb
from membudget.attach import has_region
from tests.field.case import Case, seed_everything
from tests.field.held import Trained, begun, held
from tests.field.registry import CASES
from tests.field.vision_operators import import_torchvision

pytestmark = [
    pytest.mark.field,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*:UserWarning:accelerate"),
]

NAMES = ("llama", "bert", "t5", "gpt2")
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


def trained(name: str, is_prepared_before: bool, limit: int | None) -> Trained:
    """Train by accelerate."""
    peak_bytes, limit = begun(limit)
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
    most = peak_bytes()
    assert not any(has_region(module) for module in made.model.modules())
    with torch.no_grad():
        model(**batches[0])  # It still runs, whatever was put around its forward.
    weights = [p.detach() for p in made.model.state_dict().values()]
    return Trained(weights, most, fitted)


@pytest.mark.parametrize("is_prepared_before", [True, False])
@pytest.mark.parametrize("architecture", [CASES[name] for name in NAMES])
def test_an_accelerated_loop_keeps_its_budget_and_its_weights(
    architecture: Case, is_prepared_before
):
    train = partial(trained, architecture.name, is_prepared_before)
    found = held(train, SHARE)
    assert found.limit_bytes < 0.95 * found.plain_bytes
    situations = found.fitted.status().situations
    assert sum(s.uses for s in situations) == STEPS * ACCUMULATION
