"""The step that takes the most memory, where random numbers decide what runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.errors import OptionError
from membudget.profile import Profile

LAYERS = 4
X = torch.linspace(-1, 1, 64 * 8).view(64, 8)


def kept_if_small(most: float = 0.01) -> Iterator[bool]:
    while True:
        yield bool(torch.rand(()) < most)


def kept_if_large(least: float = 0.9) -> Iterator[bool]:
    while True:
        yield torch.rand(1).item() > least


def kept_by_one_draw() -> Iterator[bool]:
    for number in torch.empty(LAYERS).uniform_():
        yield bool(number > 0.9)


def kept_always() -> Iterator[bool]:
    torch.rand(LAYERS)
    while True:
        yield True


class Dropping(nn.Module):
    """Layers that are dropped if chance says so."""

    def __init__(self, kept: Callable[[], Iterator[bool]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(LAYERS))
        self.bias = nn.Parameter(torch.zeros(8))
        self.kept = kept
        self.has_run = False

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the layers that are kept."""
        for layer, is_kept in zip(self.layers, self.kept(), strict=False):
            if is_kept:
                self.has_run = True
                x = layer(x).tanh()
        return x + self.bias


def layers_of(found: Profile) -> int:
    return sum(call.path.startswith("layers.") for call in found.graph.calls)


SINGLE = [(kept_if_small, "smallest"), (kept_if_large, "largest")]


@pytest.mark.parametrize(("kept", "draws"), [*SINGLE, (kept_by_one_draw, "largest")])
def test_a_real_profile_is_of_the_step_that_drops_no_layer(kept, draws):
    model = Dropping(kept)
    state = torch.get_rng_state()
    found = mb.profile(model, X)
    assert layers_of(found) == LAYERS
    assert found.draws == draws
    assert f"the {draws} that can be drawn" in found.report()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("kept", "draws"), SINGLE)
def test_a_fake_profile_is_of_the_step_that_drops_no_layer(kept, draws):
    found = mb.profile(Dropping(kept), X, fake=True)
    assert (layers_of(found), found.draws) == (LAYERS, draws)


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize(("kept", "draws"), SINGLE)
def test_a_step_that_fails_where_all_layers_are_dropped_is_none_of_those(
    kept: Callable[[float], Iterator[bool]], draws: str, fake: bool
):
    class Refusing(Dropping):
        def forward(self, x: Tensor) -> Tensor:
            self.has_run = False
            y = super().forward(x)
            if not self.has_run:
                raise ValueError("no layer ran")
            return y

    torch.manual_seed(0)  # The first real step is as chance decides: one layer runs.
    half = partial(kept, 0.5)
    assert mb.profile(Refusing(half), X, fake=fake).draws == draws


@pytest.mark.parametrize("fake", [False, True])
def test_a_step_whose_numbers_decide_nothing_draws_them(fake: bool):
    model, calls = Dropping(kept_always), []
    model.register_forward_hook(lambda *_: calls.append(1))
    found = mb.profile(model, X, fake=fake)
    assert found.draws is None
    assert found.notes == mb.profile(nn.Linear(8, 8), X, fake=fake).notes
    if fake:
        assert len(calls) == 1


def test_a_profile_in_a_file_says_what_was_drawn(tmp_path):
    path = tmp_path / "profile.json"
    found = mb.profile(Dropping(kept_if_small), X, fake=True)
    found.to_json(path)
    assert Profile.from_json(path).draws == "smallest"
    data = found.to_dict() | {"draws": "luckiest"}
    with pytest.raises(OptionError, match="got 'luckiest'"):
        Profile.from_dict(data)


def test_a_cached_profile_sets_what_later_steps_draw(tmp_path):
    ran: list[int] = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Dropping(kept_if_small)
        for layer in model.layers:
            layer.register_forward_hook(lambda *_: ran.append(1))
        mb.profile(model, X, cache=tmp_path)
        ran.clear()
        with mb.fit(model, X, "1GiB", cache=tmp_path):
            pass
        assert len(ran) % LAYERS == 0
