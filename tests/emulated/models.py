"""Small models on the device, and what a step of them computes there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DEVICE = "emu"

Wrap = Callable[[nn.Module], Any]


class Block(nn.Module):
    """A transformer's block, with dropout and attention."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.norm(x)).view(rows, length, 3, 2, width // 2)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(x.shape)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm_2(x)))))


def gpt(blocks: int = 2, width: int = 16) -> tuple[nn.Module, Tensor]:
    """Return a transformer on the device, and a batch."""
    torch.manual_seed(1)
    model = nn.Sequential(*(Block(width) for _ in range(blocks)), nn.Linear(width, 3))
    return model.to(DEVICE), torch.randn(2, 8, width, device=DEVICE)


def cnn(blocks: int = 2) -> tuple[nn.Module, Tensor]:
    """Return convolutions with running statistics on the device, and a batch."""
    torch.manual_seed(1)
    layers = [
        nn.Sequential(
            *(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
            nn.Dropout2d(0.1),
        )
        for _ in range(blocks)
    ]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 64, 2))
    return model.to(DEVICE), torch.randn(2, 4, 8, 8, device=DEVICE)


def step(model: nn.Module, batch: Tensor) -> Tensor:
    """Run forward and backward, and return the loss."""
    for parameter in model.parameters():
        parameter.grad = None
    loss: Tensor = model(batch).float().square().mean()
    loss.backward()
    return loss


def outcome(model: nn.Module, batch: Tensor, run: Any = step) -> list[Tensor]:
    """Return what a step computes or changes, the generator's state last."""
    torch.emu.manual_seed_all(7)  # type: ignore[attr-defined]
    loss = run(model, batch)
    gradients = [parameter.grad for parameter in model.parameters()]
    found = [loss, *(g for g in gradients if g is not None), *model.buffers()]
    state: Tensor = torch.emu.get_rng_state()  # type: ignore[attr-defined]
    return [tensor.detach().cpu() for tensor in found] + [state]


def unequal(
    made: Callable[[], tuple[nn.Module, Tensor]], wrap: Wrap, **how: Any
) -> str:
    """Compare a wrapped model's step with the plain one; return what differs."""
    plain = outcome(*made(), **how)
    model, batch = made()
    wrap(model)
    found = outcome(model, batch, **how)
    pairs = zip(plain, found, strict=True)
    return ", ".join(str(i) for i, (a, b) in enumerate(pairs) if not torch.equal(a, b))


def each_block(**options: Any) -> Wrap:
    """Return a function that puts a region on each child of a model but the last."""
    import membudget as mb

    def wrap(model: nn.Module) -> None:
        for block in list(model.children())[:-1]:
            block.forward = mb.checkpoint(**options)(block.forward)

    return wrap
