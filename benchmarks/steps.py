"""One step of a model: what it leaves behind, and its peak."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch
from models import Model
from torch import Tensor

import membudget as mb

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Outcome:
    """What a step leaves behind."""

    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    stream: Tensor


def step(model: Model, batch: Batch) -> Tensor:
    """Run forward and backward and return the loss."""
    loss: Tensor = model(*batch)
    loss.backward()
    return loss.detach()


def fresh_step(model: Model, batch: Batch) -> Tensor:
    """Run a step that makes its gradients anew: what is timed."""
    model.zero_grad()
    return step(model, batch)


def outcome(model: Model, batch: Batch) -> Outcome:
    """Run one step with the generator at a known place."""
    torch.manual_seed(1)
    loss = fresh_step(model, batch)
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return Outcome(
        loss,
        # By number: a wrapper changes the names.
        {str(i): g.clone() for i, g in enumerate(gradients) if g is not None},
        {name: buffer.clone() for name, buffer in model.named_buffers()},
        torch.get_rng_state(),
    )


def difference(plain: Outcome, other: Outcome, name: str) -> str:
    """Assert what must be equal, and say what else is not.

    Args:
        plain: What the plain step left.
        other: What this way's step left.
        name: The way.

    Returns:
        A note for the table, empty if nothing differs.

    Raises:
        AssertionError: If loss or gradients are not those of the plain step.
    """
    equal = torch.equal(plain.loss, other.loss)
    assert equal, f"{name}: the loss is not the plain one"
    wrong = [n for n, g in plain.gradients.items() if not _same(other.gradients, n, g)]
    assert not wrong, f"{name}: gradients of parameters {wrong} are not the plain ones"
    notes = []
    if not all(_same(other.buffers, n, b) for n, b in plain.buffers.items()):
        notes.append("buffers differ")
    if not torch.equal(plain.stream, other.stream):
        notes.append("random stream differs")
    return ", ".join(notes)


def _same(tensors: dict[str, Tensor], name: str, wanted: Tensor) -> bool:
    return name in tensors and torch.equal(tensors[name], wanted)


def peaks(model: Model, batch: Batch) -> tuple[int, int]:
    """Return the exact peak of a step without and with gradients from before."""
    found = []
    model.zero_grad()
    for _ in range(2):
        gc.collect()
        found.append(mb.peak(step, model, batch).peak_bytes)
    return found[0], found[1]
