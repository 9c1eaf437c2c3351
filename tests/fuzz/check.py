"""Hold a step under an engine to the plain step, which runs without anything of ours.

The verdict is one word. As promised: `equal`; `both raise`; `refused`, a documented
error of ours where the plain step trains; `limit`, another result that is documented;
`lenient`, no error where the plain step raises; `unstable`, two plain runs that differ.
Failures: `wrong`, another result; `crash`, an error that is not ours; `unfounded`, one
of ours that is not documented.
"""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import membudget as mb
from membudget.policies import Candidate
from tests.fuzz.program import Program, Step
from tests.fuzz.world import Stateful, World, shelf
from tests.oracles import same_bits

Word = Literal[
    "equal",
    "both raise",
    "refused",
    "lenient",
    "limit",
    "wrong",
    "crash",
    "unfounded",
    "unstable",
]
FAILURES: frozenset[Word] = frozenset({"wrong", "crash", "unfounded"})
Caller = Callable[..., Any]

ENGINES = ("rerun", "replay", "keep", "unverified", "fingerprints", "auto", "mixed")

# Why a region may refuse a program, and the engines that may.
_RERUNS = frozenset({"rerun", "auto", "mixed"})
REFUSALS: dict[str, frozenset[str]] = {
    "writes its input": _RERUNS,
    "python": _RERUNS,
    "counts": _RERUNS,
    "history": _RERUNS,
    "hidden": _RERUNS | {"fingerprints"},
    "bound": _RERUNS,
    "number": _RERUNS,
    "replaced": frozenset(ENGINES),
    "unseen": frozenset(ENGINES),
    "unseen between": frozenset(ENGINES),
    "written since": frozenset(ENGINES),
    # What a region keeps may be its result, and a replay begins there. Without being
    # told to, it keeps what `transpose_` and the like have changed.
    "result written since": frozenset(ENGINES) - {"rerun", "auto"},
}


_RERUN_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"early_stop": False},
    {"determinism_check": "values"},
)


@dataclass
class Record:
    """What a run left behind, step by step, and the error that ended it."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    error: Exception | None = None


@dataclass(frozen=True)
class Verdict:
    """How a run under an engine compares with the plain one.

    Attributes:
        word: See the top of this module.
        detail: What differs, or the error.
        kind: Why a refusal, or another result, is within the promise.
    """

    word: Word
    detail: str = ""
    kind: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether the engine broke its promise."""
        return self.word in FAILURES


def merely_call(function: Caller, *args: Any, **kwargs: Any) -> Any:
    """Run a region plain."""
    return function(*args, **kwargs)


def run(step: Step, seed: int, steps: int, region: Caller, trains: bool) -> Record:
    """Build a world from `seed` and run some steps in it.

    Args:
        step: The program.
        seed: What parameters, inputs and all random streams begin from.
        steps: How many steps; each has inputs of its own, and gradients add up.
        region: Calls what is to run as a region.
        trains: Whether the second input requires a gradient.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the global stream is what is under test
    m, n = World(), Stateful()
    record = Record()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(steps):
            x = torch.randn(4, 4).requires_grad_()
            y = torch.randn(4, 4).requires_grad_(trains)
            m.train()
            n.train()
            try:
                outputs = step(m, n, x, y, region)
            except Exception as error:
                record.error = error
                break
            record.steps.append(_facts(m, n, x, y, outputs))
    return record


def _facts(m: World, n: Stateful, x: Tensor, y: Tensor, outputs: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {f"output {i}": t.detach() for i, t in enumerate(outputs)}
    facts |= {f"output {i}.grad": t.grad for i, t in enumerate(outputs) if t.is_leaf}
    facts |= {"x": x.detach(), "y": y.detach(), "x.grad": x.grad, "y.grad": y.grad}
    for name, parameter in (*m.named_parameters(), *n.named_parameters()):
        facts |= {name: parameter.detach(), f"{name}.grad": parameter.grad}
    facts |= dict(m.named_buffers()) | dict(n.named_buffers())
    # Not the counter in it: a dict on a module is not put back by a rerun.
    facts |= {f"stats {name}": m.stats[name] for name in ("mean", "var")}
    facts |= {f"entry {i}": entry for i, entry in enumerate(m.entries)}
    facts |= {f"shelf {name}": shelf[name] for name in ("factor", "shift")}
    facts |= {"factor": m.factor}
    facts |= {"seen": m.seen, "generator": n.generator.get_state()}
    facts |= {"torch": torch.get_rng_state(), "python": random.getstate()}
    facts |= {"numpy": repr(np.random.get_state(legacy=False))}  # noqa: NPY002
    return {n: v.clone() if isinstance(v, Tensor) else v for n, v in facts.items()}


def _keep_some(seed: int, candidate: Candidate) -> bool:
    return random.Random(seed * 1000 + candidate.index).random() < 0.4


def _of_each(
    engines: list[Caller], seed: int, function: Caller, *args: Any, **kwargs: Any
) -> Any:
    number = int(function.__name__[1:]) + seed
    return engines[number % len(engines)](function, *args, **kwargs)


def engine(name: str, seed: int, **checks: Any) -> Caller:
    """Return what runs regions under an engine, with options of those that rerun."""
    keep = functools.partial(_keep_some, seed)
    replay = functools.partial(mb.checkpoint, engine="replay")
    match name:
        case "rerun":
            return functools.partial(
                mb.checkpoint, engine="rerun", **(checks or _RERUN_OPTIONS[seed % 4])
            )
        case "replay":
            return replay
        case "keep":
            return functools.partial(replay, keep=keep)
        case "unverified":
            some = keep if seed % 2 else None
            return functools.partial(replay, verify=False, keep=some)
        case "fingerprints":
            return functools.partial(replay, verify="fingerprints")
        case "mixed":
            names = ["rerun", "replay", "auto", "keep", "unverified"]
            engines = [engine(n, seed, **checks) for n in names]
            return functools.partial(_of_each, engines, seed)
    return functools.partial(mb.checkpoint, **checks)


def run_program(program: Program, region: Caller) -> Record:
    """Run a program from its seed, calling what is to run as a region by `region`."""
    return run(program.compiled(), program.seed, program.steps, region, program.trains)


def plain(program: Program) -> Record:
    """Run the plain step."""
    return run_program(program, merely_call)


def check(program: Program, name: str, expected: Record | None = None) -> Verdict:
    """Run a program under an engine and compare it with the plain one.

    Args:
        program: The program.
        name: The engine.
        expected: What the plain step left, where that is known.
    """
    expected = expected or plain(program)
    found = run_program(program, engine(name, program.seed))
    verdict = compared(expected, found)
    if verdict.is_failure and differs(expected, plain(program)):
        return Verdict("unstable", "two plain runs differ")
    if verdict.word == "wrong" and (kind := _limit(program, name, expected)):
        return Verdict("limit", verdict.detail, kind)
    if verdict.word == "refused":
        kind = _reason(program, name)
        return Verdict("refused" if kind else "unfounded", verdict.detail, kind)
    return verdict


def _is_wrong(program: Program, region: Caller, expected: Record) -> bool:
    return compared(expected, run_program(program, region)).word == "wrong"


def compared(expected: Record, found: Record) -> Verdict:
    if different := differs(expected, found):
        return Verdict("wrong", different)
    if expected.error and len(found.steps) >= len(expected.steps):
        at_once = found.error and len(found.steps) == len(expected.steps)
        return Verdict("both raise" if at_once else "lenient", _text(expected.error))
    if found.error is None:
        return Verdict("equal")
    is_ours = isinstance(found.error, mb.MembudgetError)
    return Verdict("refused" if is_ours else "crash", _text(found.error))


def differs(expected: Record, found: Record) -> str:
    for number, (one, other) in enumerate(
        zip(expected.steps, found.steps, strict=False)
    ):
        names = [n for n in one if not same_bits(one[n], other.get(n))]
        if names:
            return f"step {number + 1}: {', '.join(names)}"
    return ""


def _text(error: Exception | None) -> str:
    return f"{type(error).__name__}: {error}" if error else ""


def _reason(program: Program, name: str) -> str:
    """Return the documented reason for which an engine refuses, if there is one."""
    for reason, engines in REFUSALS.items():
        if reason in program.reasons and name in engines:
            return reason
    return "saved memory written" if written_after_saved(program) else ""


def _limit(program: Program, name: str, expected: Record) -> str:
    """Return the documented reason for which a result may differ, if there is one."""
    if "hidden" in program.reasons and name in ("replay", "keep", "fingerprints"):
        # The first call's writes may change nothing: zeros that are written to zeros.
        always = functools.partial(mb.checkpoint, engine="replay", verify="always")
        if not _is_wrong(program, always, expected):
            return "hidden later"
    if program.reasons & {"hidden", "unseen"} and name in ("unverified", "mixed"):
        return "hidden, unverified"
    if "unseen between" in program.reasons:
        return "unseen between"
    if "counts" in program.reasons and name in _RERUNS:
        return "counter in a dict"  # The recompute moves it on, for the next step.
    if "number" in program.reasons and name in _RERUNS:
        verified = engine(name, program.seed, determinism_check="values")
        if not _is_wrong(program, verified, expected):
            return "number later"
    if written_after_saved(program):
        return "saved memory written"
    return ""


def written_after_saved(program: Program) -> bool:
    """Return whether the plain step's backward reads memory that was changed unseen."""
    changed = []

    def unpack(packed: tuple[Tensor, Tensor]) -> Tensor:
        saved, copy = packed
        changed.append(not same_bits(saved, copy))
        return saved

    def region(function: Caller, *args: Any, **kwargs: Any) -> Any:
        with saved_tensors_hooks(lambda t: (t, t.detach().clone()), unpack):
            return function(*args, **kwargs)

    run_program(program, region)
    return any(changed)
