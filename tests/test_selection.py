"""Which modules get a region by default, and which a selection matches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.selection import default_names, select_modules


def linear(_: int = 0) -> nn.Linear:
    return nn.Linear(4, 4)


class Lists(nn.Module):
    """Blocks in a list of lists, which have no forward of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(linear(), linear())
        self.blocks = nn.ModuleList(
            nn.ModuleList([linear(), linear()]) for _ in range(3)
        )


class Direct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = linear()
        self.act = nn.Tanh()
        self.second = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.act(self.first(x)))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: nn.Sequential(linear(), nn.Tanh()), ["0", "1"]),
        (
            lambda: nn.Sequential(linear(), nn.Sequential(*(linear(), linear()) * 2)),
            ["1.0", "1.1"],
        ),
        (
            lambda: nn.Sequential(
                linear(), nn.Sequential(linear(), linear(), linear())
            ),
            ["1.0", "1.1", "1.2"],
        ),
        (
            lambda: nn.Sequential(
                *(nn.Sequential(linear(), nn.Tanh(), linear()) for _ in range(2))
            ),
            ["0", "1"],
        ),
        (
            Lists,
            [f"blocks.{i}.{j}" for i in range(3) for j in range(2)],
        ),
        (Direct, ["first", "second"]),
    ],
    ids=["sequential", "shared", "inner", "like-blocks", "lists", "no-list"],
)
def test_the_longest_list_of_blocks_gets_the_regions(make, names):
    assert default_names(make()) == names


class Nested(nn.Module):
    """Blocks that have submodules, beside a head."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.ModuleDict({"mlp": linear()}) for _ in range(3))
        self.head = linear()


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("h.*", ["h.0", "h.1", "h.2"]),
        ("h.?.mlp", ["h.0.mlp", "h.1.mlp", "h.2.mlp"]),
        ("**.mlp", ["h.0.mlp", "h.1.mlp", "h.2.mlp"]),
        ("**.head", ["head"]),
        (("head", "h.1"), ["h.1", "head"]),
        (iter(["h.2.**"]), ["h.2", "h.2.mlp"]),
    ],
    ids=["part", "letter", "any-parts", "no-part", "two", "iterator"],
)
def test_a_pattern_matches_a_name_part_by_part(names, found):
    assert list(select_modules(Nested(), None, names, None)) == found


def test_a_selection_meets_all_criteria_and_takes_every_nth():
    chosen = select_modules(
        Nested(), nn.Linear, "h.**", lambda name, module: name != "h.0.mlp"
    )
    every = select_modules(Nested(), None, "h.*", None, every=2)

    assert list(chosen) == ["h.1.mlp", "h.2.mlp"]
    assert list(every) == ["h.0", "h.2"]


def test_a_selection_that_matches_nothing_names_what_the_model_has():
    with pytest.raises(
        mb.SelectionError, match=r"no module of Nested matches names=\['x'\].*'h.0.mlp'"
    ):
        select_modules(Nested(), None, "x", None)
    with pytest.raises(mb.SelectionError, match="say which modules get a region"):
        select_modules(Nested(), None, None, None)
    with pytest.raises(mb.OptionError, match="every must be at least 1; got 0"):
        select_modules(Nested(), None, "h.*", None, every=0)


class Bare(nn.Module):
    """Nothing but a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


def refusal(model: nn.Module, **criteria: Any) -> str:
    """Return what is said of a selection that matches nothing."""
    asked = {"blocks": None, "names": None, "where": None, **criteria}
    with pytest.raises(mb.SelectionError, match="no module of") as raised:
        select_modules(model, **asked)
    return str(raised.value)


def test_a_refused_selection_names_at_most_eight_modules():
    few, many = (nn.Sequential(*map(linear, range(n))) for n in (7, 9))
    assert refusal(few, names="x").endswith("It has '0', '1', '2', '3', '4', '5', '6'.")
    assert refusal(many, names="x").endswith("'5', '6', '7' and more.")
    assert refusal(Bare(), names="x").endswith("It has no submodules.")


def test_a_refused_selection_repeats_the_criteria_that_were_given():
    assert "matches blocks=<class" in refusal(Nested(), blocks=nn.Conv2d)
    assert "matches names=['a', 'b']. It" in refusal(Nested(), names=("a", "b"))


def test_the_model_itself_is_matched_by_its_class_and_by_no_pattern():
    model = nn.Sequential(nn.Tanh())
    assert list(select_modules(model, nn.Sequential, None, None)) == [""]
    assert list(select_modules(model, None, "**", None)) == ["0"]


def test_a_model_without_blocks_or_parameters_has_no_default():
    with pytest.raises(
        mb.SelectionError, match="Bare has no ModuleList, no Sequential"
    ):
        default_names(Bare())


@pytest.mark.parametrize(
    ("model", "names"),
    [
        # Children of several classes may be searched for a longer list, ...
        (
            nn.Sequential(nn.Tanh(), nn.Sequential(nn.Tanh(), nn.ReLU(), nn.Tanh())),
            ["1.0", "1.1", "1.2"],
        ),
        # ... and so is an only child.
        (nn.Sequential(nn.Sequential(nn.Tanh(), nn.Tanh())), ["0.0", "0.1"]),
        # The outermost of equally long lists is taken, and an empty one never.
        (
            nn.Sequential(nn.Sequential(nn.Tanh(), nn.ReLU()), nn.Tanh()),
            ["0", "1"],
        ),
        (nn.Sequential(nn.ModuleList(), nn.ModuleDict({"a": nn.Tanh()})), ["1.a"]),
    ],
    ids=["several-classes", "only-child", "outermost", "empty"],
)
def test_lists_are_searched_for_longer_ones(model, names):
    assert default_names(model) == names


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_gets_no_region_by_default_and_is_refused_as_a_whole():
    scripted = torch.jit.script(nn.Linear(4, 4))
    assert default_names(nn.Sequential(nn.Linear(4, 4), scripted)) == ["0"]
    with pytest.raises(mb.SelectionError, match="outside of TorchScript"):
        default_names(nn.Sequential(scripted))
    for give in (mb.budget(scripted, "1GiB").start, lambda: fit_of(scripted)):
        with pytest.raises(mb.OptionError, match="is a TorchScript module"):
            give()


def fit_of(model: nn.Module) -> None:
    mb.fit(model, torch.ones(2, 4), "1GiB")
