"""A micro-batch is recorded without memory, and nothing of the loop's is touched."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import membudget as mb
from membudget.loop.micro_batch import LOSS_COPIES, MicroBatchStep, RecordedBatch
from membudget.memory import peak
from membudget.profile import profile_step
from tests.loop.training import counted
from tests.loops.models import Language


def recorded(model: nn.Module, *args: torch.Tensor) -> RecordedBatch:
    return RecordedBatch(profile_step(MicroBatchStep(model, args, {}), fake=True))


def test_the_peak_is_that_of_the_loop_with_its_tail():
    model = Language()
    tokens = torch.randint(64, (4, 32))
    found = recorded(model, tokens)
    logits_bytes = 4 * 32 * 64 * 4
    assert found.output_bytes == logits_bytes
    assert found.assumed_bytes == (1 + LOSS_COPIES) * logits_bytes

    def step() -> torch.Tensor:
        logits = model(tokens)
        logits.backward(torch.ones_like(logits))
        return logits

    plain = peak(step).peak_bytes
    predicted = found.with_tail(found.output_bytes).peak_bytes
    assert abs(predicted - plain) <= 0.005 * plain
    assert found.with_tail(1 << 30).peak_bytes >= 1 << 30


def test_a_model_that_returns_its_loss_has_no_assumed_tail():
    model, tokens = Language(), torch.randint(64, (4, 8))
    assert recorded(model, tokens, tokens).returns_loss


def test_hooks_that_step_an_optimizer_do_not_run():
    model = Language()
    stepped: list[torch.Tensor] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(stepped.append)
    recorded(model, torch.randint(64, (2, 8)))
    assert not stepped
    model(torch.randint(64, (2, 8))).sum().backward()
    assert len(stepped) == len(list(model.parameters()))


def test_hooks_that_wait_for_complete_gradients_do_not_run():
    """DistributedDataParallel and Megatron hang theirs on autograd's own nodes."""
    model = Language()
    views: list[Any] = [
        parameter.view_as(parameter) for parameter in model.parameters()
    ]
    accumulators = [view.grad_fn.next_functions[0][0] for view in views]
    complete: list[str] = []
    for node in accumulators:
        node.register_hook(lambda *_: complete.append("accumulated"))
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: complete.append("made"))
    recorded(model, torch.randint(64, (2, 8)))
    assert not complete
    model(torch.randint(64, (2, 8))).sum().backward()
    assert len(complete) == 2 * len(accumulators)


def test_gradients_of_a_recording_are_those_of_the_parameters():
    model = Language()
    graph = recorded(model, torch.randint(64, (2, 8))).profile.graph
    found = {s.name: s.bytes for s in graph.storages if s.kind == "gradient"}
    assert found == {name: p.nbytes for name, p in model.named_parameters()}
    assert all(p.grad is None for p in model.parameters())


def test_what_made_the_arguments_is_not_run_backward():
    maker, model = nn.Linear(8, 32), nn.Sequential(nn.Linear(32, 32), nn.ReLU())
    made = maker(torch.ones(4, 8)).exp()
    recorded(model, made)
    made.sum().backward()  # Its graph is still there.
    assert maker.weight.grad is not None
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_that_are_there_stay_what_they_are():
    model, tokens = Language(), torch.randint(64, (2, 8))
    model(tokens).sum().backward()
    before = [p.grad for p in model.parameters()]
    contents = [g.clone() for g in before if g is not None]
    recorded(model, tokens)
    after = [p.grad for p in model.parameters()]
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert all(map(torch.equal, contents, [g for g in after if g is not None]))


def test_modes_of_the_loop_do_not_see_a_recording():
    model, tokens = Language(), torch.randint(64, (2, 8))

    def flops(limit: str | None) -> int:
        budget = mb.budget(model, limit or "100%")
        if limit:
            budget.start()
        with FlopCounterMode(display=False) as counter:
            model(tokens).sum().backward()
        budget.stop()
        return int(counter.get_total_flops())

    assert flops(None) == flops("1GiB")


class Dropping(nn.Module):
    """Drops its layer at random."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input, scaled, through the layer or not."""
        return x * self.scale if torch.rand(()) < 0.5 else self.layer(x * self.scale)


def test_a_call_in_which_chance_decides_has_no_region():
    calls = recorded(Dropping(), torch.ones(2, 4)).profile.graph.calls
    assert [call.path for call in calls] == ["", "layer"]
    assert [call.end > call.start for call in calls] == [False, True]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (part.unflatten(-1, (2, 16)) for part in self.project(x).chunk(3, -1))
        heads = (part.transpose(1, 2) for part in parts)
        return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


@torch.no_grad()
def test_kernels_that_are_tried_take_no_more_than_the_budget():
    """Queries, keys and values share memory, in a trial as well."""
    model, x = nn.Sequential(Attention(), Attention()), torch.randn(8, 512, 32)
    with counted() as seen:
        model(x)
    limit = int(1.05 * seen.most_bytes)
    with counted() as seen, mb.budget(model, limit):
        model(x)
    assert seen.most_bytes <= limit
