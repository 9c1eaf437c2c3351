"""Cases about what a function does around its operators: Python, graphs, regions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import membudget as mb
from tests.replay.registry import operators
from tests.zoo import Call
from tests.zoo.case import leaf


@operators()
def branches_on_data() -> Call:
    def function(x: Tensor) -> Tensor:
        for _ in range(int(x.abs().max().item() * 2) % 3 + 1):
            x = (x * 1.5).sin()
        x = x.exp() if bool(x.sum() > 0) else x.cos()
        scale = x.detach().mean(0).tolist()
        x = x * scale[0] + float(x.detach().cpu().numpy().max())
        return x.tanh() * float(x[0, 0].detach()) if torch.equal(x, x) else x

    return Call(function, (leaf(5, 6),))


class Nested(NamedTuple):
    """A tensor and more of them."""

    value: Tensor
    others: dict[str, list[Tensor]]


@operators()
def nested_containers() -> Call:
    def function(batch: dict[str, Any], *, extra: Nested) -> dict[str, Any]:
        x = batch["x"].sin() * batch["pair"][1]
        y = (x * extra.value).exp()
        for part in extra.others["parts"]:
            y = (y * part).tanh()
        return {"y": [y, (x, None)], "nested": Nested(x.cos(), {"a": [y]}), "n": 3}

    batch = {"x": leaf(5, 6), "pair": (1.5, leaf(6))}
    extra = Nested(leaf(6), {"parts": [leaf(5, 6), leaf(5, 1)]})
    return Call(function, (batch,), {"extra": extra})


@operators()
def inputs_handed_out_again() -> Call:
    frozen = torch.randn(5, 6)

    def function(x: Tensor, y: Tensor) -> list[Any]:
        z = x.sin()
        return [x, y, z, z, x.view(-1), y[1:], frozen, (z * y).exp(), None, "text"]

    return Call(function, (leaf(5, 6), torch.randn(5, 6)))


@operators(not_again="an iterator cannot be put back")
def counted_and_remembered() -> Call:
    counts = {"calls": 0}
    seen: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        counts["calls"] += 1
        y = (x * counts["calls"]).sin()
        seen.append(y.detach() * 2)
        return y.exp() * seen[-1] * next(factors)

    factors = iter([2.0, 3.0, 5.0])
    return Call(function, (leaf(5, 6),), state={"counts": counts, "seen": seen})


@operators()
def list_that_grows() -> Call:
    key = nn.Linear(6, 6)

    def function(x: Tensor, cache: list[Tensor]) -> Tensor:
        cache.append(key(x))
        keys = torch.cat(cache)
        return (x @ keys.T).softmax(-1) @ keys

    past = [torch.randn(3, 6)]
    return Call(function, (leaf(5, 6), past), state={"key": key})


@operators()
def no_grad_inside() -> Call:
    linear = nn.Linear(6, 6)

    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = linear(x).softmax(-1)
            teacher.mul_(2)
            with torch.enable_grad():
                y = linear(x.sin())
        student = linear(x).log_softmax(-1)
        return F.kl_div(student, teacher, reduction="sum") + y.exp()

    return Call(function, (leaf(5, 6),), state={"linear": linear})


@operators()
def gradient_taken_inside() -> Call:
    critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def function(x: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        place = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(critic(place).exp().sum(), place)
        return (grad.norm(dim=1) - 1).pow(2).sum() + (x * force).sin()

    return Call(function, (leaf(5, 6),), state={"critic": critic})


@operators()
def gradient_taken_twice_inside() -> Call:
    def function(x: Tensor) -> Tensor:
        y = x.sin().exp()
        first = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
        second = torch.autograd.grad(first.sum(), x, retain_graph=True)[0]
        return y * first.cos() + (second * x).tanh()

    return Call(function, (leaf(5, 6),))


@operators()
def backward_called_inside() -> Call:
    probe = leaf(6)

    def function(x: Tensor) -> Tensor:
        (x.detach() * probe).sin().exp().sum().backward()
        assert probe.grad is not None
        return (x * probe.grad.clone()).sin() * x.exp()

    return Call(function, (leaf(5, 6),), state={"probe": probe})


@operators()
def detached_inside() -> Call:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        target = x.sin().detach()
        own = x.exp().detach_().requires_grad_()
        hard = x + (x.round() - x).detach()
        return (x * target).exp(), target.cos(), (own * x).sin(), hard.tanh()

    return Call(function, (leaf(5, 6),))


@operators()
def hooks_inside() -> Call:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        y.register_hook(lambda grad: grad * 2)
        y.retain_grad()
        z = y.exp()
        assert z.grad_fn is not None
        z.grad_fn.register_prehook(lambda grads: (grads[0] + 1,))
        return z.cos()

    return Call(function, (leaf(5, 6),))


@operators()
def checkpoint_of_torch_inside() -> Call:
    inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Tanh())

    def function(x: Tensor) -> Tensor:
        y = torch.utils.checkpoint.checkpoint(inner, x.sin(), use_reentrant=False)
        assert isinstance(y, Tensor)
        return (y * x).exp()

    return Call(function, (leaf(5, 6),), state={"inner": inner})


@operators(
    not_double="a reentrant checkpoint runs its forward without a graph",
    not_by_leaf="a reentrant checkpoint goes backward to all leaves or to none",
)
def reentrant_checkpoint_of_torch_inside() -> Call:
    inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Tanh())

    def function(x: Tensor) -> Tensor:
        y = torch.utils.checkpoint.checkpoint(inner, x.sin(), use_reentrant=True)
        assert isinstance(y, Tensor)
        return (y * x).exp()

    return Call(function, (leaf(5, 6),), state={"inner": inner})


@operators()
def rerun_inside() -> Call:
    inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Tanh())

    def function(x: Tensor) -> Tensor:
        y = mb.checkpoint(inner, x.sin())
        with mb.disable_checkpointing():
            y = mb.checkpoint(inner, y)
        return (mb.checkpoint(lambda z: z.exp() * x, y)).sin()

    return Call(function, (leaf(5, 6),), state={"inner": inner})


@operators()
def offloaded_inside() -> Call:
    linear = nn.Linear(6, 6)

    def function(x: Tensor) -> Tensor:
        y = linear(x).sin()
        with torch.autograd.graph.save_on_cpu():
            y = linear(y).exp()
        halves = torch.autograd.graph.saved_tensors_hooks(
            lambda t: t.detach() * 2, lambda t: t / 2
        )
        with halves:
            y = y.tanh()
        return y.cos()

    return Call(function, (leaf(5, 6),), state={"linear": linear})


@operators()
def error_caught_inside() -> Call:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        try:
            y = y @ y
        except RuntimeError:
            y = y @ y.T
        try:
            y[7] = 1.0
        except IndexError:
            y = y.exp()
        return y.cos()

    return Call(function, (leaf(5, 6),))


class _SineIsCosine(TorchDispatchMode):
    """Compute the cosine where the sine is asked for."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.sin.default:
            func = torch.ops.aten.cos.default
        return func(*args, **(kwargs or {}))


@operators()
def dispatch_mode_inside() -> Call:
    def function(x: Tensor) -> Tensor:
        with _SineIsCosine():
            y = (x * 2).sin().exp()
        return (y * x).sin().tanh()

    return Call(function, (leaf(5, 6),))


@operators()
def dispatch_mode_around() -> Call:
    def function(x: Tensor) -> Tensor:
        return (x * 2).sin().exp().cos()

    return Call(function, (leaf(5, 6),), around=_SineIsCosine)


class _Tagged(Tensor):
    """A tensor of another class."""


@operators()
def subclass_inside() -> Call:
    def function(x: Tensor) -> Tensor:
        y = (x * 2).as_subclass(_Tagged)
        z = y.sin().exp()
        assert type(z) is _Tagged
        weight = nn.Parameter(x.detach().T.clone())
        return (z @ weight).as_subclass(Tensor).cos()

    return Call(function, (leaf(5, 6),))


@operators()
def default_device_and_dtype_inside() -> Call:
    def function(x: Tensor) -> Tensor:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with x.device:
                y = (x * torch.ones(6)).sin() * torch.arange(6.0)
        finally:
            torch.set_default_dtype(before)
        return y.exp() * torch.full((6,), 0.5)

    return Call(function, (leaf(5, 6),))


@operators()
def values_that_die_and_are_born_again() -> Call:
    # Their memory, and the identity of their Python objects, are used again at once.
    def function(x: Tensor) -> Tensor:
        total = x.sin()
        for i in range(20):
            y = (x * i).cos()
            y = y.detach() + 1
            total = total * (y * x).tanh() + torch.full((6,), float(i)) * x
            del y
        return total.sin()

    return Call(function, (leaf(5, 6),))


@operators()
def parameters_used_twice() -> Call:
    linear, embed = nn.Linear(6, 6), nn.Embedding(6, 6)
    linear.weight = embed.weight

    def function(x: Tensor, tokens: Tensor) -> Tensor:
        y = linear(linear(embed(tokens) * x).tanh()).relu()
        return F.linear(y, embed.weight.t()[:3], linear.bias[:3]).exp()

    state = {"linear": linear, "embed": embed}
    return Call(function, (leaf(5, 6), torch.tensor([1, 1, 4, 5, 0])), state=state)


@operators()
def some_inputs_without_a_gradient() -> Call:
    def function(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        frozen = (y * z).sin()
        return (x * frozen).exp(), frozen.cos(), (x.detach() * z).tanh()

    return Call(function, (leaf(5, 6), torch.randn(5, 6), torch.randn(6)))


@operators()
def one_output_used() -> Call:
    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.sin()
        return y.exp(), y.cos().exp(), (x * y).tanh()

    return Call(function, (leaf(5, 6),), used=lambda outputs: outputs[1])


@operators()
def arguments_without_a_gradient() -> Call:
    weight = leaf(6)

    def function(x: Tensor) -> Tensor:
        return (x * 2).sin().add_(1) * weight.exp()

    return Call(function, (torch.randn(5, 6),), state={"weight": weight})
