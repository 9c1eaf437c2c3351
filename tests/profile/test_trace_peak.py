"""The predicted peak is the measured one: over the zoo, and over models of every kind.

Two things that a step allocates pass by every operator. A Python number that meets a
tensor is a tensor of 8 bytes for a moment; and `get_rng_state`, which every region with
random operators calls, makes a tensor of 5,056 bytes that lives with the region.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from membudget.engine import native
from membudget.engine.rerun_frame import RerunFrame
from membudget.graph import StepGraph
from membudget.operator_names import in_place_or_not
from membudget.profile import profile
from tests.devices import is_cpu
from tests.profile.cases import (
    Made,
    animal,
    each,
    measured_bytes,
    seed,
    without_seconds,
)
from tests.zoo import CASES, Case

NUMBERS = 16
RANDOM_STATE = 5056

REGIONS = {"nested_region": 1, "torch_checkpoint_inside": 1}
"""How many states of the random stream regions hold at the peak."""

NO_SECOND_STEP = {
    "hidden_state_with_graph": "its second step needs the graph of the first",
    "in_place_on_the_input": "its input is no leaf, and has one graph",
}

NEEDS_VALUES = {
    "branch_on_data": "a branch on an activation",
    "branch_on_item": ".item() of an activation",
    "router_with_balancing_bias": "the experts that were chosen",
    "written_through_numpy": ".numpy() of a tensor",
}
"""What no fake step can run, and why."""

VERIFIED = "the measured step takes fingerprints, which takes memory but in C++"

WRONG_ON_REAL = {
    "router_with_balancing_bias": "28 bytes of numbers, on a peak of 3 KB",
}
"""Where a real profile is wrong, and why."""

WRONG_ON_FAKE = {
    "autocast_around": "a fake layer norm has statistics in bfloat16, not float32",
    "orthogonal_weight": "the trial of linalg_matrix_exp on zeros needs less",
}
"""Where a fake profile is wrong, and why."""

if not (is_cpu() and native.is_available()):
    WRONG_ON_REAL["regions_that_reach_what_changes_later"] = VERIFIED
    WRONG_ON_FAKE["regions_that_reach_what_changes_later"] = VERIFIED

WRONG_ON_FAKE_EMU = {
    "channels_last_convolution": "a fake kernel does not know the gradient's layout",
    "half_precision_parameters": "a fake layer norm has statistics in float32",
    "orthogonal_weight": "the workspace of linalg_matrix_exp is not known",
    "regions_that_reach_what_changes_later": VERIFIED,
}
"""Where a fake profile of a model on emu is wrong, and why: its kernels are the CPU's.

No kernel is tried on a device, which on the CPU tells layouts and workspaces.
"""

FREES_FIRST = {"moving_mean_bound_anew", "moving_mean_as_plain_attribute"}
"""What frees tensors that were there before the step, which lowers a device's peak."""

VIEWS = "autograd makes views of fake tensors anew, where it restrides real ones"
OTHER_OPERATORS = {
    "lstm": "the fake kernel of the layer lays its outputs out by operators",
    "recurrent": "the fake kernel of the layer lays its outputs out by operators",
    "in_place_on_views": VIEWS,
    "rows_written_in_a_loop": VIEWS,
    "writes_into_views": VIEWS,
    "deepcopy_inside": "a fake tensor is copied in another way",
    "hidden_state_detached": "a first step, where the recorded real one is a later one",
}
"""Whose operators are others on fake tensors, and why."""


def expect_failure(request: pytest.FixtureRequest, reasons: dict[str, str]) -> str:
    """Mark the test if its case is among those that fail; return the case's name."""
    name = str(request.node.callspec.id)
    if name in reasons:
        mark = pytest.mark.xfail(strict=True, reason=reasons[name])
        request.applymarker(mark)
    return name


def check_is_measured(name: str) -> None:
    """Skip the test if the peak is not that of what the step allocates."""
    if name in FREES_FIRST and not is_cpu():
        pytest.skip("the peak is above what was there before, of which the step frees")


def of_the_zoo(case: Case) -> Callable[[], Made]:
    return lambda: animal(case.build())


ZOO = [
    pytest.param(of_the_zoo(case), id=case.name)
    for case in CASES
    if case.name not in {*NO_SECOND_STEP, "complex_output"}
]
ALL = [*ZOO, *each()]


@pytest.fixture(autouse=True)
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no region verify a call: that holds more than the calls after it."""
    monkeypatch.setattr(RerunFrame, "_may_verify", lambda frame: False)


def made(make: Callable[[], Made]) -> Made:
    """Build a model after all streams were seeded, and seed them again for the step."""
    seed()
    result = make()
    seed()
    return result


@pytest.mark.parametrize("make", ALL)
def test_the_peak_of_a_real_profile_is_the_measured_one(make, request):
    name = expect_failure(request, WRONG_ON_REAL)
    check_is_measured(name)
    expected = measured_bytes(lambda: made(make))

    found = profile(*made(make), fake=False, device="h100").peak_bytes

    slack = max(0.005 * expected, NUMBERS) + RANDOM_STATE * REGIONS.get(name, 0)
    assert abs(found - expected) <= slack, (found, expected)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")  # By `deepcopy`.
@pytest.mark.parametrize("make", ALL)
def test_the_peak_of_a_fake_profile_is_the_measured_one(make, request):
    name = expect_failure(request, WRONG_ON_FAKE if is_cpu() else WRONG_ON_FAKE_EMU)
    if name in NEEDS_VALUES:
        pytest.skip(NEEDS_VALUES[name])
    check_is_measured(name)
    expected = measured_bytes(lambda: made(make))

    found = profile(*made(make), fake=True, device="h100").peak_bytes

    slack = max(0.02 * expected, NUMBERS) + RANDOM_STATE * REGIONS.get(name, 0)
    assert abs(found - expected) <= slack, (found, expected)


@pytest.mark.parametrize("make", ALL)
def test_a_fake_profile_has_the_operators_of_a_real_one(make, request):
    name = str(request.node.callspec.id)
    if name in OTHER_OPERATORS:
        pytest.skip(OTHER_OPERATORS[name])
    if name in NEEDS_VALUES:
        pytest.skip(NEEDS_VALUES[name])
    real = profile(*made(make), fake=False, device="h100").graph

    fake = profile(*made(make), fake=True, device="h100").graph

    assert forward_of(fake) == forward_of(real)


def forward_of(graph: StepGraph) -> list[tuple[str, str]]:
    """Return the operators of the forward, by which a plan names what it keeps.

    Fake tensors are a subclass, for which torch writes less in place, also in the
    backward.
    """
    return [
        (in_place_or_not(o.name.replace("_reshape_alias", "view")), o.module_path)
        for o in graph.operators
        if o.phase == "forward"
    ]


@pytest.mark.parametrize("make", ALL)
def test_a_real_profile_repeats(make, request):
    if request.node.callspec.id == "force_inside" and not is_cpu():
        pytest.skip("a device's own thread frees what a backward pass inside held")
    # From one line, which is the user's line of the loss.
    first, second = (
        profile(*made(make), fake=False, device="h100").graph for _ in range(2)
    )

    assert without_seconds(first) == without_seconds(second)
