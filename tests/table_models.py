"""Models of many kinds, each a second or two to fit at any budget.

Activations outweigh gradients in each, so that a budget is about what is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.planner.models import Calls, Made, Residual, unet
from tests.planner.models import gpt as gpt_with_dropout

WIDTH, HEADS = 32, 4


class Attention(nn.Module):
    """Attention written out: products, softmax, products."""

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.is_causal = is_causal

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = (
            self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        )
        scores = query @ key.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5
        if self.is_causal:
            length = x.shape[1]
            above = torch.ones(length, length, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(above, float("-inf"))
        if mask is not None:
            scores = scores.masked_fill(mask[:, None, None, :], float("-inf"))
        return self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and MLP, the norms before (GPT) or after (BERT) the sums."""

    def __init__(self, is_causal: bool = True, is_before: bool = True) -> None:
        super().__init__()
        self.attention = Attention(is_causal)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.is_before = is_before

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        first, second = self.norms
        if self.is_before:
            x = x + self.attention(first(x), mask)
            return x + self.mlp(second(x))
        x = first(x + self.attention(x, mask))
        return second(x + self.mlp(x))


def gpt_eager() -> Made:
    def function(self: Any, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    made = Calls(
        function,
        embed=nn.Embedding(64, WIDTH),
        places=nn.Embedding(48, WIDTH),
        blocks=nn.ModuleList(Block() for _ in range(5)),
        norm=nn.LayerNorm(WIDTH),
        head=nn.Linear(WIDTH, 64, bias=False),
    )
    return made, torch.randint(64, (8, 48))


def bert() -> Made:
    def function(self: Any, tokens: Tensor, mask: Tensor) -> dict[str, Tensor]:
        x = self.norm(self.embed(tokens))
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(torch.tanh(self.pool(x[:, 0])))
        return {"loss": logits.logsumexp(-1).sum() - logits[:, 0].sum()}

    made = Calls(
        function,
        embed=nn.Embedding(64, WIDTH),
        norm=nn.LayerNorm(WIDTH),
        blocks=nn.ModuleList(Block(False, is_before=False) for _ in range(4)),
        pool=nn.Linear(WIDTH, WIDTH),
        head=nn.Linear(WIDTH, 3),
    )
    tokens = torch.randint(64, (12, 40))
    lengths = torch.randint(20, 40, (12, 1))
    return made, (tokens, torch.arange(40) >= lengths)


def resnet() -> Made:
    body = [Residual(12, in_place=True) for _ in range(5)]
    layers = [nn.Conv2d(3, 12, 3, padding=1), *body, nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(12, 5)), torch.randn(
        8, 3, 20, 20
    )


def mlp() -> Made:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48))

    return nn.Sequential(*(block() for _ in range(6))), torch.randn(512, 48)


def lstm() -> Made:
    def function(self: Any, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in (self.first, self.second):
            x = x + layer(x)[0]
        return self.head(self.mlp(x))

    made = Calls(
        function,
        embed=nn.Embedding(50, 16),
        first=nn.LSTM(16, 16, batch_first=True),
        second=nn.LSTM(16, 16, batch_first=True),
        mlp=nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)),
        head=nn.Linear(16, 9),
    )
    return made, torch.randint(50, (32, 10))


class Mixture(nn.Module):
    """Each token goes to the two experts whose scores are largest."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.norm, self.scores = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, experts)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 64) / 6)
        self.down = nn.Parameter(torch.randn(experts, 64, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        weights, chosen = self.scores(y).topk(2, -1)
        gates = torch.zeros_like(y[:, : len(self.up)])
        gates = gates.scatter(1, chosen, weights.softmax(-1))
        hidden = torch.einsum("nw,ewh->neh", y, self.up).relu()
        return x + torch.einsum("ne,neh,ehw->nw", gates, hidden, self.down)


def mixture() -> Made:
    return nn.Sequential(*(Mixture() for _ in range(4))), torch.randn(256, WIDTH)


def tied_weights() -> Made:
    def function(self: Any, tokens: Tensor) -> Tensor:
        logits = self.head(self.body(self.embed(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    embed, head = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 64, bias=False)
    head.weight = embed.weight
    body = nn.Sequential(*(Block() for _ in range(4)))
    tokens = torch.randint(64, (8, 40))
    return Calls(function, embed=embed, body=body, head=head), tokens


def dropout_transformer() -> Made:
    model, _ = gpt_with_dropout(dropout=0.2, blocks=4)
    return model, torch.randint(100, (16, 32))


def vit() -> Made:
    def function(self: Any, images: Tensor) -> Tensor:
        patches = self.patch(images).flatten(2).transpose(1, 2)
        first = self.first.weight.expand(len(images), -1, -1)
        x = torch.cat([first, patches], 1) + self.places.weight
        return self.head(self.norm(self.blocks(x))[:, 0])

    made = Calls(
        function,
        patch=nn.Conv2d(3, WIDTH, 4, stride=4),
        first=nn.Embedding(1, WIDTH),
        places=nn.Embedding(37, WIDTH),
        blocks=nn.Sequential(*(Block(is_causal=False) for _ in range(4))),
        norm=nn.LayerNorm(WIDTH),
        head=nn.Linear(WIDTH, 10),
    )
    return made, torch.randn(8, 3, 24, 24)


def autoencoder() -> Made:
    def down(first: int, second: int) -> nn.Module:
        layer = nn.Conv2d(first, second, 3, stride=2, padding=1)
        return nn.Sequential(layer, nn.BatchNorm2d(second), nn.LeakyReLU(0.1))

    def up(first: int, second: int) -> nn.Module:
        layer = nn.ConvTranspose2d(first, second, 4, stride=2, padding=1)
        return nn.Sequential(layer, nn.BatchNorm2d(second), nn.LeakyReLU(0.1))

    encoder = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ELU(), down(8, 12), down(12, 16))
    decoder = nn.Sequential(up(16, 12), up(12, 8), nn.Conv2d(8, 3, 1), nn.Sigmoid())
    return nn.Sequential(encoder, decoder), torch.rand(8, 3, 32, 32)


class Mixing(nn.Module):
    """An MLP over the tokens, then one over the channels."""

    def __init__(self, tokens: int) -> None:
        super().__init__()

        def mlp(width: int) -> nn.Module:
            return nn.Sequential(
                nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
            )

        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.over_tokens, self.over_channels = mlp(tokens), mlp(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.norms
        x = x + self.over_tokens(first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_channels(second(x))


def mixer() -> Made:
    return nn.Sequential(*(Mixing(24) for _ in range(5))), torch.randn(16, 24, WIDTH)


def _tower(width: int) -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(
            nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)
        )

    return nn.Sequential(*(block() for _ in range(4)))


def siamese() -> Made:
    """Return a model whose one tower is called twice."""

    def function(self: Any, left: Tensor, right: Tensor) -> Tensor:
        first, second = (F.normalize(self.tower(x), dim=-1) for x in (left, right))
        labels = torch.arange(len(left))
        return F.cross_entropy(first @ second.T, labels)

    made = Calls(function, tower=_tower(32))
    return made, (torch.randn(192, 32), torch.randn(192, 32))


def two_towers() -> Made:
    """Return a model of two towers, whose outputs meet in a third."""

    def function(self: Any, left: Tensor, right: Tensor) -> Tensor:
        both = torch.cat([self.left(left), self.right(right)], -1)
        return self.top(both)

    made = Calls(function, left=_tower(24), right=_tower(40), top=_tower(64))
    return made, (torch.randn(256, 24), torch.randn(256, 40))


TABLE: dict[str, Callable[[], Made]] = {
    made.__name__: made
    for made in (
        gpt_eager,
        bert,
        resnet,
        mlp,
        unet,
        lstm,
        mixture,
        tied_weights,
        dropout_transformer,
        vit,
        autoencoder,
        mixer,
        siamese,
        two_towers,
    )
}
