"""Cut a chain of blocks into stages that fit, so that the slowest is fast.

For each stage and each run of blocks, `StageCuts` finds which blocks the stage must
recompute to fit its budget: it takes blocks in the order of bytes freed per second of
recomputation, until the stage fits. A dynamic programme over (stages, blocks) makes the
slowest stage as fast as possible; then single blocks move between neighbours for as
long as the simulated step becomes faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from membudget.errors import BudgetError, OptionError
from membudget.planner.pipeline_bytes import PipelineRankBytes
from membudget.planner.pipeline_costs import StageCosts
from membudget.planner.pipeline_order import PipelineOrder, with_checkpoint
from membudget.planner.pipeline_simulation import PipelineSimulation, simulate_pipeline

StageSizes = tuple[int, ...]
"""Number of blocks of each stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOfPipeline:
    """What one block costs for one micro-batch.

    Attributes:
        forward_s: Seconds of its forward, and of recomputing it.
        backward_s: Seconds of its backward pass, without recomputation.
        static_bytes: Bytes live before the step: parameters, optimizer state.
        gradient_bytes: Bytes of its parameters' gradients.
        saved_bytes: Bytes live from its forward to its backward pass, its output
            included, if it is not recomputed.
        kept_bytes: The same under a region: its output, above all.
        working_bytes: Most bytes of its forward or backward pass above those.
    """

    forward_s: float
    backward_s: float
    static_bytes: int = 0
    gradient_bytes: int = 0
    saved_bytes: int = 0
    kept_bytes: int = 0
    working_bytes: int = 0


class StageCuts:
    """The cuts of a chain of blocks into the stages of a pipeline.

    Attributes:
        equal: The cut with equally many blocks in each stage, as far as that goes.
    """

    def __init__(
        self,
        order: PipelineOrder,
        blocks: Sequence[BlockOfPipeline],
        budgets: Sequence[int],
        boundary_bytes: int,
        latency_s: float,
    ):
        """Take what `plan_pipeline` is given, one budget for each stage."""
        self._blocks, self._budgets = tuple(blocks), budgets
        self._boundary_bytes, self._latency_s = boundary_bytes, latency_s
        stages = self._stages = order.stages
        self._dropping = with_checkpoint(order, ["always"] * stages)
        self._keeping = with_checkpoint(order, ["never"] * stages)
        # Equal blocks make equal stages.
        self._known: dict[
            tuple[int, tuple[BlockOfPipeline, ...]], tuple[int, ...] | None
        ] = {}
        self.equal = equal_sizes(len(blocks), stages)

    def balanced(self) -> StageSizes:
        """Return the cut whose slowest stage is fastest.

            best[stage][end] = min over start of
                max(best[stage - 1][start], seconds(stage, start, end))

        Raises:
            BudgetError: No cut fits.
        """
        count = len(self._blocks)
        best: dict[int, tuple[float, StageSizes]] = {0: (0.0, ())}
        for stage in range(self._stages):
            following: dict[int, tuple[float, StageSizes]] = {}
            for start, (so_far_s, cut) in best.items():
                for end in range(start + 1, count - (self._stages - 2 - stage)):
                    seconds = self._seconds(stage, start, end)
                    if seconds is not None:
                        found = (max(so_far_s, seconds), (*cut, end - start))
                        following[end] = min(following.get(end, found), found)
            best = following
        if count not in best:
            raise self._refusal()
        return best[count][1]

    def moved(self, cut: StageSizes) -> StageSizes:
        """Move single blocks between neighbours while the simulation gets faster."""
        best_s = self._step_s(cut)
        while True:
            found = [(self._step_s(c), c) for c in [*_neighbours(cut), self.equal]]
            least_s, other = min(found)
            if least_s >= best_s * (1 - 1e-9):
                return cut
            best_s, cut = least_s, other

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
            self._dropping, ["always" if chosen else "never" for chosen in recomputed]
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

    def _seconds(self, stage: int, start: int, end: int) -> float | None:
        """Return a stage's seconds per micro-batch, or `None` if it does not fit."""
        blocks = self._blocks[start:end]
        chosen = self._chosen(stage, blocks)
        if chosen is None:
            return None
        plain_s = sum(block.forward_s + block.backward_s for block in blocks)
        return plain_s + sum(blocks[i].forward_s for i in chosen)

    def _chosen_of(self, cut: StageSizes) -> list[tuple[int, ...] | None]:
        parts = enumerate(self._parts(cut))
        return [self._chosen(stage, blocks) for stage, blocks in parts]

    def _chosen(
        self, stage: int, blocks: tuple[BlockOfPipeline, ...]
    ) -> tuple[int, ...] | None:
        """Return the blocks that a stage must recompute; `None` if that is no help."""
        key = (stage, blocks)
        if key not in self._known:
            by_gain = sorted(range(len(blocks)), key=lambda i: -_gain(blocks[i]))
            candidates = (tuple(sorted(by_gain[:n])) for n in range(len(blocks) + 1))
            fitting = (
                chosen
                for chosen in candidates
                if self._peak_bytes(stage, blocks, chosen) <= self._budgets[stage]
            )
            self._known[key] = next(fitting, None)
        return self._known[key]

    def _peak_bytes(
        self, stage: int, blocks: Sequence[BlockOfPipeline], chosen: Sequence[int]
    ) -> int:
        order = self._dropping if chosen else self._keeping
        costs = [self._costs(stage, blocks, chosen)] * self._stages
        held = PipelineRankBytes(order, costs, order.rank_of[stage])
        for action in order.ranks[order.rank_of[stage]]:
            held.run(action)
        return held.peak_bytes

    def _costs(
        self, stage: int, blocks: Sequence[BlockOfPipeline], chosen: Sequence[int]
    ) -> StageCosts:
        """Return what a micro-batch costs a stage of these blocks."""
        again = [blocks[i] for i in chosen]
        dropped = [block.saved_bytes - block.kept_bytes for block in again]
        held_bytes = sum(block.saved_bytes for block in blocks) - sum(dropped)
        working_bytes = max(block.working_bytes for block in blocks)
        return StageCosts(
            forward_s=sum(block.forward_s for block in blocks),
            backward_s=sum(block.backward_s for block in blocks),
            recompute_s=sum(block.forward_s for block in again),
            static_bytes=sum(block.static_bytes for block in blocks),
            gradient_bytes=sum(block.gradient_bytes for block in blocks),
            input_bytes=self._boundary_bytes if stage else 0,
            output_bytes=self._boundary_bytes if stage < self._stages - 1 else 0,
            saved_bytes=held_bytes,
            kept_bytes=held_bytes,
            recomputed_bytes=sum(dropped),
            forward_peak_bytes=held_bytes + working_bytes,
            recompute_peak_bytes=sum(dropped) + working_bytes,
            backward_peak_bytes=working_bytes,
            lazy_peak_bytes=max(dropped, default=0) + working_bytes,
        )

    def _refusal(self) -> BudgetError:
        """Return the error for budgets into which not even the smallest stages fit."""
        equal = [tuple(range(size)) for size in self.equal]
        parts = enumerate(zip(self._parts(self.equal), equal, strict=True))
        peaks = [self._peak_bytes(stage, *part) for stage, part in parts]
        tight = max(range(self._stages), key=lambda s: peaks[s] - self._budgets[s])
        asked_bytes, least_bytes = self._budgets[tight], peaks[tight]
        return BudgetError(
            f"no cut of the {len(self._blocks)} blocks into {self._stages} stages fits "
            f"the budgets. With equal stages and everything recomputed, stage {tight} "
            f"needs {least_bytes:,} bytes; its budget is {asked_bytes:,}. Raise that "
            f"budget, take smaller micro-batches, or add ranks.",
            asked_bytes=asked_bytes,
            least_bytes=least_bytes,
            before_bytes=sum(b.static_bytes for b in [*self._parts(self.equal)][tight]),
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
