"""What the tests of compiled code share.

The backends `eager` and `aot_eager` trace and cut graphs as the default one does, and
make no kernels, so these tests take no compiler.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

MARKS = [
    # Dynamo looks whether tensors have a gradient, which warns of those that have none.
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
    pytest.mark.usefixtures("fresh_compiler"),
]

every_backend = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


def leaf(rows: int = 2) -> Tensor:
    return torch.linspace(-1.0, 1.0, rows * 3).reshape(rows, 3).requires_grad_()


def smooth(x: Tensor) -> Tensor:
    return (x.exp() * x.sin()).tanh()
