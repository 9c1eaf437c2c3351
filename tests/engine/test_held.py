"""What a region holds of its arguments."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import membudget as mb
from membudget.engine.arguments import HeldArguments
from membudget.engine.held import HeldTensor, stride_of, with_stride

LAYOUTS = {
    "contiguous": lambda: torch.arange(24.0).reshape(2, 3, 4),
    "transposed": lambda: torch.arange(24.0).reshape(2, 3, 4).transpose(0, 2),
    "expanded": lambda: torch.arange(4.0).expand(2, 3, 4),
    "expanded inside": lambda: torch.arange(8.0).view(2, 1, 4).expand(2, 3, 4),
    "every second": lambda: torch.arange(48.0).reshape(2, 3, 8)[..., ::2],
    "channels last": lambda: torch.randn(2, 3, 4, 4).to(
        memory_format=torch.channels_last
    ),
    "one number": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(0, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_an_offloader_made_contiguous_is_laid_out_as_before(layout):
    tensor = LAYOUTS[layout]()
    found = with_stride(tensor.contiguous(), stride_of(tensor))
    assert found.stride() == tensor.stride()
    assert torch.equal(found, tensor)


def test_an_expanded_tensor_takes_the_memory_of_one():
    tensor = torch.arange(4.0).expand(1000, 4)
    found = with_stride(tensor.contiguous(), stride_of(tensor))
    assert found.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("make", [Tensor.to_sparse, Tensor.to_sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_a_sparse_tensor_has_no_stride_and_stays_as_it_is(make):
    tensor = make(torch.eye(3))
    assert stride_of(tensor) is None
    assert with_stride(tensor, None) is tensor


def held(tensor: Tensor) -> HeldTensor:
    (only,) = HeldArguments((tensor,), {}).tensors
    return only


def test_a_parameter_is_held_as_it_is():
    parameter = nn.Parameter(torch.ones(2))
    assert held(parameter).rebuild() is parameter
    assert held(parameter).alias is parameter
    assert held(parameter).device == parameter.device


def test_a_tensor_with_a_gradient_is_a_leaf_again_and_holds_no_graph():
    y = torch.ones(2, requires_grad=True) * 2
    made = held(y).rebuild()
    assert made.is_leaf
    assert made.requires_grad
    assert made.data_ptr() == y.data_ptr()
    assert held(y).alias.grad_fn is None


def test_a_constant_is_the_very_object_while_it_lives():
    x = torch.ones(2)
    kept = held(x)
    assert kept.rebuild() is x
    pointer = x.data_ptr()
    del x
    assert kept.rebuild().data_ptr() == pointer
    assert not kept.rebuild().requires_grad


def test_a_constant_whose_memory_was_exchanged_is_what_it_was():
    x = torch.ones(2)
    kept = held(x)
    x.data = torch.zeros(2)
    assert torch.equal(kept.rebuild(), torch.ones(2))


@pytest.mark.parametrize("requires_grad", [True, False])
def test_hooks_around_the_region_hold_its_arguments(requires_grad):
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        packed.append(tensor.clone(memory_format=torch.contiguous_format))
        return len(packed) - 1

    x = torch.arange(6.0).view(2, 3).t().requires_grad_(requires_grad)
    with torch.autograd.graph.saved_tensors_hooks(pack, packed.__getitem__):
        kept = held(x)
        parameter = held(nn.Parameter(torch.ones(1)))
    assert len(packed) == 1
    made = kept.rebuild()
    assert torch.equal(made, x)
    assert made.stride() == x.stride()
    assert made.requires_grad is requires_grad
    assert made.is_leaf
    assert kept.device == x.device
    assert not kept.has_changed()
    assert isinstance(parameter.rebuild(), nn.Parameter)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_tangent_comes_along():
    with forward_ad.dual_level():
        x, tangent = torch.ones(2, requires_grad=True), torch.tensor([3.0, 4.0])
        dual = held(forward_ad.make_dual(x, tangent)).rebuild()
        assert torch.equal(forward_ad.unpack_dual(dual).tangent, tangent)
        assert dual.requires_grad
        plain = held(torch.zeros(2)).rebuild()
        assert forward_ad.unpack_dual(plain).tangent is None
        assert not plain.requires_grad


def test_a_write_is_noticed_and_whose_it_was():
    x = torch.ones(2)
    kept = held(x)
    kept.note_forward_end()
    assert not kept.changed_by_region
    x.add_(1)
    assert kept.has_changed()
    assert not kept.changed_by_region
    kept.note_forward_end()
    assert kept.changed_by_region
    assert kept.name == "argument 0"


@pytest.mark.parametrize("surrounded", [True, False])
@pytest.mark.parametrize(
    "tensor",
    [nn.Parameter(torch.ones(2)), torch.ones(2), torch.ones(2, requires_grad=True)],
    ids=["parameter", "constant", "with a gradient"],
)
def test_what_is_held_has_not_been_changed_at_first(tensor, surrounded):
    def same(tensor: Tensor) -> Tensor:
        return tensor

    with contextlib.ExitStack() as stack:
        if surrounded:
            hooks = torch.autograd.graph.saved_tensors_hooks(same, same)
            stack.enter_context(hooks)
        kept = held(tensor)
    assert not kept.changed_by_region
    assert not kept.has_changed()
    assert kept.name == "argument 0"


@pytest.mark.parametrize("verify", [True, False])
def test_a_tensor_of_inference_mode_beside_others_is_no_changed_one(verify):
    with torch.inference_mode():
        shift = torch.ones(3)
    x = torch.linspace(0, 1, 3, requires_grad=True)
    y = mb.checkpoint(
        lambda x, shift: x.exp() + shift, x, shift, engine="rerun", verify=verify
    )
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, x.detach().exp())
