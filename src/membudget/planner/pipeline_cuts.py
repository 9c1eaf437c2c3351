"""Cut a chain of blocks into stages that fit, so that the slowest is fast.

For each stage and each run of blocks, `StageCuts` finds which blocks the stage must
recompute to fit its budget: it takes blocks in the order of bytes freed per second of
recomputation, until the stage fits. A dynamic programme over (stages, blocks) makes the
slowest stage as fast as possible; then single blocks move between neighbours for as
long as the simulated step becomes faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf

from membudget.errors import BudgetError, OptionError
from membudget.planner.pipeline_bytes import PeakOfStage
from membudget.planner.pipeline_costs import BlockOfPipeline, StageCosts
from membudget.planner.pipeline_order import PipelineOrder, with_checkpoint
from membudget.planner.pipeline_simulation import PipelineSimulation, simulate_pipeline

StageSizes = tuple[int, ...]
"""Number of blocks of each stage."""


# What a stage of some blocks costs, or `None` if it does not fit.
_Cost = Callable[[int, tuple[BlockOfPipeline, ...]], float | None]


class StageCuts:
    """The cuts of a chain of blocks into the stages of a pipeline.

    Attributes:
        equal: The cut with equally many blocks in each stage, as far as that goes.
    """

    def __init__(
        self,
        order: PipelineOrder,
        blocks: Sequence[BlockOfPipeline],
        budgets: Sequence[float],
        latency_s: float,
        ahead: bool = True,
    ):
        """Take what `plan_pipeline` is given, one budget for each stage."""
        self._blocks, self._budgets = tuple(blocks), budgets
        self._latency_s, self._ahead = latency_s, ahead
        stages = self._stages = order.stages
        self._dropping = with_checkpoint(order, ["always"] * stages, ahead)
        keeping = with_checkpoint(order, ["never"] * stages)
        self._peaks_dropping, self._peaks_keeping = (
            [PeakOfStage(way, stage) for stage in range(stages)]
            for way in (self._dropping, keeping)
        )
        # Equal blocks make equal stages.
        self._known: dict[
            tuple[int, tuple[BlockOfPipeline, ...]], tuple[int, ...] | None
        ] = {}
        self.equal = equal_sizes(len(blocks), stages)

    def balanced(self) -> StageSizes:
        """Return the cut whose slowest stage is fastest.

        Raises:
            BudgetError: No cut fits.
        """
        found = self._cut_by(self._seconds)
        if found is None:
            raise self._refusal()
        return found

    def plain(self) -> StageSizes:
        """Return the cut whose slowest stage is fastest, if memory is no concern."""
        found = self._cut_by(lambda _, blocks: _plain_s(blocks))
        assert found is not None
        return found

    def _cut_by(self, cost: _Cost) -> StageSizes | None:
        """Return the cut whose worst stage is best; `None` if each has an unfit one.

        best[stage][end] = min over start of
            max(best[stage - 1][start], cost(stage, blocks[start:end]))
        """
        count = len(self._blocks)
        best: dict[int, tuple[float, StageSizes]] = {0: (-inf, ())}
        for stage in range(self._stages):
            following: dict[int, tuple[float, StageSizes]] = {}
            for start, (so_far, cut) in best.items():
                for end in range(start + 1, count - (self._stages - 2 - stage)):
                    one = cost(stage, self._blocks[start:end])
                    if one is not None:
                        found = (max(so_far, one), (*cut, end - start))
                        following[end] = min(following.get(end, found), found)
            best = following
        return best[count][1] if count in best else None

    def moved(self, cut: StageSizes) -> StageSizes:
        """Move single blocks between neighbours while the simulation gets faster."""
        best_s = self._step_s(cut)
        while True:
            found = [(self._step_s(c), c) for c in self._others(cut)]
            least_s, other = min(found)
            if least_s >= best_s * (1 - 1e-9):
                return cut
            best_s, cut = least_s, other

    def _others(self, cut: StageSizes) -> list[StageSizes]:
        return [*_neighbours(cut), self.equal, self.plain()]

    def fits(self, cut: StageSizes) -> bool:
        """Return whether every stage of a cut fits, whatever it recomputes."""
        return None not in self._chosen_of(cut)

    def recomputed(self, cut: StageSizes) -> tuple[tuple[int, ...], ...]:
        """Return which blocks each stage recomputes, numbered from its first."""
        return tuple(chosen or () for chosen in self._chosen_of(cut))

    def simulated(
        self, cut: StageSizes, recomputed: Sequence[Sequence[int]]
    ) -> PipelineSimulation:
        """Return the simulation of a cut whose stages recompute these blocks."""
        order = with_checkpoint(
            self._dropping,
            ["always" if chosen else "never" for chosen in recomputed],
            self._ahead,
        )
        costs = [
            self._costs(stage, blocks, chosen)
            for stage, (blocks, chosen) in enumerate(
                zip(self._parts(cut), recomputed, strict=True)
            )
        ]
        return simulate_pipeline(order, costs, latency_s=self._latency_s)

    def _step_s(self, cut: StageSizes) -> float:
        if not self.fits(cut):
            return float("inf")
        return self.simulated(cut, self.recomputed(cut)).step_s

    def _parts(self, cut: StageSizes) -> Iterator[tuple[BlockOfPipeline, ...]]:
        start = 0
        for size in cut:
            yield self._blocks[start : start + size]
            start += size

    def _seconds(self, stage: int, blocks: tuple[BlockOfPipeline, ...]) -> float | None:
        """Return a stage's seconds per micro-batch, or `None` if it does not fit."""
        chosen = self._chosen(stage, blocks)
        if chosen is None:
            return None
        return _plain_s(blocks) + sum(blocks[i].forward_s for i in chosen)

    def _chosen_of(self, cut: StageSizes) -> list[tuple[int, ...] | None]:
        parts = enumerate(self._parts(cut))
        return [self._chosen(stage, blocks) for stage, blocks in parts]

    def _chosen(
        self, stage: int, blocks: tuple[BlockOfPipeline, ...]
    ) -> tuple[int, ...] | None:
        """Return the blocks that a stage must recompute; `None` if that is no help."""
        key = (stage, blocks)
        if key not in self._known:
            fitting = (
                chosen
                for chosen in _candidates(blocks)
                if self._peak_bytes(stage, blocks, chosen) <= self._budgets[stage]
            )
            self._known[key] = next(fitting, None)
        return self._known[key]

    def _peak_bytes(
        self, stage: int, blocks: Sequence[BlockOfPipeline], chosen: Sequence[int]
    ) -> int:
        peaks = self._peaks_dropping if chosen else self._peaks_keeping
        return peaks[stage].of(self._costs(stage, blocks, chosen))

    def _costs(
        self, stage: int, blocks: Sequence[BlockOfPipeline], chosen: Sequence[int]
    ) -> StageCosts:
        """Return what a micro-batch costs a stage of these blocks."""
        again = [blocks[i] for i in chosen]
        dropped = [block.saved_bytes - block.kept_bytes for block in again]
        held_bytes = sum(block.saved_bytes for block in blocks) - sum(dropped)
        working_bytes = max(block.working_bytes for block in blocks)
        output_bytes = blocks[-1].output_bytes if stage < self._stages - 1 else 0
        return StageCosts(
            forward_s=sum(block.forward_s for block in blocks),
            backward_s=sum(block.backward_s for block in blocks),
            recompute_s=sum(block.forward_s for block in again),
            static_bytes=sum(block.static_bytes for block in blocks),
            gradient_bytes=sum(block.gradient_bytes for block in blocks),
            input_bytes=blocks[0].input_bytes if stage else 0,
            output_bytes=output_bytes,
            saved_bytes=held_bytes,
            kept_bytes=held_bytes,
            recomputed_bytes=sum(dropped),
            forward_peak_bytes=held_bytes + working_bytes,
            recompute_peak_bytes=sum(dropped) + working_bytes,
            backward_peak_bytes=_backward_bytes(blocks, chosen, output_bytes, False),
            lazy_peak_bytes=_backward_bytes(blocks, chosen, output_bytes, True),
        )

    def _least_bytes(self, stage: int, blocks: Sequence[BlockOfPipeline]) -> int:
        """Return the least peak of a stage, whatever it recomputes."""
        candidates = _candidates(blocks)
        return min(self._peak_bytes(stage, blocks, chosen) for chosen in candidates)

    def _refusal(self) -> BudgetError:
        """Return the error for budgets that no cut fits, with the cut that is nearest.

        Every other cut exceeds some budget by as much or more.
        """
        budgets = self._budgets
        cut = self._cut_by(lambda s, blocks: self._least_bytes(s, blocks) - budgets[s])
        assert cut is not None
        parts = [*self._parts(cut)]
        least = [self._least_bytes(*part) for part in enumerate(parts)]
        tight = max(range(self._stages), key=lambda s: least[s] - budgets[s])
        sizes = ", ".join(map(str, cut))
        return BudgetError(
            f"no cut of the {len(self._blocks)} blocks into {self._stages} stages fits "
            f"the budgets. The nearest, {sizes}, needs {least[tight]:,} bytes on stage "
            f"{tight}, recomputing all that helps; its budget is "
            f"{int(budgets[tight]):,}. Raise that budget, take smaller micro-batches, "
            f"or add ranks.",
            asked_bytes=int(budgets[tight]),
            least_bytes=least[tight],
            before_bytes=sum(block.static_bytes for block in parts[tight]),
        )


def equal_sizes(blocks: int, stages: int) -> StageSizes:
    """Return the sizes of stages that are as equal as possible, larger ones first.

    Raises:
        OptionError: There are fewer blocks than stages.

    Example:
        >>> equal_sizes(10, 4)
        (3, 3, 2, 2)
    """
    if blocks < stages:
        raise OptionError(
            f"{stages} stages need at least as many blocks; the chain has {blocks}"
        )
    return tuple(blocks // stages + (s < blocks % stages) for s in range(stages))


def _backward_bytes(
    blocks: Sequence[BlockOfPipeline],
    dropped: Sequence[int],
    received_bytes: int,
    is_lazy: bool,
) -> int:
    """Return the most bytes of a stage's backward pass above those that it finds.

    What the blocks behind one have saved is gone when its own pass runs, but for their
    outputs. The gradient that the stage has received is among the working bytes of the
    last. Of dropped blocks, only what they keep is certain to have been there; a lazy
    pass recomputes one after another.
    """
    most = gone_bytes = 0
    for i in reversed(range(len(blocks))):
        block = blocks[i]
        held_bytes = block.kept_bytes if i in dropped else block.saved_bytes
        again_bytes = block.saved_bytes - held_bytes if is_lazy else 0
        reached = block.working_bytes + again_bytes - gone_bytes - received_bytes
        most = max(most, reached)
        received_bytes = 0
        gone_bytes += max(0, held_bytes - block.output_bytes)
    return most


def _plain_s(blocks: Sequence[BlockOfPipeline]) -> float:
    """Return the seconds of a micro-batch on a stage that recomputes nothing."""
    return sum(block.forward_s + block.backward_s for block in blocks)


def _candidates(blocks: Sequence[BlockOfPipeline]) -> Iterator[tuple[int, ...]]:
    """Yield which blocks to recompute: none, then one more each time, best first."""
    by_gain = sorted(range(len(blocks)), key=lambda i: -_gain(blocks[i]))
    return (tuple(sorted(by_gain[:n])) for n in range(len(blocks) + 1))


def _gain(block: BlockOfPipeline) -> float:
    """Return the bytes that recomputing a block frees per second."""
    return (block.saved_bytes - block.kept_bytes) / max(block.forward_s, 1e-12)


def _neighbours(cut: StageSizes) -> Iterator[StageSizes]:
    """Yield the cuts in which one block moves to a stage beside its own."""
    for stage in range(len(cut) - 1):
        for giver, taker in ((stage, stage + 1), (stage + 1, stage)):
            if cut[giver] > 1:
                sizes = [*cut]
                sizes[giver] -= 1
                sizes[taker] += 1
                yield tuple(sizes)
