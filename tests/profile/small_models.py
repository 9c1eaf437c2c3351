"""Small models whose reports are read."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Made = tuple[nn.Module, Any, Any]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + (q @ k.mT).softmax(-1) @ v
        return x + self.down(F.gelu(self.up(x)))


class LanguageModel(nn.Module):
    def __init__(self, vocabulary: int, width: int, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.h = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.h:
            x = block(x)
        return self.head(x)


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def language_model(
    batch: int = 2, length: int = 16, vocabulary: int = 500, blocks: int = 4
) -> Made:
    """Return a model of 16 features whose logits are large."""
    ids = torch.zeros(batch, length, dtype=torch.long)
    return LanguageModel(vocabulary, 16, blocks), ids, next_token_loss


def perceptron(batch: int = 4, width: int = 32) -> Made:
    """Return a model in which every byte grows with the batch, or not at all."""
    layers = [nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 8)]
    return nn.Sequential(*layers), torch.ones(batch, width), None


def convolutions(batch: int = 2) -> Made:
    """Return a model with buffers, and operators that need a workspace."""
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)]
    return nn.Sequential(*layers), torch.ones(batch, 3, 12, 12), None
