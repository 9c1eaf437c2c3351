"""Choose where a pipeline recomputes, and which stage gets which blocks.

Under 1F1B, stage s of n holds min(n - s, m) micro-batches: the first stages need
recomputation most, the last ones least. Recomputing in few stages, and giving these
fewer blocks, can be much faster than recomputing everywhere:

    stage                              0    1    2    3
    micro-batches held                 4    3    2    1
    recomputed everywhere              8    8    8    8      blocks, all recomputed
    by depth, balanced                 7*   7*   9    9      * recomputed

`pipeline_cuts` finds the cut; the simulation has the last word on times and peaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from membudget.errors import OptionError
from membudget.planner.pipeline_cuts import BlockOfPipeline, StageCuts, StageSizes
from membudget.planner.pipeline_order import CheckpointMode, PipelineOrder
from membudget.planner.pipeline_simulation import PipelineSimulation
from membudget.text import format_bytes


@dataclass(frozen=True)
class PipelinePlan:
    """Which stage gets which blocks, and which of them it recomputes.

    Attributes:
        sizes: Number of blocks of each stage.
        recomputed: The recomputed blocks of each stage, numbered from its first.
        simulation: The simulated step.
        equal: The simulation with equally many blocks in each stage, which recompute by
            depth, too; `None` if that does not fit.
        everywhere: The simulation with equally many blocks, all of them recomputed.
    """

    sizes: StageSizes
    recomputed: tuple[tuple[int, ...], ...]
    simulation: PipelineSimulation
    equal: PipelineSimulation | None
    everywhere: PipelineSimulation

    @property
    def checkpoint(self) -> tuple[CheckpointMode, ...]:
        """The mode of each stage, for `PipelineSchedule`."""
        return self.simulation.order.checkpoint

    def __str__(self) -> str:
        """Return a table with one line per stage, and the other ways beside it."""
        from membudget.report import rendered

        order, peaks = self.simulation.order, self.simulation.peak_bytes
        stages = enumerate(zip(self.sizes, self.recomputed, strict=True))
        rows = [
            (
                str(stage),
                str(size),
                str(len(chosen)),
                str(order.most_in_flight(stage)),
                format_bytes(peaks[order.rank_of[stage]]),
            )
            for stage, (size, chosen) in stages
        ]
        titles = ("stage", "blocks", "recomputed", "in flight", "peak")
        planned_s = self.simulation.step_s
        lines = [rendered(titles, rows, left=0)]
        lines.append(f"step {planned_s:.4g} s, bubble {self.simulation.bubble:.1%}")
        if self.equal is not None:
            ratio = self.equal.step_s / planned_s
            lines.append(f"equal stages, recomputed by depth: x{ratio:.3f}")
        ratio = self.everywhere.step_s / planned_s
        return "\n".join([*lines, f"equal stages, all recomputed: x{ratio:.3f}"])


def plan_pipeline(
    order: PipelineOrder,
    blocks: Sequence[BlockOfPipeline],
    budget_bytes: int | Sequence[int],
    *,
    boundary_bytes: int = 0,
    latency_s: float = 0.0,
) -> PipelinePlan:
    """Find the fastest partition of a chain of blocks, and what it must recompute.

    Args:
        order: A schedule with one stage per rank; see `pipeline_order`.
        blocks: What each block costs, from the first.
        budget_bytes: Most live bytes of a rank in a step: one number for all ranks, or
            one for each.
        boundary_bytes: Bytes of the tensor between two stages, for one micro-batch.
        latency_s: Seconds that it travels.

    Raises:
        OptionError: A rank has several stages, or there are fewer blocks than stages.
        BudgetError: No partition fits, recomputing everything.
    """
    if len(order.ranks) != order.stages:
        raise OptionError(
            f"a pipeline is planned for one stage per rank; {order.name} has "
            f"{order.stages} stages on {len(order.ranks)} ranks"
        )
    given = [budget_bytes] if isinstance(budget_bytes, int) else [*budget_bytes]
    budgets = given * order.stages if len(given) == 1 else given
    if len(budgets) != order.stages:
        raise OptionError(
            f"budget_bytes names {len(budgets)} ranks, and the order has {order.stages}"
        )
    cuts = StageCuts(order, blocks, budgets, boundary_bytes, latency_s)
    cut, equal = cuts.moved(cuts.balanced()), cuts.equal
    return PipelinePlan(
        cut,
        cuts.recomputed(cut),
        cuts.simulated(cut, cuts.recomputed(cut)),
        cuts.simulated(equal, cuts.recomputed(equal)) if cuts.fits(equal) else None,
        cuts.simulated(equal, [range(size) for size in equal]),
    )
