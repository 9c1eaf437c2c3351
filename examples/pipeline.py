"""A small GPT in a pipeline whose stages recompute while they wait for the gradient.

    torchrun --nproc-per-node 4 examples/pipeline.py [--quick] [--png FILE]

The ranks talk over gloo here, and over NCCL where there are GPUs. Started without
torchrun, the example starts two ranks itself. Rank 0 measures the blocks, and all ranks
plan with its numbers: which stage gets which blocks, and which of them it recomputes to
stay within the budget. Then the same batches are trained without checkpointing and by
the plan: the losses must be equal, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from gpt import Block, GPTConfig
from membudget import pipeline

FULL = GPTConfig(length=128, width=128, blocks=14)
QUICK = GPTConfig(length=32, width=32, heads=2, blocks=6)
RANKS = 2
ROWS = 4


class Embedding(nn.Module):
    """The first block of the chain: tokens and their positions."""

    def __init__(self, config: GPTConfig) -> None:
        """Make both embeddings."""
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.length, config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return (batch, length, width)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x: Tensor = self.tokens(tokens) + self.positions(places)
        return x


def chain(config: GPTConfig) -> list[nn.Module]:
    """Return the model as a chain of blocks, with the same weights on every rank."""
    torch.manual_seed(0)
    head = nn.Sequential(
        nn.LayerNorm(config.width), nn.Linear(config.width, config.vocabulary)
    )
    return [Embedding(config), *(Block(config) for _ in range(config.blocks)), head]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of a micro-batch."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def fitted_plan(
    config: GPTConfig, device: torch.device, arguments: argparse.Namespace
) -> pipeline.PipelinePlan:
    """Return the plan for the budget, which rank 0 makes from its own measurements."""
    tokens = torch.zeros(ROWS, config.length, dtype=torch.long, device=device)
    return pipeline.fit_pipeline(
        chain(config),
        tokens,
        arguments.budget,
        micro_batches=arguments.micro_batches,
        target=tokens,
        loss_fn=loss_of,
        optimizer=torch.optim.AdamW,
    )


def train(
    schedule: pipeline.PipelineSchedule, config: GPTConfig, steps: int
) -> list[Tensor]:
    """Train for some steps, and return the losses; of the last stage's rank alone."""
    stages, losses = schedule.stages, []
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    rows = ROWS * schedule.order.micro_batches
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        shape = (rows, config.length + 1)
        text = torch.randint(config.vocabulary, shape, generator=generator)
        text = text.to(stages[0].device)
        torch.manual_seed(step)
        given = [text[:, :-1]] if stages[0].is_first else []
        of_step: list[Tensor] = []
        schedule.step(*given, target=text[:, 1:], losses=of_step, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.detach() for loss in of_step]
    return losses


def run(arguments: argparse.Namespace, device: torch.device) -> bool:
    """Train both ways; return whether all losses of this rank are equal."""
    config = QUICK if arguments.quick else FULL
    plan = fitted_plan(config, device, arguments)
    found = {}
    ways: dict[str, Any] = {"planned": {}, "without": {"checkpoint": "never"}}
    for way, options in ways.items():
        stages = pipeline.split(chain(config), plan, device=device)
        schedule = pipeline.PipelineSchedule(
            stages, plan, loss_fn=loss_of, meter=True, **options
        )
        found[way] = train(schedule, config, arguments.steps)
        report(way, schedule, plan, arguments)
    return all(map(torch.equal, found["planned"], found["without"]))


def report(
    way: str,
    schedule: pipeline.PipelineSchedule,
    plan: pipeline.PipelinePlan,
    arguments: argparse.Namespace,
) -> None:
    """Print on rank 0 what all ranks did in the last step."""
    events = schedule.gathered_events()
    costs = pipeline.measured_costs(schedule)
    peaks: list[Any] = [None] * dist.get_world_size()
    here = max((around.peak_bytes for around in schedule.bytes), default=0)
    dist.all_gather_object(peaks, here)
    if dist.get_rank():
        return
    if way == "planned":
        print(f"the plan, from rank 0's measurements:\n{plan}\n")
    simulation = pipeline.simulate_pipeline(schedule.order, costs)
    print(f"{way}: the last step\n{pipeline.timeline_text(events)}")
    print(f"{pipeline.comparison_text(simulation, events, peaks)}\n")
    if arguments.png and way == "planned":
        pipeline.save_timelines(
            arguments.png, {"measured": events, "simulated": simulation.events}
        )


def start_ranks(arguments: Sequence[str]) -> int:
    """Start the ranks on this machine, as torchrun does."""
    command = ["-m", "torch.distributed.run", "--standalone"]
    ranks = ["--nproc-per-node", str(RANKS), os.path.abspath(__file__)]
    return subprocess.call([sys.executable, *command, *ranks, *arguments])


def main(given: Sequence[str]) -> int:
    """Run one rank; the exit code is 0 if all losses were equal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=3, help="steps of each way")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--budget", default="50%", help="bytes or a share, per rank")
    parser.add_argument("--quick", action="store_true", help="a smaller model")
    parser.add_argument("--png", metavar="FILE", help="draw the planned step")
    arguments = parser.parse_args(given)
    if "RANK" not in os.environ:
        return start_ranks(given)
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        place = int(os.environ["LOCAL_RANK"])
        torch.accelerator.set_device_index(place)
        found = torch.accelerator.current_accelerator()
        device = torch.device(found.type if found else "cpu", place)
    dist.init_process_group("gloo" if device.type == "cpu" else None)
    equal = run(arguments, device)
    verdicts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(verdicts, equal)
    if dist.get_rank() == 0:
        print("losses equal to the last bit" if all(verdicts) else "losses DIFFER")
    dist.barrier()
    dist.destroy_process_group()
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
