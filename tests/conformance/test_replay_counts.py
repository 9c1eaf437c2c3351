"""Which operators a backward replays, and how often, exactly.

A replay runs what leads from a source to a value that autograd asks for: an operator
that no such path needs never, every other one once a backward. Sources are the region's
inputs and what the policy keeps. The function itself runs once, in the forward.

What is counted is the backward of a replay region less the backward of the plain call.
Views, which compute nothing, are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import membudget as mb
from membudget import policies
from tests.devices import is_cpu
from tests.keeps import replay
from tests.oracles import CountedOperators

Function = Callable[[Tensor], Any]
Backward = Callable[[Any], None]

_VIEWS = frozenset(
    ("t", "transpose", "permute", "expand", "view", "slice", "select", "_unsafe_view")
)


def once(y: Any) -> None:
    """Send an output backward."""
    y.sum().backward()


def twice(y: Tensor) -> None:
    """Send an output backward through the same graph twice."""
    y.sum().backward(retain_graph=True)
    y.sum().backward()


def operators_of(backward: Backward, y: Any, *leaves: Tensor) -> Counter[str]:
    """Count the operators of a backward, which finds no gradient to add to."""
    for leaf in leaves:
        leaf.grad = None
    with CountedOperators() as counting:
        backward(y)
    return Counter({n: k for n, k in counting.counts.items() if n not in _VIEWS})


def replayed(
    function: Function,
    x: Tensor,
    keep: Any = policies.nothing,
    backward: Backward = once,
) -> dict[str, int]:
    """Count what a backward runs more often because of a replay region."""
    leaves = [x, *(function.parameters() if isinstance(function, nn.Module) else ())]
    plain = operators_of(backward, function(x), *leaves)
    region = operators_of(backward, replay(keep)(function)(x), *leaves)
    assert plain - region == Counter()
    return dict(region - plain)


def _input(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3, 4)), requires_grad=True)


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))


def chain(x: Tensor) -> Tensor:
    """Save the input, an output, an input and an output."""
    return x.sin().exp().cos().tanh()


CHAIN = {"sin": 1, "exp": 1, "cos": 1, "tanh": 1}


def test_a_chain_is_replayed_once() -> None:
    assert replayed(chain, _input()) == CHAIN


def test_where_everything_is_kept_nothing_is_replayed() -> None:
    assert replayed(chain, _input(), policies.everything) == {}
    assert replayed(_layers(), _input(), policies.everything) == {}


def test_what_follows_the_last_saved_tensor_is_not_replayed() -> None:
    # The cosine saves its input.
    assert replayed(lambda x: x.sin().cos(), _input()) == {"sin": 1}
    assert replayed(lambda x: x.sin() + 1, _input()) == {}


def test_a_replay_begins_at_what_is_kept() -> None:
    keep = policies.operators("exp")

    assert replayed(chain, _input(), keep) == {"cos": 1, "tanh": 1}


def test_the_product_before_a_gelu_is_replayed_and_the_last_one_not() -> None:
    assert replayed(_layers(), _input()) == {"addmm": 1, "gelu": 1}


def test_with_products_kept_the_gelu_alone_is_replayed() -> None:
    assert replayed(_layers(), _input(), policies.matmuls) == {"gelu": 1}


def test_with_convolutions_kept_no_convolution_is_replayed() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.SiLU(), nn.Conv2d(3, 2, 3), nn.SiLU())
    x = _input(1, 2, 8, 8)

    assert replayed(model, x) == {"convolution": 2, "silu": 1}
    assert replayed(model, x, policies.convolutions) == {"silu": 1}


def test_what_several_branches_need_is_replayed_once() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        return (y.exp() + y.cos()).tanh() * y.erf()

    expected = {"sin": 1, "exp": 1, "cos": 1, "add": 1, "tanh": 1, "erf": 1}
    assert replayed(function, _input()) == expected


def test_a_branch_whose_output_is_dropped_is_not_replayed() -> None:
    def two(x: Tensor) -> Tensor:
        y = x.sin()
        branches = y.tanh(), y.erf().sigmoid()
        return branches[0]

    assert replayed(two, _input()) == {"sin": 1, "tanh": 1}


def test_a_branch_that_the_loss_does_not_need_is_not_replayed() -> None:
    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        return y.tanh(), y.erf().sigmoid()

    assert replayed(two, _input(), backward=lambda y: once(y[0])) == {
        "sin": 1,
        "tanh": 1,
    }


def test_a_second_backward_replays_again() -> None:
    expected = dict.fromkeys(CHAIN, 2)

    assert replayed(chain, _input(), backward=twice) == expected


def test_two_backwards_of_one_execution_group_replay_once() -> None:
    def grouped(y: Tensor) -> None:
        with mb.execution_group():
            twice(y)

    assert replayed(chain, _input(), backward=grouped) == CHAIN


def test_the_backwards_of_two_outputs_each_replay_what_they_need() -> None:
    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        return y.exp(), y.cos().tanh()

    def both(y: tuple[Tensor, Tensor]) -> None:
        y[0].sum().backward(retain_graph=True)
        once(y[1])

    # The second begins a plan of its own, in which the sine is needed again. Autograd
    # gets a copy of it, because the exponential, whose graph is retained, may want it.
    expected = {"sin": 2, "exp": 1, "cos": 1, "tanh": 1, "clone": 1}
    assert replayed(two, _input(), backward=both) == expected


def test_where_something_is_routed_to_is_not_decided_again() -> None:
    def routed(x: Tensor) -> Tensor:
        values, places = x.sin().topk(2)
        order = x.erf().argsort(1)[:, :2]
        return (values * values).exp() * places * x.cos().sort(-1).values[:, :2] * order

    counts = replayed(routed, _input())

    assert counts.keys() & {"topk", "sort", "argsort"} == set()
    # Neither is what they chose from: the values that they gave are there.
    assert counts.keys() & {"sin", "erf", "cos"} == set()
    assert counts["exp"] == 1


def test_a_write_in_place_is_replayed_in_place() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        y.mul_(2).exp_()
        return y.cos()

    # No copy is made: nobody else needs the sine.
    assert replayed(function, _input()) == {"sin": 1, "mul_": 1, "exp_": 1}


def test_a_write_through_a_view_is_replayed_in_place() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        y[1:3].mul_(2)
        return y.t().exp().cos()

    assert replayed(function, _input()) == {"sin": 1, "mul_": 1, "exp": 1}


def test_what_another_value_still_needs_is_copied_before_it_is_written() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        z = (y + 1).cos()
        y.mul_(2)
        return z + y.exp()  # Autograd asks for the exponential first.

    expected = {"sin": 1, "clone": 1, "mul_": 1, "exp": 1, "add": 1}
    assert replayed(function, _input()) == expected


def test_a_mask_is_drawn_again_once() -> None:
    counts = replayed(lambda x: F.dropout(x.sin(), 0.3).exp(), _input())

    drawing = "bernoulli_" if is_cpu() else "native_dropout"
    assert (counts["sin"], counts[drawing], counts["exp"]) == (1, 1, 1)


def test_with_the_mask_kept_nothing_is_drawn_again() -> None:
    def function(x: Tensor) -> Tensor:
        return F.dropout(x.sin(), 0.3).exp()

    # An accelerator draws the mask and multiplies by it in one operator.
    masks = torch.ops.aten.div_.Scalar, torch.ops.aten.native_dropout.default
    again = {"sin": 1, "mul": 1, "exp": 1} if is_cpu() else {"exp": 1}
    assert replayed(function, _input(), lambda c: c.operator in masks) == again


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_what_lies_k_replay_regions_deep_is_replayed_k_times(depth: int) -> None:
    # As in a rerun: an outer region goes through the inner ones for what follows them.
    marks: list[Any] = [F.gelu, F.silu, F.mish, F.softplus, F.tanh]

    def level(k: int, x: Tensor) -> Tensor:
        x = marks[k](x)
        if k + 1 < depth:
            x = replay()(level)(k + 1, x)
        return x.exp()  # It saves its output, so all that is before it is needed.

    x = _input()
    counts = operators_of(once, replay()(level)(0, x), x)

    names = [mark.__name__ for mark in marks]
    assert [counts[name] for name in names[:depth]] == list(range(1, depth + 1))


def test_what_a_function_differentiates_inside_is_replayed_once_there() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin().exp()
        (gradient,) = torch.autograd.grad(y.sum(), x)
        return gradient.tanh() * x

    x = _input()
    counts = operators_of(lambda f: once(f(x)), replay()(function), x)
    plain = operators_of(lambda f: once(f(x)), function, x)

    # Its own backward takes the sine's exponential; the outer one needs the gradient.
    assert (counts - plain)["sin"] == 2


@pytest.mark.parametrize(
    ("keep", "products"),
    [
        pytest.param(policies.nothing, 7, id="nothing"),  # Of six in the plain step.
        pytest.param(policies.matmuls, 6, id="matmuls"),
        pytest.param(policies.everything, 6, id="everything"),
    ],
)
def test_flops_of_a_replayed_step(keep: Any, products: int) -> None:
    layers, x = _layers(), _input()

    with FlopCounterMode(display=False) as counting:
        once(replay(keep)(layers)(x))

    assert counting.get_total_flops() == products * 2 * 3 * 4 * 4
