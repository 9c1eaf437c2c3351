"""Values of a replay that share memory, and what may be written over."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import membudget as mb
from membudget.engine.replay.shared_memory import is_read_by, share, sharing
from membudget.engine.replay.tape import Operation, TapeValue
from tests.keeps import KEEPS, replay
from tests.oracles import CountedOperators

Function = Callable[[Tensor], Tensor]


def made_from(*read: TapeValue, root: TapeValue | None = None) -> TapeValue:
    """Return the output of an operation; with a root, a view of that."""
    return Operation(torch.ops.aten.sin.default, list(read), {}, 1, True).output(
        0, root
    )


def test_a_recompute_reads_the_memory_of_what_its_operators_read():
    owner, other = TapeValue(None), TapeValue(None)
    view = made_from(owner, root=owner)
    assert is_read_by([made_from(owner)], owner)
    assert is_read_by([made_from(made_from(owner))], owner)
    assert is_read_by([made_from(other, view)], owner)
    assert not is_read_by([view], owner)
    assert not is_read_by([made_from(made_from(other))], owner)


def test_a_recompute_begins_at_what_an_earlier_stage_has_retained():
    owner = TapeValue(None)
    between = made_from(owner)
    view = made_from(between, root=between)
    between.tensor = view.tensor = torch.ones(1)
    for wanted in (made_from(between), made_from(view)):
        between.is_carried = False
        assert is_read_by([wanted], owner)  # It will be freed with its stage.
        between.is_carried = True
        assert not is_read_by([wanted], owner)


def test_values_that_share_memory_with_others_share_it_with_each_other():
    one, two, three, alone = (TapeValue(None) for _ in range(4))
    share(one, two)
    share(three, three)
    share(two, three)
    for value in (one, two, three):
        assert {*sharing(value)} == {one, two, three}
    assert [*sharing(alone)] == [alone]


def gates(x: Tensor) -> Tensor:
    """Turn parts of a matrix product into gates, one after the other, as a GRU does."""
    reset, update, new = (x @ x.t()).unsafe_chunk(3, -1)
    reset.add_(1).sigmoid_()
    update.mul_(2).sigmoid_()
    new = (new * reset).tanh()
    return (new * update).sin()


def test_a_replay_of_gates_copies_none_of_them():
    x = torch.randn(6, 6, requires_grad=True)
    (expected,) = torch.autograd.grad(gates(x).sum(), x)
    y = replay()(gates)(x)
    with CountedOperators() as operators:
        (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, expected)
    assert operators.counts["clone"] == 0


def test_a_replay_of_gates_holds_them_once():
    x = torch.randn(600, 600, requires_grad=True)
    y = replay()(gates)(x)
    peak_bytes = mb.peak(lambda: y.sum().backward()).peak_bytes
    assert peak_bytes < 3.1 * x.nbytes


def parts_then_all(x: Tensor) -> Tensor:
    """Write one part of a product twice, then all of it, and read the other between."""
    product = x @ x.t()
    first, second = product.unsafe_chunk(2, -1)
    first.add_(1)
    read = (second + 0).sin()
    first.mul_(3)
    product.mul_(2)
    return read.sum() + product.cos().sum()


def test_a_write_to_all_of_a_tensor_spares_the_parts_that_its_older_values_share():
    x = torch.randn(6, 6, requires_grad=True)
    (expected,) = torch.autograd.grad(parts_then_all(x), x)
    (found,) = torch.autograd.grad(replay()(parts_then_all)(x), x)
    assert torch.equal(found, expected)


GEOMETRIES: list[Callable[[Tensor], Tensor]] = [
    *(lambda t, i=i: t[i : i + 2] for i in range(5)),
    *(lambda t, i=i: t[:, i : i + 2] for i in range(5)),
    lambda t: t[:, ::2],
    lambda t: t[:, 1::2],
    lambda t: t.t()[2:4],
    lambda t: t.diagonal(),
    lambda t: t[1:5][:2],
    lambda t: t.view(-1)[7:20],
    lambda t: t.as_strided((3, 4), (6, 1), 2),
    lambda t: t,
]

WRITES: list[Callable[[Tensor], Tensor]] = [
    lambda t: t.sigmoid_(),
    lambda t: t.mul_(1.5),
    lambda t: t.add_(0.25),
]


class Product(torch.autograd.Function):
    """A product with the sum of a part, which autograd saves."""

    @staticmethod
    def forward(ctx, x, part):
        ctx.save_for_backward(part)
        return x * part.contiguous().sum()

    @staticmethod
    def backward(ctx, gradient):
        (part,) = ctx.saved_tensors
        return gradient * part.contiguous().sum(), None


@pytest.mark.parametrize(("rows", "copies"), [(slice(3, 6), 0), (slice(2, 4), 1)])
def test_a_write_copies_a_tensor_if_it_destroys_a_part_that_is_still_needed(
    rows, copies
):
    def function(x: Tensor, clones: bool) -> Tensor:
        base = x.detach() * 2
        first, second = base[:3], base[rows]
        saved = Product.apply(x, first.clone() if clones else first)
        second.sigmoid_()
        return (saved * Product.apply(x, second)).sum()

    x = torch.randn(6, 6, requires_grad=True)
    (expected,) = torch.autograd.grad(function(x, clones=True), x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mb.OverwrittenWarning)
        y = replay()(function)(x, clones=False)
        with CountedOperators() as operators:
            (found,) = torch.autograd.grad(y, x)
    assert torch.equal(found, expected)
    assert operators.counts["clone"] == copies


class Erasing(Product):
    """The same; its backward overwrites what autograd gives it."""

    @staticmethod
    def backward(ctx, gradient):
        (part,) = ctx.saved_tensors
        found = gradient * part.sum()
        part.zero_()
        return found, None


def test_a_backward_may_overwrite_a_part_of_memory_that_a_replay_reads_again():
    def function(x: Tensor, clones: bool) -> tuple[Tensor, Tensor]:
        base = x.detach() * 2
        first, second = base[:3], base[3:]
        saved = Erasing.apply(x, first.clone() if clones else first)
        second.sigmoid_()
        saved = saved + Product.apply(x, second.clone() if clones else second)
        first.sigmoid_()
        return saved, Product.apply(x, first)

    def gradients(region: Callable[..., tuple[Tensor, Tensor]], clones: bool) -> Any:
        leaf = torch.linspace(0, 1, 36).view(6, 6).requires_grad_()
        x = leaf * 1
        saved, later = region(x, clones)
        total, found = later.sum(), []
        # What `first` became is asked for when its saved part was overwritten.
        leaf.register_hook(lambda _: found.append(torch.autograd.grad(total, x)[0]))
        saved.sum().backward()
        return [*found, leaf.grad]

    expected = gradients(function, clones=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mb.OverwrittenWarning)
        found = gradients(replay()(function), clones=False)
    assert len(found) == 2
    assert all(map(torch.equal, found, expected))


class Assign(torch.autograd.Function):
    """Write one slice, unseen by version counters, as torchdiffeq does."""

    @staticmethod
    def forward(ctx, scratch, value, place):
        ctx.place = place
        scratch.data[place] = value
        return scratch

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient[ctx.place], None


def runge_kutta(x: Tensor) -> Tensor:
    """Weigh in each stage the slopes up to there, which autograd saves."""
    slopes, state = torch.empty(4, *x.shape), x
    for place in range(4):
        slopes = Assign.apply(slopes, state.sin(), place)
        weights = x[0, : place + 1, None, None]
        state = x + (slopes[: place + 1] * weights).sum(0)
    return state.exp()


def test_slices_that_are_kept_of_one_tensor_are_kept_in_it_while_others_are_written():
    x = torch.randn(30, 30, requires_grad=True)
    region = replay(mb.policies.operators("copy_"))
    kept = mb.peak(lambda: region(runge_kutta)(x))
    # The slopes, and the output.
    assert kept.end_bytes < 5.1 * x.nbytes
    (expected,) = torch.autograd.grad(runge_kutta(x).sum(), x)
    (found,) = torch.autograd.grad(kept.result.sum(), x)
    assert torch.equal(found, expected)


def program(seed: int, clones: bool) -> Function:
    """Return a function that writes and saves parts of one tensor, in random order.

    With `clones`, autograd saves copies, so that the plain step may write on.
    """

    def function(x: Tensor) -> Tensor:
        draw = random.Random(seed)
        base = x.detach() * 2
        saved = [x.sum() * 0]
        for _ in range(12):
            part = draw.choice(GEOMETRIES)(base)
            if draw.random() < 0.5:
                draw.choice(WRITES)(part)
            else:
                saved.append(Product.apply(x, part.clone() if clones else part).sum())
        draw.shuffle(saved)
        return torch.stack(saved).prod() + torch.stack(saved).sum()

    return function


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("seed", range(20))
def test_what_is_saved_of_a_tensor_stays_what_it_was_whatever_is_written_since(
    seed, keep
):
    x = torch.randn(6, 6, requires_grad=True)
    (expected,) = torch.autograd.grad(program(seed, clones=True)(x), x)
    with warnings.catch_warnings():
        # Plain autograd refuses parts that are written since they were saved.
        warnings.simplefilter("ignore", mb.OverwrittenWarning)
        y = replay(KEEPS[keep])(program(seed, clones=False))(x)
        (found,) = torch.autograd.grad(y, x)
    assert torch.equal(found, expected)
