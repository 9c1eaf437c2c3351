"""Simulate a block whose function runs again as a whole in the backward pass.

The rerun engine drops all saved tensors of a block and keeps its inputs. When the
backward pass unpacks the first of the tensors, the block's operators run again in
forward order, and the run stops once the last saved tensor that autograd still holds is
saved again. From then on all of them are live, each until autograd frees it:

    operator    0 x→a      1 a→b      2 b→c      saved: x, a, b
    rerun       0          1          (stopped: b, the last, is saved before 2 runs)
    a           ├──────────┼─────────────────── until the backward of 1 has freed it
    b                      ├────────── until the backward of 2 has freed it

A replay of the block runs only what the next unpacked tensor needs, so it may take
fewer operators and bytes. A rerun records no operator, so it costs less where operators
are small.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from membudget.graph import Operator, StepGraph
from membudget.planner.choice import (
    Block,
    ends_if_dropped,
    is_output,
    made_in,
    once,
    saved_in,
    storages_of,
)
from membudget.planner.ledger import Ledger
from membudget.planner.overwrites import SourceCopy

SMALL_BUFFER_BYTES = 64 * 1024
"""The size up to which a region holds its copy of a buffer (`engine.reads`)."""


def communicates(operator: Operator) -> bool:
    """Return whether an operator is a collective of a module, as in tensor parallelism.

    FSDP's and DDP's, which hooks run outside of a region, have other names.
    """
    return operator.name.startswith("_c10d_functional.")


def may_rerun(graph: StepGraph, block: Block) -> bool:
    """Return whether a second run of a block computes the same, and only that.

    A block with decisions is replayed: another kernel may decide differently. So is a
    block that writes to older memory, such as running statistics, and one whose saved
    tensors are unpacked more than once, because each time would take a rerun. A
    collective runs again, on all ranks, because all have the same plan.
    """
    for index in range(block.start, block.end):
        operator = graph.operators[index]
        if operator.must_keep and not communicates(operator):
            return False
        written = () if operator.is_view else graph.writes[index]
        if any(graph.storages[storage].birth < block.start for storage in written):
            return False
    turn = graph.backward_start
    asked = [graph.saved[index].asked for index in saved_in(graph, block)]
    return any(asked) and all(
        len(a) < 2 and min(a, default=turn) >= turn for a in asked
    )


def rerun_operators(graph: StepGraph, block: Block, held: Sequence[int]) -> range:
    """Return the operators that run until the last of the `held` tensors is saved."""
    last = graph.saved[held[-1]]
    return range(block.start, last.moment + is_output(graph, last))


@once
def inputs_of(graph: StepGraph, block: Block) -> set[int]:
    """Return the storages that a block reads or is called with."""
    start, end = block.start, block.end
    values = [value for o in graph.operators[start:end] for value in o.inputs]
    for call in graph.calls:
        if (call.start, call.end) == (start, end):
            values += call.inputs
    return set(storages_of(graph, values))


@once
def buffers_of(graph: StepGraph, block: Block) -> list[int]:
    """Return the buffers that a block reads or is called with."""
    inputs = sorted(inputs_of(graph, block))
    return [s for s in inputs if graph.storages[s].kind == "buffer"]


class RerunBackward:
    """Recomputation state of one block that reruns, during the simulated backward."""

    def __init__(self, ledger: Ledger, block: Block):
        """Find the saved tensors of a block, all of which it drops."""
        self._graph = ledger.graph
        self._ledger, self._block = ledger, block
        self._made = made_in(ledger.graph, block)
        self._inputs = inputs_of(ledger.graph, block)
        self._buffers = buffers_of(ledger.graph, block)
        self.dropped_saved = list(saved_in(ledger.graph, block))
        freed = (ledger.graph.saved[index].freed for index in self.dropped_saved)
        self._until = max(freed, default=0)
        self._freed: set[int] = set()
        self._holders: Counter[int] = Counter()  # Saved tensors by live storage.
        self._has_run = False

    def move_ends(self) -> None:
        """Record in the ledger the live ranges that dropping tensors changes.

        A storage of the block is freed once only saved tensors of the block refer to
        it. The inputs stay live until autograd has freed the last of these tensors.
        """
        ends = ends_if_dropped(self._graph, self._block)
        self._ledger.ends.update((s, ends[s]) for s in self._made if s in ends)
        for storage in self._inputs - self._made:
            self._ledger.hold(storage, self._until)

    def copies(self) -> list[SourceCopy]:
        """Return the copies of buffers, from which a second run would begin.

        The forward copies each buffer that it may read. The copy of a large one is
        dropped when the block ends, as a block that writes to a buffer is not rerun.
        """
        start, end = self._block.start, self._block.end
        return [
            SourceCopy(s, start, self._until if self._is_small(s) else end)
            for s in self._buffers
        ]

    def _is_small(self, storage: int) -> bool:
        return self._graph.storages[storage].bytes <= SMALL_BUFFER_BYTES

    def unpack(self, saved: int) -> None:
        """Give autograd a saved tensor; the first one runs the block again."""
        if not self._has_run:
            self._has_run = True
            self._run([i for i in self.dropped_saved if i not in self._freed])

    def free(self, saved: int) -> None:
        """Note that autograd has freed a saved tensor."""
        self._freed.add(saved)
        storage = self._storage(saved)
        if self._holders[storage]:
            self._holders[storage] -= 1
            if not self._holders[storage]:
                self._ledger.release(storage)

    def take_back(self, saved: int) -> None:
        """Do nothing: a block whose tensors are unpacked again is not rerun."""

    def _storage(self, saved: int) -> int:
        return self._graph.values[self._graph.saved[saved].value].storage

    def _run(self, held: list[int]) -> None:
        graph, ledger = self._graph, self._ledger
        ledger.read(self._inputs - self._made)
        # What the buffers hold now is put aside while they hold the forward's content.
        put_aside = [*filter(self._is_small, self._buffers)]
        for storage in put_aside:
            ledger.allocate(storage)
        again = rerun_operators(graph, self._block, held)
        holders = Counter(map(self._storage, held))
        live: set[int] = set()
        for index in again:
            over = [s for s in live if graph.storages[s].released_or_dead <= index]
            for storage in over:
                live.remove(storage)
                if not holders[storage]:
                    ledger.release(storage)
            born = graph.born_at.get(index, ())
            for storage in born:
                ledger.allocate(storage)
            live.update(born)
            ledger.update_peak(index)
            ledger.run_again(index, ledger.reran)
        for storage in [*(s for s in live if not holders[s]), *put_aside]:
            ledger.release(storage)
        # What was not made again is no copy of this block's.
        made = {s for index in again for s in graph.born_at.get(index, ())}
        self._holders = Counter({s: n for s, n in holders.items() if s in made})
