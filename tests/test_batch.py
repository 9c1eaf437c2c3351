"""What a batch means: the model's arguments, or a pair of inputs and targets."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from membudget.batch import (
    call_make,
    call_model,
    could_be_pair,
    explain_call,
    first_batch,
    is_pair,
)
from membudget.errors import OptionError

X = torch.ones(2, 3)


class Echo(nn.Module):
    """Returns what it is called with."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


ECHO = Echo()


@dataclass
class Record(dict[str, Any]):
    """A mapping that is a dataclass, as outputs of Hugging Face's models are."""

    x: int = 1


class Named(NamedTuple):
    x: int
    y: int


NAMED, RECORD, LIST = Named(1, 2), Record(), [1, 2]


@pytest.mark.parametrize(
    ("inputs", "args", "kwargs"),
    [
        (7, (7,), {}),
        ((1, 2), (1, 2), {}),
        ((), (), {}),
        ({"x": 1}, (), {"x": 1}),
        (UserDict(x=1), (), {"x": 1}),
        (LIST, (LIST,), {}),
        (NAMED, (NAMED,), {}),
        (RECORD, (RECORD,), {}),
    ],
)
def test_a_tuple_and_a_mapping_are_arguments_and_all_else_is_one(inputs, args, kwargs):
    assert call_model(Echo(), inputs) == (args, kwargs)


def loss_fn(output: Tensor, batch: Any) -> Tensor:
    return output.sum()


@pytest.mark.parametrize(
    ("batch", "could"),
    [
        *(((1, 2), True), ([1, 2], True), ((1,), False), ((1, 2, 3), False)),
        *((NAMED, False), ({1: 1, 2: 2}, False), (X, False)),
    ],
)
def test_a_plain_tuple_or_list_of_two_could_be_a_pair(batch, could):
    assert could_be_pair(batch, loss_fn) is could
    assert not could_be_pair(batch, None)
    assert is_pair(nn.Identity(), batch, F.mse_loss) is could


class TakesTwo(nn.Module):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("model", "batch", "loss", "is_one"),
    [
        (TakesTwo(), (X, X), nn.MSELoss(), True),
        (TakesTwo(), [X, X], F.mse_loss, True),
        (TakesTwo(), (X, X), loss_fn, False),
        (nn.Identity(), (X, X), loss_fn, True),
        # The model may take the list.
        (nn.Identity(), [X, X], loss_fn, False),
        (nn.Identity(), (X, X), None, False),
    ],
)
def test_a_pair_is_told_by_its_loss_or_by_what_the_model_takes(
    model, batch, loss, is_one
):
    assert is_pair(model, batch, loss) is is_one


@pytest.mark.parametrize(
    ("batch", "loss", "calls"),
    [
        ((X, 1), F.mse_loss, "model(inputs) and loss_fn(output, targets)"),
        ([X, 1], F.mse_loss, "model(inputs) and loss_fn(output, targets)"),
        ((X, 1), loss_fn, "model(*batch) and loss_fn(output, batch)"),
        ([X, 1], loss_fn, "model(batch) and loss_fn(output, batch)"),
    ],
)
def test_a_batch_of_two_that_fails_shows_how_it_was_called(batch, loss, calls):
    with pytest.raises(OptionError, match="To choose") as raised:
        explain_call(KeyError("mine"), TakesTwo(), batch, loss)
    assert str(raised.value).startswith(
        f"the batch (float32[2, 3], int) was used as {calls}, which "
        "failed with KeyError: 'mine'. To choose,"
    )


class Trains(Echo):
    def training_step(self, batch: Any, number: int) -> Any:
        return batch


@pytest.mark.parametrize(
    ("model", "batch", "call"),
    [
        (Echo(), X, "Echo(batch) with float32[2, 3]"),
        (Echo(), (X, 1, "a"), "Echo(*batch) with float32[2, 3], int, str"),
        (Echo(), {"ids": X, "n": 1}, "Echo(**batch) with ids=float32[2, 3], n=int"),
        (Trains(), [X, X], "training_step(batch, 0) of Trains with list"),
    ],
)
def test_the_error_of_any_other_batch_notes_how_it_was_called(model, batch, call):
    error = KeyError("mine")
    explain_call(error, model, batch, None)
    assert error.__notes__ == [f"The step called {call}."]


def test_a_list_of_a_loader_becomes_a_tuple_and_its_generator_stays():
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    loader: Any = DataLoader([(1, 2), (3, 4)], 2, shuffle=True, generator=generator)  # type: ignore[arg-type]

    first = first_batch(loader)

    assert type(first) is tuple
    assert [sorted(column.tolist()) for column in first] == [[1, 3], [2, 4]]
    assert torch.equal(generator.get_state(), before)
    assert torch.equal(first_batch(DataLoader([1, 2], 2)), torch.tensor([1, 2]))  # type: ignore[arg-type]
    assert first_batch(LIST) is LIST


def test_a_loader_that_fails_leaves_the_random_streams():
    def fail(items: list[Any]) -> Any:
        torch.rand(1)
        raise KeyError("mine")

    before = torch.get_rng_state()
    with pytest.raises(KeyError, match="mine"):
        first_batch(DataLoader([1, 2], collate_fn=fail))  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ((ECHO, 2), (ECHO, 2, None)),
        ((ECHO, 2, loss_fn), (ECHO, 2, loss_fn)),
        ((ECHO, 2, None), (ECHO, 2, None)),
    ],
)
def test_a_function_that_makes_model_and_batch_may_make_a_loss(made, expected):
    assert call_make(lambda batch: made, {"batch": 1}) == expected


def test_a_function_that_makes_something_else_is_refused_by_its_name():
    def mine(batch: int) -> Any:
        return [1] * batch

    with pytest.raises(OptionError, match=r"mine must return .* returned a list"):
        call_make(mine, {"batch": 2})
    with pytest.raises(OptionError, match=r"mine\(width=3, batch='x'\) cannot be call"):
        call_make(mine, {"width": 3, "batch": "x"})
    for count in (1, 4):
        with pytest.raises(OptionError, match="returned a tuple"):
            call_make(lambda: (1,) * count, {})  # noqa: B023
    for made, kinds in (((1, X), "int, Tensor"), ((ECHO, X, 3), "Echo, Tensor, int")):
        with pytest.raises(OptionError, match=rf"must return .* returned \({kinds}\)"):
            call_make(lambda: made, {})  # noqa: B023


class Makes:
    def __call__(self, batch: int) -> Any:
        return None


def test_a_maker_without_a_name_is_called_make():
    with pytest.raises(OptionError, match="make must return"):
        call_make(Makes(), {"batch": 2})
