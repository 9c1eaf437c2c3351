"""Train models with the device limited to their budget, and print a table.

    python -m tests.emulated.limited [MODEL ...]

For each model the least budget is asked of `fit`, and the peak of plain training is
measured. Between the two lie the budgets. The device raises beyond them, while five
steps are trained under the plan, and without it.
"""

from __future__ import annotations

import gc
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import membudget as mb
from membudget.batch import call_model
from membudget.errors import BudgetError
from membudget.step import find_loss
from tests import table_models as table
from tests.emulated import emu, limited_images, limited_sequences
from tests.planner import models as planned

Made = tuple[nn.Module, Any]

SEGMENT_BYTES = 4096
"""To these models what 2 MiB are to one of a gigabyte."""

SHARES = (0.0, 0.35, 0.7)
"""Of what lies between the least budget and the plain peak."""

STEPS, MOST_OPERATORS = 5, 400


def _makers(module: Any) -> list[Callable[[], Made]]:
    """Return the functions of a module that make models."""
    return [
        function
        for name, function in vars(module).items()
        if not name.startswith("_")
        and getattr(function, "__module__", "") == module.__name__
        and not isinstance(function, type)
    ]


MODELS: dict[str, Callable[[], Made]] = {
    maker.__name__: maker
    for maker in (
        *(planned.gpt, planned.convolutions_in_place, planned.shared_modules),
        planned.tied_weights,
        *(table.resnet, table.mlp, table.mixture, table.dropout_transformer),
        *(table.autoencoder, table.mixer, table.siamese, table.two_towers),
        *_makers(limited_sequences),
        *_makers(limited_images),
    )
}


@dataclass(frozen=True)
class Row:
    """A model trained under a budget.

    Attributes:
        least_bytes: The least budget that `fit` names.
        plain_bytes: Peak of the bytes that plain training has allocated.
        budget_bytes: The budget, and the limit of the device.
        reserved_bytes: Peak of the bytes reserved by training under the plan.
        slowdown: Virtual time of that training ÷ that of plain training.
        is_equal: Whether it computes what plain training does without a limit.
        raises: Whether plain training runs out of memory under the limit.
    """

    least_bytes: int
    plain_bytes: int
    budget_bytes: int
    reserved_bytes: int
    slowdown: float
    is_equal: bool
    raises: bool


class Trained:
    """A model on the device with its optimizer, the same each time that it is made."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(1)
        self.model, self.batch = MODELS[name]()
        params = self.model.parameters()
        self.optimizer: torch.optim.Optimizer
        if list(MODELS).index(name) % 2:
            self.optimizer = torch.optim.SGD(params, 1e-6, momentum=0.9)
        else:
            self.optimizer = torch.optim.AdamW(params, 1e-3)

    def fit(self, budget: int | None) -> mb.Fitted:
        options: dict[str, Any] = {"optimizer": self.optimizer, "measure": "none"}
        return mb.fit(self.model, self.batch, budget, **options)

    def steps(self) -> tuple[list[Tensor], float]:
        """Train; return losses, gradients, parameters and buffers, and the seconds."""
        torch.manual_seed(2)
        found: list[Tensor] = []
        start_s = emu.host_seconds()
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            loss = find_loss(call_model(self.model, self.batch))[0]
            loss.backward()
            gradients = (p.grad for p in self.model.parameters() if p.grad is not None)
            found += [tensor.detach().cpu() for tensor in (loss, *gradients)]
            self.optimizer.step()
        torch.accelerator.synchronize()
        seconds = emu.host_seconds() - start_s
        found += [t.detach().cpu() for t in self.model.state_dict().values()]
        return found, seconds


@contextmanager
def limited(limit_bytes: int = 0) -> Iterator[None]:
    """Let the device, with nothing cached, raise beyond a limit; 0 means none."""
    configure = {"segment_bytes": SEGMENT_BYTES, "attention": "fused", "launch_s": 0.0}
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    emu.configure(limit_bytes=limit_bytes, **configure)  # type: ignore[arg-type]
    with torch.device("emu"):
        yield
    emu.configure(**configure)  # type: ignore[arg-type]


def peak(kind: str) -> int:
    return torch.accelerator.memory_stats()[f"{kind}_bytes.all.peak"]


def operators_of(name: str) -> int:
    """Return how many operators forward and backward of a model run."""
    with limited():
        trained = Trained(name)
        return len(mb.profile(trained.model, trained.batch).graph.operators)


def least_bytes(name: str) -> int:
    """Return the least budget that `fit` names."""
    with limited():
        try:
            Trained(name).fit(2)
        except BudgetError as error:
            return error.least_bytes
    raise AssertionError("no plan fits in two bytes")


def rows_of(name: str) -> Iterator[Row]:
    """Train a model plainly without a limit, then under each budget."""
    with limited():
        plain, plain_s = Trained(name).steps()
        plain_bytes = peak("allocated")
    least = least_bytes(name)
    for share in SHARES:
        budget = least + int(share * (plain_bytes - least))
        with limited():
            trained = Trained(name)
            fitted = trained.fit(budget)
        with limited(budget), fitted:
            found, seconds = trained.steps()
            reserved = peak("reserved")
        del trained, fitted
        is_equal = len(found) == len(plain) and all(map(torch.equal, found, plain))
        yield Row(
            *(least, plain_bytes, budget, reserved, seconds / plain_s, is_equal),
            raises=runs_out(name, budget),
        )


def trains_in_what_is_free(name: str) -> bool:
    """Fit a model to what its device has free; return whether it trains to its bits.

    Then the device has 4 % less, because drivers and other processes take some, too.
    """
    with limited():
        plain, _ = Trained(name).steps()
        plain_bytes = peak("allocated")
    limit = (least_bytes(name) + plain_bytes) // 2
    with limited(limit):
        trained = Trained(name)
        fitted = trained.fit(None)
    with limited(limit * 96 // 100), fitted:
        found, _ = trained.steps()
    assert fitted.plan.regions
    return all(map(torch.equal, found, plain))


def runs_out(name: str, limit: int) -> bool:
    """Return whether plain training runs out of memory under a limit."""
    try:
        with limited(limit):
            Trained(name).steps()
    except torch.OutOfMemoryError:
        return True
    finally:
        emu.configure()
    return False


def main(names: list[str]) -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    write = sys.stdout.write
    write(f"{'model':22} operators    least    plain   budget  reserved/  slowdown\n")
    for name in names or MODELS:
        start = time.process_time()
        count = operators_of(name)
        for row in rows_of(name):
            write(
                f"{name:22} {count:9} {row.least_bytes:8} {row.plain_bytes:8} "
                f"{row.budget_bytes:8} {row.reserved_bytes / row.budget_bytes:9.3f} "
                f"{row.slowdown:9.3f}  {'equal' if row.is_equal else 'DIFFERS'} "
                f"{'raises' if row.raises else 'FITS PLAIN'}\n"
            )
            sys.stdout.flush()
        write(f"{name:22} {time.process_time() - start:9.1f} s\n")


if __name__ == "__main__":
    main(sys.argv[1:])
