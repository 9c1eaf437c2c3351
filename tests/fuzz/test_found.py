"""What the fuzzer found, minimised: each step is the plain step, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

import membudget as mb
from tests.fuzz.check import Caller
from tests.fuzz.found import differences, differences_under
from tests.fuzz.world import (
    F,
    Stateful,
    Tanh,
    World,
    identity_hooks,
    offload_hooks,
    pause,
    score,
    slope,
    torch,
)

REPLAYS = ("replay", "keep", "unverified", "fingerprints")
Outputs = tuple[Tensor, ...]


def given(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda h: h.prod(0), id="prod of a dimension"),
        pytest.param(lambda h: h.prod(), id="prod"),
        pytest.param(lambda h: h.cumprod(0), id="cumprod"),
        pytest.param(torch.linalg.det, id="det"),
        pytest.param(lambda h: h.max(), id="max"),
        pytest.param(lambda h: h[[0, 2, 2]] ** 2, id="index"),
    ],
)
@pytest.mark.parametrize("engine", [*REPLAYS, "auto", "mixed"])
def test_an_inner_gradient_uses_the_formula_of_the_plain_step(
    engine: str, function: Callable[[Tensor], Tensor]
) -> None:
    def step(m: World, n: Stateful, x: Tensor, y: Tensor, region: Caller) -> Outputs:
        def r1(x: Tensor) -> Tensor:
            def r2(x: Tensor) -> Tensor:
                return x * slope(function, x)

            return F.linear(region(r2, x), m.linear.weight, n.norm.weight)

        output = region(r1, x)
        score(output).backward()
        return (output,)

    assert differences(step, engine).word == "equal"


@pytest.mark.parametrize("engine", [*REPLAYS, "rerun", "auto"])
def test_a_parameter_given_other_memory_before_the_backward_is_no_silent_error(
    engine: str,
) -> None:
    def step(m: World, n: Stateful, x: Tensor, y: Tensor, region: Caller) -> Outputs:
        def r1(x: Tensor) -> Tensor:
            return F.gelu(x * m.scale)

        output = region(r1, x)
        m.scale.data = m.scale.data * 0.5
        score(output).backward()
        return (output,)

    assert differences(step, engine).word in ("equal", "refused")


@pytest.mark.parametrize("engine", ["rerun", "auto", "replay"])
def test_running_statistics_of_no_module_are_advanced_once(engine: str) -> None:
    def step(m: World, n: Stateful, x: Tensor, y: Tensor, region: Caller) -> Outputs:
        def r1(x: Tensor) -> Tensor:
            F.batch_norm(x, m.stats["mean"], m.stats["var"], training=True)
            return x.sin().exp()

        output = region(r1, x)
        score(output).backward()
        return (output,)

    assert differences(step, engine).word in ("equal", "refused")


@pytest.mark.parametrize("engine", ["rerun", "auto", "replay"])
def test_a_parameter_written_through_data_inside_is_advanced_once(engine: str) -> None:
    def step(m: World, n: Stateful, x: Tensor, y: Tensor, region: Caller) -> Outputs:
        def r1(x: Tensor) -> Tensor:
            m.scale.data.mul_(0.9)
            return (x * m.scale).sin().exp()

        output = region(r1, x)
        score(output).backward()
        return (output,)

    assert differences(step, engine).word in ("equal", "refused")


@pytest.mark.parametrize("engine", ["rerun", "auto", "replay"])
def test_a_codebook_written_through_data_inside_is_advanced_once(engine: str) -> None:
    def step(m: World, n: Stateful, x: Tensor, y: Tensor, region: Caller) -> Outputs:
        def r1(x: Tensor) -> Tensor:
            m.codebook.data[:4].mul_(0.5).add_(x.detach())
            return (x * m.codebook[:4]).sin().exp()

        output = region(r1, x)
        score(output).backward()
        return (output,)

    assert differences(step, engine).word in ("equal", "refused")


def _writes_its_input(x: Tensor, region: Caller) -> Tensor:
    def r2(v: Tensor) -> Tensor:
        v.mul_(3)
        return v.sin().exp()

    output: Tensor = region(r2, x * 2)
    return output


@pytest.mark.parametrize("engine", ["rerun", "auto", "mixed"])
def test_an_inner_region_that_writes_its_input_is_refused_by_us(engine: str) -> None:
    def step(m: World, n: Stateful, x: Tensor, y: Tensor, region: Caller) -> Outputs:
        def r1(x: Tensor) -> Tensor:
            return _writes_its_input(x, region)

        output = region(r1, x)
        score(output).backward()
        return (output,)

    assert differences(step, engine).word in ("equal", "refused")


@pytest.mark.parametrize("engine", ["rerun", "auto", "replay"])
def test_under_hooks_a_region_that_writes_its_input_is_refused_by_us(
    engine: str,
) -> None:
    def step(m: World, n: Stateful, x: Tensor, y: Tensor, region: Caller) -> Outputs:
        with identity_hooks():
            output = _writes_its_input(x, region)
        score(output).backward()
        return (output,)

    assert differences(step, engine).word in ("equal", "refused")


@pytest.mark.parametrize("engine", ["rerun", "auto", "replay"])
def test_a_region_may_read_the_gradient_that_a_parameter_has(engine: str) -> None:
    def step(m: World, n: Stateful, x: Tensor, y: Tensor, region: Caller) -> Outputs:
        def r1(y: Tensor) -> Tensor:
            (y.detach() * m.scale).exp().sum().backward()
            assert m.scale.grad is not None
            return y * m.scale.grad

        output = region(r1, y)
        pause(n)
        score(output).backward()
        return (output,)

    assert differences(step, engine).word in ("equal", "refused")


def _kept(function: Callable[..., Any], *args: Any) -> Any:
    """Run `r1` as a replay, and `r2` as one that keeps products."""
    keep = None if function.__name__ == "r1" else mb.policies.operators("mul")
    return mb.checkpoint(function, *args, engine="replay", keep=keep)


@pytest.mark.parametrize("write", ["mul_", "relu_", "sin_"])
def test_what_an_inner_region_kept_may_be_overwritten_in_the_outer_one(
    write: str,
) -> None:
    def step(m: World, n: Stateful, x: Tensor, y: Tensor, region: Caller) -> Outputs:
        def r1(x: Tensor) -> Tensor:
            def r2(x: Tensor) -> Outputs:
                v = x * 2
                return v, v.exp()

            v, output = region(r2, x)
            getattr(v, write)(*([3] if write == "mul_" else []))
            assert isinstance(output, Tensor)
            return output

        output = region(r1, x)
        score(output).backward()
        return (output,)

    assert differences_under(step, _kept).word == "equal"


def test_what_a_region_kept_and_somebody_overwrote_is_never_used() -> None:
    def step(m: World, n: Stateful, x: Tensor, y: Tensor, region: Caller) -> Outputs:
        def r2(x: Tensor) -> Outputs:
            v = x * 2
            return v, Tanh.apply(v)

        v, output = region(r2, x)
        v.relu_()
        score(output).backward()
        return (output,)

    # Plain needs `v` nowhere; a replay begins at what is kept.
    assert differences_under(step, _kept).word == "refused"


@pytest.mark.parametrize("third", ["rerun", "replay"])
@pytest.mark.parametrize("second", ["rerun", "replay"])
@pytest.mark.parametrize("first", ["rerun", "replay"])
def test_three_nested_regions_do_not_exchange_their_inputs(
    first: str, second: str, third: str
) -> None:
    engines = {"r1": first, "r2": second, "r3": third}

    def nested(function: Callable[..., Any], *args: Any) -> Any:
        return mb.checkpoint(function, *args, engine=engines[function.__name__])

    def step(m: World, n: Stateful, x: Tensor, y: Tensor, region: Caller) -> Outputs:
        def r1(v: Tensor, x: Tensor) -> Any:
            def r2(v: Tensor, x: Tensor) -> Any:
                def r3(v: Tensor, x: Tensor) -> Tensor:
                    return x * v

                return region(r3, v, x)

            return region(r2, v, x)

        output = region(r1, y * 3, x)
        score(output).backward()
        return (output,)

    assert differences_under(step, nested).word == "equal"


@pytest.mark.parametrize("engine", ["replay", "keep", "auto"])
def test_a_path_taken_now_and_then_is_verified_when_it_is_taken(engine: str) -> None:
    def step(m: World, n: Stateful, x: Tensor, y: Tensor, region: Caller) -> Outputs:
        m.seen += 1

        def r1(x: Tensor) -> Tensor:
            if m.seen % 2:
                return x.sin().exp()
            v = x * 2
            v.detach().numpy()[0] *= 3
            return v.sin().exp().cos()

        output = region(r1, x)
        score(output).backward()
        return (output,)

    assert differences(step, engine, steps=6).word in ("equal", "refused")


@pytest.mark.parametrize("engine", [*REPLAYS, "auto"])
def test_verification_adds_nothing_to_a_gradient_that_is_there(engine: str) -> None:
    def step(m: World, n: Stateful, x: Tensor, y: Tensor, region: Caller) -> Outputs:
        def r1(x: Tensor) -> Tensor:
            for _ in range(2):
                (x.detach() * m.scale).exp().sum().backward()
                assert m.scale.grad is not None
                output = x * m.scale.grad
            return output

        output = region(r1, x)
        score(output).backward()
        return (output,)

    assert differences(step, engine).word in ("equal", "refused")


@pytest.mark.parametrize("engine", ["rerun", "replay", "auto"])
def test_an_inner_gradient_goes_through_the_graph_of_an_input(engine: str) -> None:
    def step(m: World, n: Stateful, x: Tensor, y: Tensor, region: Caller) -> Outputs:
        def r1(v: Tensor, x: Tensor) -> Tensor:
            return slope(lambda h: v * h, x).sin()

        output = region(r1, x + 1, x)
        score(output).backward()
        return (output,)

    assert differences(step, engine).word in ("equal", "refused")


@pytest.mark.parametrize("engine", ["rerun", "auto", "replay"])
def test_a_penalty_on_a_normalised_value_trains(engine: str) -> None:
    def step(m: World, n: Stateful, x: Tensor, y: Tensor, region: Caller) -> Outputs:
        def r1(x: Tensor, y: Tensor) -> Tensor:
            return x * slope(lambda h: n.norm(h) ** 3, y)

        output = region(r1, x, y)
        score(output).backward()
        return (output,)

    assert differences(step, engine).word == "equal"


@pytest.mark.parametrize("engine", ["replay", "keep", "fingerprints"])
def test_an_inner_gradient_reads_what_no_operator_wrote(engine: str) -> None:
    def step(m: World, n: Stateful, x: Tensor, y: Tensor, region: Caller) -> Outputs:
        def r1(x: Tensor) -> Tensor:
            v = x * 2
            v.detach().numpy()[0] *= 3
            return slope(lambda h: v * h, v)

        output = region(r1, x)
        score(output).backward()
        return (output,)

    assert differences(step, engine).word in ("equal", "refused")


@pytest.mark.parametrize("engine", ["rerun", "auto"])
def test_statistics_are_advanced_once_in_a_region_around_which_one_differentiates(
    engine: str,
) -> None:
    def step(m: World, n: Stateful, x: Tensor, y: Tensor, region: Caller) -> Outputs:
        def r1(x: Tensor, y: Tensor) -> Tensor:
            def r2() -> None:
                F.batch_norm(x, m.stats["mean"], m.stats["var"], training=True)

            region(r2)
            return y * slope(lambda h: h.tanh() * h, y)

        output = region(r1, x, y)
        score(output).backward()
        return (output,)

    assert differences(step, engine).word in ("equal", "refused")


@pytest.mark.parametrize("engine", ["rerun", "auto"])
def test_a_region_that_writes_its_input_and_differentiates_is_refused_by_us(
    engine: str,
) -> None:
    def step(m: World, n: Stateful, x: Tensor, y: Tensor, region: Caller) -> Outputs:
        def r1(v: Tensor, x: Tensor, y: Tensor) -> Tensor:
            v += v
            return y * slope(lambda h: h.prod(), x)

        output = region(r1, x * y, x, y)
        score(output).backward()
        return (output,)

    assert differences(step, engine).word in ("equal", "refused")


def test_a_view_made_without_gradients_may_be_written_in_place() -> None:
    def step(m: World, n: Stateful, x: Tensor, y: Tensor, region: Caller) -> Outputs:
        def r1(y: Tensor) -> Tensor:
            with torch.no_grad():
                view = y.unsqueeze(0).transpose(1, 2).squeeze(0)
                view.transpose_(0, 1)
                return view * 2

        region(r1, y)
        score(x).backward()
        return (x,)

    for engine in REPLAYS:
        assert differences(step, engine, trains=True).word == "equal"


def test_what_an_inner_backward_was_given_may_be_overwritten_afterwards() -> None:
    def step(m: World, n: Stateful, x: Tensor, y: Tensor, region: Caller) -> Outputs:
        def r1(x: Tensor) -> Tensor:
            v1 = x.sin()
            _v2 = v1 * slope(lambda h: h.norm(dim=0), v1)
            return v1.sin_()

        output = region(r1, x)
        score(output).backward()
        return (output,)

    assert differences(step, "fingerprints", trains=False).word == "equal"


def test_a_parameter_given_other_memory_inside_is_no_silent_error() -> None:
    def step(m: World, n: Stateful, x: Tensor, y: Tensor, region: Caller) -> Outputs:
        def r1(x: Tensor) -> Tensor:
            v1 = F.linear(x, m.linear.weight.t(), m.scale)
            m.scale.data = m.scale.data * 0.5 + v1.detach().mean(0)
            return v1 * m.scale

        output = region(r1, x)
        score(output).backward()
        return (output,)

    for engine in (*REPLAYS, "rerun", "auto"):
        assert differences(step, engine).word in ("equal", "refused")


@pytest.mark.parametrize("engine", ["rerun", "auto"])
def test_a_recompute_adds_no_gradient_that_passes_the_hooks_of_a_region(
    engine: str,
) -> None:
    def step(m: World, n: Stateful, x: Tensor, y: Tensor, region: Caller) -> Outputs:
        def r1(y: Tensor) -> Tensor:
            for _ in range(2):
                z = y.sin()
                with identity_hooks():
                    (z.detach() * m.scale).exp().sum().backward()
                    z = z * given(m.scale.grad)
            return z

        output = region(r1, y)
        score(output, y).backward()
        return (output, y)

    assert differences(step, engine, steps=1, trains=True).word == "equal"


@pytest.mark.parametrize("engine", ["rerun", "auto"])
def test_a_function_that_reads_the_sum_of_gradients_is_no_silent_error(
    engine: str,
) -> None:
    def step(m: World, n: Stateful, x: Tensor, y: Tensor, region: Caller) -> Outputs:
        def r1(x: Tensor) -> Tensor:
            (x.detach() * m.scale).exp().sum().backward()
            return x * given(m.scale.grad)

        if m.scale.grad is not None:
            region(r1, x)  # The second call; the third is not verified by its number.
        output = region(r1, x)
        score(output).backward()
        return (output,)

    assert differences(step, engine).word in ("equal", "refused")


def test_an_inner_gradient_may_be_rerun_within_an_execution_group() -> None:
    def step(m: World, n: Stateful, x: Tensor, y: Tensor, region: Caller) -> Outputs:
        def r1() -> Tensor:
            def r2(x: Tensor, y: Tensor) -> Tensor:
                v1 = m.linear(x)
                v2 = x * 1
                v2.register_hook(lambda grad: grad * 2)
                _v3 = v1 * slope(lambda h: m.linear(h).tanh(), y)
                return F.silu(v2)

            output: Tensor = region(r2, x=x, y=y)
            return output

        output = region(r1)
        loss = score(output)
        with mb.execution_group():
            loss.backward(retain_graph=True)
            loss.backward()
        return (output,)

    # `r1` is rerun, and `r2` replayed with some outputs kept.
    assert differences(step, "mixed", seed=904429001, trains=False).word == "equal"


@pytest.mark.parametrize("engine", ["replay", "rerun"])
def test_an_input_that_went_through_hooks_and_was_written_is_refused(
    engine: str,
) -> None:
    def step(m: World, n: Stateful, x: Tensor, y: Tensor, region: Caller) -> Outputs:
        def r1(a: Tensor) -> Tensor:
            return a * torch.bernoulli(a.sigmoid().detach())

        with identity_hooks():
            inner = x - m.mean
            output = region(r1, inner)
        inner.diagonal().mul_(200)
        score(output).backward()
        return (output,)

    assert differences(step, engine).word == "refused"


@pytest.mark.parametrize("engine", ["rerun", "auto"])
def test_a_new_branch_that_writes_unseen_is_no_silent_error(engine: str) -> None:
    def step(m: World, n: Stateful, x: Tensor, y: Tensor, region: Caller) -> Outputs:
        def r1(x: Tensor) -> Tensor:
            if m.seen == 2:
                F.batch_norm(x * 2, m.stats["mean"], m.stats["var"], training=True)
            return x.sin()

        output = region(r1, x)
        m.seen += 1
        score(output).backward()
        return (output,)

    assert differences(step, engine, steps=3).word == "refused"


def test_what_is_read_by_its_place_in_a_storage_may_go_through_hooks() -> None:
    def step(m: World, n: Stateful, x: Tensor, y: Tensor, region: Caller) -> Outputs:
        def r1(x: Tensor) -> Tensor:
            return x.as_strided((2, 2), (4, 1), 9).sin().exp()

        part = (x * 2)[1:, 1:]
        with offload_hooks():
            output = region(r1, part)
        score(output).backward()
        return (output,)

    for engine in REPLAYS:
        assert differences(step, engine).word == "equal"


def test_an_input_written_by_an_alias_at_the_end_is_replayed_as_it_was() -> None:
    def step(m: World, n: Stateful, x: Tensor, y: Tensor, region: Caller) -> Outputs:
        def r1(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            v1 = torch.empty(4, 4)
            with torch.no_grad():
                torch.mul(x, y, out=v1)
            v2 = y.detach()
            v2.unbind(1)[0].fill_(0.2)
            return v1 * x, v2

        outputs: Outputs = region(r1, x, y)
        score(*outputs).backward()
        return outputs

    for engine in REPLAYS:
        assert differences(step, engine, steps=1).word == "equal"


def test_regions_around_a_replay_that_differentiates_know_that_it_does() -> None:
    def step(m: World, n: Stateful, x: Tensor, y: Tensor, region: Caller) -> Outputs:
        def replayed(x: Tensor) -> Tensor:
            return x * slope(lambda h: m.linear(h).tanh() ** 2, x)

        def inner(x: Tensor) -> Tensor:
            output: Tensor = region(replayed, x.sin()).exp()
            return output

        def outer(x: Tensor) -> Tensor:
            output: Tensor = region(inner, x.cos()).tanh()
            return output

        output = region(outer, x)
        score(output).backward()
        return (output,)

    def region(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
        name = "replay" if function.__name__ == "replayed" else "rerun"
        return mb.checkpoint(function, *args, engine=name)

    assert differences_under(step, region, steps=4).word == "equal"


def test_a_tensor_that_a_rerun_writes_twice_is_refused_and_left_as_it_was() -> None:
    def step(m: World, n: Stateful, x: Tensor, y: Tensor, region: Caller) -> Outputs:
        def outer() -> Tensor:
            y[1] = y[0]  # Again, it changes nothing; the next write does.

            def inner(x: Tensor, y: Tensor) -> Tensor:
                output = torch.utils.checkpoint.checkpoint(
                    torch.sin, x, use_reentrant=False
                )
                y.sin_()
                return output.exp()

            output: Tensor = region(inner, x, y)
            return output

        output = region(outer)
        score(output).backward()
        return (output,)

    def region(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
        name = "replay" if function.__name__ == "inner" else "rerun"
        return mb.checkpoint(function, *args, engine=name)

    assert differences_under(step, region, steps=1, trains=False).word == "refused"
