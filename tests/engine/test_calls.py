"""Which calls of a function are verified, and which are alike."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.engine import calls
from membudget.engine.callees import signature_of
from membudget.engine.calls import Calls, calls_of
from membudget.engine.controls import verification_postponed

X = torch.ones(2)


def known(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Calls:
    return calls_of(function, args, kwargs)


def path_of(*tensors: Tensor) -> list[Any]:
    return [(t.shape, t.dtype, t.device, t.stride()) for t in tensors]


class Slotted:
    """A callable that nobody can hold weakly."""

    __slots__ = ()

    def __call__(self, x: Tensor) -> Tensor:
        return x


class Plain:
    """A class of the user's with a method."""

    def method(self, x: Tensor) -> Tensor:
        return x


def closing_over(held: Any) -> Callable[[Tensor], Any]:
    return lambda x: (x, held)


def test_calls_are_verified_until_one_was_recomputed_and_then_at_powers_of_two():
    of_sine = known(torch.sin, X)

    before = [of_sine.begin() for _ in range(3)]
    of_sine.verified(path_of(X))
    after = [of_sine.begin() for _ in range(4, 20)]

    assert before == [True] * 3
    assert [number for number, is_verified in enumerate(after, 4) if is_verified] == [
        *(4, 8, 16),
    ]


def test_a_call_that_is_due_while_verification_is_postponed_is_verified_afterwards():
    of_sine = known(torch.sin, X)
    of_sine.verified(path_of(X))
    of_sine.begin()

    with verification_postponed():
        inside = [of_sine.begin() for _ in range(9)]

    assert inside == [False] * 9
    assert [of_sine.begin() for _ in range(3)] == [True, False, True]


def test_a_first_call_is_verified_although_verification_is_postponed():
    with verification_postponed():
        assert known(torch.sin, X).begin()


def test_a_call_on_a_verified_path_changes_nothing():
    of_sine = known(torch.sin, X)
    of_sine.verified(path_of(X))
    assert of_sine.begin()
    assert of_sine.begin()

    of_sine.end(path_of(torch.ones(7)))  # Another length is no other path.

    assert not of_sine.begin()


def test_a_path_that_never_comes_again_is_not_awaited_for_ever(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(calls, "_PATIENCE", 3)
    of_sine = known(torch.sin, X)
    assert of_sine.begin()
    of_sine.verified(path_of(X))
    of_sine.end(path_of(X, X))

    begun = [of_sine.begin() for _ in range(14)]

    # Calls number 2 to 5 wait for the path; number 8 is sampled.
    assert begun == [*[True] * 4, *[False] * 2, True, *[False] * 7]


def test_a_path_that_comes_again_ends_the_waiting():
    of_sine = known(torch.sin, X)
    assert [of_sine.begin(), of_sine.begin()] == [True, True]
    of_sine.verified(path_of(X))
    of_sine.end(path_of(X, X))
    assert of_sine.begin()

    of_sine.verified(path_of(X, X))

    assert of_sine.paths[2] == path_of(X, X)
    assert of_sine.begin()  # The fourth.
    assert not of_sine.begin()


LINEAR, OTHER = nn.Linear(2, 2), nn.Linear(2, 2)
PLAIN = Plain()

ALIKE: dict[str, tuple[Callable[[], Calls], Callable[[], Calls]]] = {
    "one function": (lambda: known(torch.sin, X), lambda: known(torch.sin, X * 2)),
    "fresh closures": (
        lambda: known(closing_over(LINEAR), X),
        lambda: known(closing_over(LINEAR), X),
    ),
    "another number": (
        lambda: known(closing_over(1), X, 3),
        lambda: known(closing_over(2), X, 4),
    ),
    "a log that grows": (
        lambda: known(closing_over([1.0]), X),
        lambda: known(closing_over([1.0, 2.0]), X),
    ),
    "bound methods": (lambda: known(PLAIN.method, X), lambda: known(PLAIN.method, X)),
    "slots": (lambda: known(Slotted(), X), lambda: known(Slotted(), X)),
}

UNLIKE: dict[str, tuple[Callable[[], Calls], Callable[[], Calls]]] = {
    "functions": (lambda: known(torch.sin, X), lambda: known(torch.cos, X)),
    "shapes": (lambda: known(torch.sin, X), lambda: known(torch.sin, torch.ones(3))),
    "dtypes": (lambda: known(torch.sin, X), lambda: known(torch.sin, X.double())),
    "flags": (lambda: known(torch.sin, X, True), lambda: known(torch.sin, X, False)),
    "keywords": (lambda: known(torch.sin, x=X), lambda: known(torch.sin, y=X)),
    "modules": (lambda: known(LINEAR, X), lambda: known(OTHER, X)),
    "modules that are held": (
        lambda: known(closing_over(LINEAR), X),
        lambda: known(closing_over(OTHER), X),
    ),
    "modules in a list": (
        lambda: known(closing_over([LINEAR]), X),
        lambda: known(closing_over([OTHER]), X),
    ),
    "modules in a dict": (
        lambda: known(closing_over({"a": LINEAR}), X),
        lambda: known(closing_over({"a": OTHER}), X),
    ),
    "modules that are given": (
        lambda: known(functools.partial(torch.add, LINEAR), X),
        lambda: known(functools.partial(torch.add, OTHER), X),
    ),
    "objects": (lambda: known(PLAIN.method, X), lambda: known(Plain().method, X)),
}


@pytest.mark.parametrize("name", ALIKE)
def test_calls_with_one_signature_are_alike(name: str):
    first, second = ALIKE[name]
    assert first() is second()


@pytest.mark.parametrize("name", UNLIKE)
def test_calls_with_two_signatures_are_not(name: str):
    first, second = UNLIKE[name]
    assert first() is not second()


def test_training_and_autocast_tell_calls_apart():
    module = nn.Linear(2, 2)
    training = known(module, X)
    module.eval()
    evaluating = known(module, X)
    with torch.autocast("cpu"):
        casting = known(module, X)

    assert len({id(training), id(evaluating), id(casting)}) == 3
    assert training.owner is evaluating.owner is casting.owner


def test_a_function_that_holds_itself_is_described():
    def function(x: Tensor) -> Any:
        return function

    assert known(function, X) is known(function, X)


def test_functions_that_hold_each_other_are_described_once():
    def ping() -> Any:
        return pong

    def pong() -> Any:
        return ping

    key, parts, _ = signature_of(ping, (), {})

    codes = ping.__code__, pong.__code__
    assert parts == [*codes, codes[0]]
    assert key[1:] == (*map(id, codes), id(codes[0]))


def test_two_functions_of_one_code_are_described_by_what_each_holds():
    def held(module: nn.Module) -> Callable[[], nn.Module]:
        return lambda: module

    layers = nn.Linear(1, 1), nn.Linear(1, 1)
    functions = [held(layer) for layer in layers]

    _, in_turn, _ = signature_of(functools.partial(print, *functions), (), {})

    assert [part for part in in_turn if part in layers] == [*layers]


def test_what_is_known_of_a_module_goes_when_it_dies():
    module = nn.Linear(2, 2)
    known(module, X).owner.replays = True
    assert calls._KNOWN
    assert calls._OWNERS

    del module
    gc.collect()

    assert not calls._KNOWN
    assert not calls._OWNERS


def test_no_more_is_known_than_a_bound(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calls, "_MOST_KEYS", 3)
    for size in range(10):
        known(torch.sin, torch.ones(size))

    assert len(calls._KNOWN) == 3


def test_calls_that_nobody_goes_backward_from_are_verified_for_a_while_alone():
    def function(x):
        return x.sin().exp()

    x = torch.ones(3, requires_grad=True)
    for _ in range(300):
        mb.checkpoint(function, x, engine="rerun")
    known = calls_of(function, (x,), {})
    assert not any(known.begin() for _ in range(20))


def test_no_more_paths_are_known_than_a_bound(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calls, "_MOST_PATHS", 3)
    of_sine = known(torch.sin, X)

    for number in range(10):
        of_sine.verified(path_of(*[X] * number))
        of_sine.end(path_of(*[X] * (number + 20)))

    assert len(of_sine._verified) <= 3
    assert len(of_sine._awaited) <= 3
    assert len(of_sine.paths) <= 3
