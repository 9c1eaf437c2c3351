"""Which modules get a region by default, and which a selection matches."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

import membudget as mb
from membudget.selection import default_names, select_modules


def linear() -> nn.Linear:
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
