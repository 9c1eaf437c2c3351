"""A small GPT in plain PyTorch: what the demonstration trains.

Nothing here knows of regions. The model is the usual one (pre-norm blocks, causal
attention, an MLP four times as wide, learned positions) after Radford et al. 2019, with
dropout on the embedding and on all that is added to the residual stream. So each block
draws random numbers, and a recompute is right only if it draws the same ones again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a `GPT`."""

    vocabulary: int = 256
    length: int = 64
    width: int = 64
    heads: int = 4
    blocks: int = 8
    dropout: float = 0.1


class Attention(nn.Module):
    """Causal self-attention with one fused projection for query, key and value."""

    def __init__(self, config: GPTConfig) -> None:
        """Make the two projections."""
        super().__init__()
        self.heads = config.heads
        self.project_in = nn.Linear(config.width, 3 * config.width)
        self.project_out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attended values, in the shape of `x`: (batch, length, width)."""
        split = self.project_in(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        merged: Tensor = self.project_out(attended.transpose(1, 2).flatten(2))
        return merged


class Block(nn.Module):
    """Attention and MLP, each behind a norm, beside the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        """Make the block's two halves."""
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream `x` with this block's two additions."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        y: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return y


class GPT(nn.Module):
    """Predicts the next token; with targets it returns the mean cross-entropy."""

    def __init__(self, config: GPTConfig) -> None:
        """Make the model and draw its weights from torch's global generator."""
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.length, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.05)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits of `tokens` or, given `targets`, the loss."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
