"""What recomputing ahead, and choosing where to recompute, save a pipeline's step.

Four processes under 1F1B, 4 to 32 micro-batches, two kinds of stages: blocks that sleep
for fixed times, so that the ranks do not compete for cores, and transformer blocks. In
turns:

* none: nothing is recomputed;
* torch: every block under torch's checkpoint, on torch's schedule;
* lazy: every block in a region, recomputed by the backward pass;
* ahead: every block in a region, recomputed while the gradient is awaited;
* planned: as many blocks in each stage, and as many of them recomputed, as
  `plan_pipeline` says for a budget half of the way between none and all.

A step is timed from a barrier to the end of the last rank. Medians of interleaved
rounds; `x` is over `lazy`. A step is simulated from the costs that were measured in one
more step; that of sleeping stages also from how long they mean to sleep ("nominal"),
which is less than they do: each sleep ends late, the more so where processes share
cores, and regions take time, too. Peaks are above what is live before the step.

    python3 run.py bench pipelines [--rounds 5] [--stages sleep transformer]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from operator import sub
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness import save, show
from models import GPTBlock
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from membudget import pipeline

RANKS = 4
BLOCKS = 32
COUNTS = (4, 8, 16, 32)
ARMS = ("none", "torch", "lazy", "ahead", "planned")
FORWARD_S = 0.01
ROWS, LENGTH, WIDTH = 2, 64, 128


class Nap(torch.autograd.Function):
    """Sleep for a forward, and for a backward pass of twice as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Sleep, and save what makes a region recompute."""
        time.sleep(FORWARD_S)
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Ask for what was saved, then sleep."""
        _ = ctx.saved_tensors
        time.sleep(2 * FORWARD_S)
        return gradients[0]


class Sleeper(nn.Module):
    """A block that takes time and next to no computation."""

    def __init__(self) -> None:
        """Make a parameter, without which a stage would have nothing to train."""
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` scaled, later."""
        y: Tensor = Nap.apply(x * self.scale)  # type: ignore[no-untyped-call]
        return y


class InRegion(nn.Module):
    """A block under torch's checkpoint that counts its forwards."""

    def __init__(self, block: nn.Module) -> None:
        """Wrap a block."""
        super().__init__()
        self.block, self.calls = block, 0

    def forward(self, x: Tensor) -> Tensor:
        """Run the block under torch's checkpoint."""
        y: Tensor = torch_checkpoint(self._run, x, use_reentrant=False)
        return y

    def _run(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.block(x)
        return y


@dataclass
class Row:
    """What one arm takes at one number of micro-batches.

    Attributes:
        steps_s: Seconds of each round.
        bubbles: Share of idle time of each round, where events are logged.
        simulated_s: Seconds that the simulation predicts; 0 where there is none.
        nominal_s: The same from how long sleeping stages mean to sleep.
        peaks_bytes: Peak of each rank, above what is live before the step.
        recomputes: Recomputes of a block per micro-batch; of the most recomputed one.
        sizes: Blocks of each stage.
        recomputed: Recomputed blocks of each stage.
    """

    steps_s: list[float] = field(default_factory=list)
    bubbles: list[float] = field(default_factory=list)
    simulated_s: float = 0.0
    nominal_s: float = 0.0
    peaks_bytes: list[int] = field(default_factory=list)
    recomputes: float = 0.0
    sizes: Sequence[int] = (BLOCKS // RANKS,) * RANKS
    recomputed: Sequence[int] = ()


def chain(kind: str) -> list[nn.Module]:
    """Return the model: sleepers, or transformer blocks."""
    torch.manual_seed(0)
    make: Callable[[], nn.Module] = Sleeper
    if kind == "transformer":
        make = partial(GPTBlock, WIDTH, 4, 0.1)
    return [make() for _ in range(BLOCKS)]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error."""
    return (output - target).square().mean()


def plan(kind: str, micro_batches: int) -> pipeline.PipelinePlan:
    """Return the plan of rank 0 for half of the way between none and all."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        order = pipeline.pipeline_order(
            "1F1B", ranks=RANKS, micro_batches=micro_batches
        )
        if kind == "sleep":
            sleeper = pipeline.BlockOfPipeline(
                forward_s=FORWARD_S,
                backward_s=2 * FORWARD_S,
                saved_bytes=100,
                kept_bytes=5,
                input_bytes=5,
                output_bytes=5,
            )
            blocks = [sleeper] * BLOCKS
        else:
            x = torch.randn(ROWS, LENGTH, WIDTH)
            blocks = pipeline.measure_blocks(chain(kind), x)
        free = pipeline.plan_pipeline(order, blocks, 2**60)
        ways = (free.everywhere, free.simulation)
        budget_bytes = sum(max(way.peak_bytes) for way in ways) // 2
        found[0] = pipeline.plan_pipeline(order, blocks, budget_bytes)
    dist.broadcast_object_list(found)
    made: pipeline.PipelinePlan = found[0]
    return made


class Arm:
    """One way to run a step."""

    def __init__(self, name: str, kind: str, micro_batches: int, meter: bool):
        """Make the stages and the schedule."""
        self.name, self.kind, self.micro_batches = name, kind, micro_batches
        self.row = Row()
        self.forwards = 0
        self.schedule: Any = None
        self.module: nn.Module
        if name == "torch":
            self._make_torch()
        else:
            self._make_ours(meter)

    def _make_torch(self) -> None:
        rank, size = dist.get_rank(), BLOCKS // RANKS
        blocks = map(InRegion, chain(self.kind)[rank * size : (rank + 1) * size])
        self.module = nn.Sequential(*blocks)
        stage = PipelineStage(self.module, rank, RANKS, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, self.micro_batches, loss_fn)

    def _make_ours(self, meter: bool) -> None:
        options: dict[str, Any] = {"engine": "rerun", "verify": False}
        checkpoint: Any = "never" if self.name == "none" else "always"
        ahead = self.name != "lazy"
        if self.name == "planned":
            found = plan(self.kind, self.micro_batches)
            options |= {"sizes": found.sizes, "recomputed": found.recomputed}
            checkpoint, ahead = found.checkpoint, found.ahead
            self.row.sizes = found.sizes
            self.row.recomputed = [len(chosen) for chosen in found.recomputed]
            if self.kind == "sleep":
                self.row.nominal_s = found.simulation.step_s
        stages = pipeline.split(chain(self.kind), **options)
        self.schedule = pipeline.PipelineSchedule(
            stages,
            micro_batches=self.micro_batches,
            loss_fn=loss_fn,
            checkpoint=checkpoint,
            ahead=ahead,
            meter=meter,
        )
        self.module = stages[0].submod

    def step(self) -> float:
        """Run a step; return its seconds, to the end of the last rank."""
        rank = dist.get_rank()
        self.forwards += self.micro_batches
        rows = ROWS * self.micro_batches
        shape = (rows, WIDTH) if self.kind == "sleep" else (rows, LENGTH, WIDTH)
        x = torch.randn(shape)
        self.module.zero_grad()
        dist.barrier()
        start_s = time.perf_counter()
        given = [x] if rank == 0 else []
        target = x if rank == RANKS - 1 else None
        self.schedule.step(*given, target=target, return_outputs=False)
        took = torch.tensor([time.perf_counter() - start_s])
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return float(took)

    def round(self) -> None:
        """Time a step."""
        self.row.steps_s.append(self.step())
        if self.name != "torch":
            events = self.schedule.gathered_events()
            self.row.bubbles.append(pipeline.bubble(events))

    def finish(self) -> None:
        """Count recomputes in one more step, and simulate it."""
        before = self._recomputes()
        self.step()
        once = max(map(sub, self._recomputes(), before), default=0)
        most: list[Any] = [None] * RANKS
        dist.all_gather_object(most, once / self.micro_batches)
        self.row.recomputes = max(most)
        if self.name == "torch":
            return
        self.row.simulated_s = self._simulated_s(pipeline.measured_costs(self.schedule))
        if self.kind == "sleep" and not self.row.nominal_s:
            self.row.nominal_s = self._simulated_s(self._sleeping_costs())

    def _simulated_s(self, costs: Sequence[pipeline.StageCosts]) -> float:
        return pipeline.simulate_pipeline(self.schedule.order, costs).step_s

    def _recomputes(self) -> list[int]:
        """Return how often each block of this rank was recomputed so far."""
        if self.name == "torch":
            wrapped = self.module.children()
            calls = [block.calls for block in wrapped if isinstance(block, InRegion)]
            return [count - self.forwards for count in calls]
        applied = self.schedule.stages[0].applied
        if applied is None:
            return []
        return [region.recomputes for region in applied.status().regions]

    def _sleeping_costs(self) -> Sequence[pipeline.StageCosts]:
        forward_s = FORWARD_S * BLOCKS / RANKS
        recompute_s = 0.0 if self.name == "none" else forward_s
        costs = pipeline.StageCosts(
            forward_s=forward_s, backward_s=2 * forward_s, recompute_s=recompute_s
        )
        return [costs] * RANKS


def peaks(name: str, kind: str, micro_batches: int) -> list[int]:
    """Return the peak of each rank in a step of its own, with a meter."""
    arm = Arm(name, kind, micro_batches, meter=True)
    arm.step()
    arm.step()
    counted = arm.schedule.bytes
    most = max(around.peak_bytes for around in counted) - counted[0].before_bytes
    found: list[Any] = [None] * RANKS
    dist.all_gather_object(found, most)
    return found


def measured(kind: str, micro_batches: int, rounds: int) -> dict[str, Row]:
    """Return the row of every arm at one number of micro-batches."""
    arms = [Arm(name, kind, micro_batches, meter=False) for name in ARMS]
    for arm in arms:
        arm.step()  # torch infers shapes in the first.
    for _ in range(rounds):
        for arm in arms:
            arm.round()
    for arm in arms:
        arm.finish()
        if kind == "transformer" and arm.name != "torch":
            arm.row.peaks_bytes = peaks(arm.name, kind, micro_batches)
    return {arm.name: arm.row for arm in arms}


def table_of(kind: str, found: dict[int, dict[str, Row]]) -> Table:
    """Return the table of one kind of stages."""
    table = Table(title=f"1F1B, {RANKS} ranks, {kind} stages")
    titles = ("m", "arm", "step s", "x", "simulated ÷ measured", "nominal ÷ measured")
    for title in (*titles, "bubble", "recomputes", "blocks", "recomputed", "peaks KiB"):
        table.add_column(title, justify="right")
    for micro_batches, rows in found.items():
        lazy_s = median(rows["lazy"].steps_s)
        for name, row in rows.items():
            step_s = median(row.steps_s)
            simulated, nominal = (
                f"{seconds / step_s:.3f}" if seconds else ""
                for seconds in (row.simulated_s, row.nominal_s)
            )
            table.add_row(
                str(micro_batches),
                name,
                f"{step_s:.3f}",
                f"{step_s / lazy_s:.3f}",
                simulated,
                nominal,
                f"{median(row.bubbles):.1%}" if row.bubbles else "",
                f"{row.recomputes:g}",
                " ".join(map(str, row.sizes)),
                " ".join(map(str, row.recomputed)),
                " ".join(str(peak // 1024) for peak in row.peaks_bytes),
            )
    return table


def run(arguments: argparse.Namespace) -> None:
    """Run one rank; rank 0 prints and saves."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    for kind in arguments.stages:
        found = {
            count: measured(kind, count, arguments.rounds)
            for count in arguments.micro_batches
        }
        if dist.get_rank() == 0:
            show(Console(), table_of(kind, found))
            results[kind] = {
                count: {name: asdict(row) for name, row in rows.items()}
                for count, rows in found.items()
            }
    if dist.get_rank() == 0:
        print(f"saved {save('pipelines', results)}")
    dist.barrier()
    dist.destroy_process_group()


def main(given: Sequence[str]) -> int:
    """Start the ranks, or run one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    kinds = ["sleep", "transformer"]
    parser.add_argument("--stages", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--micro-batches", nargs="+", type=int, default=COUNTS)
    arguments = parser.parse_args(given)
    if "RANK" in os.environ:
        run(arguments)
        return 0
    command = ["-m", "torch.distributed.run", "--standalone"]
    ranks = ["--nproc-per-node", str(RANKS), os.path.abspath(__file__)]
    return subprocess.call([sys.executable, *command, *ranks, *given])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
