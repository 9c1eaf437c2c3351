"""What others do with a step's memory, measured beside the plans of `planners`.

Every block checkpointed, by torch's checkpoint and by ours; a chain of blocks in two,
three, four and six segments by torch's `checkpoint_sequential`, and in √n segments by
ours; the step compiled under torch's activation budget; and torch's SAC ILP.

Each way gets a copy of the model, on which forwards are patched where that is how it is
put on. The first step, in which a compiler compiles, counts for nothing but its wall
time. What the second leaves (loss, gradients, buffers, the random stream) is compared
with what the plain step leaves from the same state, bit for bit; the third is metered;
then all are timed in turns with the plain step. Compiled steps are timed one by one
with the plain step: copies of a model share compiled code, whatever budget it was made
for. A way that fails, or is not ready in time, stands in the table with what it said.

Not tried: other options of these tools than those that stand here.
"""

from __future__ import annotations

import copy
import gc
import io
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stdout,
)
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
from harness import in_turns
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import membudget as mb
from membudget.step import Step

SEGMENTS = (2, 3, 4, 6)
COMPILE_BUDGETS = (0.8, 0.5, 0.2)

Made = tuple[nn.Module, Any]


@dataclass(frozen=True)
class Subject:
    """A model that is measured.

    Attributes:
        make: Makes it and its batch, from torch's global generator.
        blocks: The names of its blocks, in the order of the forward.
        is_chain: Whether a block takes what the one before returned, and else nothing
            that the step makes between them.
    """

    make: Callable[[], Made]
    blocks: tuple[str, ...]
    is_chain: bool = True


@dataclass(frozen=True)
class Way:
    """One way of needing less memory.

    Attributes:
        put: Puts it on a copy of the model.
        first: What stands around the first step, in which a compiler compiles.
        alone: Whether it is timed apart from the other ways.
    """

    put: Callable[[nn.Module], object]
    first: Callable[[], AbstractContextManager[object]] = nullcontext
    alone: bool = False


def ways(subject: Subject) -> dict[str, Way]:
    """Return all ways that this machine and the model allow."""
    blocks = subject.blocks
    found = {
        "each block, torch": Way(partial(_each_by_torch, blocks)),
        "each block, membudget": Way(
            lambda model: mb.apply(model, names=blocks, verify=False)
        ),
    }
    for count in SEGMENTS if subject.is_chain else ():
        if count <= len(blocks):
            put = partial(_segments_by_torch, blocks, count)
            found[f"{count} segments, torch"] = Way(put)
    found["√n segments, membudget"] = Way(partial(_root_segments, blocks))
    backends = ["aot_eager_decomp_partition", "inductor"]
    for backend in backends if has_compiler() else backends[:1]:
        for budget in COMPILE_BUDGETS:
            found[f"compiled, {backend}, {budget}"] = _compiled(backend, budget)
    return found


def has_compiler() -> bool:
    """Say whether there is a C++ compiler, which inductor needs on a CPU."""
    names = (os.environ.get("CXX") or "g++", "clang++")
    return any(shutil.which(name) for name in names)


def _each_by_torch(blocks: Sequence[str], model: nn.Module) -> None:
    for name in blocks:
        block = model.get_submodule(name)
        forward = partial(checkpoint, block.forward, use_reentrant=False)
        block.forward = forward


def _segments_by_torch(blocks: Sequence[str], count: int, model: nn.Module) -> None:
    """Let the first block run the whole chain, and the others hand on what they get."""
    modules = [model.get_submodule(name) for name in blocks]
    forwards = [module.forward for module in modules]

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        # torch hands one tensor from layer to layer; a block may take more than that.
        layers = [
            lambda x, forward=forward: forward(x, *args, **kwargs)
            for forward in forwards
        ]
        return checkpoint_sequential(layers, count, x, use_reentrant=False)

    for module in modules:
        module.forward = _handed_on
    modules[0].forward = run


def _handed_on(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x


def _root_segments(blocks: Sequence[str], model: nn.Module) -> None:
    count = round(len(blocks) ** 0.5)
    starts = [index * len(blocks) // count for index in range(count)]
    # The last segment is no region: its backward comes at once.
    spans = [(blocks[start], blocks[end - 1]) for start, end in pairwise(starts)]
    mb.apply(model, spans=spans, verify=False)


def _compiled(backend: str, budget: float) -> Way:
    def put(model: nn.Module) -> None:
        torch._dynamo.reset()
        if backend == "inductor":
            import torch._inductor.config as inductor

            # The first step is timed, so nothing of it may be there from an earlier
            # run, and no worker process may be busy while steps are timed.
            inductor.force_disable_caches, inductor.compile_threads = True, 1
        model.compile(backend=backend, dynamic=False)

    patched = partial(torch._functorch.config.patch, activation_memory_budget=budget)
    return Way(put, patched, alone=True)


def measure(
    model: nn.Module, batch: Any, candidates: dict[str, Way], seconds: float, limit: int
) -> dict[str, dict[str, Any]]:
    """Return a row for each way.

    Args:
        model: The plain model; it is copied.
        batch: What it is called with.
        candidates: The ways.
        seconds: How long to time all of them.
        limit: The seconds after which a first step is given up.
    """
    together = {name: way for name, way in candidates.items() if not way.alone}
    groups = [together]
    groups += [{name: way} for name, way in candidates.items() if way.alone]
    rows: dict[str, dict[str, Any]] = {}
    for group in filter(None, groups):
        share = len(group) / len(candidates)
        rows |= _measured(copy.deepcopy(model), batch, group, seconds * share, limit)
    return rows


def _measured(
    origin: nn.Module, batch: Any, group: dict[str, Way], seconds: float, limit: int
) -> dict[str, dict[str, Any]]:
    """Return a row for each way of a group that is timed in turns."""
    plain = Step(copy.deepcopy(origin), batch, None)
    wanted = left_behind(plain)
    rows: dict[str, dict[str, Any]] = {}
    steps = {"plain": plain}
    for name, way in group.items():
        step = Step(copy.deepcopy(origin), batch, None)
        try:
            rows[name] = tried(way, step, wanted, limit)
        except Exception as error:
            rows[name] = {"error": one_line(error)}
            continue
        steps[name] = step
    if len(steps) == 1:
        return rows
    cases = {name: partial(run_step, step) for name, step in steps.items()}
    estimates, rounds = in_turns(cases, seconds=seconds)
    for name in steps.keys() - {"plain"}:
        ratio, quartile = estimates[name].ratio(estimates["plain"])
        rows[name] |= {"slowdown": ratio, "slowdown_quartile": quartile}
        rows[name]["rounds"] = rounds
    return rows


def run_step(step: Step) -> None:
    """Run a step that makes its gradients anew: what is timed."""
    step.run()
    step.prepare()


def tried(
    way: Way, step: Step, wanted: dict[str, list[Tensor]], limit: int
) -> dict[str, Any]:
    """Put a way on a step's model; compare a step with the plain one, and meter one.

    Args:
        way: The way.
        step: The step of a copy of the model.
        wanted: What the plain step left behind.
        limit: The seconds after which the first step is given up.
    """
    before = {name: t.clone() for name, t in step.model.state_dict().items()}
    start = time.perf_counter()
    way.put(step.model)
    with limited(limit), way.first():
        run_step(step)
    ready_s = time.perf_counter() - start
    step.model.load_state_dict(before)
    left = left_behind(step)
    differs = [kind for kind, of in wanted.items() if not _are_equal(of, left[kind])]
    del left
    gc.collect()
    peak_bytes = mb.peak(step.run).peak_bytes
    step.prepare()
    return {"peak_bytes": peak_bytes, "differs": differs, "first_step_s": ready_s}


def left_behind(step: Step) -> dict[str, list[Tensor]]:
    """Run one step with the generator at a known place, and hold what it left."""
    torch.manual_seed(1)
    loss = step.run().detach()
    found = {
        "loss": [loss],
        "gradients": [p.grad for p in step.model.parameters() if p.grad is not None],
        "buffers": [buffer.clone() for buffer in step.model.buffers()],
        "random stream": [torch.get_rng_state()],
    }
    step.prepare()
    return found


def _are_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise `TimeoutError` if the block takes longer, where the system has alarms."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not ready after {seconds} s")

    if not hasattr(signal, "SIGALRM"):
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def one_line(error: Exception) -> str:
    r"""Return an error for a table: its kind and how it begins, without folders.

    Example:
        >>> one_line(OSError("no /home/me/lib/x.so,\n  which is needed"))
        'OSError: no x.so, which is needed'
    """
    text = " ".join(f"{type(error).__name__}: {error}".split())
    text = re.sub(r"(?<![\w:/])(?:/[\w.+@-]+)+/", "", text)
    return text if len(text) <= 120 else text[:117] + "..."


def sac_ilp(
    make: Callable[[], Made], limits: dict[float, int], limit: int
) -> dict[str, dict[str, Any]]:
    """Let torch's SAC ILP plan; torch has nothing that applies what it finds.

    Args:
        make: Makes the model and its batch.
        limits: The bytes for parameters and step, by the share they stand for.
        limit: The seconds after which a plan is given up.

    Returns:
        A row for each share, or one for an estimator that failed.
    """
    rows: dict[str, dict[str, Any]] = {}
    for mode in ("operator-level-cost-model", "operator-level-benchmark"):
        name = f"torch SAC ILP, {mode.removeprefix('operator-level-')}"
        try:
            # Its estimators print, and a table follows.
            with limited(limit), redirect_stdout(io.StringIO()):
                solved = _solved(_module_graph(make, mode), limits)
        except Exception as error:
            rows[name] = {"error": one_line(error)}
            continue
        rows |= {f"{name}, {share}": found for share, found in solved.items()}
    return rows


def _module_graph(make: Callable[[], Made], mode: str) -> Any:
    """Return what the ILP reads: bytes and times of each module, on fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools import ilp_utils
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator
    from torch.distributed._tools.sac_estimator import SACEstimator

    with FakeTensorMode():
        model, batch = make()
        step = Step(model, batch, None)
        memory = MemTracker()
        memory.track_external(model)
        with memory:
            run_step(step)
            memory.reset_mod_stats()
            run_step(step)
        runtime, sac = RuntimeEstimator(), SACEstimator()
        with runtime(estimate_mode_type=mode):
            run_step(step)
        with sac(estimate_mode_type=mode):
            run_step(step)
    device = torch.device("cpu")
    stats = ilp_utils.aggregate_stats(model, memory, runtime, sac, device)
    return ilp_utils.parse_module_info(stats)


def _solved(graph: Any, limits: dict[float, int]) -> dict[float, dict[str, Any]]:
    from torch.distributed._tools.ilp_utils import get_peak_memory_runtime_baseline
    from torch.distributed._tools.sac_ilp import sac_milp

    _, plain_ms = get_peak_memory_runtime_baseline(graph)
    rows: dict[float, dict[str, Any]] = {}
    for share, limit_bytes in limits.items():
        units, again_ms, peak_bytes = sac_milp(graph, limit_bytes / 2**30)
        if peak_bytes < 0:
            rows[share] = {"error": "the solver found no solution"}
            continue
        rows[share] = {
            "units": len(units),
            "planned_slowdown": 1 + again_ms / plain_ms,
            "planned_of_limit": peak_bytes / limit_bytes,
        }
    return rows


def table(title: str, rows: dict[str, dict[str, Any]]) -> Table:
    """Return the rows as a table."""
    result = Table(title=f"{title}: what others do")
    result.add_column("way", no_wrap=True)
    for head in ("share", "slowdown (quartile)", "predicted, plan at that peak"):
        result.add_column(head, justify="right")
    result.add_column("differs from plain")
    result.add_column("first step in s", justify="right")
    for name, row in rows.items():
        if "peak_bytes" not in row:
            result.add_row(name, "", "", "", _said(row))
            continue
        plan = row.get("plan_slowdown")
        result.add_row(
            name,
            f"{row['share']:.3f}",
            f"{row['slowdown']:.3f} ({row['slowdown_quartile']:.3f})",
            "none fits" if plan is None else f"{plan:.3f}",
            ", ".join(row["differs"]) or "no",
            f"{row['first_step_s']:.1f}",
        )
    return result


def _said(row: dict[str, Any]) -> str:
    if "error" in row:
        return str(row["error"])
    return (
        f"planned, not run: slowdown {row['planned_slowdown']:.3f}, "
        f"{row['planned_of_limit']:.3f} of the limit, {row['units']} units"
    )
