"""Each private name of torch that membudget needs is there, and does what it must.

If a test fails after an upgrade of torch, the name in it has gone or changed; `_torch`
says what it was for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils import parametrizations, parametrize

from membudget import _torch, _torch_observing
from membudget._torch_modules import (
    is_asked,
    is_compiled,
    own_parameters,
    parametrized_cache,
    without_gradient_hooks,
)


def test_saved_tensor_hooks_can_be_pushed_read_and_popped():
    pack, unpack = (lambda t: t), (lambda t: t)
    assert _torch.top_saved_tensors_hooks() is None
    _torch.push_saved_tensors_hooks(pack, unpack)
    try:
        assert _torch.top_saved_tensors_hooks() == (pack, unpack)
    finally:
        _torch.pop_saved_tensors_hooks()
    assert _torch.top_saved_tensors_hooks() is None


def test_the_graph_task_is_known_inside_a_backward_and_ends_with_a_callback():
    seen: list[int] = []
    ended: list[bool] = []

    def hook(gradient: torch.Tensor) -> None:
        seen.append(_torch.current_graph_task_id())
        _torch.at_end_of_backward(lambda: ended.append(True))

    x = torch.ones(2, requires_grad=True)
    x.register_hook(hook)
    x.sum().backward()
    assert seen[0] >= 0
    assert ended == [True]
    assert _torch.current_graph_task_id() == -1


def test_compiled_modules_are_told_from_others():
    inside, outside = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    assert not is_compiled(inside)
    inside.compile(backend="eager")
    assert is_compiled(inside)
    wrapper: Any = torch.compile(outside, backend="eager")
    assert is_compiled(wrapper)
    assert not is_compiled(outside)


def test_hooks_of_complete_gradients_can_be_suspended():
    seen: list[torch.Tensor] = []
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.register_post_accumulate_grad_hook(seen.append)
    with without_gradient_hooks([parameter]):
        parameter.sum().backward()
    assert seen == []
    parameter.sum().backward()
    assert len(seen) == 1


def test_autocast_is_noticed():
    assert not _torch.is_any_autocast_enabled()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert _torch.is_any_autocast_enabled()


def test_the_grad_mode_can_be_set():
    _torch.set_grad_enabled(False)
    assert not torch.is_grad_enabled()
    _torch.set_grad_enabled(True)
    assert torch.is_grad_enabled()


def test_a_whole_backward_is_told_from_a_partial_one():
    seen: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    for differentiate in (torch.autograd.backward, lambda y: torch.autograd.grad(y, x)):
        y = x * 2
        y.register_hook(lambda gradient: seen.append(_torch.is_whole_backward()))
        differentiate(y.sum())
    assert seen == [True, False]


def test_a_view_has_the_storage_address_of_its_base():
    x = torch.zeros(4)
    assert _torch.storage_address(x) == _torch.storage_address(x[2:])
    assert _torch.storage_address(x) != _torch.storage_address(x.clone())


def test_modes_are_listed_outermost_first():
    class Mode(_torch.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with torch.device("cpu") as device, Mode() as outer, Mode() as inner:
        assert _torch.function_mode_count() == 1
        assert _torch.is_device_context(_torch.function_modes()[0]), device
        assert _torch.dispatch_mode_count() == 2
        assert _torch.dispatch_modes() == (outer, inner)


def test_versions_can_be_put_back():
    x = torch.zeros(2)
    x.add_(1)
    _torch.set_versions([x], [0])
    assert x._version == 0


def test_operators_say_what_they_are():
    aten = torch.ops.aten
    assert _torch.is_view_operator(aten.view.default)
    assert not _torch.is_view_operator(aten.add_.Tensor)
    assert _torch.is_random_operator(aten.bernoulli_.float)
    assert not _torch.is_random_operator(aten.sin.default)
    x = torch.zeros(2)
    assert list(_torch.written_arguments(aten.add_.Tensor, (x, 1), {})) == [x]


def test_the_profiler_says_that_it_runs():
    from torch.autograd.profiler import profile

    assert not _torch.is_profiling()
    with profile():
        assert _torch.is_profiling()


def test_a_module_s_call_has_a_code_object_with_self():
    (code,) = _torch.module_call_codes()
    assert code.co_varnames[0] == "self"


def test_an_open_dual_level_is_noticed():
    assert not _torch.is_forward_ad_on()
    with torch.autograd.forward_ad.dual_level():
        assert _torch.is_forward_ad_on()


def test_the_uses_of_a_storage_are_the_tensors_that_hold_it():
    tensor = torch.ones(3)
    address = _torch.storage_address(tensor)
    assert _torch.storage_uses(address) == 1
    array = tensor.detach().numpy()
    assert _torch.storage_uses(address) == 2
    del array
    assert _torch.storage_uses(address) == 1


def test_a_function_can_be_a_constant_to_dynamo():
    def marked() -> int:
        return 1

    def expected() -> int:
        return 1

    torch.compiler.assume_constant_result(expected)
    assert vars(_torch.constant_to_dynamo(marked)) == vars(expected)


def test_the_module_of_checkpoint_wrapper_is_there():
    assert callable(_torch.torch_wrapping().checkpoint_wrapper)


def test_operators_whose_result_python_reads_are_seen_as_such():
    seen = []

    class Mode(_torch.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Mode():
        assert x.equal(x)
        assert x[0].item() == 1
    assert seen[0] is _torch_observing.EQUAL
    assert seen[-1] is _torch_observing.ITEM


def test_the_reason_why_hooks_are_disabled_can_be_read():
    assert _torch.why_hooks_are_disabled() is None
    with torch.autograd.graph.disable_saved_tensors_hooks("a reason"):
        assert _torch.why_hooks_are_disabled() == "a reason"
    assert _torch.why_hooks_are_disabled() is None


def test_modules_hold_their_own_parameters_and_a_shared_one_each():
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False)
    second.weight = first.weight
    held = own_parameters(torch.nn.Sequential(first, second).modules())
    assert list(map(id, held)) == list(
        map(id, [first.weight, first.bias, first.weight])
    )


def test_torch_caches_parametrized_tensors_in_a_dict():
    layer = parametrizations.weight_norm(torch.nn.Linear(2, 2))
    assert parametrized_cache() == {}
    with parametrize.cached():
        weight = layer.weight
        assert any(held is weight for held in parametrized_cache().values())
    assert parametrized_cache() == {}


def test_a_backward_pass_tells_which_gradients_it_is_asked_for():
    linear, seen = torch.nn.Linear(2, 2), []
    x = torch.ones(1, 2, requires_grad=True)

    def output() -> torch.Tensor:
        made = linear(x * 1)
        made.register_hook(
            lambda _: seen.append([is_asked(t) for t in (x, linear.weight)])
        )
        return made.sum()

    torch.autograd.grad(output(), x)
    torch.autograd.grad(output(), linear.weight, create_graph=True)
    output().backward(inputs=[x])
    output().backward()
    assert seen == [[True, False], [False, True], [True, False], [True, True]]


def test_bytes_cannot_be_read_inside_of_a_transform():
    seen: list[bool] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(_torch.may_read_bytes())
        return x

    torch.func.vmap(function)(torch.ones(2))
    assert seen == [False]
    assert _torch.may_read_bytes()


def test_no_mode_sees_what_runs_without_modes():
    class Refuse(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, *_: object) -> object:
            raise AssertionError("a function mode saw an operator")

    x = torch.ones(2)
    with Refuse(), _torch.without_modes():
        assert torch.add(x, x) is not None


def test_a_tensor_can_be_shown_negated():
    x = torch.ones(2)
    shown = _torch.negative_view(x)
    assert shown.is_neg()
    assert shown.data_ptr() == x.data_ptr()
    assert torch.equal(shown.resolve_neg(), -x)
