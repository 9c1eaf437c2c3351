"""The table of regions: one line per run of regions that do the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.graph import ModuleCall
from membudget.planner.choice import Choice
from membudget.planner.overheads import Overheads
from membudget.planner.schedule import Schedule, Simulator
from membudget.report.region_table import region_table
from tests.planner.drafts import keeping


class Block(nn.Module):
    """A linear layer, GELU, and the sine of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(self.linear(x)).sin()


@pytest.fixture(scope="module")
def found() -> mb.Profile:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    return mb.profile(model, torch.randn(64, 32), fake=True, device="h100")


def chosen(found: mb.Profile, keeps: dict[str, tuple[str, ...]]) -> Schedule:
    """Return regions on modules, with the operators whose outputs each keeps."""
    graph = found.graph
    calls = {call.path: call for call in graph.calls}
    picked: list[ModuleCall] = [calls[path] for path in keeps]
    regions = [
        keeping(graph, Choice(call.start, call.end), keeps[call.path])
        for call in picked
    ]
    schedule = Simulator(graph).schedule(picked, regions)
    return replace(schedule, overhead_s=0.5 * graph.seconds)


def rows_of(table: str) -> list[list[str]]:
    lines = table.split("\n\n")[0].splitlines()[2:]
    return [
        [cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines
    ]


def test_a_line_says_what_a_region_keeps_and_recomputes(found):
    table = region_table(found.graph, chosen(found, {"0": ("aten.addmm.default",)}))

    head = ["region", "keeps", "recomputes", "operators", "kept", "time added"]
    titles, rule, *_ = table.splitlines()
    assert [cell.strip() for cell in titles.split("  ") if cell.strip()] == head
    assert set(rule) == {"─"}
    ((region, keeps, again, operators, kept, share),) = rows_of(table)
    assert (region, keeps, again) == ("0", "addmm", "gelu")
    assert (operators, kept) == ("4", "8.0 KiB")
    graph = found.graph
    gelu = next(o for o in graph.operators if o.name == "aten.gelu.default")
    assert share == f"{gelu.seconds / graph.seconds:.1%}"


def test_neighbours_that_do_the_same_share_a_line_with_the_sums(found):
    keep = ("aten.addmm.default",)
    table = region_table(
        found.graph, chosen(found, {"0": keep, "1": keep, "2": keep, "3": ()})
    )

    first, second = rows_of(table)
    assert first[:2] == ["0 to 2 (3)", "addmm"]
    assert first[4] == "24.0 KiB"
    assert second[:3] == ["3", "nothing", "addmm, gelu"]
    assert second[4] == "0 B"


def test_recomputation_and_overhead_of_regions_are_separate_times(found):
    table = region_table(found.graph, chosen(found, {"0": ()}))

    share = rows_of(table)[0][-1]
    assert table.endswith(
        f"recomputation takes {share} of the plain step, "
        "and the regions' overhead 50.0%"
    )


def test_a_region_takes_the_share_of_the_forward_that_its_replay_takes(found):
    call = next(call for call in found.graph.calls if call.path == "0")
    simulator = Simulator(found.graph, Overheads(again_share=0.5))
    replayed = simulator.schedule([call], [Choice(call.start, call.end)])

    table = region_table(found.graph, simulator.with_plain_times(replayed))

    seconds = (found.graph.operators[i].seconds for i in replayed.simulation.replayed)
    share = f"{0.5 * sum(seconds) / found.graph.seconds:.1%}"
    assert rows_of(table)[0][-1] == share
    assert f"recomputation takes {share} of the plain step" in table


def test_a_kept_output_that_nothing_reads_is_not_counted(found):
    graph = found.graph
    all_kept = chosen(found, {"0": ("aten.addmm.default", "aten.sin.default")})
    # The sine's output is saved by the next block, not in this one.
    assert len(all_kept.choices[0].kept) == 2

    ((_, keeps, _, _, kept, _),) = rows_of(region_table(graph, all_kept))

    assert (keeps, kept) == ("addmm", "8.0 KiB")


def test_a_region_on_the_whole_model_has_a_name():
    model = Block()
    found = mb.profile(model, torch.randn(64, 32), fake=True, device="h100")
    table = region_table(found.graph, chosen(found, {"": ()}))
    assert rows_of(table)[0][0] == "(the model)"


def test_many_kinds_of_operators_are_cut_with_their_number():
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    found = mb.profile(model, torch.randn(4, 8, 32), fake=True, device="h100")
    table = region_table(found.graph, chosen(found, {"": ()}))
    text = " ".join(" ".join(row) for row in rows_of(table))
    assert " and " in text
    assert text.count(" more") == 1
