"""What an architecture of the field suite is: a model and batches, from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from zlib import crc32

import numpy
import torch
from torch import nn

from membudget.step import LossFunction
from tests.field.vision_operators import import_torchvision

Half = Literal["tuned", "held out"]


@dataclass(frozen=True)
class Made:
    """A model, and what it is trained on.

    Attributes:
        model: In training mode, with random weights.
        batch: Makes a batch from the global random streams; `True` asks for another
            shape.
        loss_fn: As `fit` takes it.
    """

    model: nn.Module
    batch: Callable[[bool], Any]
    loss_fn: LossFunction | None = None


@dataclass(frozen=True)
class Case:
    """An architecture.

    Attributes:
        name: The name in tests and tables.
        family: What it belongs to, such as `"decoder"`.
        function: Makes it, from the global random streams.
    """

    name: str
    family: str
    function: Callable[[], Made]

    @property
    def half(self) -> Half:
        """Whether the library may be tuned on it; drawn by name, so nobody chooses."""
        return "tuned" if crc32(self.name.encode()) % 2 else "held out"

    def make(self) -> Made:
        """Make the model, the same each time."""
        import_torchvision()  # timm needs it, and transformers takes it where it is.
        seed_everything(0)
        return self.function()


def family(name: str) -> Callable[[Callable[[], Made]], Case]:
    """Decorate the functions that make the architectures of one family."""

    def decorate(function: Callable[[], Made]) -> Case:
        return Case(function.__name__, name, function)

    return decorate


def seed_everything(seed: int) -> None:
    """Seed every random stream that a model here draws from."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)  # noqa: NPY002


def tokens(vocabulary: int, batch: int, length: int) -> dict[str, torch.Tensor]:
    """Return what a language model of transformers is trained on."""
    ids = torch.randint(3, vocabulary, (batch, length))
    return {"input_ids": ids, "labels": ids.clone()}
