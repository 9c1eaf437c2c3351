"""Hold a step written by hand, or printed by the fuzzer, to the plain one."""

from __future__ import annotations

from tests.fuzz.check import Caller, Verdict, compared, engine, merely_call, run
from tests.fuzz.program import Step


def differences(
    step: Step, name: str, *, seed: int = 0, steps: int = 2, trains: bool = True
) -> Verdict:
    """Run a step plain and under an engine, and say how they compare."""
    region = engine(name, seed)
    return differences_under(step, region, seed=seed, steps=steps, trains=trains)


def differences_under(
    step: Step, region: Caller, *, seed: int = 0, steps: int = 2, trains: bool = True
) -> Verdict:
    """Run a step plain and with what calls its regions, and say how they compare."""
    expected = run(step, seed, steps, merely_call, trains)
    return compared(expected, run(step, seed, steps, region, trains))
