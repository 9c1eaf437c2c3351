"""What holds the bytes at a peak: each of them dominates in one model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import membudget as mb
from membudget.errors import ByteHolder
from membudget.graph import StepGraph
from membudget.planner.planner import Planner, plain_schedule
from membudget.planning import plan_for
from membudget.report.holders import MOST_NAMED, held_at_peak
from tests.planner.models import MODELS, Calls

BEFORE = ("parameters", "inputs", "optimizer state", "earlier gradients", "other")


def holders(model: nn.Module, batch: Any, **options: Any) -> tuple[ByteHolder, ...]:
    """Return what holds the bytes at the peak of the smallest plan for a step."""
    found = mb.profile(model, batch, fake=True, **options)
    with pytest.raises(mb.BudgetError, match="is predicted to take") as raised:
        plan_for(found, model, "1%")
    smallest = Planner(found.graph).smallest()
    total = smallest.peak_bytes + found.graph.static.total
    assert sum(holder.bytes for holder in raised.value.holders) == total
    return raised.value.holders


def of_step(found: tuple[ByteHolder, ...]) -> list[ByteHolder]:
    return [holder for holder in found if holder.kind not in BEFORE]


def blocks(width: int, inner: int, count: int = 4) -> list[nn.Module]:
    return [
        nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
        for _ in range(count)
    ]


def cross_entropy(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


def test_the_logits_and_their_loss_dominate():
    model = nn.Sequential(*blocks(16, 16), nn.Linear(16, 2048))
    largest, *_ = holders(model, torch.randn(256, 16), loss_fn=cross_entropy)
    assert largest.kind == "loss"
    assert largest.name == "the output of 4 and its loss, float32[256, 2048]"
    assert largest.bytes >= 2 * 256 * 2048 * 4
    assert "in chunks" in largest.remedy


def test_the_working_set_of_one_layer_dominates():
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.mlp = nn.Sequential(nn.Linear(8, 512), nn.GELU(), nn.Linear(512, 8))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mlp(self.norm(x))

    model = nn.Sequential(*(Layer() for _ in range(4)))
    largest, *_ = holders(model, torch.randn(256, 8))
    assert largest.kind == "layer"
    path = largest.name.removeprefix("the working set of ")
    assert path.partition(".")[2].startswith("mlp")
    assert path in dict(model.named_modules())
    assert largest.bytes >= 2 * 256 * 512 * 4


def test_the_gradient_of_an_embedding_dominates():
    embed = nn.Embedding(20_000, 16)
    model = nn.Sequential(embed, *blocks(16, 16))
    embedding, *_ = of_step(holders(model, torch.randint(100, (4, 8))))
    assert embedding.kind == "embedding"
    assert (embedding.name, embedding.bytes) == ("the gradient of 0.weight", 1_280_000)
    assert "sparse=True" in embedding.remedy


def test_the_gradient_of_a_tied_embedding_is_counted_with_what_is_added_to_it():
    def ends(model: Any, ids: Tensor) -> Tensor:
        return (
            F.linear(model.body(model.embed(ids)), model.embed.weight).square().mean()
        )

    body = nn.Sequential(*blocks(16, 16))
    model = Calls(ends, embed=nn.Embedding(20_000, 16), body=body)
    embedding, *_ = of_step(holders(model, torch.randint(100, (1, 2))))
    assert embedding.kind == "embedding"
    copies, rest = divmod(embedding.bytes, 1_280_000)
    assert (copies >= 2, rest) == (True, 0)


def test_gradients_dominate_what_the_step_makes():
    model = nn.Sequential(*blocks(128, 128))
    gradients, *_ = of_step(holders(model, torch.randn(4, 128)))
    assert gradients.kind == "gradients"
    assert gradients.bytes == sum(p.nbytes for p in model.parameters())
    assert "register_post_accumulate_grad_hook" in gradients.remedy


def test_what_lives_beside_the_step_dominates():
    model = nn.Sequential(*blocks(128, 128))
    batch = torch.randn(4, 128)
    found = holders(model, batch, optimizer=torch.optim.Adam)
    by_kind = {holder.kind: holder.bytes for holder in found}
    parameters = sum(p.nbytes for p in model.parameters())
    assert found[0].kind == "optimizer state"
    assert by_kind["optimizer state"] >= 2 * parameters
    assert by_kind["parameters"] == parameters


def test_temporaries_of_the_optimizer_are_its_own():
    model = nn.Sequential(*blocks(128, 128))
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    found = of_step(holders(model, torch.randn(4, 128), optimizer=optimizer))
    assert "optimizer step" in [holder.kind for holder in found]


def test_what_a_model_runs_itself_is_its_own_working_set():
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight).sin().exp().cos()

    largest, *_ = holders(Functional(), torch.randn(512, 8))
    assert largest.name == "the working set of the model itself and its loss"


def test_what_the_model_itself_runs_between_modules_is_told_from_its_loss():
    def wide(model: Any, x: Tensor) -> Tensor:
        y = model.into(x)
        y = torch.cat([y] * 64, -1).sin().exp().cos()
        return model.out(y.mean(-1, keepdim=True))

    model = Calls(wide, into=nn.Linear(8, 8), out=nn.Linear(1, 1))
    largest, *_ = holders(model, torch.randn(512, 8))
    assert largest.name == "the working set of the model itself"


def test_a_module_above_repeated_blocks_is_not_taken_for_one_of_them():
    deep = nn.Sequential(nn.Sequential(*blocks(16, 256)), nn.Linear(16, 16))
    largest, *_ = of_step(holders(deep, torch.randn(512, 16)))
    assert largest.kind == "layer"
    assert largest.name.startswith("the working set of 0.")


def pairs(graph: StepGraph) -> list[tuple[Any, int]]:
    return [(plain_schedule(graph), 0), (Planner(graph).smallest(), 10**6)]


@pytest.mark.parametrize("name", MODELS)
def test_the_holders_add_up_to_the_peak_and_are_few(name):
    torch.manual_seed(0)
    graph = mb.profile(*MODELS[name](), fake=True).graph
    for schedule, before_bytes in pairs(graph):
        found = held_at_peak(graph, schedule, before_bytes)
        assert found.bytes == schedule.peak_bytes + before_bytes
        *named, last = found.holders
        sizes = [holder.bytes for holder in named]
        assert sizes == sorted(sizes, reverse=True)
        assert len(named) <= MOST_NAMED
        assert all(holder.bytes > 0 for holder in found.holders)
        assert all(h.remedy and h.kind != "other" for h in named)
        assert last.kind == "other" or last.remedy


def test_state_that_is_yet_to_be_made_is_no_part_of_what_is_there():
    model = nn.Sequential(*blocks(128, 128))
    options: Any = {"fake": True, "optimizer": torch.optim.Adam}
    graph = mb.profile(model, torch.randn(4, 128), **options).graph
    there = graph.static.parameters + 1000
    found = held_at_peak(graph, plain_schedule(graph), there)
    assert "optimizer state" not in [holder.kind for holder in found.holders]
    assert found.bytes == plain_schedule(graph).peak_bytes + there
