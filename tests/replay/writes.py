"""Cases that write tensors otherwise: by index, into `out=`, in lists, from outside."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.replay.registry import operators
from tests.zoo import Call
from tests.zoo.case import leaf


@operators()
def out_into_intermediates() -> Call:
    def function(x: Tensor) -> Tensor:
        product, total = torch.empty(5, 5), torch.zeros(5, 6)
        with torch.no_grad():
            torch.mm(x, x.T, out=product)
            torch.add(x, 1.0, out=total[:])
            early = total + 0
            torch.mul(total, x, out=total)
            torch.sin(x[:, :3], out=total[:, 3:])
        return (x.T @ product).sin().T * total * early.exp()

    return Call(function, (leaf(5, 6),))


@operators()
def out_that_is_resized() -> Call:
    def function(x: Tensor) -> Tensor:
        joined = torch.empty(0)
        values, places = torch.empty(0), torch.empty(0, dtype=torch.int64)
        with torch.no_grad():
            torch.cat([x, x.sin()], 1, out=joined)
            torch.sort(x, dim=1, out=(values, places))
        return (joined[:, 6:] * x).exp() * values.cos() * (x * places).sin()

    return Call(function, (leaf(5, 6),))


@operators(not_again="a region that runs again refuses to write what it reads")
def out_into_a_closed_over_buffer() -> Call:
    buffer = torch.ones(5, 6)

    def function(x: Tensor) -> Tensor:
        before = (x + buffer).sin()
        with torch.no_grad():
            torch.mul(x, 0.5, out=buffer)
        return before * (x - buffer).exp()

    return Call(function, (leaf(5, 6),), state={"buffer": buffer})


@operators()
def foreach_makes_new_tensors() -> Call:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        parts = torch._foreach_mul([x, y], [y, x])
        parts = torch._foreach_addcmul(parts, [x, y], [y, y], value=0.5)
        parts = torch._foreach_lerp(torch._foreach_sin(parts), [y, x], 0.25)
        norms = torch._foreach_norm(parts, 2)
        return [*torch._foreach_exp(parts), *norms, *torch._foreach_pow(parts, 2)]

    return Call(function, (leaf(5, 6), leaf(5, 6)))


@operators()
def foreach_in_place() -> Call:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        base = x * 2
        parts = [base[:2], y.sin(), base[3:]]
        torch._foreach_add_(parts, 1.0)
        torch._foreach_mul_(parts, [x[:2], x, x[3:]])
        before = (parts[1] + 0).exp()
        torch._foreach_sin_(parts)
        plain = [x.detach().clone(), torch.zeros(3)]
        torch._foreach_copy_(plain, [y.detach(), y.detach()[0, :3]])
        torch._foreach_zero_(plain[1:])
        return [base.exp(), before * parts[1], (x * plain[0]).cos()]

    return Call(function, (leaf(5, 6), leaf(5, 6)))


@operators(not_again="a region that runs again refuses to write what it reads")
def foreach_in_place_on_views_that_are_read() -> Call:
    # A view asks by the version whether its history is still the one that it knows.
    average = torch.ones(5, 6)

    def function(x: Tensor) -> list[Tensor]:
        base = x * 2
        first, last = base[:2], base[3:]
        torch._foreach_mul_([first, last], [x[:2], x[3:]])
        torch._foreach_mul_([average], 0.9)
        torch._foreach_lerp_([average], [x.detach()], 0.1)
        torch._foreach_sin_([last])
        return [first.exp(), last * base[2:4], (x + average).cos()]

    state = {"average": average, "version": lambda: average._version}
    return Call(function, (leaf(5, 6),), state=state)


@operators()
def lists_of_outputs() -> Call:
    def function(x: Tensor) -> Tensor:
        parts = [torch.empty(6) for _ in range(5)]
        whole = torch.zeros(5, 6)
        with torch.no_grad():
            torch.unbind_copy(x, out=parts)
            torch.ops.aten.split_with_sizes_copy.out(
                x, [2, 4], 1, out=[whole[:, :2], whole[:, 2:]]
            )
        return (x * parts[1]).sin() * parts[2] * (x + whole).exp()

    return Call(function, (leaf(5, 6),))


@operators()
def unscaled_in_a_list() -> Call:
    # The list that it writes is its first argument, the flag its second.
    def function(x: Tensor) -> Tensor:
        grads, found = [x.detach() * 8, x.detach().exp()], torch.zeros(1)
        early = grads[0] + 0
        torch._amp_foreach_non_finite_check_and_unscale_(
            grads, found, torch.tensor([0.25])
        )
        return (x * grads[0]).sin() * (x - early).cos() * grads[1] + found

    return Call(function, (leaf(5, 6),))


@operators()
def storage_set_inside() -> Call:
    def function(x: Tensor) -> Tensor:
        y = x.detach().sin()
        alias = torch.empty(0)
        alias.set_(y.untyped_storage(), 0, (5, 6), (6, 1))
        tail = torch.empty(0)
        tail.set_(y.untyped_storage(), 6, (4, 6), (6, 1))
        tail.mul_(2)
        out = (x + alias).exp()
        torch.ops.aten.set_.source_Tensor(alias, x.detach().cos())
        return out * (x + alias).sin() + tail.sum()

    return Call(function, (leaf(5, 6),))


@operators()
def resized_inside() -> Call:
    def function(x: Tensor) -> Tensor:
        y = torch.empty(0).resize_(5, 6).copy_(x.detach())
        out = (x * y).sin()
        small = x.detach().exp()
        small.resize_(2, 6)
        large = torch.ones(3).resize_(5, 6)
        large.fill_(0.25)[1:3] = small
        return (out * large).cos() * torch.ones(2).resize_as_(x).fill_(2.0)

    return Call(function, (leaf(5, 6),))


@operators()
def written_by_index() -> Call:
    def function(x: Tensor) -> Tensor:
        rows, columns = torch.tensor([0, 2, 2]), torch.tensor([1, 3, 3])
        y = x.exp() * 1
        y.index_put_((rows, columns), x[0, :3], accumulate=True)
        y.index_fill_(0, torch.tensor([4]), 0.5)
        y.index_copy_(0, torch.tensor([1]), x[:1].sin())
        y.index_add_(1, columns, x[:, :3] * 2, alpha=0.5)
        y.put_(torch.tensor([7, 8]), x[3, :2].cos())
        y[rows] = y[rows] * x[:3]
        y[x > 1] = -0.25
        return y.tanh() * x

    return Call(function, (leaf(5, 6),))


@operators()
def scattered_in_place() -> Call:
    def function(x: Tensor) -> Tensor:
        places = torch.tensor([[0, 1, 2], [3, 4, 4]])
        y = torch.zeros(5, 6)
        y.scatter_(1, places, x[:2, :3].sin())
        y.scatter_add_(1, places, x[2:4, 3:].exp())
        y.scatter_(1, places[:, :1], 0.75)
        z = y.scatter_reduce(1, places, x[1:3, :3], "amax")
        return (y * x).cos() + z.tanh()

    return Call(function, (leaf(5, 6),))


@operators()
def masked_and_copied_in_place() -> Call:
    def function(x: Tensor) -> Tensor:
        y = torch.zeros(5, 6, dtype=torch.float64)
        y.copy_(x)  # To another precision.
        y[1:].copy_(x[0].sin())  # To more rows.
        mask = x.detach() > 0.5
        y.masked_fill_(mask, 0.25)
        z = x * 3
        z.masked_scatter_(mask, y.float().exp().flatten()[:30])
        z[0].zero_()
        return (z.double() * y).sin()

    return Call(function, (leaf(5, 6),))


@operators()
def data_set_on_what_was_read() -> Call:
    def function(x: Tensor) -> Tensor:
        z = x.detach() * 2
        before = (x + z).sin()
        z.data = x.detach().cos()
        y = x.exp()
        y.data = y.data[:, :3].repeat(1, 2)
        return before * (x * z).exp() * (y + 1).tanh()

    return Call(function, (leaf(5, 6),))


@operators()
def data_set_again_and_again() -> Call:
    # The place of a storage that is gone is soon another's.
    def function(x: Tensor) -> Tensor:
        total = x.sin()
        for _ in range(40):
            y = x.detach().exp()
            y.data = x.detach() + 1
            candidates = [x.detach() * 2 for _ in range(8)]
            y.data = candidates[-1]
            total = total + (x + y).sin()
        return total

    return Call(function, (leaf(5, 6),))


@operators()
def data_written_inside() -> Call:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        before = (y + 1).sin()
        y.data.add_(1.0)
        y.data[0].mul_(0.5)
        return before * y.exp() * (y - 1).cos()

    return Call(function, (leaf(5, 6),))


@operators()
def deepcopies_inside() -> Call:
    linear = nn.Linear(6, 6)

    def function(x: Tensor) -> Tensor:
        y = x.detach().sin()
        pair: list[Any] = copy.deepcopy([y, y[1:3], {"view": y.T}])
        pair[0].mul_(2)
        twin = copy.deepcopy(linear).requires_grad_(False)
        with torch.no_grad():
            twin.weight.mul_(0.5)
        again = copy.copy(y)
        out = linear(twin(x).tanh()) * pair[1].sum() * (x * pair[0]).sin()
        return out * (x + pair[2]["view"].T).cos() * again

    return Call(function, (leaf(5, 6),), state={"linear": linear})


@operators(
    not_twice="plain autograd refuses it: the second call changes what the first saved"
)
def moving_average_read_before_and_after() -> Call:
    class Average(nn.Module):
        mean: Tensor
        steps: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.ones(6))
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            before = (x + self.mean).sin()
            self.steps += 1
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            between = (x - self.mean) / self.steps
            self.mean[2:4].copy_(x.detach()[0, :2])
            return before * between.tanh() * (self.mean + x).cos()

    return Call(Average(), (leaf(5, 6),))


@operators(not_again="a region that runs again refuses to write what it reads")
def argument_written_after_it_was_read() -> Call:
    def function(x: Tensor, history: Tensor) -> Tensor:
        before = (x + history).exp()
        history[1:].copy_(history[:-1].clone())
        history[0] = x.detach().amax(0)
        return before * (x - history).sin()

    return Call(function, (leaf(5, 6), torch.ones(5, 6)))


@operators(
    not_twice="plain autograd refuses it: the second call changes what the first saved",
    not_again="a region that runs again refuses to write what it reads",
)
def argument_with_a_gradient_written() -> Call:
    x = leaf(5, 6)

    def function(y: Tensor) -> Tensor:
        before = (y + 1).cos()
        y[1:3].mul_(2).sin_()
        F.relu(y, inplace=True)
        return before * y.exp()

    return Call(function, (x * 1,), state={"x": x})


@operators(
    not_twice="plain autograd refuses it: the second call changes what the first saved",
    not_again="a region that runs again refuses to write what it reads",
)
def weight_clamped_inside() -> Call:
    weight = leaf(6, 6)

    def function(x: Tensor) -> Tensor:
        before = (x @ weight.detach().clone()).sin()
        with torch.no_grad():
            weight.clamp_(-0.5, 0.5)
        return before * (x @ weight).exp()

    return Call(function, (leaf(5, 6),), state={"weight": weight})


@operators()
def accumulated_in_a_loop() -> Call:
    def function(x: Tensor) -> list[Tensor]:
        total, seen = torch.zeros(6), []
        for row in x:
            total += row.sin()
            seen.append((total * 2).exp())
            total[1:3].mul_(row[1:3])
        return [torch.stack(seen), total.cos()]

    return Call(function, (leaf(5, 6),))


@operators()
def uninitialised_then_filled() -> Call:
    def function(x: Tensor) -> Tensor:
        filled = torch.empty(5, 6).fill_(0.5)
        filled[1:3] = x[:2].sin()
        strided = torch.empty_strided((5, 6), (1, 5)).copy_(x)
        rows = x.new_empty(5, 6)
        for i in range(5):
            rows[i] = x[i].exp() * i
        tied = torch.empty_like(x).uniform_().sub_(0.5)
        return (filled * strided).tanh() * rows.cos() + (tied * x).sin()

    return Call(function, (leaf(5, 6),))


@operators()
def integers_and_booleans_in_place() -> Call:
    def function(x: Tensor) -> Tensor:
        counts = torch.zeros(6, dtype=torch.int64)
        counts[x.detach().argmax(1)] += 1
        before = counts.clone()
        counts.mul_(2).clamp_(max=3).bitwise_xor_(1)
        mask = x.detach() > 0
        mask.logical_and_(counts > 1)
        mask[0] = True
        return (x * counts).sin().masked_fill(~mask, 0.1) * torch.where(
            mask, x * before, x.exp()
        )

    return Call(function, (leaf(5, 6),))


@operators()
def inference_mode_inside() -> Call:
    # Its tensors have no version counter.
    def function(x: Tensor) -> Tensor:
        with torch.inference_mode():
            teacher = x.sin().mul_(2)
            teacher[0] = 1.0
        return (x + teacher).exp() * (x * teacher.clone()).cos()

    return Call(function, (leaf(5, 6),))
