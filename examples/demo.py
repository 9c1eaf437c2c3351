"""The demonstration: the same small GPT trained plain and within a number of bytes.

Two copies of one model start from the same seed and take the same steps on the text of
`pydoc_data.topics`. One is left as it is; the other is fitted into a budget by
`membudget.fit`, by default 40 % of what the plain step allocates. At the end a table
shows both side by side: what a step needs at most, what autograd keeps, what a step
takes, and that not one bit of the result differs.

    python examples/demo.py [--budget 40%] [--steps N] [--quick]

The copies take turns, step by step, so that whatever else the machine does slows both,
and the ratio of their times means something.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import membudget as mb
import text
from gpt import GPT, GPTConfig
from terminal import human, progress

SEED = 1
BATCH_SIZE = 12
FULL = GPTConfig()
QUICK = GPTConfig(length=32, width=32, heads=2, blocks=3)

Batch = tuple[Tensor, Tensor]


@dataclass
class Trainee:
    """A model in training, with a random stream of its own.

    Both trainees live in one process and share torch's global generator, so each takes
    its stream up where its own last step left it. A region that left the stream
    elsewhere than the plain step does would change every dropout mask that follows.
    """

    model: GPT
    optimizer: torch.optim.Optimizer
    random_state: Tensor
    losses: list[Tensor] = field(default_factory=list)
    passes_s: list[float] = field(default_factory=list)  # Forward and backward.
    step_s: list[float] = field(default_factory=list)  # With the optimizer's step.

    @classmethod
    def start(cls, config: GPTConfig) -> Trainee:
        """Make the model that every trainee with this `config` starts as."""
        torch.manual_seed(SEED)
        model = GPT(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        return cls(model, optimizer, torch.get_rng_state())

    def forward_backward(self, batch: Batch) -> Tensor:
        """Compute the loss and all gradients; this is what is measured for bytes."""
        self.optimizer.zero_grad()
        loss: Tensor = self.model(*batch)
        loss.backward()
        return loss.detach()

    def step(self, batch: Batch) -> None:
        """Take one training step, and note its loss and its seconds."""
        torch.set_rng_state(self.random_state)
        start_s = time.perf_counter()
        loss = self.forward_backward(batch)
        self.passes_s.append(time.perf_counter() - start_s)
        self.optimizer.step()
        self.step_s.append(time.perf_counter() - start_s)
        self.losses.append(loss)
        self.random_state = torch.get_rng_state()


def train(
    console: Console, trainees: Sequence[Trainee], batches: Sequence[Batch]
) -> None:
    """Let the trainees take one step each on every batch, in turns."""
    with progress(console, "training", len(batches)) as report:
        for batch in batches:
            for trainee in trainees:
                trainee.step(batch)
            report(f"loss {trainees[0].losses[-1].item():.3f}")


def differences(plain: Trainee, budgeted: Trainee) -> list[str]:
    """Name everything in which the trainees differ, were it by one bit."""
    named = [
        (f"loss of step {i}", a, b)
        for i, (a, b) in enumerate(zip(plain.losses, budgeted.losses, strict=True))
    ]
    weights = plain.model.state_dict()
    named += [(n, weights[n], w) for n, w in budgeted.model.state_dict().items()]
    named.append(("random stream", plain.random_state, budgeted.random_state))
    return [name for name, a, b in named if not torch.equal(a, b)]


def compare(
    plain: Trainee, budgeted: Trainee, batch: Batch, plan: mb.Plan, verdict: str
) -> Table:
    """Measure both trainees on `batch` and return the table that the user is shown."""
    table = Table(
        title="The same training, plain and within the budget",
        caption="Peak: activations, gradients and temporaries of one step, beyond the"
        " parameters and optimizer states that both hold. Step time: of forward and"
        " backward. Predicted: before training.",
    )
    table.add_column()
    for head in ("plain", "budgeted", "budgeted / plain"):
        table.add_column(head, justify="right")

    pair = (plain, budgeted)
    for trainee in pair:  # So that the measured step makes all its gradients anew.
        trainee.optimizer.zero_grad()
    peaks = [mb.peak(trainee.forward_backward, batch).peak_bytes for trainee in pair]
    saved = [mb.saved(trainee.model, *batch).activation_bytes for trainee in pair]
    passes_s = [statistics.median(trainee.passes_s) for trainee in pair]
    step_s = [statistics.median(trainee.step_s) for trainee in pair]
    rates = [batch[0].numel() / s for s in step_s]
    losses = [trainee.losses[-1].item() for trainee in pair]

    def row(name: str, values: Sequence[float], cells: Sequence[str]) -> None:
        table.add_row(name, *cells, f"{values[1] / values[0]:.3f}")

    share = plan.budget_bytes / peaks[0]
    table.add_row("budget", "", human(plan.budget_bytes), f"{share:.3f}")
    predicted = [plan.plain_peak_bytes, plan.peak_bytes]
    row("peak bytes, predicted", predicted, [human(x) for x in predicted])
    row("peak bytes, measured", peaks, [human(x) for x in peaks])
    row("activations autograd keeps", saved, [human(x) for x in saved])
    table.add_row("step time, of any schedule", "", "", f"≥ {plan.bound:.3f}")
    table.add_row("step time, predicted", "", "", f"{plan.slowdown:.3f}")
    row("step time, median", passes_s, [_ms(s) for s in passes_s])
    row("with the optimizer's step", step_s, [_ms(s) for s in step_s])
    row("tokens per second", rates, [f"{x:,.0f}" for x in rates])
    equal = torch.equal(plain.losses[-1], budgeted.losses[-1])
    said = "equal to the last bit" if equal else "NOT EQUAL"
    table.add_row("loss at the end", *[f"{x:.6f}" for x in losses], said)
    table.add_row("audit of one step", "", verdict, "")
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, help="training steps (default 200)")
    parser.add_argument("--budget", default="40%", help='as "40%%" or "30MiB" in all')
    parser.add_argument("--quick", action="store_true", help="a few tiny steps only")
    chosen = parser.parse_args(argv)
    if chosen.steps is None:
        chosen.steps = 4 if chosen.quick else 200
    if chosen.steps < 1:
        parser.error(f"--steps must be at least 1; got {chosen.steps}")
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration.

    Returns:
        The exit code: 0 if both trainings ended equal bit for bit and the audit agrees,
        within the budget, otherwise 1; 2 if nothing fits into the budget.
    """
    chosen = options(argv)
    config = QUICK if chosen.quick else FULL
    console = Console()
    corpus = text.load()
    generator = torch.Generator().manual_seed(SEED)
    batches = [
        corpus.batch(BATCH_SIZE, config.length, generator) for _ in range(chosen.steps)
    ]

    plain, budgeted = Trainee.start(config), Trainee.start(config)
    try:
        fitted = mb.fit(
            budgeted.model, batches[0], chosen.budget, optimizer=budgeted.optimizer
        )
    except mb.MembudgetError as error:
        console.print(str(error))
        return 2
    count = sum(p.numel() for p in plain.model.parameters())
    console.print(
        f"A GPT of {count:,} parameters, {config.blocks} blocks, on "
        f"{len(corpus.tokens):,} bytes of Python's documentation"
        f" (Python {platform.python_version()}, sha256 {corpus.digest[:12]});"
        f" torch {torch.__version__}, {torch.get_num_threads()} threads."
    )
    train(console, (plain, budgeted), batches)

    differing = differences(plain, budgeted)
    audit = fitted.audit()
    verdict = "equal" if audit.equal else "DIFFERENT"
    console.print(compare(plain, budgeted, batches[-1], fitted.plan, verdict))
    console.print(str(fitted.status()))
    if differing:
        console.print("NOT EQUAL:", ", ".join(differing))
    else:
        console.print(
            f"All {chosen.steps} losses, every weight and the random stream are equal"
            " to the last bit (torch.equal)."
        )
    if not audit.equal:
        console.print(str(audit))
    fits = fitted.peak_bytes <= fitted.plan.budget_bytes
    return 0 if audit.equal and fits and not differing else 1


if __name__ == "__main__":
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    sys.exit(main())
