"""The twelve profiles that the planner's solvers are compared on.

Ten models with random weights: real shapes, recorded on fake tensors, so that nothing
is computed. The seconds are those of a roofline with given rates, so that a profile,
and every number predicted from it, is the same on every machine. Two of the models are
profiled a second time with a GPU's rates, where the engine's own time is hidden.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from models import WORKLOADS
from profiled import MODELS
from torch import Tensor, nn
from torch.nn import functional as F

import membudget as mb
from membudget.graph import StepGraph
from membudget.planner.overheads import CPU_OVERHEADS, NO_OVERHEADS, Overheads
from membudget.profile.cost import roofline
from membudget.profile.devices import Device

Made = tuple[nn.Module, Any]

CPU = Device("a given CPU", {"float32": 5e10}, 1e10, 1e10)
GPU = Device("a given GPU", {"float32": 2e13}, 1.5e12, 3e10)
LAUNCH_S = 4e-6


@dataclass(frozen=True)
class Subject:
    """One profile: a model, the device whose time it takes, the engine's overhead."""

    make: Callable[[], Made]
    device: Device = CPU
    overheads: Overheads = CPU_OVERHEADS


class _Encoder(nn.Module):
    """A transformer encoder between a stem and a linear head; returns the loss."""

    def __init__(self, stem: nn.Module, classes: int, norm_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            128, 4, 512, 0.1, F.gelu, batch_first=True, norm_first=norm_first
        )
        self.stem = stem
        self.blocks = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(128, classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.stem(x)))
        if labels.dim() == 1:
            logits = logits.mean(1)
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def bert() -> Made:
    """Return an encoder with masked-language head; norms after the sums."""
    tokens = torch.randint(1000, (16, 96))
    stem = nn.Sequential(nn.Embedding(1000, 128), nn.LayerNorm(128), nn.Dropout(0.1))
    return _Encoder(stem, 1000, norm_first=False), (tokens, tokens)


def vit() -> Made:
    """Return a vision transformer on 64 patches; norms before the sums."""
    patches = nn.Conv2d(3, 128, 8, stride=8)
    stem = nn.Sequential(patches, nn.Flatten(2), _Transposed(nn.Identity()))
    images = torch.randn(16, 3, 64, 64), torch.randint(10, (16,))
    return _Encoder(stem, 10, norm_first=True), images


class _Transposed(nn.Module):
    """A layer between two transpositions of the last axes; one, around nothing."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.inner, nn.Identity):
            return x.transpose(1, 2)
        y: Tensor = self.inner(x.transpose(1, 2)).transpose(1, 2)
        return y


class _Residual(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.layers(x)
        return y


def _wide(width: int, inner: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))


def mixer() -> Made:
    """Return an MLP mixer of six blocks: over 64 tokens, then over 128 channels."""
    blocks = [
        nn.Sequential(
            _Residual(nn.LayerNorm(128), _Transposed(_wide(64, 128))),
            _Residual(nn.LayerNorm(128), _wide(128, 512)),
        )
        for _ in range(6)
    ]
    return nn.Sequential(*blocks), torch.randn(16, 64, 128)


class _ChannelsLast(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return y


def convnext() -> Made:
    """Return a ConvNeXt of three stages of three blocks, 32 to 128 channels."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 2, stride=2)]
    for width in (32, 64, 128):
        if width > 32:
            layers.append(nn.Conv2d(width // 2, width, 2, stride=2))
        for _ in range(3):
            mlp = _ChannelsLast(nn.LayerNorm(width), _wide(width, 4 * width))
            layers.append(_Residual(nn.Conv2d(width, width, 7, 1, 3, 1, width), mlp))
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)]
    return nn.Sequential(*layers, *head), torch.randn(8, 3, 64, 64)


SUBJECTS = {
    "GPT 6 x 64": Subject(WORKLOADS["launch-bound GPT"].make),
    "GPT 12 x 256": Subject(WORKLOADS["compute-bound GPT"].make),
    "GPT 12 x 256, GPU": Subject(
        WORKLOADS["compute-bound GPT"].make, GPU, NO_OVERHEADS
    ),
    "MLP": Subject(WORKLOADS["MLP"].make),
    "ResNet": Subject(WORKLOADS["ResNet"].make),
    "ResNet, GPU": Subject(WORKLOADS["ResNet"].make, GPU, NO_OVERHEADS),
    "U-Net": Subject(lambda: MODELS["U-Net"](8)),
    "LSTM": Subject(lambda: MODELS["LSTM"](8)),
    "BERT": Subject(bert),
    "ViT": Subject(vit),
    "mixer": Subject(mixer),
    "ConvNeXt": Subject(convnext),
}


def step_graph(name: str, cache: Path) -> StepGraph:
    """Return the step of a subject, from the cache where it lies there.

    Args:
        name: The subject.
        cache: A folder; one file is added for each subject.
    """
    path = cache / f"{name.replace(' ', '_').replace(',', '')}.json"
    if not path.exists():
        torch.manual_seed(0)
        model, batch = SUBJECTS[name].make()
        graph = _timed(mb.profile(model, batch, fake=True).graph, SUBJECTS[name].device)
        cache.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(graph.to_dict()))
    return StepGraph.from_dict(json.loads(path.read_text()))


def _timed(graph: StepGraph, device: Device) -> StepGraph:
    """Return the graph with the seconds of a device, and of a launch for each."""
    graph = roofline(graph, device)
    operators = tuple(
        dataclasses.replace(o, seconds=o.seconds + LAUNCH_S) for o in graph.operators
    )
    return dataclasses.replace(graph, operators=operators)
