"""Small models of sequences, sets and graphs, to be trained under a limit of bytes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.planner.models import Calls, Made

WIDTH = 32


def _mlp(width: int, hidden: int, act: type[nn.Module] = nn.GELU) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden), act(), nn.Linear(hidden, width))


class Attention(nn.Module):
    """Attention from one sequence to another."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.query, self.key_value = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
        )
        self.out, self.heads = nn.Linear(WIDTH, WIDTH), heads

    def forward(self, x: Tensor, memory: Tensor, causal: bool = False) -> Tensor:
        q = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.key_value(memory).unflatten(-1, (2, self.heads, -1)).unbind(2)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.out(y.transpose(1, 2).flatten(2))


def gru_loop() -> Made:
    """Return a cell that is called for each token."""

    def function(self: Any, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], 24)
        losses = []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            losses.append(self.head(state).square().mean())
        return torch.stack(losses).sum()

    made = Calls(function, cell=nn.GRUCell(16, 24), head=_mlp(24, 96, nn.Tanh))
    return made, torch.randn(128, 6, 16)


def recommender() -> Made:
    """Return tables of users and items, whose rows' products a network weighs."""

    def function(self: Any, rows: Tensor, numbers: Tensor) -> Tensor:
        parts = [
            table(row) for table, row in zip(self.tables, rows.unbind(1), strict=True)
        ]
        stack = torch.stack([self.bottom(numbers), *parts], 1)
        products = (stack @ stack.transpose(1, 2)).flatten(1)
        return F.softplus(self.top(torch.cat([products, stack.flatten(1)], 1))).mean()

    made = Calls(
        function,
        tables=nn.ModuleList(nn.Embedding(64, 16) for _ in range(5)),
        bottom=nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 16)),
        top=nn.Sequential(
            *(nn.Linear(132, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU()),
            nn.Linear(64, 1),
        ),
    )
    return made, (torch.randint(64, (256, 5)), torch.randn(256, 8))


def rmsnorm_decoder() -> Made:
    """Return a decoder with rotated positions, gated MLPs and no biases."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
            self.attention = Attention()
            self.gate, self.up = (nn.Linear(WIDTH, 96, bias=False) for _ in range(2))
            self.down = nn.Linear(96, WIDTH, bias=False)

        def forward(self, x: Tensor, angles: Tensor) -> Tensor:
            y = self.norms[0](x)
            first, second = y.chunk(2, -1)
            turned = torch.cat(
                [first * angles.cos() - second, first + second * angles.sin()], -1
            )
            x = x + self.attention(turned, y, causal=True)
            y = self.norms[1](x)
            return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def function(self: Any, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        angles = torch.arange(tokens.shape[1])[:, None] / (1 + torch.arange(WIDTH // 2))
        for block in self.blocks:
            x = block(x, angles)
        logits = self.head(x)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    made = Calls(
        function,
        embed=nn.Embedding(50, WIDTH),
        blocks=nn.ModuleList(Block() for _ in range(2)),
        head=nn.Linear(WIDTH, 50),
    )
    return made, torch.randint(50, (8, 32))


def perceiver() -> Made:
    """Return a few latents that read a long input."""

    def function(self: Any, x: Tensor) -> Tensor:
        latents = self.latents.weight.expand(x.shape[0], -1, -1)
        for read, think in zip(self.reads, self.thoughts, strict=True):
            latents = latents + read(latents, x)
            latents = latents + think(latents)
        return self.head(latents.mean(1)).square().mean()

    made = Calls(
        function,
        latents=nn.Embedding(16, WIDTH),
        reads=nn.ModuleList(Attention() for _ in range(3)),
        thoughts=nn.ModuleList(_mlp(WIDTH, 128) for _ in range(3)),
        head=nn.Linear(WIDTH, 4),
    )
    return made, torch.randn(8, 128, WIDTH)


def linear_attention() -> Made:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.mlp, self.norm = _mlp(WIDTH, 64), nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
            q, k = F.elu(q) + 1, F.elu(k) + 1
            y = (
                q
                @ (k.transpose(1, 2) @ v)
                / (q * k.sum(1, keepdim=True)).sum(-1, keepdim=True)
            )
            return self.mlp(x + self.out(y))

    return nn.Sequential(*(Block() for _ in range(3))), torch.randn(8, 64, WIDTH)


def state_space() -> Made:
    """Return layers that scan their input with a decay for each channel."""

    class Scan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.out = (
                nn.Linear(WIDTH, 3 * WIDTH),
                nn.Linear(WIDTH, WIDTH),
            )

        def forward(self, x: Tensor) -> Tensor:
            value, gate, step = self.project(x).chunk(3, -1)
            decay = torch.sigmoid(step)
            state, outs = torch.zeros_like(value[:, 0]), []
            for t in range(x.shape[1]):
                state = decay[:, t] * state + (1 - decay[:, t]) * value[:, t]
                outs.append(state)
            return x + self.out(torch.stack(outs, 1) * F.silu(gate))

    return nn.Sequential(Scan(), Scan()), torch.randn(64, 6, WIDTH)


def wavenet() -> Made:
    class Gated(nn.Module):
        def __init__(self, dilation: int) -> None:
            super().__init__()
            self.conv = nn.Conv1d(16, 32, 2, dilation=dilation, padding=dilation)
            self.out = nn.Conv1d(16, 16, 1)

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.conv(x)[..., : x.shape[-1]].chunk(2, 1)
            return x + self.out(a.tanh() * b.sigmoid())

    layers = [
        nn.Conv1d(1, 16, 1),
        *(Gated(2**i) for i in range(6)),
        nn.Conv1d(16, 8, 1),
    ]
    return nn.Sequential(*layers), torch.randn(8, 1, 128)


def conformer() -> Made:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = _mlp(WIDTH, 64, nn.SiLU), _mlp(WIDTH, 64, nn.SiLU)
            self.attention, self.norm = Attention(), nn.LayerNorm(WIDTH)
            self.conv = nn.Conv1d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH)
            self.statistics = nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = x + 0.5 * self.first(x)
            x = x + self.attention(x, x)
            y = self.statistics(self.conv(x.transpose(1, 2)))
            return self.norm(x + F.silu(y).transpose(1, 2) + 0.5 * self.last(x))

    return nn.Sequential(Block(), Block()), torch.randn(8, 40, WIDTH)


def routed() -> Made:
    """Return experts of which each gets the tokens that chose it, however many."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = nn.Linear(WIDTH, 3)
            self.experts = nn.ModuleList(_mlp(WIDTH, 96) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            scores = self.scores(x).softmax(-1)
            weight, chosen = scores.max(-1)
            out = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                (rows,) = torch.where(chosen == number)
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
            return x + out

    return nn.Sequential(Layer(), Layer()), torch.randn(256, WIDTH)


def graph_convolution() -> Made:
    """Return layers that add up what comes along the edges."""

    def function(self: Any, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            messages = layer(torch.cat([x[source], x[target]], -1)).relu()
            x = x + torch.zeros_like(x).index_add(0, target, messages)
        return x

    layers = nn.ModuleList(nn.Linear(2 * 16, 16) for _ in range(5))
    edges = torch.randint(96, (2, 400))
    return Calls(function, layers=layers), (torch.randn(96, 16), edges[0], edges[1])


def deep_sets() -> Made:
    def function(self: Any, x: Tensor) -> Tensor:
        for layer, of_all in zip(self.layers, self.of_all, strict=True):
            x = F.leaky_relu(layer(x) + of_all(x.amax(1, keepdim=True)))
        return self.head(x.sum(1))

    made = Calls(
        function,
        layers=nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6)),
        of_all=nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6)),
        head=nn.Linear(WIDTH, 2),
    )
    return made, torch.randn(16, 48, WIDTH)


def adapters() -> Made:
    """Return a frozen model with small layers beside it that are trained."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(64, 64).requires_grad_(False)
            self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64)

        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(self.frozen(x) + self.up(self.down(x)))

    return nn.Sequential(*(Adapted() for _ in range(8))), torch.randn(256, 64)


def half_precision() -> Made:
    """Return an MLP whose products run in bfloat16."""

    def function(self: Any, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return self.body(x).float().square().mean()

    body = nn.Sequential(*(_mlp(64, 128) for _ in range(5)))
    return Calls(function, body=body), torch.randn(256, 64)


def highway() -> Made:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = nn.Linear(48, 96)

        def forward(self, x: Tensor) -> Tensor:
            value, gate = self.both(x).chunk(2, -1)
            return torch.lerp(x, value.relu(), gate.sigmoid())

    return nn.Sequential(*(Layer() for _ in range(8))), torch.randn(256, 48)
