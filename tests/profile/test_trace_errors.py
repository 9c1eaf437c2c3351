"""Which arguments a profile rejects, and the messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.profile import profile

FAKE = pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])


@pytest.mark.parametrize("thing", [torch.sin, None, nn.Linear])
def test_a_model_that_is_not_a_module_is_rejected(thing):
    with pytest.raises(mb.OptionError, match=r"expected a torch\.nn\.Module"):
        profile(thing, torch.ones(1))


@FAKE
def test_a_batch_that_lacks_an_argument_fails_as_the_model_does(fake):
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        profile(nn.Bilinear(2, 2, 2), torch.ones(1, 2), fake=fake, device="h100")


@FAKE
@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (lambda o, b: o, r"it returned \[2, 4\]"),
        (lambda o, b: None, "it returned NoneType"),
        (lambda o, b: 1.0, "it returned float"),
        (lambda o, b: o.detach().sum(), "does not require a gradient"),
    ],
)
def test_a_loss_without_gradient_is_rejected(loss: Any, says, fake):
    with pytest.raises(mb.OptionError, match=says):
        profile(nn.Linear(4, 4), torch.ones(2, 4), loss, fake=fake, device="h100")


@FAKE
def test_a_frozen_model_is_rejected(fake):
    model = nn.Linear(4, 4).requires_grad_(False)

    with pytest.raises(mb.OptionError, match="every parameter is frozen"):
        profile(model, torch.ones(2, 4), fake=fake, device="h100")


@FAKE
def test_an_output_without_floating_tensors_is_rejected(fake):
    class Says(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return "text"

    with pytest.raises(mb.OptionError, match="without a floating-point tensor"):
        profile(Says(4, 4), torch.ones(2, 4), fake=fake, device="h100")


@FAKE
def test_a_lazy_module_is_rejected(fake):
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2))

    with pytest.raises(mb.OptionError, match=r"'1\.weight' has no shape yet"):
        profile(model, torch.ones(2, 4), fake=fake)


@FAKE
@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_a_profile_under_no_grad_is_the_same(without, fake):
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    peaks = []
    peaks.append(profile(model, x, fake=fake, device="h100").peak_bytes)

    with without():
        peaks.append(profile(model, x, fake=fake, device="h100").peak_bytes)

    assert peaks[0] == peaks[1]
