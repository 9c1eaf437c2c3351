"""Models of a few blocks each, small enough to plan and measure in a moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from membudget.memory import peak
from membudget.step import Step

Made = tuple[nn.Module, Any]

WIDTH = 32


def measured_peak(model: nn.Module, batch: Any) -> int:
    """Return what the meter reads of a step that is not the first."""
    step = Step(model, batch, None)
    step.run()
    step.prepare()
    found = peak(step.run).peak_bytes
    step.prepare()
    return found


class Residual(nn.Module):
    """Two convolutions with BatchNorm around a residual sum."""

    def __init__(self, channels: int, in_place: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(in_place),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + x)


class Block(nn.Module):
    """Attention and MLP, each behind a norm, with dropout."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.dropout(self.out(y.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))


class Calls(nn.Module):
    """A model made of layers and of a function that uses them."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def mlp() -> Made:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    return nn.Sequential(*(block() for _ in range(6))), torch.randn(256, 64)


def gpt(dropout: float = 0.1, blocks: int = 4) -> Made:
    body = [Block(dropout) for _ in range(blocks)]
    embed, head = nn.Embedding(100, WIDTH), nn.Linear(WIDTH, 100)
    return nn.Sequential(embed, *body, head), torch.randint(100, (8, 32))


def resnet(in_place: bool = False) -> Made:
    body = [Residual(16, in_place) for _ in range(4)]
    layers = [nn.Conv2d(3, 16, 3, padding=1), *body, nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten()), torch.randn(4, 3, 16, 16)


def convolutions_in_place() -> Made:
    """Return a model whose ReLUs write into what the convolutions made."""

    def block() -> nn.Module:
        return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True))

    layers = [nn.Conv2d(3, 8, 3, padding=1)]
    body = [nn.Sequential(block(), block()) for _ in range(3)]
    return nn.Sequential(*layers, *body), torch.randn(4, 3, 16, 16)


def resnet_in_place() -> Made:
    return resnet(in_place=True)


def _double(first: int, second: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(first, second, 3, padding=1),
        nn.BatchNorm2d(second),
        nn.ReLU(),
        nn.Conv2d(second, second, 3, padding=1),
        nn.SiLU(),
    )


def unet() -> Made:
    def function(self: Any, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        b = self.up2(torch.cat([F.interpolate(c, scale_factor=2.0), b], 1))
        return self.up1(torch.cat([F.interpolate(b, scale_factor=2.0), a], 1))

    made = Calls(
        function,
        down1=_double(3, 8),
        down2=_double(8, 16),
        middle=_double(16, 32),
        up2=_double(48, 16),
        up1=_double(24, 4),
    )
    return made, torch.randn(4, 3, 16, 16)


def lstm_tagger() -> Made:
    def function(self: Any, x: Tensor) -> Tensor:
        return self.head(self.mlp(self.lstm(self.embed(x))[0]))

    made = Calls(
        function,
        embed=nn.Embedding(50, 16),
        lstm=nn.LSTM(16, 16, batch_first=True, bidirectional=True),
        mlp=nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)),
        head=nn.Linear(32, 9),
    )
    return made, torch.randint(50, (8, 12))


def encoder_decoder() -> Made:
    def function(self: Any, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(source)
        return self.decoder(target, memory)

    encoder = nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.1, batch_first=True)
    decoder = nn.TransformerDecoderLayer(WIDTH, 4, 64, 0.1, batch_first=True)
    made = Calls(
        function,
        encoder=nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False),
        decoder=nn.TransformerDecoder(decoder, 2),
    )
    return made, (torch.randn(4, 24, WIDTH), torch.randn(4, 16, WIDTH))


def dict_with_loss() -> Made:
    def function(self: Any, x: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x)
        return {"loss": hidden.square().mean(), "hidden": hidden}

    return Calls(function, body=mlp()[0]), torch.randn(256, 64)


def shared_modules() -> Made:
    def function(self: Any, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.shared(x)
        return self.last(self.own(x))

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    made = Calls(function, shared=block(), own=block(), last=block())
    return made, torch.randn(128, 64)


def tied_weights() -> Made:
    def function(self: Any, tokens: Tensor) -> Tensor:
        logits = self.head(self.body(self.embed(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    embed, head = nn.Embedding(100, WIDTH), nn.Linear(WIDTH, 100, bias=False)
    head.weight = embed.weight
    body = nn.Sequential(*(Block(0.0) for _ in range(3)))
    return Calls(function, embed=embed, body=body, head=head), torch.randint(
        100, (4, 32)
    )


MODELS: dict[str, Callable[[], Made]] = {
    made.__name__: made
    for made in (
        mlp,
        gpt,
        resnet,
        resnet_in_place,
        convolutions_in_place,
        unet,
        lstm_tagger,
        encoder_decoder,
        dict_with_loss,
        shared_modules,
        tied_weights,
    )
}
