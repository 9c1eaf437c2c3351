"""Every code block of the README and of docs/ runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import membudget as mb

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/**/*.md")),
]
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(
        re.findall(
            r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S
        )
    )
]
LINKS = [
    pytest.param(page, link, id=f"{page.stem}-{link}")
    for page in PAGES
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text(encoding="utf-8"))
]


class Block(nn.Module):
    """What the pages call a block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.attn = nn.MultiheadAttention(32, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        y: Tensor = x + self.attn(h, h, h, need_weights=False)[0]
        return y + self.mlp(y)


def loss_of(output: Tensor, batch: Tensor) -> Tensor:
    return (output - batch).square().mean()


def make(batch: int = 8) -> tuple[nn.Sequential, Tensor, Any]:
    return nn.Sequential(Block(), Block(), Block()), torch.randn(batch, 64, 32), loss_of


def what_a_reader_has() -> dict[str, Any]:
    """Return what the pages name without saying where it comes from."""
    model, batch, loss_fn = make()

    def step() -> None:
        loss_fn(model(batch), batch).backward()

    return {
        "mb": mb,
        "torch": torch,
        "model": model,
        "batch": batch,
        "make": make,
        "loss_fn": loss_fn,
        "step": step,
        "train": lambda model, *others: step(),
        "optimizer": torch.optim.AdamW(model.parameters()),
        "Block": Block,
        "shard": lambda block: block,  # One process trains here.
        "block": model[0],
        "layers": model,
        "inputs": batch,
        "targets": batch.clone(),
        "loader": DataLoader(TensorDataset(batch, batch.clone()), len(batch)),
        "x": batch.clone().requires_grad_(),
    }


@pytest.mark.parametrize("block", BLOCKS)
def test_a_code_block_runs_as_it_stands(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "the page", "exec"), what_a_reader_has())


@pytest.mark.parametrize(("page", "link"), LINKS)
def test_a_link_leads_to_a_file(page: Path, link: str):
    assert (page.parent / link).exists()
