"""Row C8: storages that are written in parts, as the gates of a recurrent cell are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.state.copies import are_apart


class Cells(nn.Module):
    """A cell that is called for each time step."""

    def __init__(self, cell: type[nn.Module]):
        """Make the cell, and the layers behind it."""
        super().__init__()
        self.cell, self.dropout = cell(24, 24), nn.Dropout(0.1)
        self.out = nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of what the cell makes of all time steps."""
        state, outputs = None, []
        for part in x:
            state = self.cell(part, state)
            hidden = state[0] if isinstance(state, tuple) else state
            outputs.append(self.dropout(hidden))
        return self.out(torch.stack(outputs)).square().mean()


@pytest.mark.parametrize("share", ["90%", "75%"])
@pytest.mark.parametrize("cell", [nn.GRUCell, nn.LSTMCell, nn.RNNCell])
def test_row_c08_a_plan_keeps_what_a_cell_writes_in_parts(
    cell: type[nn.Module], share: str
) -> None:
    torch.manual_seed(0)
    with mb.fit(Cells(cell), torch.randn(6, 32, 24), share) as fitted:
        assert fitted.plan.regions
        assert not any(r.differences for r in fitted.status().regions)
        assert fitted.audit()


class Parts(nn.Module):
    """Parts of one storage, the first saved before the second is written."""

    def __init__(self) -> None:
        """Make the layer whose output is split."""
        super().__init__()
        self.layer = nn.Linear(16, 128)

    def forward(self, x: Tensor) -> Tensor:
        """Write one part after the other."""
        first, second = torch.unsafe_chunk(self.layer(x), 2, dim=1)
        return first.sigmoid_() * second.tanh_()


def held_bytes(model: nn.Module, x: Tensor, **options: Any) -> int:
    """Return what is live after a forward."""
    applied = mb.apply(model, names="0", engine="replay", **options)
    found = mb.peak(lambda: model(x)).end_bytes
    applied.remove()
    return found


def test_row_c08_a_storage_kept_from_its_first_part_on_is_kept_once() -> None:
    model = nn.Sequential(Parts())
    x = torch.randn(64, 16)
    keep = mb.policies.operators("sigmoid_")
    held = held_bytes(model, x, keep=keep, verify=False)
    assert held == 4 * 64 * 128 + 4 * 64 * 64


@pytest.mark.parametrize("keep", ["sigmoid_", "tanh_", "addmm"])
def test_row_c08_gradients_of_parts_are_exact_whatever_is_kept(keep: str) -> None:
    model = nn.Sequential(Parts())
    mb.apply(model, names="0", engine="replay", keep=mb.policies.operators(keep))
    assert mb.audit(model, torch.randn(64, 16))


def test_row_c08_parts_are_apart_where_their_elements_are() -> None:
    for shape in [(4,), (2, 6), (3, 4, 5)]:
        count = torch.Size(shape).numel()
        whole = torch.arange(count + 3)
        base, shifted = whole[:count].view(shape), whole[3:].view(shape)
        views = [
            base.narrow(dim, start, length)
            for dim, size in enumerate(shape)
            for start in range(size)
            for length in range(1, size - start + 1)
        ]
        views += [v.transpose(0, -1) for v in views]
        views += [v.select(dim, 0) for v in views for dim in range(v.dim())]
        others = [whole[start::step] for start in (0, 1, 4) for step in (1, 3)]
        others += [shifted, shifted[1:], shifted[..., :2], shifted[..., ::3]]
        others += [whole.as_strided((3, 2), (1, 1)), whole.as_strided((3, 2), (0, 1))]
        for one in views + others:
            for other in views + others:
                shared = set(one.flatten().tolist()) & set(other.flatten().tolist())
                if are_apart(one, other):
                    assert not shared
                elif not any(view is one or view is other for view in others):
                    assert shared
