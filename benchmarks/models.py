"""The models that the benchmarks of whole steps train, in plain PyTorch.

Each is a sequence of blocks between a head and a tail. A benchmark sets `model.runs`,
how each block is called, and leaves the rest alone; so all ways of checkpointing run
the same code, cut in the same places.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Run = Callable[[Tensor], Tensor]


class Attend(nn.Module):
    """Causal attention, without weights; a module so that a benchmark can mark it."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attended values."""
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class GPTBlock(nn.Module):
    """Attention and MLP, each behind a norm and before dropout, and the residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        """Make the block's two halves."""
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.project_in = nn.Linear(width, 3 * width)
        self.attend = Attend()
        self.project_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream `x` with this block's two additions."""
        split = self.project_in(self.attention_norm(x))
        split = split.unflatten(-1, (3, self.heads, -1))
        attended = self.attend(*split.permute(2, 0, 3, 1, 4))
        merged = self.project_out(attended.transpose(1, 2).flatten(2))
        x = x + self.dropout(merged)
        hidden = F.gelu(self.mlp_in(self.mlp_norm(x)))
        y: Tensor = x + self.dropout(self.mlp_out(hidden))
        return y


class MLPBlock(nn.Module):
    """A linear layer and GELU, twice."""

    def __init__(self, width: int) -> None:
        """Make the two layers."""
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return as many features as `x` has."""
        y: Tensor = F.gelu(self.second(F.gelu(self.first(x))))
        return y


class ResNetBlock(nn.Module):
    """Two convolutions with BatchNorm, in-place ReLU, and the residual."""

    def __init__(self, channels: int) -> None:
        """Make the layers."""
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return an image of the same shape."""
        y = F.relu(self.first_norm(self.first(x)), inplace=True)
        y = self.second_norm(self.second(y))
        return F.relu(y + x, inplace=True)


class Model(nn.Module):
    """Head, blocks, tail; returns the mean cross-entropy."""

    def __init__(self, head: nn.Module, blocks: list[nn.Module], tail: nn.Module):
        """Take the parts; each block is called plainly."""
        super().__init__()
        self.head, self.tail = head, tail
        self.blocks = nn.ModuleList(blocks)
        # A tuple, so that no module is registered twice.
        self.runs: tuple[Run, ...] = tuple(blocks)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss."""
        x = self.head(inputs)
        for run in self.runs:
            x = run(x)
        return F.cross_entropy(self.tail(x).flatten(0, -2), targets.flatten())


class Embedding(nn.Module):
    """Tokens and learned positions, then dropout."""

    def __init__(self, vocabulary: int, length: int, width: int, dropout: float):
        """Make the two tables."""
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the residual stream: (batch, length, width)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x: Tensor = self.dropout(self.tokens(tokens) + self.positions(places))
        return x


@dataclass(frozen=True)
class Workload:
    """A model and the batch that it is trained on.

    Attributes:
        title: What it is, for the head of a table.
        make: Makes the model and its batch, from torch's global generator.
    """

    title: str
    make: Callable[[], tuple[Model, tuple[Tensor, Tensor]]]


def gpt(
    *, blocks: int, width: int, heads: int, batch: int, length: int
) -> tuple[Model, tuple[Tensor, Tensor]]:
    """Make a GPT with 256 tokens and dropout 0.1."""
    model = Model(
        Embedding(256, length, width, 0.1),
        [GPTBlock(width, heads, 0.1) for _ in range(blocks)],
        nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256, bias=False)),
    )
    tokens = torch.randint(256, (batch, length + 1))
    return model, (tokens[:, :-1], tokens[:, 1:])


def mlp() -> tuple[Model, tuple[Tensor, Tensor]]:
    """Make an MLP of twelve layers of 512, two a block."""
    width, batch = 512, 512
    blocks: list[nn.Module] = [MLPBlock(width) for _ in range(6)]
    model = Model(nn.Identity(), blocks, nn.Linear(width, 10))
    return model, (torch.randn(batch, width), torch.randint(10, (batch,)))


class Pooled(nn.Module):
    """The mean over an image, and a linear layer."""

    def __init__(self, channels: int, classes: int) -> None:
        """Make the layer."""
        super().__init__()
        self.classify = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits: (batch, classes)."""
        y: Tensor = self.classify(x.mean((2, 3)))
        return y


def resnet() -> tuple[Model, tuple[Tensor, Tensor]]:
    """Make six residual blocks of 32 channels on 32 x 32 images."""
    channels, batch = 32, 8
    head = nn.Conv2d(3, channels, 3, padding=1)
    blocks: list[nn.Module] = [ResNetBlock(channels) for _ in range(6)]
    model = Model(head, blocks, Pooled(channels, 10))
    return model, (torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,)))


WORKLOADS = {
    "launch-bound GPT": Workload(
        "GPT of 6 blocks, width 64, 4 heads; batch 4, length 32; dropout 0.1",
        lambda: gpt(blocks=6, width=64, heads=4, batch=4, length=32),
    ),
    "compute-bound GPT": Workload(
        "GPT of 12 blocks, width 256, 4 heads; batch 8, length 128; dropout 0.1",
        lambda: gpt(blocks=12, width=256, heads=4, batch=8, length=128),
    ),
    "MLP": Workload("MLP, 12 layers of 512 in 6 blocks; batch 512", mlp),
    "ResNet": Workload(
        "6 residual blocks of 32 channels, BatchNorm, in-place ReLU; 8 of 32x32",
        resnet,
    ),
}
