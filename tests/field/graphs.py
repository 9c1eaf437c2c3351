"""Graph networks of torch_geometric, on random graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.field.case import Made, family

WIDTH = 48


class GraphNetwork(nn.Module):
    """Layers that pass messages, dropout between them, one class per node."""

    def __init__(self, layer: Callable[[int, int], nn.Module], depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(WIDTH, WIDTH) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = nodes
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.dropout(F.relu(norm(layer(x, edges))), 0.2, self.training)
        return F.cross_entropy(self.head(x), torch.arange(len(x)) % 7)


def graph_network(layer: Callable[[int, int], nn.Module]) -> Made:
    """Return a network and graphs; another shape has fewer nodes and edges."""
    return Made(GraphNetwork(layer), graph)


def graph(other: bool) -> tuple[Tensor, Tensor]:
    """Return nodes and edges."""
    nodes, edges = (1200, 5000) if other else (1600, 8000)
    return torch.randn(nodes, WIDTH), torch.randint(0, nodes, (2, edges))


@family("graph")
def graph_convolution() -> Made:
    from torch_geometric.nn import GCNConv

    return graph_network(GCNConv)


@family("graph")
def graph_attention() -> Made:
    from torch_geometric.nn import GATv2Conv

    return graph_network(
        lambda first, second: GATv2Conv(first, second // 4, heads=4, dropout=0.1)
    )


@family("graph")
def graph_isomorphism() -> Made:
    from torch_geometric.nn import GINConv

    def layer(first: int, second: int) -> nn.Module:
        made: nn.Module = GINConv(
            nn.Sequential(
                nn.Linear(first, 2 * second),
                nn.BatchNorm1d(2 * second),
                nn.ReLU(),
                nn.Linear(2 * second, second),
            )
        )
        return made

    return graph_network(layer)


@family("graph")
def graph_sage() -> Made:
    from torch_geometric.nn import SAGEConv

    return graph_network(lambda first, second: SAGEConv(first, second, aggr="max"))


@family("graph")
def principal_neighbourhood() -> Made:
    from torch_geometric.nn import PNAConv

    return graph_network(
        lambda first, second: PNAConv(
            first,
            second,
            aggregators=["mean", "min", "max", "std"],
            scalers=["identity", "amplification"],
            deg=torch.tensor([0, 10, 40, 200, 300, 250]),
            towers=4,
            divide_input=True,
        )
    )
