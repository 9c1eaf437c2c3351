"""An audit restores everything: at its end, after a failure, between runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import membudget as mb
from membudget.audit import audit
from membudget.audit.differences import Outcome
from membudget.state.rng import frozen, global_streams
from membudget.state.snapshot import State
from tests.untidy import Untidy


class Clamps(nn.Linear):
    """A layer that changes its own parameter."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(max=0)
        return super().forward(x)


def everything(model: nn.Module) -> tuple[dict[str, Any], ...]:
    """Return all that a model holds: the very objects, and copies of their content."""
    objects = {
        f"{name}.{key}": value
        for name, module in model.named_modules()
        for space in (vars(module), module._parameters, module._buffers)
        for key, value in space.items()
    }
    inert = {k: v for k, v in objects.items() if not isinstance(v, torch.Generator)}
    return objects, copy.deepcopy(inert)


def assert_same(model: nn.Module, before: tuple[dict[str, Any], ...]) -> None:
    objects, contents = before
    objects_now, contents_now = everything(model)
    assert list(objects_now) == list(objects)
    for key, value in objects.items():
        assert objects_now[key] is value, key
    for key, value in contents.items():
        if isinstance(value, Tensor):
            assert torch.equal(contents_now[key], value), key
        elif not key.endswith("_modules"):
            assert repr(contents_now[key]) == repr(value), key


def streams() -> dict[str, Any]:
    return {name: frozen(stream.read()) for name, stream in global_streams().items()}


def untidy() -> Any:
    model: Any = nn.Sequential(Untidy(), nn.Dropout(), Untidy(), Clamps(4, 4))
    model[2].linear.weight.requires_grad_(False)
    return model


def test_a_model_that_changes_everything_is_restored():
    model, x = untidy(), torch.randn(5, 4)
    generator_before = model[0].generator.get_state()
    before, streams_before = everything(model), streams()

    report = audit(model, x, names=["0", "1", "2"])

    assert report.equal
    assert_same(model, before)
    assert torch.equal(model[0].generator.get_state(), generator_before)
    assert streams() == streams_before
    assert [type(module) for module in model] == [Untidy, nn.Dropout, Untidy, Clamps]


def test_a_failing_step_leaves_everything_as_before_and_says_which_run_failed():
    class Fails(Untidy):
        def forward(self, x: Tensor) -> Tensor:
            if mb.is_recomputing():
                raise KeyError("in the recompute")
            return super().forward(x)

    x = torch.randn(5, 4)
    model: Any = nn.Sequential(Fails(), Fails())
    model[0].linear.weight.grad = torch.ones(4, 4)
    grad = model[0].linear.weight.grad
    before, streams_before = everything(model), streams()

    with pytest.raises(KeyError, match="in the recompute") as caught:
        audit(model, x, engine="rerun")

    assert_same(model, before)
    assert streams() == streams_before
    assert model[0].linear.weight.grad is grad
    assert type(model[0]) is Fails
    assert "the budgeted run of an audit" in caught.value.__notes__[-1]


def test_a_step_that_fails_plain_says_so():
    model = nn.Sequential(nn.Linear(4, 4))

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        audit(model, torch.ones(5, 3))

    assert "the plain run of an audit" in caught.value.__notes__[-1]


def test_gradients_are_the_same_tensors_with_the_same_content():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight.grad = torch.full((4, 4), 1e8)
    grad = model[0].weight.grad

    report = audit(model, torch.randn(5, 4))

    # A fault would be rounded away if the step's gradient were added to 1e8.
    assert report.equal
    assert model[0].weight.grad is grad
    assert torch.equal(grad, torch.full((4, 4), 1e8))
    assert model[0].bias.grad is None
    assert model[1].weight.grad is None


def test_a_gradient_that_a_step_writes_into_is_restored():
    linear = nn.Linear(2, 2)
    linear.weight.grad = shared = torch.ones(2, 2)

    def step(_: int) -> None:
        linear(torch.ones(1, 2)).sum().backward()
        shared.zero_()

    audit(step, plain=0, budgeted=1, modules=linear)

    assert torch.equal(shared, torch.ones(2, 2))


def test_a_parameter_whose_data_a_step_exchanges_is_restored():
    class Exchanges(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data = self.weight.data * 2
            return super().forward(x)

    linear = Exchanges(2, 2)
    address, content = linear.weight.data_ptr(), linear.weight.detach().clone()

    report = audit(
        lambda _: linear(torch.ones(1, 2)).sum().backward(),
        plain=0,
        budgeted=1,
        modules=linear,
    )

    assert report.equal
    assert linear.weight.data_ptr() == address
    assert torch.equal(linear.weight, content)


def test_a_parameter_that_a_step_freezes_is_restored():
    layers = nn.Linear(2, 2), nn.Linear(2, 2)

    def step(_: int) -> None:
        layers[1](layers[0](torch.ones(1, 2))).sum().backward()
        layers[0].requires_grad_(False)

    assert audit(step, plain=0, budgeted=1, modules=layers).compared.gradients == 4
    assert layers[0].weight.requires_grad


def test_an_expanded_tensor_that_a_step_overwrites_is_restored():
    base = torch.ones(1, 4)

    class Overwrites(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            base.mul_(2)
            return super().forward(x)

    model = nn.Sequential(nn.Tanh(), Overwrites(4, 4))

    assert audit(model, base.expand(5, 4), names="0").repeatable
    assert torch.equal(base, torch.ones(1, 4))


def test_an_unchanged_tensor_is_copied_once():
    linear = nn.Linear(2, 2)
    state = State([("", linear)])

    outcome = Outcome({"": linear}, state)

    assert outcome.tensors["parameter", "weight"] is state.content("weight")


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_an_audit_under_no_grad_is_the_same(without):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(5, 4)

    with without():
        report = audit(model, x)

    assert report.equal
    assert report.compared.gradients == 2
    assert report.regions_ran == 2


class CountsCasts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def test_no_run_finds_the_casts_of_weights_that_autocast_remembers():
    linear = nn.Linear(4, 4)

    def step(x: Tensor) -> int:
        with CountsCasts() as casts:
            linear(x).sum().backward()
        return casts.count

    x = torch.ones(2, 4, dtype=torch.bfloat16)
    with torch.autocast("cpu"):
        report = audit(step, plain=x, budgeted=x, modules=linear)

    assert report.repeatable
    assert report.equal


def test_an_optimizer_inside_the_backward_is_undone_and_compared():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def update(parameter: Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter -= parameter.grad
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    report = audit(model, torch.randn(5, 4))

    assert report.equal
    assert report.compared.no_gradients == 4
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_a_lazy_module_is_rejected_before_anything_runs():
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2))

    with pytest.raises(mb.SelectionError, match="run one forward first"):
        audit(model, torch.randn(5, 4))


def test_a_tensor_of_one_element_is_restored_whatever_its_stride():
    tensor = torch.arange(4.0)[::2][:1]
    state = State([("batch", [tensor])])
    state.restore()
    tensor.add_(1)
    state.restore()
    assert tensor.tolist() == [0.0]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_what_has_not_changed_is_found_so_without_a_copy(layout: torch.memory_format):
    x = torch.randn(2, 4, 64, 64, dtype=torch.complex64).to(memory_format=layout)
    state = State([("x", x)])

    assert mb.peak(state.restore).peak_bytes < x.nbytes // 8
