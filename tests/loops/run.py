"""Run a training loop, and note what it leaves behind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.devices import device_type, rng_state
from tests.loops.loop import INSIDE, STEPS, Loop
from tests.loops.models import (
    MODELS,
    Language,
    enter_autocast,
    generate,
    inputs_of,
    loss_of,
)

OVERFLOWING = 2.0**127
"""A scale at which gradients overflow until it was halved a few times."""

NEW_TOKENS = 3


@dataclass
class Outcome:
    """What a loop leaves behind: all tensors of its models, and the random streams."""

    tensors: list[Tensor]

    @classmethod
    def of(cls, models: list[nn.Module]) -> Outcome:
        """Copy what a loop left behind just now."""
        states = (t for model in models for t in model.state_dict().values())
        return cls([*(t.detach().to("cpu", copy=True) for t in states), rng_state()])

    def equals(self, other: Outcome) -> bool:
        """Return whether another loop left the same bits behind."""
        pairs = zip(self.tensors, other.tensors, strict=True)
        return all(torch.equal(one, two) for one, two in pairs)


Around = Callable[[list[nn.Module]], AbstractContextManager[Any]]


def run(loop: Loop, around: Around | None = None) -> list[nn.Module]:
    """Run a loop, inside of what `around` returns for its models; return these."""
    torch.manual_seed(0)
    models = [_made(loop) for _ in range(1 + loop.adversary)]
    with around(models) if around else nullcontext():
        for one in models:
            _train(loop, one, others=[m for m in models if m is not one])
    return models


def _made(loop: Loop) -> nn.Module:
    model = MODELS[loop.model]()
    if loop.autocast in INSIDE:
        blocks = getattr(model, "blocks", model).children()
        for part in (model,) if loop.autocast == "inside" else blocks:
            enter_autocast(part, device_type())
    return model


def _train(loop: Loop, model: nn.Module, others: list[nn.Module]) -> None:
    trainer = _Trainer(loop, model)
    sizes = iter(loop.sizes)
    for step in range(STEPS):
        if loop.frozen and step == 2:
            for parameter in list(model.parameters())[::2]:
                parameter.requires_grad_(False)
        trainer.step([next(sizes) for _ in range(loop.accumulation)])
        if loop.evaluates or loop.generates:
            model.eval()
            _use(loop, model)
            model.train()
        for other in others:
            inputs, targets = inputs_of(loop.model, other, loop.sizes[step])
            loss_of(other(inputs), targets).backward()
            other.zero_grad()


@torch.no_grad()
def _use(loop: Loop, model: nn.Module) -> None:
    """Do with the model what the loop does between its steps, without gradients."""
    inputs, _ = inputs_of(loop.model, model, loop.sizes[0])
    if loop.evaluates:
        model(inputs)
    if loop.generates and not inputs.is_floating_point():
        has_cache = loop.generates == "cached" and isinstance(model, Language)
        generate(model, inputs, NEW_TOKENS, has_cache)


class _Trainer:
    """The state of one training loop."""

    def __init__(self, loop: Loop, model: nn.Module) -> None:
        self.loop, self.model = loop, model
        self.optimizer = None if loop.is_late else self._made()
        scale = OVERFLOWING if loop.scaler == "overflows" else 2.0**16
        self.scaler = torch.amp.GradScaler(
            device_type(), scale, enabled=bool(loop.scaler)
        )
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
        return torch.autocast(device_type(), torch.bfloat16) if is_on else nullcontext()

    def _backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = (self._adapted if self.loop.inner else self._loss)(inputs, targets)
        if self.loop.twice:
            loss = loss + self._loss(inputs.roll(1, 0), targets.roll(1, 0))
        is_first = self.loop.accumulation == 1 and self.optimizer is not None
        if self.loop.zeroes_before and is_first:
            self.model.zero_grad(set_to_none=self.loop.sets_none)
        self.scaler.scale(loss / self.loop.accumulation).backward()
        return loss.detach()

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with self._autocast("forward"):
            if self.loop.has_labels and isinstance(self.model, Language):
                output = self.model(inputs, labels=targets)
                self.kept = output if self.loop.keeps_output else None
                return output["loss"]
            output = self.model(inputs)
            self.kept = output if self.loop.keeps_output else None
            return loss_of(output, targets)

    def _adapted(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss after one step that is differentiated, too.

        Of torch's attentions, only that of operators has a second derivative.
        """
        with sdpa_kernel(SDPBackend.MATH):
            return self._after_inner_step(inputs, targets)

    def _after_inner_step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        loss = self._loss(inputs, targets)
        gradients = torch.autograd.grad(
            loss, list(named.values()), create_graph=True, allow_unused=True
        )
        fast = {
            name: parameter - 0.1 * gradient
            for (name, parameter), gradient in zip(
                named.items(), gradients, strict=True
            )
            if gradient is not None
        }
        output = torch.func.functional_call(self.model, fast, (inputs,))
        return loss_of(output, targets)
