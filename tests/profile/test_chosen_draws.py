"""The step that takes the most memory, where random numbers decide what runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.errors import OptionError
from membudget.profile import Profile, chosen_draws
from membudget.profile.cache import FROM_CACHE
from tests.situations import Notes

LAYERS = 4
X = torch.linspace(-1, 1, 64 * 8).view(64, 8)


def kept_if_small(most: float = 0.01) -> Iterator[bool]:
    while True:
        yield bool(torch.rand(()) < most)


def kept_if_large(least: float = 0.9) -> Iterator[bool]:
    while True:
        yield torch.rand(1).item() > least


def kept_either_way() -> Iterator[bool]:
    while True:
        yield bool(torch.rand(()) < 0.1)
        yield bool(torch.rand(()) > 0.9)


def kept_inside() -> Iterator[bool]:
    if torch.rand(()) > 0.9:
        yield from kept_if_small()


def kept_by_python() -> Iterator[bool]:
    while True:
        yield random.random() > 0.9


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


KEEPING = [
    *((kept_if_small, "SSSS"), (kept_if_large, "LLLL")),
    (kept_either_way, "SLSL"),
    (kept_inside, "LSSSS"),
    (kept_by_python, "LLLL"),
]


@pytest.mark.parametrize(("kept", "letters"), [*KEEPING, (kept_by_one_draw, "L")])
def test_a_real_profile_is_of_the_step_that_drops_no_layer(kept, letters):
    model = Dropping(kept)
    states = torch.get_rng_state(), random.getstate()
    found = mb.profile(model, X)
    assert layers_of(found) == LAYERS
    assert found.draws == letters
    assert "those with which it allocates most" in found.report()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


@pytest.mark.parametrize(("kept", "letters"), KEEPING)
def test_a_fake_profile_is_of_the_step_that_drops_no_layer(kept, letters):
    found = mb.profile(Dropping(kept), X, fake=True)
    assert (layers_of(found), found.draws) == (LAYERS, letters)


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("kept", [kept_if_small, kept_if_large])
def test_a_step_that_fails_where_all_layers_are_dropped_is_none_of_those(kept, fake):
    class Refusing(Dropping):
        is_busy = False

        def forward(self, x: Tensor) -> Tensor:
            if self.is_busy:
                raise RuntimeError("a step that failed was not undone")
            self.is_busy, self.has_run = True, False
            y = super().forward(x)
            if not self.has_run:
                raise ValueError("no layer ran")
            self.is_busy = False
            return y

    torch.manual_seed(0)  # The first real step is as chance decides: one layer runs.
    found = mb.profile(Refusing(partial(kept, 0.5)), X, fake=fake)
    assert layers_of(found) == LAYERS
    assert found.draws == ("SSSS" if kept is kept_if_small else "LLLL")


def test_a_step_that_no_numbers_let_run_raises_what_it_raised():
    class Failing(Dropping):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError(f"in every case, such as {super().forward(x).sum()}")

    with pytest.raises(ValueError, match="in every case"):
        mb.profile(Failing(kept_if_small), X)


def test_a_fake_step_that_asks_for_values_with_other_numbers_is_refused():
    class Asking(Dropping):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if self.has_run and y.mean().item() > 100:
                y = y * 2
            return y

    for kept in (kept_if_small, kept_if_large):
        with pytest.raises(OptionError, match="asks a fake tensor"):
            mb.profile(Asking(kept), X, fake=True)


@pytest.mark.parametrize("fake", [False, True])
def test_a_loop_that_draws_until_a_number_is_large_is_recorded_as_often_as_drawn(fake):
    class Repeating(Dropping):
        def forward(self, x: Tensor) -> Tensor:
            while torch.rand(()) < 0.5:
                x = self.layers[0](x).tanh()
            return x + self.bias

    torch.manual_seed(1)
    found = mb.profile(Repeating(kept_always), X, fake=fake)
    assert layers_of(found) < 20


@pytest.mark.parametrize("fake", [False, True])
def test_a_step_whose_numbers_decide_nothing_draws_them(fake: bool):
    class Reading(Dropping):
        def forward(self, x: Tensor) -> Tensor:
            torch.rand(()).item()
            return super().forward(x)

    for made in (Dropping, Reading):
        found = mb.profile(made(kept_always), X, fake=fake)
        assert found.draws == ""
        assert found.chance == ()
        assert found.notes == mb.profile(nn.Linear(8, 8), X, fake=fake).notes


def test_a_fake_step_that_decides_nothing_is_recorded_once():
    model, calls = Dropping(kept_always), Notes()
    model.register_forward_hook(lambda *_: calls(1))
    mb.profile(model, X, fake=True)
    assert len(calls.items) == 1


@pytest.mark.parametrize(("kept", "times"), [(kept_if_large, 3), (kept_if_small, 4)])
def test_a_step_is_recorded_again_only_if_another_was_recorded_after_it(kept, times):
    model, calls = Dropping(kept), Notes()
    model.register_forward_hook(lambda *_: calls(1))
    mb.profile(model, X, fake=True)  # As drawn, with the smallest, with the largest.
    assert len(calls.items) == times


def test_each_recording_is_of_the_second_step_from_the_start():
    class Counting(Dropping):
        steps = 0

        def forward(self, x: Tensor) -> Tensor:
            counts(self.steps)
            self.steps += 1
            return super().forward(x)

    counts = Notes()
    mb.profile(Counting(kept_if_large), X)
    # As drawn, with the smallest numbers, with the largest; what follows is timed.
    assert counts.items[:7] == [0, 1, 0, 1, 0, 1, 2]


@pytest.mark.parametrize("kept", [kept_if_large, kept_if_small])
def test_ranks_record_as_many_steps_whichever_letters_they_choose(kept, monkeypatch):
    monkeypatch.setattr(chosen_draws, "is_grouped", lambda: True)
    model, calls = Dropping(kept), Notes()
    model.register_forward_hook(lambda *_: calls(1))
    mb.profile(model, X, fake=True)
    assert len(calls.items) == 4


@pytest.mark.parametrize("fake", [False, True])
def test_calls_with_a_draw_that_decides_are_those_of_chance(fake: bool):
    found = mb.profile(nn.Sequential(Dropping(kept_if_small)), X, fake=fake)
    assert [found.graph.calls[n].path for n in found.chance] == ["", "0"]


def test_a_profile_in_a_file_says_what_was_drawn(tmp_path):
    path = tmp_path / "profile.json"
    found = mb.profile(Dropping(kept_if_small), X, fake=True)
    found.to_json(path)
    assert Profile.from_json(path).draws == "SSSS"
    assert Profile.from_json(path).chance == (0,)
    older = {k: v for k, v in found.to_dict().items() if k not in ("draws", "chance")}
    assert Profile.from_dict(older).draws == ""


def test_a_cached_profile_sets_what_later_steps_draw(tmp_path):
    def model() -> Dropping:
        torch.manual_seed(0)
        return Dropping(kept_if_small)

    mb.profile(model(), X, cache=tmp_path)
    with mb.fit(model(), X, "1GiB", cache=tmp_path) as fitted:
        # Else the plain step would take less, and the profile be taken for stale.
        assert FROM_CACHE in fitted.profile.notes


@pytest.mark.parametrize("fake", [False, True])
def test_numbers_between_that_decide_leave_the_step_as_it_is_drawn(fake: bool):
    def kept_in_the_middle() -> Iterator[bool]:
        while True:
            yield bool(0.1 < torch.rand(()) < 0.9)

    torch.manual_seed(0)
    found = mb.profile(Dropping(kept_in_the_middle), X, fake=fake)
    assert layers_of(found) > 0
    assert found.draws == "-"
    assert found.chance == (0,)
    assert "as they were drawn; another step may take more" in found.report()
