"""A training loop drawn from a seed: what it does, and what it leaves behind."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from tests.loops.models import MODELS, inputs_of, loss_of

STEPS = 5


@dataclass(frozen=True)
class Loop:
    """What a training loop does; every field is drawn.

    Attributes:
        model: Name of the model.
        sizes: Size of each micro-batch, in turn.
        accumulation: Micro-batches of one step.
        autocast: Where autocast is on, if anywhere.
        scaler: Whether a `GradScaler` scales the loss.
        optimizer: Name of the optimizer, in `torch.optim`.
        is_late: Whether the optimizer is made after the first backward pass.
        sets_none: What `zero_grad` does; and whether it runs before the backward pass.
        zeroes_before: Whether `zero_grad` runs between forward and backward.
        evaluates: Whether the model is evaluated between the steps.
        frozen: Whether half of the parameters are frozen after two steps.
        clips: Whether gradients are clipped.
        averages: Whether a copy of the model follows it.
        has_labels: Whether the model computes its loss itself, if it can.
        keeps_output: Whether the loop's variables keep the last output alive.
        twice: Whether two forwards run before one backward pass.
        inner: Whether each step takes a step of its own inside (MAML).
        adversary: Whether a second model is trained in turn (GAN).
        share: The budget ÷ the peak of the plain loop.
    """

    model: str
    sizes: tuple[int, ...]
    accumulation: int
    autocast: str
    scaler: bool
    optimizer: str
    is_late: bool
    sets_none: bool
    zeroes_before: bool
    evaluates: bool
    frozen: bool
    clips: bool
    averages: bool
    has_labels: bool
    keeps_output: bool
    twice: bool
    inner: bool
    adversary: bool
    share: float

    def __str__(self) -> str:
        """Name all that differs from the simplest loop."""
        shown = {f.name: getattr(self, f.name) for f in fields(self)}
        return ", ".join(f"{k}={v}" for k, v in shown.items() if v not in (False, ""))


def drawn(seed: int) -> Loop:
    """Draw a loop."""
    draw = random.Random(seed)

    def rarely(share: float) -> bool:
        return draw.random() < share

    model = draw.choice(list(MODELS))
    base = 8 if model in ("images", "recurrent") else 16
    accumulation = draw.choice((1, 1, 2, 3, 8))
    spread = draw.choice(((1.0,), (1.0,), (0.25, 4.0), (0.5, 1.0, 2.0)))
    count = STEPS * accumulation
    grows = len(spread) > 1
    sizes = [
        max(2, int(base * (draw.uniform(spread[0], spread[-1]) if grows else 1.0)))
        for _ in range(count)
    ]
    twice, inner, adversary = rarely(0.08), rarely(0.06), rarely(0.08)
    closure = rarely(0.06)
    optimizer = draw.choice(("SGD", "AdamW", "AdamW", "Adam", "RMSprop"))
    return Loop(
        model=model,
        sizes=tuple(sizes),
        accumulation=1 if closure or inner else accumulation,
        autocast=draw.choice(("", "", "forward", "around")),
        scaler=rarely(0.1),
        optimizer="LBFGS" if closure and not inner else optimizer,
        is_late=rarely(0.2),
        sets_none=not rarely(0.2),
        zeroes_before=rarely(0.15),
        evaluates=rarely(0.2),
        frozen=rarely(0.1),
        clips=rarely(0.2),
        averages=rarely(0.15),
        has_labels=rarely(0.4),
        keeps_output=rarely(0.5),
        twice=twice,
        inner=inner,
        adversary=adversary and not inner,
        share=draw.uniform(0.3, 0.9),
    )


@dataclass
class Outcome:
    """What a loop leaves behind: all tensors of its models, and the random stream."""

    tensors: list[Tensor]

    def equals(self, other: Outcome) -> bool:
        """Return whether another loop left the same bits behind."""
        pairs = zip(self.tensors, other.tensors, strict=True)
        return all(torch.equal(one, two) for one, two in pairs)


Around = Callable[[list[nn.Module]], AbstractContextManager[Any]]


def run(
    loop: Loop, around: Around | None = None, ended: Callable[[], object] = int
) -> Outcome:
    """Run a loop, inside of what `around` returns for its models; call `ended` then."""
    torch.manual_seed(0)
    model = MODELS[loop.model]()
    adversary = MODELS[loop.model]() if loop.adversary else None
    models = [m for m in (model, adversary) if m is not None]
    with around(models) if around else nullcontext():
        for one in models:
            _train(loop, one, others=[m for m in models if m is not one])
        ended()
    states = (t for m in models for t in m.state_dict().values())
    return Outcome([*(t.detach().clone() for t in states), torch.get_rng_state()])


def _train(loop: Loop, model: nn.Module, others: list[nn.Module]) -> None:
    trainer = _Trainer(loop, model)
    sizes = iter(loop.sizes)
    for step in range(STEPS):
        if loop.frozen and step == 2:
            for parameter in list(model.parameters())[::2]:
                parameter.requires_grad_(False)
        trainer.step([next(sizes) for _ in range(loop.accumulation)])
        if loop.evaluates:
            model.eval()
            with torch.no_grad():
                model(inputs_of(loop.model, model, loop.sizes[0])[0])
            model.train()
        for other in others:
            inputs, targets = inputs_of(loop.model, other, loop.sizes[step])
            loss_of(other(inputs), targets).backward()
            other.zero_grad()


class _Trainer:
    """The state of one training loop."""

    def __init__(self, loop: Loop, model: nn.Module) -> None:
        self.loop, self.model = loop, model
        self.optimizer = None if loop.is_late else self._made()
        self.scaler = torch.amp.GradScaler("cpu", enabled=loop.scaler)
        self.average = copy.deepcopy(model) if loop.averages else None
        self.kept: Any = None

    def _made(self) -> torch.optim.Optimizer:
        kind: Any = getattr(torch.optim, self.loop.optimizer)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        more = {"max_iter": 2} if self.loop.optimizer == "LBFGS" else {}
        return kind(parameters, lr=1e-3, **more)

    def step(self, sizes: list[int]) -> None:
        """Run the micro-batches of one step, and the optimizer."""
        if self.loop.optimizer == "LBFGS" and self.optimizer is not None:
            batch = inputs_of(self.loop.model, self.model, sizes[0])

            def closure() -> float:
                self.model.zero_grad()
                return self._backward(*batch).item()

            self.optimizer.step(closure)
            return
        with self._autocast("around"):
            for size in sizes:
                self._backward(*inputs_of(self.loop.model, self.model, size))
        if self.optimizer is None:
            self.optimizer = self._made()
            if self.loop.optimizer == "LBFGS":
                return
        self.scaler.unscale_(self.optimizer)
        if self.loop.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.average is not None:
            with torch.no_grad():
                for slow, fast in self._pairs():
                    slow.lerp_(fast, 0.1)
        if not self.loop.zeroes_before:
            self.optimizer.zero_grad(set_to_none=self.loop.sets_none)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        assert self.average is not None
        yield from zip(self.average.parameters(), self.model.parameters(), strict=True)

    def _autocast(self, where: str) -> AbstractContextManager[Any]:
        is_on = self.loop.autocast == where
        return torch.autocast("cpu", torch.bfloat16) if is_on else nullcontext()

    def _backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = self._adapted(inputs, targets) if self.loop.inner else None
        if loss is None:
            loss = self._loss(inputs, targets)
        if self.loop.twice:
            loss = loss + self._loss(inputs.roll(1, 0), targets.roll(1, 0))
        is_first = self.loop.accumulation == 1 and self.optimizer is not None
        if self.loop.zeroes_before and is_first:
            self.model.zero_grad(set_to_none=self.loop.sets_none)
        self.scaler.scale(loss / self.loop.accumulation).backward()
        return loss.detach()

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with self._autocast("forward"):
            has_labels = self.loop.has_labels and hasattr(self.model, "embed")
            if has_labels and hasattr(self.model, "drop"):
                output = self.model(inputs, labels=targets)
                self.kept = output if self.loop.keeps_output else None
                return output["loss"]
            output = self.model(inputs)
            self.kept = output if self.loop.keeps_output else None
            return loss_of(output, targets)

    def _adapted(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss after one step that is differentiated, too."""
        named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        loss = self._loss(inputs, targets)
        gradients = torch.autograd.grad(loss, list(named.values()), create_graph=True)
        fast = {
            name: parameter - 0.1 * gradient
            for (name, parameter), gradient in zip(
                named.items(), gradients, strict=True
            )
        }
        output = torch.func.functional_call(self.model, fast, (inputs,))
        return loss_of(output, targets)
