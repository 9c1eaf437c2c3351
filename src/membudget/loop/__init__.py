"""Hold a training loop to a number of bytes, whatever is in it.

`root` is what the model carries while the budget is open: `situation` tells its calls
apart, `room` says what is left for one, `plans` chooses a plan, `regions` puts it on
the model, `meter` measures what the call takes, `awaited` knows whose backward pass is
still to come, `casts` what autocast caches, and `step_needs` what the optimizer will
take. `micro_batch` records a call without memory, with `leaves` for parameters, FSDP
without its `shards`, and no `collectives` sent. `point` predicts it under a plan, and
`kind` predicts calls of other sizes from a few points; `evaluation` foresees calls
without gradients, and `twice` gradients that keep their graph. `host_room` says what
may be moved to the host, and `numbers` finds arguments that decide nothing.
`budgeted` is what a user sees, `undo` and `report` serve its `step` and `status`;
`learned` and `plan_file` hand what is known to the next run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch.nn import Module
from torch.optim import Optimizer

from membudget.allowance import check_budget, share_of
from membudget.errors import OptionError
from membudget.host import Offloading
from membudget.loop.budgeted import Budgeted
from membudget.loop.host_room import host_rooms
from membudget.loop.plan_file import PlanFile
from membudget.loop.room import OnExceed, Room
from membudget.loop.root import Root
from membudget.loop.step_needs import given_to
from membudget.memory.counting import Counted
from membudget.planner.plan import Plan
from membudget.sharding import ranks_of, unwrapped_model
from membudget.step import check_arguments, device_of_model
from membudget.text import parse_bytes

__all__ = ["Budgeted", "budget"]


def budget(
    model: Module | Sequence[Module],
    budget: int | str,
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    on_exceed: OnExceed = "raise",
    verify: float = 0.01,
    plan: Plan | str | Path | None = None,
    host: int | str | None = None,
    offload: Offloading = "auto",
) -> Budgeted:
    """Keep the training loop inside the context within a number of bytes, unmodified.

    Each call of the model that a backward pass may follow is planned before it runs: it
    is recorded on fake tensors, and the fastest plan that fits what is left is put on
    the model. What the loop needs beside the model (its loss, the optimizer's step) is
    measured as it runs. Calls that run the same code on other sizes share what was
    recorded. Gradients, buffers and random streams are bitwise those of the plain loop.

    Args:
        model: The module whose forward the loop calls, or several, as for a GAN. In
            DistributedDataParallel, or sharded by `fully_shard`, each rank plans for
            its own micro-batches.
        budget: Total bytes of live tensors allowed on the model's device, whatever
            holds them, as a number or `"20GiB"`. `"40%"` allows 40 % of what the plain
            micro-batch adds to the bytes live before it; `"40% of activations"` allows
            its gradients plus 40 % of the rest.
        optimizer: The optimizer, whose state and temporaries then count from the first
            micro-batch on; or a list, of which each model takes the one that steps
            most of its parameters. Others are noticed when they first step.
        on_exceed: What to do if even the smallest plan for a micro-batch is over
            budget: `"raise"` raises a `BudgetError` before the forward, `"warn"` warns
            and uses the smallest plan, `"plain"` warns and runs without a plan. Calls
            without gradients, which have no plan, are treated likewise.
        verify: Share of micro-batches in which recomputed tensors are compared with the
            dropped ones, by fingerprints. Besides these, the first one of each kind is
            verified, and of its further sizes the 2nd, 4th, 8th, ...
        plan: What `save()` wrote in an earlier run. Situations that are in it have
            their plan from the first micro-batch on, and are not recorded again.
        host: Bytes of the host's memory that plans may move tensors to, such as
            `"64GiB"`, allocated as they are needed, for all models together. The link
            to the host, and how fast the device computes, are measured once for each
            process. `None` moves nothing.
        offload: `False` moves nothing, whatever `host` is.

    Returns:
        A context manager, with `start()`, `stop()`, `step()`, `status()`, `report()`,
        `save()`.

    Raises:
        OptionError: If the budget is neither a size nor a share, `on_exceed` is
            unknown, `verify` is not in (0, 1], `host` is not a positive size, `host`
            is given for a model on the CPU, or an optimizer steps none of the models.
        PlanError: If the plan was saved for other parameters, another device or another
            torch, or is not whole.

    Warns:
        BudgetWarning: If a micro-batch took more than was left for it, or the model
            cannot be recorded on fake tensors; each block is then recomputed. Also if
            the plan was saved under other conditions, such as other code of the model,
            and if numbers or strings among the arguments make ever new situations.

    Not counted: memory outside torch's allocator; on the CPU without a C++ compiler,
    tensors that nothing in Python refers to, and no micro-batch is measured.

    Example:
        >>> import membudget as mb, torch
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with mb.budget(model, "1GiB", optimizer=optimizer) as fitted:
        ...     for _ in range(3):
        ...         model(torch.randn(8, 64)).square().mean().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> [(s.tensors, s.uses) for s in fitted.status().situations]
        [('8x64', 3)]
    """
    check_budget(budget)
    if on_exceed not in ("raise", "warn", "plain"):
        raise OptionError(
            f"on_exceed must be 'raise', 'warn' or 'plain'; got {on_exceed!r}"
        )
    if not 0 < verify <= 1:
        raise OptionError(f"verify must be a share above 0, at most 1; got {verify!r}")
    limit = share_of(budget) or parse_bytes(budget)
    given = [*model] if isinstance(model, Sequence) else [model]
    for one in given:
        check_arguments(one)
    # No region in it communicates, so that each rank may plan for itself.
    models = [unwrapped_model(one) for one in given]
    devices = [device_of_model(one) for one in models]
    hosts = host_rooms(host, offload, devices)
    roots = [
        Root(one, Room(limit, on_exceed, Counted(on)), steps, float(verify), hosts[on])
        for one, on, steps in zip(
            models, devices, given_to(models, optimizer), strict=True
        )
    ]
    ranks = max(map(ranks_of, given), default=1)
    return Budgeted(budget, roots, PlanFile(roots, plan), ranks)
