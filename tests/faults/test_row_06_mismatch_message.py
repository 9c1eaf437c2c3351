"""Row 6: the message of a failed recompute does not say where to look.

A recompute that does something else than its forward is the best known failure of
checkpointing. Torch's message speaks of "tensor at position 3". It names no module and
no line of the user's, and its debug log is a thousand lines long. Ours must name the
module, the operator, the user's line and the likely cause, on one screen.
"""

from __future__ import annotations

import linecache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

import membudget as mb
from tests.faults.implementations import Checkpoint, torch_fails, torch_rerun

ONE_SCREEN = 40  # Lines.


class Impure(nn.Module):
    """Does something else on every second call, as a forgotten counter makes it.

    The counter lies in a list: an attribute of a module would be brought back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(4, 4)
        self.calls = [0]

    def is_first_call(self) -> bool:
        self.calls[0] += 1
        return self.calls[0] % 2 == 1


class OtherShape(Impure):
    def forward(self, x: Tensor) -> Tensor:
        x = x if self.is_first_call() else x[:2]
        return torch.tanh(self.projection(x))


class OtherDtype(Impure):
    def forward(self, x: Tensor) -> Tensor:
        projected = self.projection(x)
        projected = projected if self.is_first_call() else projected.double()
        return torch.tanh(projected).sin()


class FewerTensors(Impure):
    def forward(self, x: Tensor) -> Tensor:
        projected = self.projection(x)
        return projected.sin().cos() if self.is_first_call() else projected.sin()


class Block(nn.Module):
    """Holds an impure module under the name `attention`."""

    def __init__(self, attention: Impure) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


class Model(nn.Module):
    """Two blocks."""

    def __init__(self, kind: type[Impure]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(kind()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def failed_step(kind: type[Impure], debug: bool = False) -> mb.RecomputeMismatchError:
    """Return the error of a step in which the last block is recomputed first."""
    model = Model(kind)
    mb.apply(model, blocks=Block, debug=debug)
    loss = model(torch.ones(3, 4)).sum()
    with pytest.raises(mb.RecomputeMismatchError, match="recompute") as raised:
        loss.backward()
    return raised.value


def torch_step(kind: type[Impure], checkpoint: Checkpoint = torch_rerun) -> None:
    model = Model(kind)
    x = torch.ones(3, 4)
    for block in model.blocks:
        x = checkpoint(block, x)
    x.sum().backward()


def source_line(error: mb.RecomputeMismatchError) -> str:
    """Return the text of the line that an error names."""
    name, number = error.line.split(":")
    assert name == Path(__file__).name
    return linecache.getline(__file__, int(number)).strip()


def test_row06_mismatch_names_the_module_by_its_path() -> None:
    error = failed_step(OtherShape)

    assert error.module_path.startswith("blocks.1.attention")
    assert error.module_path in str(error)


def test_row06_mismatch_names_the_operator_and_the_line_of_the_user() -> None:
    error = failed_step(OtherShape)

    assert "linear" in error.operator
    assert "self.projection(x)" in source_line(error)
    assert error.operator in str(error)
    assert error.line in str(error)


def test_row06_mismatch_shows_both_shapes() -> None:
    error = failed_step(OtherShape)

    assert "[3, 4]" in error.saved
    assert "[2, 4]" in error.recomputed


def test_row06_mismatch_of_dtypes_says_so() -> None:
    error = failed_step(OtherDtype)

    assert error.module_path == "blocks.1.attention"
    assert "tanh" in error.operator
    assert "torch.tanh(projected)" in source_line(error)
    assert "dtype" in error.causes[0]


def test_row06_missing_tensors_are_counted() -> None:
    error = failed_step(FewerTensors)

    assert error.index is None
    assert "tensors" in error.saved
    assert error.saved != error.recomputed


@pytest.mark.parametrize("kind", [OtherShape, OtherDtype, FewerTensors])
@pytest.mark.parametrize("debug", [False, True])
def test_row06_mismatch_gives_a_cause_on_one_screen(
    kind: type[Impure], debug: bool
) -> None:
    error = failed_step(kind, debug=debug)

    assert len(str(error).splitlines()) < ONE_SCREEN
    assert error.causes
    assert all(cause in str(error) for cause in error.causes)


@torch_fails
def test_row06_torch_names_positions_only() -> None:
    with pytest.raises(CheckpointError, match="tensor at position") as raised:
        torch_step(OtherShape)

    message = str(raised.value)
    assert "attention" not in message
    assert "linear" not in message
    assert Path(__file__).name not in message
