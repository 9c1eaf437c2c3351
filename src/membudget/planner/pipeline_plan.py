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
from math import inf

from membudget.errors import BudgetError, OptionError
from membudget.planner.pipeline_costs import BlockOfPipeline
from membudget.planner.pipeline_cuts import StageCuts, StageSizes
from membudget.planner.pipeline_order import CheckpointMode, PipelineOrder
from membudget.planner.pipeline_simulation import PipelineSimulation


@dataclass(frozen=True)
class PipelinePlan:
    """Which stage gets which blocks, and which of them it recomputes.

    Attributes:
        sizes: Number of blocks of each stage.
        recomputed: The recomputed blocks of each stage, numbered from its first.
        budgets: Most live bytes of each rank in a step.
        simulation: The simulated step.
        plain_sizes: The sizes of balanced stages: the slowest is as fast as it can be
            if nothing is recomputed, whatever that takes.
        plain: The simulation of these, recomputing nothing.
        equal: The simulation with equally many blocks in each stage, which recompute by
            depth, too; `None` if that does not fit.
        everywhere: The simulation with equally many blocks, all of them recomputed.
    """

    sizes: StageSizes
    recomputed: tuple[tuple[int, ...], ...]
    budgets: tuple[int, ...]
    simulation: PipelineSimulation
    plain_sizes: StageSizes
    plain: PipelineSimulation
    equal: PipelineSimulation | None
    everywhere: PipelineSimulation

    @property
    def order(self) -> PipelineOrder:
        """What every rank does in a step."""
        return self.simulation.order

    @property
    def checkpoint(self) -> tuple[CheckpointMode, ...]:
        """The mode of each stage, for `PipelineSchedule`."""
        return self.order.checkpoint

    @property
    def ahead(self) -> bool:
        """Whether stages recompute while they wait for a gradient."""
        return bool(self.order.recomputed_ahead) or not any(self.recomputed)

    def __str__(self) -> str:
        """Return a table with one line per stage, and the other ways beside it."""
        from membudget.report.pipeline_table import plan_text

        return plan_text(self)


def plan_pipeline(
    order: PipelineOrder,
    blocks: Sequence[BlockOfPipeline],
    budget_bytes: int | Sequence[int],
    *,
    latency_s: float = 0.0,
) -> PipelinePlan:
    """Find the fastest partition of a chain of blocks, and what it must recompute.

    Stages recompute while they wait for a gradient, unless the step is faster, or fits
    at all, if their backward passes recompute, which hold one block's activations at
    once and not a stage's.

    Args:
        order: A schedule with one stage per rank; see `pipeline_order`.
        blocks: What each block costs, from the first.
        budget_bytes: Most live bytes of a rank in a step: one number for all ranks, or
            one for each.
        latency_s: Seconds that a tensor travels from one rank to another.

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
    ahead = StageCuts(order, blocks, budgets, latency_s)
    cuts, cut = _faster(ahead, StageCuts(order, blocks, budgets, latency_s, False))
    equal, plain = cuts.equal, ahead.plain()
    return PipelinePlan(
        cut,
        cuts.recomputed(cut),
        tuple(budgets),
        cuts.simulated(cut, cuts.recomputed(cut)),
        plain,
        ahead.simulated(plain, [()] * order.stages),
        cuts.simulated(equal, cuts.recomputed(equal)) if cuts.fits(equal) else None,
        ahead.simulated(equal, [range(size) for size in equal]),
    )


def fullest_rank(
    order: PipelineOrder, blocks: Sequence[BlockOfPipeline]
) -> tuple[int, int]:
    """Return what the fullest rank of balanced stages that keep all holds.

    Returns:
        Its bytes before the step, and its peak.
    """
    cuts = StageCuts(order, blocks, [inf] * order.stages, 0.0)
    sizes = cuts.plain()
    peaks = cuts.simulated(sizes, [()] * order.stages).peak_bytes
    fullest = max(range(order.stages), key=lambda s: peaks[order.rank_of[s]])
    first = sum(sizes[:fullest])
    here = blocks[first : first + sizes[fullest]]
    return sum(b.static_bytes for b in here), peaks[order.rank_of[fullest]]


def _faster(ahead: StageCuts, lazily: StageCuts) -> tuple[StageCuts, StageSizes]:
    """Return the way to recompute whose best cut is faster, with that cut.

    Raises:
        BudgetError: No cut fits.
    """
    found: list[tuple[float, StageCuts, StageSizes]] = []
    refusals: list[BudgetError] = []
    for cuts in (ahead, lazily):
        try:
            cut = cuts.moved(cuts.balanced())
        except BudgetError as refusal:
            refusals.append(refusal)
            continue
        found.append((cuts.simulated(cut, cuts.recomputed(cut)).step_s, cuts, cut))
        if not any(cuts.recomputed(cut)):
            break
    if not found:
        raise min(refusals, key=lambda refusal: refusal.least_bytes)
    _, cuts, cut = min(found, key=lambda one: one[0])
    return cuts, cut
