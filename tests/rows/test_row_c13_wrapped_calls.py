"""Row C13: solvers that wrap what they call often in modules of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import membudget as mb


class Wrapped(nn.Module):
    """What a solver puts around the function that it integrates."""

    def __init__(self, function: nn.Module):
        """Wrap a function."""
        super().__init__()
        self.function = function

    def forward(self, y: Tensor) -> Tensor:
        """Return what the function returns."""
        result: Tensor = self.function(y)
        return result


class Solved(nn.Module):
    """An equation that is solved step by step."""

    def __init__(self) -> None:
        """Make the function."""
        super().__init__()
        self.function = nn.Sequential(
            nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16), nn.Tanh()
        )

    def forward(self, y: Tensor) -> Tensor:
        """Take twelve steps, each by a wrapper that the model does not name."""
        for _ in range(12):
            y = y + Wrapped(self.function)(y) / 12
        return y.square().mean()


def test_row_c13_a_call_spans_what_modules_without_a_name_run_in_it() -> None:
    graph = mb.profile(Solved(), torch.randn(128, 16)).graph
    ends = {call.path: call.end for call in graph.calls}
    assert ends[""] == graph.backward_start
    assert [c.path for c in graph.calls].count("function") == 12
    assert all(c.end - c.start == 6 for c in graph.calls if c.path == "function")


def test_row_c13_a_solver_that_wraps_its_function_fits() -> None:
    torch.manual_seed(0)
    with mb.fit(Solved(), torch.randn(128, 16), "30%") as fitted:
        assert [r.differences for r in fitted.status().regions] == [0]
        assert fitted.audit()
