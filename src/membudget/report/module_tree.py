"""Per-module costs of a step, as a tree: each node is the sum of its children.

Every operator, parameter, saved tensor and byte live at the peak is attributed to
exactly one module. A module that runs operators outside its children gets an extra
child `(itself)`, or `(itself, loss)` for the model, so that each module is the sum of
its children:

    model            100        model                       100
    ├── h.0           40        ├── h.0 … h.1 (2×)           80
    ├── h.1           40   ──>  └── (itself, loss)           20
    └── (itself, loss) 20       after `fold`

The functions in this file are pure and do not need torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from itertools import groupby

from membudget.graph import Operator, StepGraph
from membudget.profile.live_ranges import (
    PeakContents,
    SavedActivation,
    peak_contents,
    saved_activations,
)

ITSELF = "(itself)"
OUTSIDE = "(itself, loss)"
"""The model's own code, and everything outside all modules."""

OPTIMIZER = "(optimizer)"


@dataclass(frozen=True, slots=True)
class Figures:
    """Bytes, operations and times of one or several modules.

    Attributes:
        parameter_bytes: Parameter bytes; shared parameters count under one name only.
        saved_bytes: Bytes of activations saved for the backward pass.
        peak_bytes: Bytes live at the peak.
        flops: Floating-point operations, forward and backward.
        forward_seconds: Time of the forward pass.
        seconds: Time of the forward and backward pass.
    """

    parameter_bytes: int = 0
    saved_bytes: int = 0
    peak_bytes: int = 0
    flops: int = 0
    forward_seconds: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Figures) -> Figures:
        """Return the sum of two sets of figures."""
        names = (field.name for field in fields(self))
        return Figures(*(getattr(self, n) + getattr(other, n) for n in names))

    @property
    def is_nothing(self) -> bool:
        """Whether all figures are zero."""
        return self == Figures()


@dataclass(frozen=True, slots=True)
class ModuleNode:
    """A module with its submodules, or several identical modules folded into one node.

    Attributes:
        label: Name in the report, such as `"attn"` or `"h.0 … h.11 (12×)"`.
        paths: Module paths of the node; empty for `(itself)` and the optimizer.
        figures: Bytes, operations and times; the sum over the children, if any.
        children: Child nodes, in forward order.
    """

    label: str
    paths: tuple[str, ...]
    figures: Figures
    children: tuple[ModuleNode, ...] = ()

    @property
    def signature(self) -> object:
        """Key shared by identical modules; it excludes times and peak bytes."""
        own = self.figures
        below = tuple((child.label, child.signature) for child in self.children)
        return (own.parameter_bytes, own.saved_bytes, own.flops, below)


@dataclass(frozen=True)
class Summary:
    """Per-module costs, saved activations and peak of one step.

    Attributes:
        modules: The tree of modules, with the model at its root.
        saved: Activations saved by autograd, largest first.
        peak: Tensors and workspace live at the peak.
    """

    modules: ModuleNode
    saved: tuple[SavedActivation, ...]
    peak: PeakContents

    @property
    def saved_bytes(self) -> int:
        """Total bytes of the activations saved by autograd."""
        return sum(activation.bytes for activation in self.saved)


def summarise(graph: StepGraph, model: str = "model") -> Summary:
    """Summarise a step, without folding identical modules."""
    saved = saved_activations(graph)
    peak = peak_contents(graph)
    own = _own_figures(graph, saved, peak)
    optimizer = [o for o in graph.operators if o.phase == "optimizer"]
    at_peak = peak.optimizer_bytes
    step = reduce(Figures.__add__, map(_cost, optimizer), Figures(peak_bytes=at_peak))
    extra = () if step.is_nothing else (ModuleNode(OPTIMIZER, (), step),)
    return Summary(_tree(model, own, extra), saved, peak)


def _own_figures(
    graph: StepGraph, saved: Iterable[SavedActivation], peak: PeakContents
) -> dict[str, Figures]:
    """Return bytes, FLOPs and times per module without children, in forward order."""
    own: defaultdict[str, Figures] = defaultdict(Figures)
    for operator in graph.operators:
        if operator.phase != "optimizer":
            own[operator.module_path] += _cost(operator)
    for storage in graph.storages:
        if storage.kind == "parameter":
            own[storage.name.rpartition(".")[0]] += Figures(
                parameter_bytes=storage.bytes
            )
    for activation in saved:
        own[activation.module_path] += Figures(saved_bytes=activation.bytes)
    for path, size in peak.by_module().items():
        own[path] += Figures(peak_bytes=size)
    return dict(own)


def _cost(operator: Operator) -> Figures:
    seconds = operator.seconds
    forward = seconds if operator.phase == "forward" else 0.0
    return Figures(flops=operator.flops, forward_seconds=forward, seconds=seconds)


def _tree(
    model: str, own: dict[str, Figures], extra: tuple[ModuleNode, ...]
) -> ModuleNode:
    below: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for path in own:
        names = path.split(".") if path else []
        for depth in range(len(names)):
            below[".".join(names[:depth])][".".join(names[: depth + 1])] = None

    def node(path: str, label: str, extra: tuple[ModuleNode, ...]) -> ModuleNode:
        children = tuple(node(p, p.rpartition(".")[2], ()) for p in below[path])
        itself = own.get(path, Figures())
        children += extra
        if not children:
            return ModuleNode(label, (path,), itself)
        if not itself.is_nothing:
            itself_label = ITSELF if path else OUTSIDE
            children = (*children, ModuleNode(itself_label, (), itself))
        return ModuleNode(label, (path,), _sum(children), children)

    return node("", model, extra)


def _sum(nodes: Iterable[ModuleNode]) -> Figures:
    return reduce(Figures.__add__, (node.figures for node in nodes), Figures())


def fold(node: ModuleNode) -> ModuleNode:
    """Fold consecutive identical modules, such as a transformer's blocks, into one."""
    children: list[ModuleNode] = []
    # From the root downwards: runs inside a merged module fold afterwards.
    for run in _equal_runs(node):
        children += [_merge(run)] if _is_foldable(run) else run
    folded = tuple(fold(child) for child in children)
    figures = _sum(folded) if folded else node.figures
    return ModuleNode(node.label, node.paths, figures, folded)


def _equal_runs(node: ModuleNode) -> Iterable[list[ModuleNode]]:
    for _, run in groupby(node.children, key=lambda child: child.signature):
        yield list(run)


def _is_foldable(run: Sequence[ModuleNode]) -> bool:
    return len(run) > 1 and all(child.paths for child in run)


def _merge(nodes: Sequence[ModuleNode], label: str = "") -> ModuleNode:
    """Merge identical module trees into one by summing their figures."""
    paths = tuple(path for node in nodes for path in node.paths)
    first, last = nodes[0], nodes[-1]
    label = label or f"{first.paths[0]} … {last.paths[0]} ({len(nodes)}×)"
    columns = zip(*(node.children for node in nodes), strict=True)
    children = tuple(_merge(column, column[0].label) for column in columns)
    return ModuleNode(label, paths, _sum(nodes), children)


def repeated_blocks(graph: StepGraph) -> tuple[str, ...]:
    """Return the paths of the run of identical modules that saves the most bytes."""

    def runs(node: ModuleNode) -> Iterable[list[ModuleNode]]:
        for run in _equal_runs(node):
            if _is_foldable(run):
                yield run
            for child in run:
                yield from runs(child)

    found = max(
        runs(summarise(graph).modules),
        key=lambda run: (_sum(run).saved_bytes, _sum(run).flops),
        default=(),
    )
    return tuple(node.paths[0] for node in found)
