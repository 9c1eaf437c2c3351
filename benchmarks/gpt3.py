"""What GPT-3 175B keeps for its backward: counted in a fake step, and by the paper.

The model is that of Korthikanti and others 2022 (arXiv:2205.05198), on one device: 96
layers of width 12288 with 96 heads, 2048 tokens, a vocabulary of 51200, half precision,
written so that each tensor which the paper counts is kept once. Its parameters are on
`meta` and its step is fake, so it needs no memory of that size.

A region keeps its inputs, and drops what its own operators made for one another. So
the bytes under selective recomputation (a region around each attention core) and under
full recomputation (a region around each layer) are found in the same graph.

    python3 run.py bench gpt3 [--layers 96]
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import save, show
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import membudget
from membudget import StepGraph
from membudget.memory.formulas import (
    Recompute,
    TransformerShape,
    extra_terms,
    layer_bytes,
    layer_terms,
    model_bytes,
)

SHAPE = TransformerShape(batch=1, sequence=2048, hidden=12288, heads=96)
LAYERS = 96
VOCABULARY = 51200
MOST_SECONDS = 60
MOST_BYTES = 2 << 30
WAYS: tuple[Recompute, ...] = ("none", "selective", "full")


class Dropout(nn.Module):
    """Dropout that keeps its mask, a byte for each element."""

    def forward(self, x: Tensor) -> Tensor:
        """Drop a tenth."""
        dropped: Tensor = torch.native_dropout(x, 0.1, True)[0]
        return dropped


class Core(nn.Module):
    """What selective recomputation makes again."""

    def __init__(self) -> None:
        """Make the one module in it."""
        super().__init__()
        self.dropout = Dropout()

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend; all three are (batch · heads, sequence, width of a head)."""
        weights = torch.bmm(query, key.transpose(1, 2)).softmax(-1)
        return torch.bmm(self.dropout(weights), value)


class Layer(nn.Module):
    """The layer of the paper's figure 2."""

    def __init__(self, hidden: int, heads: int) -> None:
        """Make the parts."""
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(hidden)
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.core = Core()
        self.projection = nn.Linear(hidden, hidden)
        self.dropout = Dropout()
        self.norm_2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.gelu = nn.GELU()
        self.down = nn.Linear(4 * hidden, hidden)
        self.mlp_dropout = Dropout()

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then the MLP; each is added to what it reads."""
        x = x + self.dropout(self.projection(self._attend(self.norm_1(x))))
        hidden = self.gelu(self.up(self.norm_2(x)))
        return x + self.mlp_dropout(self.down(hidden))

    def _attend(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape

        def split(x: Tensor) -> Tensor:
            each = x.view(batch, sequence, self.heads, -1).transpose(1, 2)
            return each.reshape(batch * self.heads, sequence, -1)

        # The scale goes into the query: no second tensor of s² is made.
        query = self.query(x) * (hidden // self.heads) ** -0.5
        out = self.core(split(query), split(self.key(x)), split(self.value(x)))
        out = out.view(batch, self.heads, sequence, -1).transpose(1, 2)
        return out.reshape(batch, sequence, hidden)


class GPT(nn.Module):
    """Embeddings, layers, a norm, the projection to the vocabulary, and the loss."""

    def __init__(self, shape: TransformerShape, layers: int, vocabulary: int) -> None:
        """Make the parts; the projection has the embedding's weight."""
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.sequence, shape.hidden)
        self.dropout = Dropout()
        self.layers = nn.ModuleList(
            Layer(shape.hidden, shape.heads) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(shape.hidden)
        self.output = nn.Linear(shape.hidden, vocabulary, bias=False)
        self.output.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting each token by those before it."""
        positions = torch.arange(tokens.shape[1])
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for layer in self.layers:
            x = layer(x)
        logits = self.output(self.norm(x)).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
