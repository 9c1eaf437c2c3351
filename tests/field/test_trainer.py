"""transformers' Trainer under a budget: one line, the same weights, fewer bytes."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.field.case import Case, seed_everything
from tests.field.held import Trained, begun, held
from tests.field.registry import CASES
from tests.field.vision_operators import import_torchvision

pytestmark = [
    pytest.mark.field,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]

NAMES = (
    *("llama", "llama_lora", "gemma3", "qwen2_moe", "t5", "deberta_v2", "gpt2"),
    *("whisper", "clip", "mamba2", "bert"),
)
STEPS, ACCUMULATION, SHARE = 3, 2, 0.75


def trained(name: str, folder: Path, limit: int | None) -> Trained:
    """Train by the Trainer; the callback stands for what was fitted."""
    import_torchvision()  # transformers takes it where it is.
    from transformers import Trainer, TrainingArguments

    from membudget.integrations.transformers import BudgetCallback

    peak_bytes, limit = begun(limit)
    made = CASES[name].make()
    callbacks = [] if limit is None else [BudgetCallback(limit)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        gradient_accumulation_steps=ACCUMULATION,
        per_device_train_batch_size=1,
        bf16=True,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        label_names=["labels"],
    )
    batches: dict[int, Any] = {}
    seed_everything(1)
    for number in range(STEPS * ACCUMULATION):
        batches[number] = made.batch(number % 3 == 2)
    trainer = Trainer(
        model=made.model,
        args=arguments,
        train_dataset=list(batches),
        data_collator=lambda numbers: batches[numbers[0]],
        callbacks=callbacks,
    )
    trainer.train()
    most = peak_bytes()
    weights = [p.detach() for p in made.model.state_dict().values()]
    return Trained(weights, most, callbacks[0] if callbacks else None)


@pytest.mark.parametrize("architecture", [CASES[name] for name in NAMES])
def test_a_trainer_keeps_its_budget_and_its_weights(architecture: Case, tmp_path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        held(partial(trained, architecture.name, tmp_path), SHARE)
