"""Every operator-level case under the replay engine equals the plain step, bit for bit.

Equal means each bit of the loss, the outputs, every gradient, every buffer and other
state, and every random stream: whatever is kept, and however often one goes backward.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget import policies
from membudget.engine.options import Verify
from membudget.engine.replay import verified
from tests import devices
from tests.devices import array, is_cpu
from tests.keeps import VERIFIES
from tests.oracles import (
    Backward,
    StepResult,
    Way,
    assert_same_step,
    backward_once,
    backward_twice,
    differences,
    double_backward,
    plain,
    run_step,
)
from tests.replay.functions import FilledZeros, Overwrites, squared_by_numpy
from tests.replay.operators import OPERATORS, OperatorCase
from tests.zoo import Call

# What does not come back is kept, which is said. That is right where something was
# hidden; elsewhere it would conceal a fault of the engine, so there it is an error.
may_warn = pytest.mark.filterwarnings("ignore::membudget.errors.UnrepeatableWarning")

SEEN = [case for case in OPERATORS if not case.hidden]
HIDDEN = [case for case in OPERATORS if case.hidden]
ALL = [pytest.param(case, marks=may_warn if case.hidden else ()) for case in OPERATORS]


def every_second(candidate: Any) -> bool:
    """Keep what every second operator of the region makes."""
    return bool(candidate.index % 2 == 0)


POLICIES: dict[str, Any] = {
    "nothing": policies.nothing,
    "everything": policies.everything,
    "every-second": every_second,
    "matmuls": policies.matmuls,
}

BACKWARDS: dict[str, Backward] = {
    "once": backward_once,
    "retain-graph": backward_twice,
    "double-backward": double_backward,
}


def leaf_by_leaf(loss: Tensor, leaves: list[Tensor]) -> None:
    """Go backward to one leaf after another, which needs other values each time."""
    for leaf in (*leaves, *reversed(leaves)):
        loss.backward(inputs=[leaf], retain_graph=True)


def replayed(call: Call, keep: Any = policies.nothing, verify: Verify = True) -> Any:
    """Run the call as one region that is recorded."""
    return mb.checkpoint(
        call.function,
        *call.args,
        engine="replay",
        keep=keep,
        verify=verify,
        **call.kwargs,
    )


def replayed_twice(call: Call) -> Any:
    """Run the call twice; the second recording is of a signature that was verified."""
    return [replayed(call), replayed(call)]


def twice_plain(call: Call) -> Any:
    """Run the call twice."""
    return [plain(call), plain(call)]


def replay_in_replay(call: Call) -> Any:
    """Run the call as a recorded region in a recorded region."""
    inner = functools.partial(mb.checkpoint, call.function, engine="replay")
    return mb.checkpoint(inner, *call.args, engine="replay", **call.kwargs)


def offloaded(call: Call) -> Any:
    """Run the call as a recorded region whose sources are moved to the CPU."""
    with torch.autograd.graph.save_on_cpu():
        return replayed(call)


def replay_in_rerun(call: Call) -> Any:
    """Run the call as a recorded region in one that runs again."""
    inner = functools.partial(mb.checkpoint, call.function, engine="replay")
    return mb.checkpoint(inner, *call.args, **call.kwargs)


@pytest.fixture(autouse=True)
def nothing_verified() -> None:
    """Forget what earlier tests verified, so that no test depends on another."""
    verified.VERIFIED.clear()


@functools.cache
def reference(case: OperatorCase, backward: str, way: Way = plain) -> StepResult:
    """Return the step without regions, run once for all tests."""
    return run_step(case, way, BACKWARDS[backward])


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("keep", POLICIES)
@pytest.mark.parametrize("case", ALL, ids=str)
def test_a_step_under_replay_is_the_plain_step(
    case: OperatorCase, keep: str, backward: str
) -> None:
    not_double = case.not_double or ("" if is_cpu() else case.not_double_on_devices)
    if backward == "double-backward" and not_double:
        pytest.skip(not_double)
    way = functools.partial(replayed, keep=POLICIES[keep])
    found = run_step(case, way, BACKWARDS[backward])
    assert_same_step(reference(case, backward), found)


@pytest.mark.parametrize("case", ALL, ids=str)
def test_a_step_leaf_by_leaf_is_the_plain_step(case: OperatorCase) -> None:
    if case.not_by_leaf:
        pytest.skip(case.not_by_leaf)
    expected = run_step(case, plain, leaf_by_leaf)
    assert_same_step(expected, run_step(case, replayed, leaf_by_leaf))


@pytest.mark.parametrize("case", SEEN, ids=str)
def test_a_step_that_is_not_verified_is_the_plain_step(case: OperatorCase) -> None:
    way = functools.partial(replayed, verify=False)
    assert_same_step(reference(case, "once"), run_step(case, way))


@pytest.mark.parametrize("case", ALL, ids=str)
def test_a_second_recording_is_the_plain_call(case: OperatorCase) -> None:
    if case.not_twice:
        pytest.skip(case.not_twice)
    expected = reference(case, "once", twice_plain)
    assert_same_step(expected, run_step(case, replayed_twice))


@pytest.mark.parametrize("case", ALL, ids=str)
def test_a_recording_in_a_recording_is_the_plain_step(case: OperatorCase) -> None:
    assert_same_step(reference(case, "once"), run_step(case, replay_in_replay))


@pytest.mark.parametrize("case", [c for c in SEEN if not c.not_again], ids=str)
def test_a_recording_in_a_region_that_runs_again_is_the_plain_step(
    case: OperatorCase,
) -> None:
    assert_same_step(reference(case, "once"), run_step(case, replay_in_rerun))


@pytest.mark.parametrize("case", ALL, ids=str)
def test_a_recording_under_an_offloader_is_the_plain_step(case: OperatorCase) -> None:
    assert_same_step(reference(case, "once"), run_step(case, offloaded))


@pytest.mark.parametrize("case", HIDDEN, ids=str)
def test_a_hidden_write_is_wrong_where_nobody_verifies(case: OperatorCase) -> None:
    # Else the case would not show that the verification found anything.
    way = functools.partial(replayed, verify=False)
    assert differences(reference(case, "once"), run_step(case, way))


def _gradient(function: Any, seed: int, **options: Any) -> Tensor:
    x = torch.randn(5, 6, generator=devices.generator().manual_seed(seed))
    y = mb.checkpoint(function, x.requires_grad_(), **options)
    y.sum().backward()
    assert x.grad is not None
    return x.grad


def _with_hidden_kernel(x: Tensor) -> Tensor:
    return (FilledZeros.apply(x.sin()) + 1).exp().cos()


@may_warn
def test_a_hidden_write_is_kept_in_the_first_step() -> None:
    # The later steps are not verified, and have other values.
    for seed in range(4):
        with mb.disable_checkpointing():
            expected = _gradient(_with_hidden_kernel, seed)
        found = _gradient(_with_hidden_kernel, seed, engine="replay")
        assert torch.equal(expected, found)


class _Declared(torch.autograd.Function):
    """A square whose kernel says that it writes behind the dispatcher."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        squared = torch.zeros_like(x)
        with mb.opaque(squared):
            squared_by_numpy(x, squared)
        ctx.save_for_backward(x)
        return squared

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2 * x


def test_a_write_that_is_declared_opaque_needs_no_verification() -> None:
    def function(x: Tensor) -> Tensor:
        before = torch.ones(5, 6)
        y = (_Declared.apply(x.sin()) + before).exp()
        with mb.opaque(before[1:3]):
            array(before)[1:3] = 0.25
        return (y * before).cos()

    for seed in range(2):
        with mb.disable_checkpointing():
            expected = _gradient(function, seed)
        found = _gradient(function, seed, engine="replay", verify=False)
        assert torch.equal(expected, found)


@pytest.mark.parametrize("verify", VERIFIES)
def test_the_function_never_runs_twice(verify: Verify) -> None:
    calls = 0

    def function(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x.sin().exp().cos()

    for _ in range(2):
        _gradient(function, 0, engine="replay", verify=verify)
    assert calls == 2


def test_a_backward_may_overwrite_what_it_saved() -> None:
    # As fused kernels do, which write a gradient into the memory of what they saved.
    def function(x: Tensor) -> Tensor:
        y, z = x.sin() + 0, x.exp() + 0
        late = (y + 1).exp() * (z + 1).tanh()
        y = Overwrites.apply(y)
        return late * y + Overwrites.apply(z.view(-1)).view(5, 6)

    with mb.disable_checkpointing():
        expected = _gradient(function, 0)
    assert torch.equal(expected, _gradient(function, 0, engine="replay"))


def _maybe_hidden(x: Tensor, hides: bool) -> Tensor:
    filled = torch.zeros(5, 6)
    if hides:
        squared_by_numpy(x, filled)
    return ((x + filled).sin() * 2).exp()


class _Kernels(nn.Module):
    """One module, two methods, a flag: only one way through it hides a write."""

    def open(self, x: Tensor) -> Tensor:
        return _maybe_hidden(x, False)

    def hidden(self, x: Tensor) -> Tensor:
        return _maybe_hidden(x, True)

    def forward(self, x: Tensor) -> Tensor:
        return _maybe_hidden(x, not self.training)


def _two_methods() -> list[Any]:
    module = _Kernels()
    return [module.open, module.hidden]


def _two_arguments() -> list[Any]:
    return [functools.partial(_maybe_hidden, hides=hides) for hides in (False, True)]


def _two_closures() -> list[Any]:
    def closure(hides: bool) -> Any:
        return lambda x: _maybe_hidden(x, hides)

    return [closure(False), closure(True)]


def _called(function: Any, x: Tensor) -> Tensor:
    return function(x)


def _two_wrapped_functions() -> list[Any]:
    module = _Kernels()
    return [functools.partial(_called, f) for f in (module.open, module.hidden)]


def _two_modules() -> list[Any]:
    return [_Kernels().train(), _Kernels().eval()]


@may_warn
@pytest.mark.parametrize(
    "make",
    [_two_methods, _two_arguments, _two_closures, _two_wrapped_functions, _two_modules],
)
def test_one_function_is_not_taken_as_verified_because_another_was(make: Any) -> None:
    first, second = make()
    _gradient(first, 0, engine="replay")
    with mb.disable_checkpointing():
        expected = _gradient(second, 1)
    assert torch.equal(expected, _gradient(second, 1, engine="replay"))


@may_warn
def test_a_module_is_verified_anew_in_another_training_mode() -> None:
    module = _Kernels()
    _gradient(module, 0, engine="replay")
    module.eval()
    with mb.disable_checkpointing():
        expected = _gradient(module, 1)
    assert torch.equal(expected, _gradient(module, 1, engine="replay"))


@may_warn
def test_a_function_is_verified_anew_with_other_arguments() -> None:
    def step(**options: Any) -> Tensor:
        x = torch.linspace(-1, 1, 30).view(5, 6).requires_grad_()
        for hides in (False, True):
            x.grad = None
            mb.checkpoint(_maybe_hidden, x, hides, **options).sum().backward()
        assert x.grad is not None
        return x.grad

    with mb.disable_checkpointing():
        expected = step()
    assert torch.equal(expected, step(engine="replay"))
