"""Behaviours 61-68: a saved tensor is served as often as autograd asks for it.

A graph may be walked more than once (`retain_graph`), from several losses, from inside
a hook of another backward, or looked at outside every backward. The runs of a region's
function are counted exactly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import membudget as mb
from membudget import compat
from tests.behaviours.steps import Counted, Region, differences

GROUPS = [
    pytest.param(mb.execution_group, id="execution_group"),
    pytest.param(compat.GraphExecGroup, id="GraphExecGroup"),
]
Group = Callable[[], Any]


def smooth(x: Tensor) -> Tensor:
    return (x.exp() * x.sin()).tanh()


def leaf(n: int = 5) -> Tensor:
    return torch.linspace(-1.0, 1.0, n).requires_grad_()


def gradient(y: Tensor, x: Tensor, retain: bool = False) -> Tensor:
    # Not `y.sum()`: a hook runs without grad mode, and could not differentiate it.
    return torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=retain)[0]


def test_b61_each_backward_with_retain_graph_recomputes_once() -> None:
    function, x = Counted(smooth), leaf()
    y = mb.checkpoint(function, x)
    expected = gradient(smooth(x), x)
    for backwards in (1, 2, 3):
        assert torch.equal(gradient(y, x, retain=True), expected)
        assert function.calls == 1 + backwards


def test_b61_a_chain_of_regions_is_walked_three_times() -> None:
    functions, x = [Counted(smooth) for _ in range(3)], leaf()
    y, expected = x, x
    for function in functions:
        y, expected = mb.checkpoint(function, y), smooth(expected)
    for retain in (True, True, False):
        assert torch.equal(gradient(y, x, retain), gradient(expected, x, retain))
    assert [function.calls for function in functions] == [4, 4, 4]


def test_b61_gradients_of_two_backwards_add_up() -> None:
    def step(region: Region) -> Any:
        x = leaf()

        def outer(x: Tensor) -> Tensor:
            return region(smooth, x.sin()) * region(smooth, x)

        loss = region(outer, x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return loss, x

    assert differences(step) == []


def test_b61_a_second_backward_draws_the_same_dropout_mask() -> None:
    def step(region: Region) -> Any:
        x = leaf(64)
        y = region(lambda x: F.dropout(x.exp(), 0.5).sin(), x)
        first = gradient(y, x, retain=True)
        return first, torch.rand(3), gradient(y, x)

    assert differences(step) == []


def test_b62_a_second_backward_without_retain_graph_is_refused() -> None:
    function, x = Counted(smooth), leaf()
    loss = mb.checkpoint(function, x).sum()
    loss.backward()
    assert x.grad is not None
    first = x.grad.clone()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert function.calls == 2
    assert torch.equal(x.grad, first)


def test_b63_two_losses_over_one_region_add_up() -> None:
    def step(region: Region) -> Any:
        x = leaf()
        y = region(smooth, x)
        y.sum().backward(retain_graph=True)
        (y * y).mean().backward()
        return x

    assert differences(step) == []


def test_b63_losses_that_share_nothing_need_not_retain_the_graph() -> None:
    def step(region: Region) -> Any:
        x = leaf()
        for output in region(lambda x: (x.exp().sin(), x.cos().tanh()), x):
            output.sum().backward()
        return x

    assert differences(step) == []


def test_b64_a_hook_may_run_the_backward_of_another_region() -> None:
    def step(region: Region) -> Any:
        x, other = leaf(), leaf(7)
        y, inner = region(smooth, x), region(smooth, other).sum()
        y.register_hook(lambda grad: inner.backward())
        y.sum().backward()
        return x, other

    assert differences(step) == []


def test_b64_a_hook_may_run_the_backward_of_its_own_region() -> None:
    def step(region: Region) -> Any:
        x = leaf()
        y = region(smooth, x)
        inner, later = (y * 2).sum(), y.cos()
        found: list[Tensor] = []
        later.register_hook(lambda grad: found.append(gradient(inner, x, retain=True)))
        found.append(gradient(later, x))
        return found

    assert differences(step) == []


def test_b64_a_hook_amid_a_region_may_run_another_backward_of_it() -> None:
    def step(region: Region) -> Any:
        x = leaf()
        probes: list[Tensor] = []
        found: list[Tensor] = []

        def two(x: Tensor) -> tuple[Tensor, Tensor]:
            z = x.exp()
            if not mb.is_recomputing():
                z.register_hook(lambda grad: found.append(gradient(probes[0], x, True)))
            return smooth(z).exp(), x.cos().exp()

        y, probe = region(two, x)
        probes.append(probe.sum())
        found.append(gradient(y, x))
        return found

    assert differences(step) == []


def test_b65_each_read_of_a_saved_tensor_outside_backward_recomputes() -> None:
    function, x = Counted(torch.exp), leaf()
    y = mb.checkpoint(function, x)
    node: Any = y.grad_fn
    for reads in (1, 2, 3):
        assert torch.equal(node._saved_result, x.exp())
        assert function.calls == 1 + reads
    assert torch.equal(gradient(y, x), x.exp())


def test_b65_a_saved_tensor_that_was_freed_cannot_be_read() -> None:
    x = leaf()
    y = mb.checkpoint(torch.exp, x)
    y.sum().backward()
    node: Any = y.grad_fn
    with pytest.raises(RuntimeError, match="after they have already been freed"):
        _ = node._saved_result


class ReadsTwice(torch.autograd.Function):
    """A product whose backward asks for its saved tensors twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, _ = ctx.saved_tensors
        again, y = ctx.saved_tensors
        assert torch.equal(x, again)
        return grad * y, grad * again


def reads_twice(x: Tensor) -> Tensor:
    product: Tensor = ReadsTwice.apply(x.sin(), x.cos())
    return product.exp()


def test_b66_saved_tensors_read_twice_are_never_wrong() -> None:
    x = leaf()
    y = mb.checkpoint(reads_twice, x)
    with contextlib.suppress(mb.CheckpointError):
        assert torch.equal(gradient(y, x), gradient(reads_twice(x), x))


# torch 2.13 refuses: it forgets a recomputed tensor at its first unpacking.
@pytest.mark.parametrize("nested", [False, True])
def test_b67_saved_tensors_may_be_read_twice(nested: bool) -> None:
    def step(region: Region) -> Any:
        x = leaf()
        inner = region if nested else lambda function, x: function(x)
        y = region(lambda x: inner(reads_twice, x), x)
        return gradient(y, x, retain=True), gradient(y, x)

    assert differences(step) == []


def three(x: Tensor) -> tuple[Tensor, ...]:
    """Return three values that share no saved tensor."""
    return x.exp().sin(), x.cos().exp(), x.sin().tanh()


@pytest.mark.parametrize("group", GROUPS)
def test_b68_a_group_recomputes_once_for_backwards_that_do_not_overlap(
    group: Group,
) -> None:
    function, x = Counted(three), leaf()
    expected = [gradient(y, x) for y in three(x)]
    outputs = mb.checkpoint(function, x)
    with group():
        for output, wanted in zip(outputs, expected, strict=True):
            assert torch.equal(gradient(output, x), wanted)
    assert function.calls == 2


@pytest.mark.parametrize("group", GROUPS)
def test_b68_a_group_recomputes_each_of_several_regions_once(group: Group) -> None:
    functions, x = [Counted(three) for _ in range(4)], leaf()
    expected = [gradient(y, x) for y in three(x)]
    outputs = [mb.checkpoint(function, x) for function in functions]
    with group():
        for i, wanted in enumerate(expected):  # All first outputs, then all second.
            for output in outputs:
                assert torch.equal(gradient(output[i], x), wanted)
    assert [function.calls for function in functions] == [2, 2, 2, 2]


@pytest.mark.parametrize("group", GROUPS)
def test_b68_overlapping_backwards_in_a_group_are_refused_or_right(
    group: Group,
) -> None:
    function, x = Counted(smooth), leaf()
    expected = gradient(smooth(x), x)
    y = mb.checkpoint(function, x)
    with group():
        assert torch.equal(gradient(y, x, retain=True), expected)
        with contextlib.suppress(mb.CheckpointError):
            assert torch.equal(gradient(y, x, retain=True), expected)
    assert function.calls == 2


# torch 2.13 refuses the second backward: its group allows no common saved tensor.
def test_b68_overlapping_backwards_recompute_once() -> None:
    function, x = Counted(smooth), leaf()
    expected = gradient(smooth(x), x)
    y = mb.checkpoint(function, x)
    with mb.execution_group():
        for _ in range(3):
            assert torch.equal(gradient(y, x, retain=True), expected)
    assert function.calls == 2


@pytest.mark.parametrize("group", GROUPS)
def test_b68_after_a_group_a_backward_recomputes_again(group: Group) -> None:
    function, x = Counted(smooth), leaf()
    y = mb.checkpoint(function, x)
    with group():
        inside = gradient(y, x, retain=True)
    assert torch.equal(gradient(y, x), inside)
    assert function.calls == 3


@pytest.mark.parametrize("group", GROUPS)
def test_b68_a_chain_is_walked_back_piece_by_piece_in_a_group(group: Group) -> None:
    functions = [Counted(smooth) for _ in range(3)]

    def step(region: Region) -> Any:
        values = [leaf()]
        for function in functions:
            values.append(region(function, values[-1]))
        grads = [torch.ones_like(values[-1])]
        with group():
            for i in (3, 2, 1):
                grads += torch.autograd.grad(values[i], values[i - 1], grads[-1])
        return grads

    assert differences(step) == []
    assert [function.calls for function in functions] == [3, 3, 3]  # Plain is one.


def test_b68_groups_of_torch_do_not_nest() -> None:
    with (
        compat.GraphExecGroup(),
        pytest.raises(RuntimeError, match="cannot be nested"),
        compat.GraphExecGroup(),
    ):
        pass
