"""Eight small models whose calls differ: inputs, outputs, state, and what they skip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, WORDS = 32, 64

Cache = dict[nn.Module, tuple[Tensor, Tensor]]
"""Keys and values of each block, for the tokens that it has seen."""


class Block(nn.Module):
    """A transformer's block with dropout."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.rank = rank
        if rank:
            self.a, self.b = nn.Linear(WIDTH, rank), nn.Linear(rank, 4 * WIDTH)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (4, -1)).transpose(1, 2)
            for part in self.mix(self.norm(x)).chunk(3, -1)
        )
        is_first = cache is None or self not in cache
        if cache is not None:
            if not is_first:
                k, v = (
                    torch.cat(pair, 2) for pair in zip(cache[self], (k, v), strict=True)
                )
            cache[self] = k, v
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=is_first)
        x = x + F.dropout(
            self.out(mixed.transpose(1, 2).flatten(2)), 0.1, self.training
        )
        up = self.up(x)
        if self.rank:
            up = up + self.b(self.a(x))
        return x + self.down(F.gelu(up))


class Language(nn.Module):
    """A language model with tied weights, layers dropped at random, or LoRA."""

    def __init__(self, drop: float = 0.0, rank: int = 0, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(rank) for _ in range(5))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.drop = drop
        if tied:
            self.head.weight = self.embed.weight
        if rank:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(".a." in name or ".b." in name)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            if not (self.training and torch.rand(()) < self.drop):
                x = block(x, cache)
        logits = self.head(x)
        if labels is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return {"loss": loss, "logits": logits}


class Images(nn.Module):
    """A residual convolutional network with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(12, 12, 3, padding=1, bias=False),
                nn.BatchNorm2d(12),
                nn.ReLU(inplace=True),
                nn.Conv2d(12, 12, 3, padding=1),
                nn.BatchNorm2d(12),
            )
            for _ in range(4)
        )
        self.head = nn.Linear(12, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = F.relu(x + block(x))
        return self.head(x.mean((2, 3)))


class Recurrent(nn.Module):
    """A cell that a loop calls for each place of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        state = torch.zeros(len(tokens), WIDTH, device=tokens.device)
        states = []
        for x in self.embed(tokens).unbind(1):
            state = self.cell(x, state)
            states.append(F.dropout(state, 0.1, self.training))
        return self.head(torch.stack(states, 1))


class Mixed(nn.Module):
    """An MLP with normalisation over the batch, whose blocks are all alike."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Linear(WIDTH, WIDTH),
                    nn.BatchNorm1d(WIDTH),
                    nn.GELU(),
                    nn.Dropout(0.1),
                    nn.Linear(WIDTH, WIDTH),
                )
                for _ in range(6)
            )
        )
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        # Blocks in autocast of their own return another dtype than the head takes.
        return self.head(self.blocks(x).float())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "language": Language,
    "tied": lambda: Language(tied=True),
    "dropped": lambda: Language(drop=0.3),
    "lora": lambda: Language(rank=4),
    "images": Images,
    "recurrent": Recurrent,
    "mixed": Mixed,
    "deep": lambda: nn.Sequential(Mixed().blocks, Mixed()),
}


def inputs_of(name: str, model: nn.Module, size: int) -> tuple[Tensor, Tensor]:
    """Return inputs of a size, and targets, drawn from the global stream."""
    if name == "images":
        return torch.randn(4, 3, size, size), torch.randint(10, (4,))
    if name in ("mixed", "deep"):
        return torch.randn(16 * size, WIDTH), torch.randint(10, (16 * size,))
    tokens = torch.randint(WORDS, (4, size))
    return tokens, tokens.roll(1, 1)


@torch.no_grad()
def generate(model: nn.Module, tokens: Tensor, count: int, has_cache: bool) -> Tensor:
    """Return tokens with those that a model adds to them, each the likeliest one."""
    cache: Cache = {}
    for _ in range(count):
        if has_cache:
            logits = model(tokens[:, -1:] if cache else tokens, cache=cache)
        else:
            logits = model(tokens)
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
    return tokens


def enter_autocast(part: nn.Module, device_type: str) -> None:
    """Let a module's forward enter autocast by itself, as accelerate does it."""
    part.forward = torch.autocast(device_type, torch.bfloat16)(part.forward)


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of logits, over all places."""
    return F.cross_entropy(output.flatten(0, -2).float(), targets.flatten())
