"""Text reports of a profile and of a sweep over sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from membudget.graph import StepGraph
from membudget.planner.timeline import Timeline
from membudget.profile.live_ranges import (
    LiveItem,
    PeakContents,
    SavedActivation,
)
from membudget.report import (
    Padding,
    Table,
    aligned,
    empty_table,
    flops,
    marks,
    page,
    share,
    sparkline,
    time,
)
from membudget.report.advice import advise, operator_text
from membudget.report.kind_text import kind_lines
from membudget.report.module_tree import (
    OUTSIDE,
    Figures,
    ModuleNode,
    Summary,
    fold,
    summarise,
)
from membudget.text import format_bytes

if TYPE_CHECKING:
    from membudget.profile import Sweep
    from membudget.profile.result import Profile

WIDTH = 120  # Wider than other reports: the module table has eight columns.
COLUMNS = 80
"""Width of the sparkline."""

MOST_ROWS = 32
"""The module table is cut at the depth at which it would have more rows."""

MOST_CHILDREN = 24
"""How many children of a module are shown, the largest; the others share a row."""

TOP = 8
"""How many saved tensors, and how many storages at the peak, are listed."""


def profile_text(found: Profile) -> str:
    """Return the report of a profile: sizes, timeline, modules, peak and advice."""
    graph, line = found.graph, found.timeline
    summary = summarise(graph, found.model)
    parts = (
        *_header(found),
        *_sizes(graph, line),
        *kind_lines(graph),
        *_timeline(graph, line),
        *_modules(summary),
        *_saved(summary),
        *_peak(summary.peak),
        *_advice(graph, summary.peak),
    )
    return page(parts, WIDTH).rstrip()


# Parts of the report.


def _header(found: Profile) -> Iterator[Any]:
    graph = found.graph
    cost = "measured" if found.cost == "measured" else f"roofline of {found.cost}"
    yield f"{found.model}: one training step, recorded on {found.tensors} tensors"
    yield f"  loss   {found.loss_from}"
    seconds = {
        phase: sum(o.seconds for o in graph.operators if o.phase == phase)
        for phase in ("forward", "backward", "optimizer")
    }
    parts = ", ".join(f"{name} {time(s)}" for name, s in seconds.items() if s)
    yield f"  time   {time(sum(seconds.values()))} ({parts}), {cost}"
    yield f"  work   {len(graph.operators):,} operators, {flops(graph.flops)}"
    for note in found.notes:
        yield Padding(f"note   {note}", (0, 0, 0, 2))


def _sizes(graph: StepGraph, line: Timeline) -> Iterator[Any]:
    yield ""
    static = graph.static
    table = empty_table(("", "left"), ("", "right"), ("bytes", "right"))
    for name, size in (
        ("parameters", static.parameters),
        ("buffers", static.buffers),
        ("inputs", static.inputs),
        ("optimizer state", static.optimizer),
        ("the step, at its peak", line.peak_bytes),
    ):
        table.add_row(name, format_bytes(size), f"{size:,}")
    total = static.total + line.peak_bytes
    table.add_section()
    table.add_row("total", format_bytes(total), f"{total:,}")
    yield table


def _timeline(graph: StepGraph, line: Timeline) -> Iterator[str]:
    count = len(graph.operators)
    if not count:
        return
    yield ""
    yield "live bytes that the step allocated, operator by operator"
    alive = [
        size + operator.workspace_bytes
        for size, operator in zip(line.alive_bytes, graph.operators, strict=True)
    ]
    yield f"  {sparkline(alive, COLUMNS)}"
    begins = [(0, "forward"), (graph.backward_start, "backward")]
    if graph.optimizer_start < count:
        begins.append((graph.optimizer_start, "optimizer"))
    yield f"  {marks([(_column(m, count), f'└{text}') for m, text in begins])}"
    peak = f"▲ {format_bytes(line.peak_bytes)}"
    yield f"  {marks([(_column(line.peak_moment, count), peak)])}"


def _column(moment: int, count: int) -> int:
    """Return the column of the sparkline that contains an op index."""
    return moment * COLUMNS // count


def _modules(summary: Summary) -> Iterator[Any]:
    yield ""
    table = empty_table(
        ("module", "left"),
        ("parameters", "right"),
        ("saved", "right"),
        ("at peak", "right"),
        ("FLOP", "right"),
        ("forward", "right"),
        ("time", "right"),
        ("share", "right"),
    )
    root = fold(summary.modules)
    for depth, node in visible(root):
        table.add_row(f"{'  ' * depth}{node.label}", *_cells(node.figures, root))
    yield table


def _cells(figures: Figures, root: ModuleNode) -> Iterator[str]:
    for size in (figures.parameter_bytes, figures.saved_bytes, figures.peak_bytes):
        yield format_bytes(size) if size else "·"
    yield flops(figures.flops) if figures.flops else "·"
    yield time(figures.forward_seconds) if figures.forward_seconds else "·"
    yield time(figures.seconds) if figures.seconds else "·"
    yield share(figures.seconds, root.figures.seconds)


def visible(root: ModuleNode) -> list[tuple[int, ModuleNode]]:
    """Return the rows of the module table, each with its depth in the tree.

    The tree is cut at the greatest depth that yields at most `MOST_ROWS` rows; the
    children of the root are always shown.
    """
    rows = _rows(root, 0, 1)
    for most in range(2, _height(root) + 1):
        deeper = _rows(root, 0, most)
        if len(deeper) > MOST_ROWS:
            break
        rows = deeper
    return rows


def _rows(node: ModuleNode, depth: int, most: int) -> list[tuple[int, ModuleNode]]:
    rows = [(depth, node)]
    if depth < most:
        for child in _largest(node.children):
            rows += _rows(child, depth + 1, most)
    return rows


def _height(node: ModuleNode) -> int:
    return max((1 + _height(child) for child in node.children), default=0)


def _largest(nodes: Sequence[ModuleNode]) -> list[ModuleNode]:
    """Return the nodes in order; if there are many, merge the smallest into one."""
    if len(nodes) <= MOST_CHILDREN:
        return list(nodes)

    def weight(index: int) -> tuple[int, float]:
        figures = nodes[index].figures
        return figures.saved_bytes + figures.peak_bytes, figures.seconds

    # One row stays free for the sum of the others.
    kept = set(sorted(range(len(nodes)), key=weight)[1 - MOST_CHILDREN :])
    rest = [node for index, node in enumerate(nodes) if index not in kept]
    others = sum((node.figures for node in rest), Figures())
    row = ModuleNode(f"({len(rest)} more)", (), others)
    return [node for index, node in enumerate(nodes) if index in kept] + [row]


def _saved(summary: Summary) -> Iterator[Any]:
    count, total = len(summary.saved), summary.saved_bytes
    yield ""
    yield (
        f"saved for the backward pass: {format_bytes(total)} ({total:,} bytes) in "
        f"{count:,} storages{', most of it by' if count else ''}"
    )
    if count:
        yield _origins(summary.saved, total)


def _peak(peak: PeakContents) -> Iterator[Any]:
    if peak.operator is None:
        return
    total = peak.peak_bytes
    yield ""
    yield f"the peak: {format_bytes(total)} ({total:,} bytes), in"
    yield f"  {operator_text(peak.operator)}"
    yield ""
    groups = empty_table(("live then", "left"), ("", "right"), ("share", "right"))
    for group, size in peak.by_group().items():
        groups.add_row(group, format_bytes(size), share(size, total))
    yield groups
    yield ""
    yield _origins(peak.items, total)


def _origins(items: Sequence[SavedActivation | LiveItem], total: int) -> Table:
    table = empty_table(
        ("", "right"),
        ("share", "right"),
        ("", "right"),
        ("module", "left"),
        ("line", "left"),
        ("operator", "left"),
        ("tensor", "left"),
    )
    # Items that differ only in the number of their block share a row.
    counts = Counter((_origin(item), item.bytes) for item in items)
    rows = sorted(counts.items(), key=lambda row: -row[0][1] * row[1])
    for (origin, size), count in rows[:TOP]:
        times = f"{count} ×" if count > 1 else ""
        size *= count
        table.add_row(format_bytes(size), share(size, total), times, *origin)
    return table


def _origin(item: SavedActivation | LiveItem) -> tuple[str, ...]:
    """Return the module path (numbers as `*`), line, operator and tensor of an item."""
    names = item.module_path.split(".")
    path = ".".join("*" if name.isdigit() else name for name in names)
    operator = item.operator.removeprefix("aten.").removesuffix(".default")
    tensor = f"{item.dtype}{list(item.shape)}" if item.dtype else "its workspace"
    return path or OUTSIDE, item.line, operator, tensor


def _advice(graph: StepGraph, peak: PeakContents) -> Iterator[Any]:
    yield ""
    yield "advice"
    for text in advise(graph, peak).texts:
        yield Padding(f"- {text}", (0, 0, 0, 2))


def sweep_text(found: Sweep) -> str:
    """Return the measured sizes of a sweep as a table, followed by fitted curves."""
    titles = (found.name, "total", "static", "peak", "saved")
    rows = []
    for p in found.points:
        sizes = (p.total_bytes, p.static_bytes, p.peak_bytes, p.saved_bytes)
        rows.append((str(p.size), *map(format_bytes, sizes)))
    lines = aligned([titles, *rows])
    lines += ["", "bytes, fitted:"]
    for quantity, fit in found.fits():
        off = f"(off by {fit.residual:.2%}, at most)"
        lines.append(f"  {quantity:6} = {fit.text(found.name)}   {off}")
    if len({found.curve_at(point.size) for point in found.points}) > 1:
        moved = f"another operator makes the peak as {found.name} grows"
        lines.append(f"  {moved}; `largest` uses a polynomial per operator")
    return "\n".join(lines)
