"""The commands that plan: `plan`, `fit`, `tradeoff`, `diff`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import membudget
from membudget.cli import DIFFERENT, FAILED, OK, main
from membudget.planner.plan import VERSION, KeptOutput, Plan, RegionPlan
from membudget.profile import profiling
from membudget.report.plan_text import described, differences, kept_text
from tests.commands import without_torch
from tests.planner import drafts

STEP = """
import torch
from torch import nn

def blocks(width):
    layer = lambda: nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1))
    return [layer() for _ in range(4)]

def make(batch=128, width=32):
    torch.manual_seed(0)
    return nn.Sequential(*blocks(width), nn.Linear(width, 1)), torch.ones(batch, width)

def with_loss():
    return *make(), lambda output, batch: output.square().mean()

def asks():
    rates = torch.linspace(0, 0.1, 4).tolist()
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(rates[1])), torch.ones(2, 4)

class Layer(nn.Linear):
    pass

def layers():
    return nn.Sequential(Layer(4, 4), nn.GELU(), Layer(4, 4)), torch.ones(2, 4)

def shard(model, mesh):
    print(sum(isinstance(module, Layer) for module in model), "layers to shard")
"""


@pytest.fixture
def step(tmp_path: Path) -> str:
    path = tmp_path / "target_plan.py"
    path.write_text(STEP)
    return str(path)


def planned(step: str, path: Path, budget: str = "60%", *options: str) -> Plan:
    """Write the plan for a budget, and read it."""
    arguments = ["plan", f"{step}:make", "--fake", "--budget", budget, *options]
    assert main([*arguments, "-o", str(path)]) == OK
    return Plan.from_json(path)


def test_the_commands_are_in_the_help_and_diff_needs_no_torch(tmp_path: Path):
    path = tmp_path / "plan.json"
    path.write_text(PLAN.to_json())
    out = without_torch(f"assert main(['diff', {str(path)!r}, {str(path)!r}]) == 0")
    for command in ("plan", "fit", "tradeoff", "diff"):
        assert f"\n    {command} " in out
    assert "the plans are equal" in out


@pytest.mark.parametrize("options", ["", "--fake"])
def test_commands_share_a_cache_of_profiles(
    step, tmp_path, capsys, monkeypatch, options
):
    recorded: list[object] = []
    record = profiling._new_profile

    def noting(*arguments: Any) -> Any:
        recorded.append(arguments)
        return record(*arguments)

    monkeypatch.setattr(profiling, "_new_profile", noting)
    for command in ("plan --budget 60%", "tradeoff", "profile", "fit --budget 60%"):
        name, *rest = command.split()
        cache = ["--cache", str(tmp_path / "cache"), *options.split()]
        assert main([name, f"{step}:make", *rest, *cache]) == OK
    # A model without memory is another one than `fit` needs.
    assert len(recorded) == (2 if options else 1)
    assert "read from the cache" in capsys.readouterr().out


def test_fit_may_be_given_seconds(step, capsys):
    options = ["--budget", "60%", "--steps", "1", "--seconds", "0"]
    assert main(["fit", f"{step}:make", *options]) == OK
    assert "skipped: annealing" in capsys.readouterr().out
    assert main(["fit", f"{step}:make", *options[:-1], "-1"]) == FAILED
    assert "seconds must be a number" in capsys.readouterr().err


# membudget plan


@pytest.mark.parametrize("options", ["", "--fake", "--device cpu", "--fake --batch 64"])
def test_a_plan_is_printed_with_what_each_region_keeps(step, capsys, options):
    code = main(["plan", f"{step}:make", "--budget", "60%", *options.split()])
    out = capsys.readouterr().out
    assert code == OK
    for word in ("budget", "plain", "predicted", "slowdown", "region", "keeps"):
        assert word in out
    assert out.startswith("Sequential: ")


def test_a_plan_is_written_and_can_be_applied(step, tmp_path):
    plan = planned(step, tmp_path / "plan.json")
    assert plan.regions
    assert plan.peak_bytes <= plan.budget_bytes < plan.plain_peak_bytes

    model, _ = membudget.cli_options.load_target(f"{step}:make")()
    with_plan = membudget.apply(model, plan)
    assert set(with_plan.names) == {region.path for region in plan.regions}
    with_plan.remove()


def test_the_function_that_shards_a_model_sees_the_classes_of_the_model(step, capsys):
    options = ["--budget", "100%", "--mesh", "dp_shard=2", "--parallelize", "shard"]
    assert main(["plan", f"{step}:layers", *options]) == OK
    assert "2 layers to shard" in capsys.readouterr().out


def test_a_budget_in_bytes_counts_what_is_there_before(step, tmp_path):
    share = planned(step, tmp_path / "a.json", "60%")
    static = (4 * (32 * 32 + 32) + 32 + 1) * 4 + 128 * 32 * 4
    whole = planned(step, tmp_path / "b.json", str(static + share.budget_bytes))
    assert whole == share


def test_the_state_of_an_optimizer_leaves_less_for_the_step(step, tmp_path):
    plain = planned(step, tmp_path / "a.json", "1MiB")
    adam = planned(step, tmp_path / "b.json", "1MiB", "--optimizer", "adam")
    assert adam.budget_bytes < plain.budget_bytes


def test_a_budget_that_the_plain_step_fits_needs_no_region(step, capsys):
    assert main(["plan", f"{step}:make", "--fake", "--budget", "1GiB"]) == OK
    assert "the plain step fits: no region is needed" in capsys.readouterr().out


def test_the_least_that_an_error_names_can_be_planned(step, tmp_path, capsys):
    found = membudget.profile(
        *membudget.cli_options.load_target(f"{step}:make")(), fake=True
    )
    assert main(["plan", f"{step}:make", "--fake", "--budget", "1%"]) == FAILED
    words = capsys.readouterr().err.split("the smallest plan needs ")[1]
    least = int(words.split(". ")[0].replace(",", ""))
    budget = str(found.graph.static.total + least)
    assert planned(step, tmp_path / "plan.json", budget).peak_bytes <= least


@pytest.mark.parametrize("command", ["plan", "fit"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("make --budget 1%", "no plan fits in"),
        ("make --budget 1KiB", "the smallest plan needs"),
        ("make --budget 8G", "has the unit 'G'; write GiB for 1024³ bytes"),
        ("make --budget 8parsec", "has the unit 'parsec'"),
        ("make --budget much", "a size is a number of bytes"),
        ("make --budget 0%", "a percentage budget must be above 0 and at most 100"),
        ("make --budget 130%", "a percentage budget must be above 0 and at most 100"),
        ("make --budget much%", "a percentage budget must be above 0 and at most 100"),
        ("missing --budget 60%", "has no function 'missing'"),
        ("make --budget 60% --mode most", "there is no mode 'most'; the modes are"),
        ("make --budget 5% --mode full", "the smallest plan of mode='auto' needs"),
        ("make --budget 60% --set batch", "--set takes NAME=VALUE"),
        ("make --budget 60% --set depth=3", "make(depth=3) cannot be called"),
        ("make --budget 60% --device abacus", "there is no device 'abacus'"),
        ("make --budget 60% --optimizer magic", "torch.optim has no optimizer"),
        ("make --budget 90% -o missing/plan.json", "the plan cannot be written"),
    ],
)
def test_what_cannot_be_planned_gives_2_and_says_why(
    step, capsys, command, options, message
):
    target, *rest = options.split()
    steps = ["--steps", "1"] if command == "fit" else []
    assert main([command, f"{step}:{target}", *rest, *steps]) == FAILED
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "fit", "tradeoff"])
def test_a_command_without_a_target_gives_2_and_the_usage(capsys, command):
    with pytest.raises(SystemExit, match="2"):
        main([command])
    assert "TARGET" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "fit"])
def test_a_command_without_a_budget_gives_2_and_says_so(step, capsys, command):
    with pytest.raises(SystemExit, match="2"):
        main([command, f"{step}:make"])
    assert "the following arguments are required: --budget" in capsys.readouterr().err


def test_a_model_that_asks_for_values_cannot_be_made_fake(step, capsys):
    assert main(["plan", f"{step}:asks", "--fake", "--budget", "90%"]) == FAILED
    assert "the function reads some" in capsys.readouterr().err


def test_an_older_plan_outlives_a_write_that_fails(step, tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    before = planned(step, path)

    def fails(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("membudget.text.os.fsync", fails)
    arguments = ["plan", f"{step}:make", "--fake", "--budget", "70%", "-o", str(path)]
    assert main(arguments) == FAILED
    assert Plan.from_json(path) == before
    assert {file.name for file in tmp_path.iterdir()} == {"plan.json", Path(step).name}


@pytest.mark.parametrize("mode", ["none", "full", "selective", "every_2"])
def test_a_plan_of_a_mode_is_written(step, tmp_path, mode):
    plan = planned(step, tmp_path / "plan.json", "1GiB", "--mode", mode)
    count = {"none": 0, "full": 4, "selective": 4, "every_2": 2}[mode]
    assert len(plan.regions) == count


# membudget fit


def test_a_fit_in_a_mode_names_it_and_is_audited(step, capsys):
    arguments = ["fit", f"{step}:make", "--budget", "1GiB", "--steps", "1"]
    assert main([*arguments, "--mode", "full"]) == OK
    out = capsys.readouterr().out
    assert "full  a rule, without planning" in out
    assert "audit: equal to the last bit" in out


def test_a_fit_is_printed_with_predicted_beside_measured(step, tmp_path, capsys):
    path = tmp_path / "plan.json"
    arguments = ["fit", f"{step}:with_loss", "--budget", "60%", "--steps", "3"]
    assert main([*arguments, "-o", str(path)]) == OK
    out = capsys.readouterr().out
    for word in ("predicted", "measured", "3 steps, plan 1", "is kept"):
        assert word in out
    assert "audit: equal to the last bit" in out
    assert Plan.from_json(path).regions


def test_a_fit_of_a_step_that_does_not_fit_plain_runs_no_plain_step(step, capsys):
    arguments = ["fit", f"{step}:make", "--budget", "60%", "--steps", "1", "--fake"]
    assert main(arguments) == OK
    out = capsys.readouterr().out
    assert "1 step, plan 1" in out
    assert "audit: not run" in out
    measured = [line for line in out.splitlines() if line.startswith("slowdown")][-1]
    assert measured.endswith("·")


def test_a_fit_without_regions_needs_no_audit(step, capsys):
    arguments = ["fit", f"{step}:make", "--budget", "1GiB", "--steps", "1"]
    assert main(arguments) == OK
    assert "audit: not needed, the step is the plain one" in capsys.readouterr().out


def test_a_peak_over_the_budget_gives_1(step, capsys, monkeypatch):
    class More:
        bounded_bytes = 1 << 40

    module = import_module("membudget.trial")
    monkeypatch.setattr(module, "peak_on", lambda device, run: (run(), More)[1])
    arguments = ["fit", f"{step}:make", "--budget", "60%", "--steps", "1"]
    assert main(arguments) == DIFFERENT
    out = capsys.readouterr().out
    assert "is NOT kept" in out
    assert "audit: equal" in out


def test_an_audit_that_differs_gives_1(step, capsys, monkeypatch):
    from membudget.audit import AuditReport, Difference
    from membudget.fitted import Fitted

    report = AuditReport((Difference("gradient", "0.weight", "3 of 4 bytes"),))
    monkeypatch.setattr(Fitted, "audit", lambda self: report)
    arguments = ["fit", f"{step}:make", "--budget", "60%", "--steps", "1"]
    assert main(arguments) == DIFFERENT
    out = capsys.readouterr().out
    assert "audit: NOT equal: 1 difference" in out
    assert "is kept" in out


@pytest.mark.parametrize("steps", ["0", "-2"])
def test_a_fit_runs_at_least_one_step(step, capsys, steps):
    arguments = ["fit", f"{step}:make", "--budget", "60%", "--steps", steps]
    assert main(arguments) == FAILED
    assert "--steps must be at least 1" in capsys.readouterr().err


def test_the_steps_of_a_fit_leave_the_model_as_it_was():
    import torch
    from torch import nn

    from membudget.fit import fit
    from membudget.step import Step
    from membudget.trial import try_steps

    layers = [nn.Linear(8, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 1)]
    model, batch = nn.Sequential(nn.Sequential(*layers)), torch.randn(64, 8)
    with fit(model, batch, "100%") as fitted:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        trial = try_steps(fitted, Step(model, batch, None), 2)
    assert all(before[name].equal(v) for name, v in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert len(trial.planned_seconds) == len(trial.plain_seconds) == 2
    assert trial.slowdown is not None
    assert trial.slowdown > 0


# membudget tradeoff


def test_a_tradeoff_is_printed_and_written(step, tmp_path, capsys):
    path = tmp_path / "curve.json"
    arguments = ["tradeoff", f"{step}:make", "--budgets", "5", "--json", str(path)]
    assert main([*arguments, "--fake", "--device", "h100"]) == OK
    assert "times H100" in (out := capsys.readouterr().out)
    assert len(out.strip().splitlines()) == 9
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 5
    assert rows[-1]["slowdown"] == 1.0


def test_a_tradeoff_of_one_budget_is_refused(step, capsys):
    assert main(["tradeoff", f"{step}:make", "--budgets", "1"]) == FAILED
    assert "--budgets must be at least 2; got 1" in capsys.readouterr().err


def test_a_picture_without_matplotlib_is_refused_before_the_model_is_made(
    capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["tradeoff", "missing.py:make", "--png", "curve.png"]) == FAILED
    assert 'pip install "membudget[plots]"' in capsys.readouterr().err


def test_a_picture_is_drawn(step, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "curve.png"
    arguments = ["tradeoff", f"{step}:make", "--fake", "--budgets", "3"]
    assert main([*arguments, "--png", str(path)]) == OK
    assert path.read_bytes().startswith(b"\x89PNG")


# membudget diff

KEPT = KeptOutput(1, 0, "aten.addmm.default")
REGIONS = (RegionPlan("h.0", 3, (KEPT,)), RegionPlan("h.1", 3, ()))
PLAN = dataclasses.replace(drafts.PLAN, model="GPT", regions=REGIONS)


def with_regions(*regions: RegionPlan) -> Plan:
    return dataclasses.replace(PLAN, regions=regions)


FIRST, SECOND = PLAN.regions
CHANGES: dict[str, tuple[Plan, str]] = {
    "model": (dataclasses.replace(PLAN, model="ViT"), "model: GPT -> ViT"),
    "another model": (
        dataclasses.replace(PLAN, parameters=("0.weight float32[4,8]",)),
        "0.weight is float32[4,4] in the first and float32[4,8] in the second",
    ),
    "budget": (
        dataclasses.replace(PLAN, budget_bytes=2048),
        "budget: 1000 B (1,000 bytes) -> 2.0 KiB (2,048 bytes)",
    ),
    "plain": (dataclasses.replace(PLAN, plain_peak_bytes=7), "plain peak: 2.0 KiB"),
    "peak": (dataclasses.replace(PLAN, peak_bytes=901), "predicted peak: 900 B"),
    "slowdown": (dataclasses.replace(PLAN, slowdown=1.5), "slowdown: 1.25 -> 1.5"),
    "bound": (dataclasses.replace(PLAN, bound=1.1), "least slowdown: 1.0 -> 1.1"),
    "cost": (dataclasses.replace(PLAN, cost="L4"), "seconds: measured -> L4"),
    "gone": (with_regions(FIRST), "region 'h.1': only in the first plan, keeps noth"),
    "new": (
        with_regions(FIRST, SECOND, RegionPlan("h.2", 3, (KEPT,))),
        "region 'h.2': only in the second plan, keeps addmm #1",
    ),
    "less": (
        with_regions(RegionPlan("h.0", 3, ()), SECOND),
        "region 'h.0': only the first keeps addmm #1",
    ),
    "more": (
        with_regions(FIRST, RegionPlan("h.1", 3, (KeptOutput(2, 1, "aten.max"),))),
        "region 'h.1': only the second keeps max #2 (output 1)",
    ),
    "operators": (
        with_regions(FIRST, RegionPlan("h.1", 4, ())),
        "region 'h.1': 3 operators -> 4 operators",
    ),
    "order": (with_regions(SECOND, FIRST), "the regions are in another order"),
    "twice": (with_regions(FIRST, SECOND, SECOND), "or one is listed twice"),
}


@pytest.mark.parametrize(("other", "words"), CHANGES.values(), ids=CHANGES)
def test_each_difference_gives_1_and_one_line(tmp_path, capsys, other, words):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, plan in zip(paths, (PLAN, other), strict=True):
        path.write_text(plan.to_json())
    assert main(["diff", *map(str, paths)]) == DIFFERENT
    assert words in capsys.readouterr().out
    assert len(differences(PLAN, other)) == 1
    assert differences(other, PLAN)


def test_equal_plans_give_0(step, tmp_path, capsys):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    assert planned(step, paths[0]) == planned(step, paths[1])
    assert main(["diff", *map(str, paths)]) == OK
    assert capsys.readouterr().out.endswith("the plans are equal\n")


def test_plans_for_two_budgets_differ_in_budget_and_predictions(step, tmp_path, capsys):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    planned(step, paths[0], "60%")
    planned(step, paths[1], "80%")
    assert main(["diff", *map(str, paths)]) == DIFFERENT
    out = capsys.readouterr().out
    for word in ("budget: ", "predicted peak: ", "slowdown: ", "region "):
        assert f"\n  {word}" in out


BREAK: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (lambda p: p.write_text(PLAN.to_json()[:90]), "cannot be read"),
    "empty": (lambda p: p.write_text(""), "cannot be read"),
    "a list": (lambda p: p.write_text("[]"), "plan must be an object"),
    "not whole": (
        lambda p: p.write_text(f'{{"version": {VERSION}}}'),
        "is missing: the plan is not whole",
    ),
    "a folder": (lambda p: p.mkdir(), "cannot be read"),
    "gone": (lambda p: None, "No such file"),
}


@pytest.mark.parametrize(("broken", "words"), BREAK.values(), ids=BREAK)
def test_a_file_that_holds_no_plan_gives_2_and_its_name(
    tmp_path, capsys, broken, words
):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(PLAN.to_json())
    broken(bad)
    for paths in ([good, bad], [bad, good]):
        assert main(["diff", *map(str, paths)]) == FAILED
        err = capsys.readouterr().err
        assert words in err
        assert "bad.json" in err


# The text of a plan


def test_many_operators_of_one_name_are_cut():
    kept = [KeptOutput(number, 0, "aten.gelu.default") for number in range(1, 12)]
    assert kept_text(kept).endswith("#7 #8 and 3 more")


def test_a_region_on_the_whole_model_has_a_name():
    text = described(with_regions(RegionPlan("", 9, (KEPT,))))
    assert "GPT: 1 region, times measured" in text
    assert "(the model)" in text
