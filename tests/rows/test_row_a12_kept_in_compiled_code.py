"""Row A12: inside `torch.compile` a region keeps what it keeps outside.

What is kept is counted in the matrix products of a backward: four of the gradients, and
one for each product of the forward that is recomputed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpointing
from functorch.compile import (  # type: ignore[import-untyped]
    min_cut_rematerialization_partition,
)
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import membudget as mb
from membudget import compat, policies
from tests.compiled import MARKS
from tests.oracles import CountedOperators

pytestmark = [
    *MARKS,
    pytest.mark.filterwarnings("ignore:the policy of a selective region"),
    pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd"),
]

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default}

Run = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """Two layers: two products in the forward, four in the backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh()).sin()


def gradients_of(module: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def leaf() -> Tensor:
    return torch.linspace(-1, 1, 8).reshape(2, 4).requires_grad_()


def products_outside(run: Run) -> int:
    """Return how many products the backward of a step makes that is not compiled."""
    loss = run(leaf()).sum()
    with CountedOperators() as operators:
        loss.backward()
    return operators.counts["mm"] + operators.counts["addmm"]


def products_inside(run: Run) -> int:
    """Return how many products stand in the graph of the compiled backward."""
    counts = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        counts.append(sum(node.target in PRODUCTS for node in graph.graph.nodes))
        return graph

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: graph,
        bw_compiler=count,
        partition_fn=min_cut_rematerialization_partition,
    )
    torch.compile(run, backend=backend, fullgraph=True)(leaf()).sum().backward()
    (found,) = counts
    return found


def save_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    is_saved = operator in PRODUCTS
    policy = compat.CheckpointPolicy
    return policy.MUST_SAVE if is_saved else policy.PREFER_RECOMPUTE


def is_in_up(candidate: policies.Candidate) -> bool:
    return candidate.module_path == "up"


BLOCK = Block()
KEEPS = {
    "nothing": (policies.nothing, 6),
    "matmuls": (policies.matmuls, 4),
    "everything": (policies.everything, 4),
    "composed": (policies.matmuls & policies.inside("down"), 5),
    "inverted": (~policies.operators("addmm", "tanh"), 6),
    "glob": ("up", 5),
    "globs": (["up", "down"], 4),
    "predicate on the path": (is_in_up, 5),
}


@pytest.mark.parametrize(("keep", "products"), KEEPS.values(), ids=KEEPS)
def test_row_a12_a_region_keeps_inside_what_it_keeps_outside(keep, products) -> None:
    def run(x: Tensor) -> Tensor:
        return mb.checkpoint(BLOCK, x, keep=keep)

    assert products_outside(run) == products
    assert products_inside(run) == products


CONTEXTS = {
    "function": (save_products, 4),
    "function of bool": (lambda context, operator, *_: operator in PRODUCTS, 4),
    "packets": ([aten.addmm, aten.mm], 4),
    "another operator": ([aten.bmm.default], 6),
}


@pytest.mark.parametrize(
    "checkpoint",
    [mb.checkpoint, compat.checkpoint, torch_checkpointing.checkpoint],
    ids=["mb", "compat", "torch"],
)
@pytest.mark.parametrize(("policy", "products"), CONTEXTS.values(), ids=CONTEXTS)
def test_row_a12_contexts_keep_inside_what_they_keep_outside(
    policy, products, checkpoint
) -> None:
    contexts = functools.partial(compat.create_selective_checkpoint_contexts, policy)

    def run(x: Tensor) -> Tensor:
        return checkpoint(BLOCK, x, use_reentrant=False, context_fn=contexts)

    assert products_outside(run) == products
    assert products_inside(run) == products


def test_row_a12_a_method_and_a_lambda_keep_by_submodule() -> None:
    assert products_inside(lambda x: mb.checkpoint(BLOCK.forward, x, keep="up")) == 5
    assert (
        products_inside(lambda x: mb.checkpoint(lambda y: BLOCK(y), x, keep="*.up"))
        == 5
    )


class Net(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("options", "products"),
    [
        ({}, 12),
        ({"keep": "blocks.0.up"}, 11),
        ({"keep": ["*.up"]}, 10),
        (
            {
                "context_fn": functools.partial(
                    compat.create_selective_checkpoint_contexts, [aten.addmm]
                )
            },
            8,
        ),
    ],
    ids=["nothing", "name", "pattern", "contexts"],
)
def test_row_a12_applied_regions_keep_inside_what_they_keep_outside(
    options, products
) -> None:
    net = Net()
    mb.apply(net, blocks=Block, **options)
    assert products_outside(net) == products
    assert products_inside(net) == products


def test_row_a12_a_decorated_function_keeps_inside_what_it_keeps_outside() -> None:
    region = mb.checkpoint(keep=policies.matmuls)(BLOCK)
    assert products_outside(region) == 4
    assert products_inside(lambda x: region(x)) == 4


def test_row_a12_segments_of_a_chain_keep_inside_what_they_keep_outside() -> None:
    layers = [Block(), Block()]

    def run(x: Tensor) -> Tensor:
        return mb.checkpoint_sequential(layers, 2, x, keep=KEEPS["matmuls"][0])

    assert products_outside(run) == 8
    assert products_inside(run) == 8


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "keep", ["up", policies.nothing, policies.matmuls], ids=["up", "nothing", "matmuls"]
)
def test_row_a12_the_gradients_are_plain_s(keep, backend) -> None:
    gradients = []
    for run in (
        BLOCK,
        torch.compile(lambda x: mb.checkpoint(BLOCK, x, keep=keep), backend=backend),
    ):
        x = leaf()
        loss = run(x).sum()
        BLOCK.zero_grad()
        loss.backward()
        gradients.append([loss, x.grad, *gradients_of(BLOCK)])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_row_a12_another_policy_compiles_anew() -> None:
    counts = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        counts.append(sum(node.target in PRODUCTS for node in graph.graph.nodes))
        return graph

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: graph,
        bw_compiler=count,
        partition_fn=min_cut_rematerialization_partition,
    )
    run = torch.compile(
        lambda x, keep: mb.checkpoint(BLOCK, x, keep=keep), backend=backend
    )
    for keep in (policies.matmuls, policies.nothing, policies.matmuls):
        run(leaf(), keep).sum().backward()
    assert counts == [4, 6]


def test_row_a12_a_policy_that_is_made_inside_is_refused() -> None:
    run = torch.compile(
        lambda x: mb.checkpoint(BLOCK, x, keep=policies.matmuls | policies.attention),
        backend="aot_eager",
    )
    with pytest.raises(Exception, match="make it outside"):
        run(leaf())


def test_row_a12_a_policy_that_reads_names_warns() -> None:
    keep = policies.matmuls | policies.named("h")
    run = torch.compile(lambda x: mb.checkpoint(BLOCK, x, keep=keep), backend="eager")
    with pytest.warns(UserWarning, match=r"membudget\.name does nothing inside"):
        run(leaf())


def test_row_a12_a_tensor_can_be_named_in_compiled_code() -> None:
    def run(x: Tensor) -> Tensor:
        return mb.name(x.sin(), "h").exp()

    x = leaf()
    y = torch.compile(lambda x: mb.checkpoint(run, x), backend="eager")(x)
    assert torch.equal(y, run(x))


def test_row_a12_what_is_kept_in_compiled_code_and_written_later_is_an_error() -> None:
    weight = torch.eye(4)

    def run(x: Tensor) -> Tensor:
        product = x @ weight
        return product.mul_(2).sin()

    keep = policies.matmuls
    y = torch.compile(lambda x: mb.checkpoint(run, x, keep=keep), backend="eager")(
        leaf()
    )
    with pytest.raises(RuntimeError, match="selective activation checkpoint has been"):
        y.sum().backward()
