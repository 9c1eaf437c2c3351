"""Steps made by hand, and what is known of small ones by trying everything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from hypothesis import strategies as st

from membudget.graph import (
    Kind,
    ModuleCall,
    Operator,
    Saved,
    StaticBytes,
    StepGraph,
    Storage,
    Value,
)
from membudget.planner.choice import Choice, made_in
from membudget.planner.plan import KeptOutput, Plan, RegionPlan
from membudget.planner.simulate import simulate

PLAN = Plan(
    model="Sequential",
    parameters=("0.weight float32[4,4]",),
    budget_bytes=1000,
    plain_peak_bytes=2000,
    peak_bytes=900,
    slowdown=1.25,
    bound=1.0,
    cost="measured",
    regions=(
        RegionPlan("0", 3, (KeptOutput(1, 0, "aten.addmm.default"),)),
        RegionPlan("1", 3, ()),
    ),
)
"""A plan that says little."""


def operator(phase: str, seconds: float) -> Operator:
    """Return an operator that touches nothing."""
    return Operator(
        name=f"test.{phase}",
        phase=phase,  # type: ignore[arg-type]
        module_path="",
        line="",
        inputs=(),
        outputs=(),
        flops=0,
        read_bytes=0,
        written_bytes=0,
        workspace_bytes=0,
        seconds=seconds,
        is_view=False,
        is_random=False,
        must_keep=False,
    )


@dataclass
class Draft:
    """A step in the making: the backward is the forward the other way around.

    Each operator of the forward has one in the backward, which asks for what the former
    saved and allocates nothing. A storage is released after its last use.
    """

    operators: list[Operator] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    births: list[int] = field(default_factory=list)
    saved: list[tuple[int, int, bool]] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    kinds: dict[int, Kind] = field(default_factory=dict)

    def outside(self, size: int = 1, kind: Kind = "outside") -> int:
        """Return a value that was there before the step."""
        storage = self._storage(size, -1)
        self.kinds[storage] = kind
        return self._value(storage, 0, -1)

    def run(
        self,
        *inputs: int,
        makes: Sequence[int] = (),
        writes: Sequence[int] = (),
        seconds: float = 1.0,
        workspace: int = 0,
        must_keep: bool = False,
        is_view: bool = False,
    ) -> list[int]:
        """Run an operator; return its values, those that it wrote last."""
        moment = len(self.operators)
        storages = [self._storage(size, moment) for size in makes]
        storages += [self.values[value].storage for value in writes]
        outputs = [self._value(s, i, moment) for i, s in enumerate(storages)]
        made = operator("forward", seconds)
        self.operators.append(
            replace(
                made,
                inputs=(*inputs, *writes),
                outputs=tuple(outputs),
                written_bytes=sum(makes),
                workspace_bytes=workspace,
                must_keep=must_keep,
                is_view=is_view,
            )
        )
        return outputs

    def view(self, value: int) -> int:
        """Return a view of a value."""
        moment = len(self.operators)
        self.operators.append(replace(operator("forward", 0.0), is_view=True))
        output = self._value(self.values[value].storage, 0, moment)
        view = replace(self.operators[moment], inputs=(value,), outputs=(output,))
        self.operators[moment] = view
        return output

    def save(self, *values: int, is_asked: bool = True) -> None:
        """Let the last operator save values for the backward."""
        moment = len(self.operators) - 1
        self.saved += [(value, moment, is_asked) for value in values]

    def hold(self, value: int) -> None:
        """Let the user hold a value until the end of the step."""
        self.held.add(self.values[value].storage)

    def finish(
        self, calls: Iterable[tuple[str, int, int]] = (), backward_s: float = 1.0
    ) -> StepGraph:
        """Return the step."""
        count = len(self.operators)
        saved = [
            Saved(
                value=value,
                moment=moment,
                asked=(2 * count - 1 - moment,) if is_asked else (),
                freed=2 * count - moment,
                module_path="",
                line="",
            )
            for value, moment, is_asked in self.saved
        ]
        backward = [operator("backward", backward_s) for _ in range(count)]
        return StepGraph(
            operators=(*self.operators, *backward),
            values=tuple(self.values),
            storages=tuple(self._finished(s, saved) for s in range(len(self.sizes))),
            saved=tuple(saved),
            calls=tuple(ModuleCall(*call) for call in calls),
            backward_start=count,
            optimizer_start=2 * count,
            static=StaticBytes(0, 0, 0, 0),
        )

    def _finished(self, storage: int, saved: Sequence[Saved]) -> Storage:
        end = 2 * len(self.operators)
        uses = [
            moment
            for moment, op in enumerate(self.operators)
            if any(self.values[v].storage == storage for v in (*op.inputs, *op.outputs))
        ]
        last = max(uses, default=-1) + 1
        freed = [s.freed for s in saved if self.values[s.value].storage == storage]
        released: int | None = last if freed else None
        death = max([last, *freed])
        if storage in self.held or self.births[storage] < 0:
            released, death = None, end
        return Storage(
            bytes=self.sizes[storage],
            kind=self.kinds.get(storage, "activation"),
            name="",
            birth=self.births[storage],
            death=death,
            released=released,
        )

    def _storage(self, size: int, birth: int) -> int:
        self.sizes.append(size)
        self.births.append(birth)
        return len(self.sizes) - 1

    def _value(self, storage: int, output: int, moment: int) -> int:
        size = self.sizes[storage]
        self.values.append(Value(storage, size, (size,), "uint8", moment, output))
        return len(self.values) - 1


def chain_of(
    sizes: Sequence[int], seconds: Sequence[float], per_call: int = 0
) -> StepGraph:
    """Return a chain of operators, each of which saves what it reads.

    Args:
        sizes: What each operator makes.
        seconds: What each takes.
        per_call: How many operators a module has; 0 for no modules.
    """
    draft = Draft()
    value = draft.outside()
    for size, cost in zip(sizes, seconds, strict=True):
        (made,) = draft.run(value, makes=[size], seconds=cost)
        draft.save(value)
        value = made
    starts = range(0, len(sizes), per_call) if per_call else ()
    calls = [(f"h.{i}", s, min(s + per_call, len(sizes))) for i, s in enumerate(starts)]
    return draft.finish(calls)


@st.composite
def drafts(
    draw: st.DrawFn,
    in_place: bool = True,
    multiple: bool = True,
    pinned: bool = True,
    most: int = 7,
) -> StepGraph:
    """Make a small random step.

    What an operator writes in place was read by none before it, and is the only output
    of what made it: see the tests of `frontier` that are expected to fail.
    """
    draft = Draft()
    draft.run()  # Nothing: its backward, the last moment, is after all others.
    known = [draft.outside()]
    used: set[int] = set()
    storages = 0
    for _ in range(draw(st.integers(1, 6))):
        inputs = draw(st.lists(st.sampled_from(known), min_size=1, max_size=2))
        used |= {draft.values[v].storage for v in inputs}
        free = [v for v in known[1:] if draft.values[v].storage not in used]
        writes: list[int] = []
        makes: list[int] = []
        if in_place and free and draw(st.booleans()):
            writes = [draw(st.sampled_from(free))]
        else:
            count = draw(st.integers(1, 2 if multiple else 1))
            makes = [draw(st.integers(1, 9)) for _ in range(count)]
        storages += len(makes)
        if storages > most:
            break
        outputs = draft.run(
            *inputs,
            makes=makes,
            writes=writes,
            seconds=float(draw(st.integers(1, 9))),
            must_keep=pinned and draw(st.integers(0, 5)) == 0,
        )
        known = [v for v in known if v not in writes] + outputs
        candidates = sorted({*inputs, *outputs})
        keeps = draw(st.lists(st.sampled_from(candidates), unique=True, max_size=3))
        draft.save(*keeps)
        used |= {draft.values[v].storage for v in keeps}
        if len(makes) > 1:
            used |= {draft.values[v].storage for v in outputs}
    return draft.finish()


def subsets(members: Iterable[int]) -> list[frozenset[int]]:
    """Return every subset, the small ones first."""
    items = sorted(members)
    counts = range(len(items) + 1)
    return [frozenset(s) for count in counts for s in combinations(items, count)]


def fastest_s(graph: StepGraph, budget_bytes: int) -> float:
    """Return the seconds of the fastest single region that fits, of all."""
    region = Choice(0, graph.backward_start)
    kept = subsets(made_in(graph, region))
    found = [simulate(graph, [Choice(0, region.end, k)]) for k in kept]
    return min(s.seconds for s in found if s.peak_bytes <= budget_bytes)


def extra_seconds(graph: StepGraph, region: Choice) -> float:
    """Return what a step under one region takes more, by `simulate`."""
    again = simulate(graph, [region]).recomputed
    if any(graph.operators[i].must_keep for i in again):
        return float("inf")
    return sum(graph.operators[i].seconds for i in again)


def every_trade(graph: StepGraph, region: Choice) -> set[tuple[int, float]]:
    """Return bytes and seconds of every subset of what a region makes."""
    found = set()
    for kept in subsets(made_in(graph, region)):
        size = sum(graph.storages[index].bytes for index in kept)
        candidate = Choice(region.start, region.end, kept)
        found.add((size, extra_seconds(graph, candidate)))
    return {(size, seconds) for size, seconds in found if seconds < float("inf")}


def lower_hull(points: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the corners of the lower left hull, the most bytes first."""
    hull: list[tuple[int, float]] = []
    for point in sorted(points):
        if hull and point[1] >= hull[-1][1]:
            continue  # More bytes and no fewer seconds.
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull[::-1]


def _is_above(a: tuple[int, float], b: tuple[int, float], c: tuple[int, float]) -> bool:
    """Return whether `b` lies on or above the line from `a` to `c`."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


def region_of(graph: StepGraph, module_path: str) -> Choice:
    """Return the region of the operators that ran in the one call of a module."""
    (call,) = (call for call in graph.calls if call.path == module_path)
    return Choice(call.start, call.end)


def keeping(graph: StepGraph, region: Choice, operators: Iterable[str]) -> Choice:
    """Return the region with the outputs of some operators kept.

    Args:
        graph: The step.
        region: The region.
        operators: Overloads, such as `"aten.addmm.default"`.
    """
    names = frozenset(operators)
    kept = frozenset(
        storage
        for storage in made_in(graph, region)
        if graph.operators[graph.storages[storage].birth].name in names
    )
    return Choice(region.start, region.end, region.kept | kept)
