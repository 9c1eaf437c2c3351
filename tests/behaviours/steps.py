"""What the tests of behaviours share: one step, run plain and run under regions.

A test writes its step once, as a function of `region`, the caller that runs a function
under a checkpoint. `plain` merely calls it. Everything the step makes, it makes itself,
so that both runs begin from the same seeds and own their tensors; what it returns is
compared bit for bit: values, gradients, parameters, buffers, and the random streams of
torch, Python and NumPy where the step left them. The counting of calls, operators and
living storages is here too.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import membudget as mb
from tests.devices import rng_state, settle

Region = Callable[..., Any]
Step = Callable[[Region], Any]

SEED = 7

# How many results `sines` makes.
SINES = 5


def plain(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call `function` as it is: the region of a run without regions."""
    return function(*args, **kwargs)


def region_with(**options: Any) -> Region:
    """Return `mb.checkpoint` with `options`."""
    return functools.partial(mb.checkpoint, **options)


def differences(step: Step, region: Region = mb.checkpoint) -> list[str]:
    """Run `step` plain and under `region` and name everything that is not equal."""
    expected, found = facts_of(step, plain), facts_of(step, region)
    if expected.keys() != found.keys():
        return sorted(expected.keys() ^ found.keys())
    return [name for name in expected if not is_equal(expected[name], found[name])]


def facts_of(step: Step, region: Region) -> dict[str, Any]:
    """Run `step` from fixed seeds and return what it returned and left behind."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002 - the global stream is what is compared
    facts = dict(_facts("step", step(region)))
    facts["torch streams"] = rng_state()
    facts["python stream"] = random.getstate()
    facts["numpy stream"] = str(np.random.get_state(legacy=False))  # noqa: NPY002
    return facts


def is_equal(a: Any, b: Any) -> bool:
    """Return whether two facts are equal, tensors to the last bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def _facts(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield named tensors and plain values found in `thing`."""
    if isinstance(thing, Tensor):
        yield name, thing.detach().clone()
        yield f"{name} requires_grad", thing.requires_grad
        if thing.is_leaf:
            grad = thing.grad
            yield f"{name}.grad", None if grad is None else grad.detach().clone()
    elif isinstance(thing, nn.Module):
        for key, tensor in (*thing.named_parameters(), *thing.named_buffers()):
            yield from _facts(f"{name}.{key}", tensor)
    elif isinstance(thing, torch.Generator):
        yield name, thing.get_state()
    else:
        yield from _facts_of_parts(name, thing)


def _facts_of_parts(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield the facts of a structure's parts, or the plain value itself."""
    if dataclasses.is_dataclass(thing):
        parts: Any = vars(thing).items()
    elif isinstance(thing, Mapping):
        parts = thing.items()
    elif isinstance(thing, (list, tuple)):
        parts = enumerate(thing)
    else:
        yield name, thing
        return
    yield f"{name} type", type(thing)
    for key, value in parts:
        yield from _facts(f"{name}[{key!r}]", value)


class Counted:
    """A function that counts its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.function(*args, **kwargs)


class Storages:
    """Weak references to the storages of the tensors that were shown to it."""

    def __init__(self) -> None:
        self.seen: list[StorageWeakRef] = []
        self.most = 0

    def see(self, tensor: Tensor) -> Tensor:
        """Note `tensor`'s storage, and the most alive so far; return `tensor`."""
        self.seen.append(StorageWeakRef(tensor.untyped_storage()))
        self.most = max(self.most, self._count())
        return tensor

    def alive(self) -> int:
        """Return how many of the storages seen are alive, outside of regions."""
        settle()
        return self._count()

    def _count(self) -> int:
        return sum(not ref.expired() for ref in self.seen)


def sines(x: Tensor, storages: Storages, steps: int = SINES) -> Tensor:
    """Take the sine `steps` times. Each saves its input; each result is noted."""
    for _ in range(steps):
        x = storages.see(x.sin())
    return x


def perceptron(width: int = 6) -> nn.Sequential:
    """Return two linear layers with GELU between."""
    return nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Linear(8, width))


class Block(nn.Module):
    """A small transformer block, with dropout where transformers have it."""

    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(
            width, num_heads=2, dropout=dropout, batch_first=True
        )
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.dropout(self.down(nn.functional.gelu(self.up(x))))
