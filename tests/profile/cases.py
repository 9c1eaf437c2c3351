"""Models whose steps are profiled, and the plain step that a profile is about."""

from __future__ import annotations

import dataclasses
import gc
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import membudget as mb
from membudget.batch import call_model
from membudget.step import find_loss
from tests.devices import device_type
from tests.planner.models import Calls
from tests.zoo.case import Call

Made = tuple[nn.Module, Any]
Loss = Callable[[Any, Any], Tensor] | None


class Animal(nn.Module):
    """A call of the zoo as a module, called with `(args, kwargs)`."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = [call]  # In a list, so that no module in it is registered.
        for name, thing in {"function": call.function, **call.state}.items():
            if isinstance(thing, nn.Module):
                self.add_module(name, thing)
            elif isinstance(thing, Tensor) and thing.requires_grad:
                self._parameters[name] = thing  # type: ignore[assignment]
            elif not callable(thing):
                setattr(self, f"own_{name}", thing)

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self.call[0]
        with call.around():
            return call.used(call.function(*args, **kwargs))


def animal(call: Call) -> Made:
    """Return a call of the zoo as a model and its batch."""
    return Animal(call), {"args": call.args, "kwargs": call.kwargs}


def seed() -> None:
    """Put every global random stream to the same place."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002


def plain_step(model: nn.Module, batch: Any, loss_fn: Loss = None) -> None:
    """Run the step that a profile is about."""
    output = call_model(model, batch)
    loss = find_loss(output)[0] if loss_fn is None else loss_fn(output, batch)
    del output
    loss.backward()


def measured_bytes(make: Callable[[], Made]) -> int:
    """Return what the meter reads of a plain step that is not the first."""
    seed()
    plain_step(*make())
    model, batch = make()
    seed()
    gc.collect()  # Cycles of earlier tests must not be collected while it counts.
    return mb.peak(lambda: plain_step(model, batch)).peak_bytes


MODELS: list[Callable[[], Made]] = []


def model(make: Callable[[], Made]) -> Callable[[], Made]:
    """Enter a builder into `MODELS`."""
    MODELS.append(make)
    return make


WIDTH = 64


def block(width: int = WIDTH) -> nn.Sequential:
    """Return the block that most of the models repeat."""
    return nn.Sequential(
        nn.LayerNorm(width),
        nn.Linear(width, 4 * width),
        nn.GELU(),
        nn.Linear(4 * width, width),
    )


@model
def mlp() -> Made:
    layers = [nn.Linear(WIDTH, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, WIDTH)]
    return nn.Sequential(*layers), torch.randn(32, WIDTH)


@model
def mlp_of_a_batch_of_one() -> Made:
    return mlp()[0], torch.randn(1, WIDTH)


@model
def deep_mlp() -> Made:
    return nn.Sequential(*(block() for _ in range(4))), torch.randn(4, 16, WIDTH)


class Residual(nn.Module):
    """Convolutions, batch norms and ReLUs in place around a residual sum."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y += x
        return self.relu(y)


@model
def residual_blocks() -> Made:
    layers = [nn.Conv2d(3, 16, 3, padding=1), Residual(), Residual()]
    return nn.Sequential(*layers), torch.randn(4, 3, 16, 16)


@model
def residual_blocks_of_a_batch_of_one() -> Made:
    return residual_blocks()[0], torch.randn(1, 3, 16, 16)


@model
def convolutions() -> Made:
    layers = [
        nn.Conv2d(3, 16, 3, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, groups=4),
        nn.GroupNorm(4, 32),
        nn.SiLU(),
        nn.ConvTranspose2d(32, 8, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    ]
    return nn.Sequential(*layers), torch.randn(4, 3, 32, 32)


class Language(nn.Module):
    """Embeddings, blocks, and a head whose weight is that of the embeddings."""

    def __init__(self, attention: nn.Module, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(200, WIDTH, **options)
        self.attention = attention
        self.block = block()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 200, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens)
        x = x + self.attention(x)
        x = x + self.block(x)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class Attention(nn.Module):
    """Self-attention, by torch's operator or written out."""

    def __init__(self, fused: bool, heads: int = 4) -> None:
        super().__init__()
        self.fused, self.heads = fused, heads
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        q, k, v = (
            part.view(b, s, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-1, -2) / (w // self.heads) ** 0.5
            mask = torch.ones(s, s, dtype=torch.bool, device=x.device).tril()
            y = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, s, w))


def _tokens(batch: int = 4, length: int = 32) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(200, (batch, length))
    return tokens, tokens.roll(-1, 1)


@model
def tied_embeddings_with_attention() -> Made:
    return Language(Attention(fused=True)), _tokens()


@model
def tied_embeddings_of_a_batch_of_one() -> Made:
    return Language(Attention(fused=True)), _tokens(batch=1)


@model
def attention_written_out() -> Made:
    return Language(Attention(fused=False)), _tokens()


@model
def recurrent() -> Made:
    def function(self: Any, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])

    lstm = nn.LSTM(16, 32, num_layers=2, batch_first=True)
    return Calls(function, lstm=lstm, head=nn.Linear(32, 8)), torch.randn(4, 20, 16)


@dataclass
class Output:
    """What a model returns, in the manner of Hugging Face."""

    loss: Tensor
    hidden: tuple[Tensor, ...]


@model
def dataclass_output() -> Made:
    def function(self: Any, x: Tensor) -> Output:
        a = self.first(x)
        b = self.second(a)
        return Output(b.square().mean(), (a, b))

    return Calls(function, first=block(), second=block()), torch.randn(8, 16, WIDTH)


@model
def tuple_output_in_a_list() -> Made:
    def function(self: Any, x: Tensor) -> tuple[Any, ...]:
        a = self.first(x)
        return a, [self.second(a), {"none": None}]

    return Calls(function, first=block(), second=block()), torch.randn(8, 16, WIDTH)


class _Swish(torch.autograd.Function):
    """x times its sigmoid, which is computed again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return grad * (s + x * s * (1 - s))


@model
def custom_function() -> Made:
    def function(self: Any, x: Tensor) -> Tensor:
        return self.last(_Swish.apply(self.first(x)))

    layers = {"first": nn.Linear(WIDTH, 256), "last": nn.Linear(256, WIDTH)}
    return Calls(function, **layers), torch.randn(64, WIDTH)


@model
def torch_checkpoint_inside() -> Made:
    def function(self: Any, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            x = torch_checkpoint(layer, x, use_reentrant=False)
        return x

    return Calls(function, first=block(), second=block()), torch.randn(8, 16, WIDTH)


@model
def regions_of_membudget() -> Made:
    made = nn.Sequential(*(block() for _ in range(4)), nn.Linear(WIDTH, 8))
    # A verified call holds more than those after it.
    mb.apply(made, names=["0", "2"], verify=False)
    return made, torch.randn(8, 16, WIDTH)


@model
def sparse_gradients() -> Made:
    layers = [nn.Embedding(200, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers), torch.randint(200, (4, 32))


@model
def views_and_expanded_tensors() -> Made:
    def function(self: Any, x: Tensor) -> Tensor:
        a, b = self.first(x).chunk(2, -1)
        row = self.norm(b[:, :1]).expand(-1, x.shape[1], -1)
        y = (a * row + b.flip(1)).transpose(1, 2).reshape(x.shape[0], -1, x.shape[1])
        return y[:, ::2].exp().unflatten(1, (2, -1)).permute(3, 0, 1, 2)

    layers = {"first": nn.Linear(WIDTH, 2 * WIDTH), "norm": nn.LayerNorm(WIDTH)}
    return Calls(function, **layers), torch.randn(4, 32, WIDTH)


@model
def broadcast_tensors() -> Made:
    def function(self: Any, x: Tensor) -> Tensor:
        y = self.first(x)
        distance = (y[:, None] - y[None]).square().sum(-1)
        return (distance * y.mean(1) + y[:, :1]).softmax(0)

    return Calls(function, first=nn.Linear(WIDTH, 16)), torch.randn(48, WIDTH)


@model
def rows_taken_by_index() -> Made:
    def function(self: Any, x: Tensor) -> Tensor:
        return self.first(x)[torch.arange(8)].exp()

    return Calls(function, first=nn.Linear(WIDTH, 256)), torch.randn(128, WIDTH)


@model
def writes_into_views() -> Made:
    def function(self: Any, x: Tensor) -> Tensor:
        y = self.first(x)
        y[:, :16] *= 2
        y[:, 16:].sigmoid_()
        out = torch.zeros_like(y)
        for i in range(4):
            out[:, i::4] = y[:, i::4].sin()
        return out.relu_().exp()

    return Calls(function, first=nn.Linear(WIDTH, WIDTH)), torch.randn(64, WIDTH)


@model
def complex_numbers() -> Made:
    def function(self: Any, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.first(x))
        spectrum = spectrum * torch.polar(spectrum.abs(), spectrum.angle()).conj()
        return torch.fft.irfft(spectrum).tanh()

    return Calls(function, first=nn.Linear(WIDTH, WIDTH)), torch.randn(64, WIDTH)


@model
def bfloat16_parameters() -> Made:
    made = nn.Sequential(block(), block()).bfloat16()
    return made, torch.randn(16, 8, WIDTH, dtype=torch.bfloat16)


@model
def float16_parameters() -> Made:
    made = nn.Sequential(block(), block()).half()
    return made, torch.randn(16, 8, WIDTH, dtype=torch.float16)


@model
def autocast_to_bfloat16() -> Made:
    def function(self: Any, x: Tensor) -> Tensor:
        with torch.autocast(device_type(), torch.bfloat16):
            return x + self.second(x + self.first(x))

    return Calls(function, first=block(), second=block()), torch.randn(8, 16, WIDTH)


@model
def no_grad_prefix() -> Made:
    def function(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.first(x)
        return self.second(x)

    return Calls(function, first=block(), second=block()), torch.randn(8, 16, WIDTH)


@model
def frozen_prefix() -> Made:
    made = nn.Sequential(block(), block())
    made[0].requires_grad_(False)
    return made, torch.randn(8, 16, WIDTH)


@model
def layers_used_again() -> Made:
    def function(self: Any, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.first(x)
        return x

    return Calls(function, first=block()), torch.randn(8, 16, WIDTH)


@model
def transformer_layer() -> Made:
    made = nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.1, batch_first=True)
    return made, torch.randn(4, 32, WIDTH)


@model
def input_that_requires_a_gradient() -> Made:
    return block(), {"input": torch.randn(8, 16, WIDTH, requires_grad=True)}


def each(*apart: str) -> list[Any]:
    """Return a parameter for each builder, but those with such words in it."""
    without_sparse = pytest.mark.cpu_only("emu has no sparse tensors")
    return [
        pytest.param(
            make,
            id=make.__name__,
            marks=without_sparse if make.__name__ == "sparse_gradients" else (),
        )
        for make in MODELS
        if not any(word in make.__name__ for word in apart)
    ]


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Yield parameters and buffers."""
    yield from model.parameters()
    yield from model.buffers()


def without_seconds(graph: Any) -> Any:
    """Return a graph with nothing in it that differs from run to run."""
    operators = tuple(dataclasses.replace(o, seconds=0.0) for o in graph.operators)
    return dataclasses.replace(graph, operators=operators)
