"""What torch itself does with the device: amp, checkpoints, saving, its accelerator."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.emulated import emu


def on_device(*shape: int) -> Tensor:
    return torch.randn(*shape, device="emu")


def test_torch_takes_it_for_the_accelerator():
    assert torch.accelerator.current_accelerator() == torch.device("emu")
    assert torch.accelerator.device_count() == 2
    assert torch.accelerator.current_stream().device == torch.device("emu:0")
    assert torch.get_device_module("emu").is_initialized()


def test_autocast_runs_products_in_half_the_precision():
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).to("emu")
    with torch.autocast("emu", dtype=torch.bfloat16):
        product = model[0](on_device(2, 8))
        assert product.dtype == torch.bfloat16
        assert model[1](product).dtype == torch.float32
    assert not torch.is_autocast_enabled("emu")


@pytest.mark.parametrize("scale", [8.0, float("inf")])
def test_a_scaler_skips_the_step_whose_gradients_are_infinite(scale: float):
    model = nn.Linear(4, 1).to("emu")
    before = copy.deepcopy(model.state_dict())
    scaler = torch.amp.GradScaler("emu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(on_device(2, 4)).sum() * (scale / 8.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    is_same = all(
        torch.equal(a, b)
        for a, b in zip(before.values(), model.state_dict().values(), strict=True)
    )
    assert is_same == (scale == float("inf"))
    assert scaler.get_scale() == (4.0 if is_same else 8.0)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_torchs_checkpoint_gives_the_bits_of_the_plain_step(use_reentrant: bool):
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).to("emu")
    x = on_device(3, 8).requires_grad_()
    state = torch.emu.get_rng_state()  # type: ignore[attr-defined]
    model(x).sum().backward()
    plain = [p.grad for p in model.parameters()]
    model.zero_grad()
    torch.emu.set_rng_state(state)  # type: ignore[attr-defined]
    checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    for gradient, parameter in zip(plain, model.parameters(), strict=True):
        assert gradient is not None
        assert parameter.grad is not None
        assert torch.equal(gradient, parameter.grad)


def test_shapes_that_depend_on_values_are_found_by_waiting():
    x = torch.tensor([0.0, 1.0, 2.0, 0.0], device="emu")
    assert x.nonzero().tolist() == [[1], [2]]
    assert x[x > 0].tolist() == [1.0, 2.0]
    assert x.unique().tolist() == [0.0, 1.0, 2.0]


def test_shapes_are_inferred_once_for_each_layout():
    x = on_device(7, 13)
    torch.special.entr(x)
    before = emu.counters()["shapes_inferred"]
    for scale in (2.0, 3.0):
        torch.special.entr(x * scale)
    torch.special.entr(on_device(7, 13))
    repeated = emu.counters()["shapes_inferred"]
    assert repeated - before <= 2  # `mul` and `normal_`, if no test before had them.
    torch.special.entr(on_device(13, 7))
    assert emu.counters()["shapes_inferred"] > repeated


def test_what_arange_returns_depends_on_its_numbers():
    assert torch.arange(3.0, device="emu").tolist() == [0, 1, 2]
    assert torch.arange(5.0, device="emu").tolist() == [0, 1, 2, 3, 4]


def test_an_output_that_is_given_is_resized():
    out = torch.empty(0, device="emu")
    torch.add(torch.ones(3, device="emu"), 1, out=out)
    assert out.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_loss_is_the_cpus(loss: Callable[..., Tensor], reduction: str):
    x, y = torch.randn(2, 5, 6)
    expected = loss(x, y, reduction=reduction)
    found = loss(x.to("emu"), y.to("emu"), reduction=reduction)
    assert torch.equal(found.cpu(), expected)


def test_an_operator_refuses_operands_of_host_and_device():
    with pytest.raises(RuntimeError, match="on the same device"):
        on_device(3) + torch.ones(3)
    with pytest.raises(RuntimeError, match="on the same device"):
        torch.mm(on_device(3, 3), torch.ones(3, 3))
    assert (on_device(3) + torch.ones(())).shape == (3,)


def test_an_error_of_shapes_is_raised_at_once():
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        torch.mm(on_device(2, 3), on_device(2, 3))


def test_numpy_is_refused_as_on_cuda():
    with pytest.raises(TypeError, match="can't convert emu:0 device type tensor"):
        on_device(2).numpy()


def test_tensors_are_saved_copied_and_printed():
    x = torch.ones(2, device="emu")
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    assert torch.load(file).device == x.device
    assert torch.equal(copy.deepcopy(x), x)
    assert repr(x) == "tensor([1., 1.], device='emu:0')"


def test_complex_numbers_keep_their_conjugation():
    x = torch.complex(on_device(3), on_device(3))
    y = (x * x.conj()).cpu()
    assert torch.equal(y, x.cpu() * x.cpu().conj())
    assert torch.equal(torch.view_as_real(x).cpu(), torch.view_as_real(x.cpu()))


def test_gradients_are_differentiated_again():
    x = on_device(4).requires_grad_()
    (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    gradient.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 6 * x.detach())


def test_functions_are_mapped_over_a_dimension():
    squares = torch.func.vmap(torch.func.grad(lambda x: (x**2).sum()))
    assert squares(torch.arange(3.0, device="emu")).tolist() == [0, 2, 4]


def test_fake_tensors_of_the_device_need_no_memory():
    from torch._subclasses.fake_tensor import FakeTensorMode

    before = emu.counters()["allocations"]
    with FakeTensorMode():
        y = torch.nn.functional.linear(
            torch.empty(4, 4, device="emu"), torch.empty(2, 4, device="emu")
        )
    assert (y.device, y.shape) == (torch.device("emu:0"), (4, 2))
    assert emu.counters()["allocations"] == before


def test_the_profiler_sees_its_memory():
    with torch.profiler.profile(profile_memory=True) as profile:
        x = torch.ones(100, device="emu")
    assert x.numel() == 100
    assert any("aten::ones" in event.name for event in profile.events())
