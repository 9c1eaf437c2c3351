"""What a region in compiled code hands to torch's checkpoint, which runs it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import noop_context_fn

import membudget as mb
from membudget import policies
from membudget.engine import compiled, region
from membudget.engine.compiled import checkpoint_in_compiled_code
from membudget.engine.options import RegionOptions, Statistics
from membudget.engine.region import run_region
from membudget.engine.selective import policy_of

X = torch.linspace(0, 1, 4).requires_grad_()


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return what torch's checkpoint is called with."""
    seen: list[tuple[Any, ...]] = []

    def run(function: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((function, args, kwargs))
        return "ran"

    monkeypatch.setattr(compiled, "torch_checkpoint", run)
    return seen


def contexts() -> Any:
    return nullcontext(), nullcontext()


def test_options_stay_behind_and_the_function_s_keywords_go_along(handed):
    keywords = {"dim": 0, "early_stop": False, "debug": True, "engine": "rerun"}
    assert checkpoint_in_compiled_code(torch.sum, (X,), keywords) == "ran"
    assert handed == [(torch.sum, (X,), {"use_reentrant": False, "dim": 0})]


def test_a_decorator_takes_the_options_first(handed):
    decorated = checkpoint_in_compiled_code(None, (), {"context_fn": contexts})
    assert decorated(torch.sum)(X, dim=0) == "ran"
    assert handed == [
        (torch.sum, (X,), {"use_reentrant": False, "dim": 0, "context_fn": contexts})
    ]


def test_contexts_that_do_nothing_are_left_out(handed):
    checkpoint_in_compiled_code(torch.sin, (X,), {"context_fn": noop_context_fn})
    checkpoint_in_compiled_code(torch.sin, (X,), {"context_fn": None})
    assert [kwargs for *_, kwargs in handed] == [{"use_reentrant": False}] * 2


@pytest.fixture
def compiling(monkeypatch) -> None:
    monkeypatch.setattr(region, "is_compiling", lambda: True)


def test_options_that_were_checked_before_mean_the_same(handed, compiling):
    options = RegionOptions(context_fn=contexts, debug=True)
    assert run_region(torch.sum, (X,), {"dim": 0}, options, None) == "ran"
    assert handed == [
        (torch.sum, (X,), {"use_reentrant": False, "dim": 0, "context_fn": contexts})
    ]


def kept_by(handed: list[tuple[Any, ...]]) -> Any:
    """Return the policy that the contexts of the last call carry."""
    *_, kwargs = handed[-1]
    return policy_of(kwargs["context_fn"]())


def test_what_is_kept_reaches_torch_by_contexts(handed, compiling):
    checkpoint_in_compiled_code(torch.sin, (X,), {"keep": policies.matmuls})
    assert kept_by(handed) == policies.matmuls
    decorated = checkpoint_in_compiled_code(None, (), {"keep": policies.everything})
    decorated(torch.sin)(X)
    assert kept_by(handed) == policies.everything
    options = RegionOptions(keep=policies.nothing)
    run_region(torch.sin, (X,), {}, options, None)
    assert kept_by(handed) == policies.nothing


def test_globs_are_a_policy_like_any_other(handed):
    checkpoint_in_compiled_code(nn.Sequential(nn.Linear(4, 4)), (X,), {"keep": ["0"]})
    assert kept_by(handed) is not None


def test_names_of_tensors_are_refused_in_a_warning(handed):
    with pytest.warns(UserWarning, match="membudget.name does nothing inside"):
        checkpoint_in_compiled_code(torch.sin, (X,), {"keep": policies.named("out")})


def test_modules_are_known_by_their_names_below_the_region_s(handed, compiling):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def names() -> dict[str, str]:
        return compiled._KEPT[-1][1]

    options = RegionOptions(keep=policies.matmuls)
    run_region(model, (X,), {}, options, Statistics("h.3"))
    assert names()[str(id(model[0]))] == "h.3.0"
    run_region(model.forward, (X,), {}, options, None)
    assert names()[str(id(model[0]))] == "0"
    run_region(lambda x: model(x), (X,), {}, options, None)
    assert names() == {}


@pytest.mark.parametrize("keep", [None, policies.matmuls, ["*"]])
def test_outside_of_a_compiler_the_gradients_are_the_plain_ones(keep):
    def function(x: Tensor) -> Tensor:
        return (x.sin() @ x).exp()

    y = checkpoint_in_compiled_code(function, (X,), {"keep": keep})
    (found,) = torch.autograd.grad(y, X)
    (expected,) = torch.autograd.grad(function(X), X)
    assert torch.equal(found, expected)


def test_an_unhashable_policy_that_is_no_list_is_refused():
    class Unmade:
        def __hash__(self) -> int:
            raise AttributeError

    with pytest.raises(
        mb.OptionError, match=r"made inside a function that torch\.comp"
    ):
        checkpoint_in_compiled_code(torch.sin, (X,), {"keep": Unmade()})
