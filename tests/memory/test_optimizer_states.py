"""The closed forms are what an optimizer keeps, to the byte."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer

import membudget as mb
from membudget.memory.counting import Counted
from membudget.memory.formulas import adafactor_bytes, adam_bytes, sgd_bytes
from membudget.memory.optimizer_states import lbfgs_step_bytes


def state_bytes(kind: type[Optimizer], weight: Tensor, **options) -> int:
    """Return what an optimizer keeps after a real step."""
    parameter = nn.Parameter(weight)
    parameter.grad = torch.ones_like(weight)
    optimizer = kind([parameter], **options)
    optimizer.step()
    state = optimizer.state[parameter].values()
    return mb.storage_bytes(x for x in state if isinstance(x, Tensor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_of_sgd_and_adam_matches_the_closed_forms(dtype: torch.dtype):
    weight = torch.zeros(5, 7, dtype=dtype)
    elements, each = weight.numel(), weight.element_size()
    assert state_bytes(SGD, weight, momentum=0.9) == sgd_bytes(elements, each)
    assert state_bytes(Adam, weight) == adam_bytes(elements, each)
    assert state_bytes(AdamW, weight) == adam_bytes(elements, each)
    for kind in (Adam, AdamW):
        found = state_bytes(kind, weight, amsgrad=True)
        assert found == adam_bytes(elements, each, amsgrad=True)


@pytest.mark.parametrize("size", [(), (7,), (5, 7), (3, 5, 7), (2, 3, 5, 7)])
def test_adafactor_has_one_number_per_row_and_column(size: tuple[int, ...]):
    assert state_bytes(Adafactor, torch.zeros(size)) == adafactor_bytes(size)


@pytest.mark.cpu_only("a model on `meta` is taken to be on the CPU")
@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_a_profile_finds_the_state_of_adam_for_each_parameter(kind: type[Optimizer]):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))
    graph = mb.profile(model, torch.zeros(2, 5), optimizer=kind).graph
    forms = [adam_bytes(parameter.numel()) for parameter in model.parameters()]
    assert graph.static.optimizer == sum(forms)


def test_sgd_without_momentum_has_no_state():
    found = state_bytes(SGD, torch.zeros(5, 7))
    assert found == sgd_bytes(35, momentum=False) == 0


def parts_of_lbfgs_steps(parameter: nn.Parameter, **options) -> list[int]:
    """Return what each part of six steps takes, from closure to closure or to the end.

    Without a C++ compiler nothing is counted.
    """
    counted, parts, before = Counted(parameter.device), [], [0]
    optimizer = torch.optim.LBFGS([parameter], lr=0.5, **options)
    scale = torch.linspace(0.1, 3.0, parameter.numel())

    def end() -> None:
        if before:
            parts.append(counted.peak_bytes() - before.pop())

    def closure() -> float:
        end()
        parameter.grad = scale * (parameter.detach() - 1)
        loss = (parameter.detach() - 1).square().mul(scale).sum().item() / 2
        before.append(counted.live_bytes())
        counted.restart()
        return loss

    counted.start()
    try:
        if not counted.is_exact:
            pytest.skip(counted.why_not)
        before.clear()
        for _ in range(6):
            optimizer.step(closure)
            end()
    finally:
        counted.stop()
    return parts


@pytest.mark.parametrize("line_search_fn", [None, "strong_wolfe"])
@pytest.mark.parametrize(("iterations", "history"), [(1, 1), (2, 100), (4, 3), (20, 9)])
def test_lbfgs_takes_no_more_than_its_closed_form_between_closures(
    line_search_fn: str | None, iterations: int, history: int
):
    parameter = nn.Parameter(torch.linspace(-2.0, 2.0, 100_000))
    parts = parts_of_lbfgs_steps(
        parameter,
        line_search_fn=line_search_fn,
        max_iter=iterations,
        history_size=history,
    )
    searches_line = line_search_fn is not None
    bound = lbfgs_step_bytes(parameter.nbytes, searches_line=searches_line)
    assert bound - 2.1 * parameter.nbytes <= max(parts) <= bound
    if iterations < 3 and history > 2:
        assert max(parts) > bound - 0.1 * parameter.nbytes


def test_sizes_that_no_parameter_has_are_rejected():
    with pytest.raises(mb.OptionError, match="elements must be a positive integer"):
        sgd_bytes(0)
    with pytest.raises(mb.OptionError, match="element_bytes must be a positive"):
        adam_bytes(1, 0)
    with pytest.raises(mb.OptionError, match=r"size\[1\] must be a positive integer"):
        adafactor_bytes([2, 0])
