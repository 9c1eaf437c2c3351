"""Llama 3 in 100 lines, to be predicted and planned on a mesh that does not exist.

    membudget plan examples/llama.py:make --mesh dp_shard=8,tp=8 --fake \
        --optimizer adamw --device h100 --budget 60GiB -o plan.json

plans Llama 3 70B on 64 devices in this process, in which nothing of it is allocated.
`--set layers=32 --set width=4096 ...` makes another size; `make` has the names.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Grouped-query attention; a tensor-parallel device has some of the heads."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        """Create the projections."""
        super().__init__()
        self.head_width = width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, groups * self.head_width, bias=False)
        self.v = nn.Linear(width, groups * self.head_width, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """Attend from each position to those before it."""
        q, k, v = (self._heads(layer(x)) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(
            rotated(q, turn), rotated(k, turn), v, is_causal=True, enable_gqa=True
        )
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_width).transpose(1, 2)


def rotated(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs of features by angles that grow with the position."""
    cos, sin = turn
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Layer(nn.Module):
    """Attention and a gated feed-forward part, each added to its input."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        """Create both parts."""
        super().__init__()
        self.attention = Attention(width, heads, groups)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.before_attention = nn.RMSNorm(width)
        self.before_hidden = nn.RMSNorm(width)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """Run both parts."""
        x = x + self.attention(self.before_attention(x), turn)
        hidden = self.before_hidden(x)
        added: Tensor = self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return x + added


class Llama(nn.Module):
    """Predicts the next token; called with tokens, it returns the mean loss.

    Attributes:
        tp_plan: How a tensor-parallel group shares each layer's matrices.
    """

    tp_plan = dict.fromkeys(
        [f"layers.*.{n}" for n in ("attention.q", "attention.k", "attention.v")]
        + ["layers.*.gate", "layers.*.up"],
        "colwise",
    ) | {"layers.*.attention.o": "rowwise", "layers.*.down": "rowwise"}

    def __init__(
        self, width: int, heads: int, groups: int, hidden: int, layers: int, words: int
    ) -> None:
        """Create the layers."""
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(
            Layer(width, heads, groups, hidden) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head_width = width // heads

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of predicting each token from those before."""
        x = self.embed(tokens)
        turn = self._turn(tokens.shape[1], x)
        for layer in self.layers:
            x = layer(x, turn)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def _turn(self, length: int, x: Tensor) -> tuple[Tensor, Tensor]:
        speed = 5e5 ** -torch.arange(0, 1, 2 / self.head_width, device=x.device)
        angle = torch.outer(torch.arange(length, device=x.device), speed).repeat(1, 2)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


def make(
    batch: int = 1,
    length: int = 8192,
    width: int = 8192,
    heads: int = 64,
    groups: int = 8,
    hidden: int = 28672,
    layers: int = 80,
    words: int = 128256,
) -> tuple[nn.Module, Tensor]:
    """Return a model of these sizes, Llama 3 70B by default, and tokens of a batch."""
    model = Llama(width, heads, groups, hidden, layers, words)
    tokens = torch.zeros(batch, length, dtype=torch.long, device="cpu")
    return model.bfloat16(), tokens
