"""What `benchmarks/peers.py` says of given times, and the steps that it compares."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from harness import rounds_in_turns
from models import GPTBlock, gpt
from peers import PLAIN, Arms, measure, ours, peers
from peers_models import SUBJECTS, Subject
from peers_verdicts import fastest, interval, verdicts

import membudget as mb


def row(slowdown: float, low: float = 0.0, high: float = 0.0) -> dict:
    """Return the row of a peer: how slow it is, and where ours lies beside it."""
    difference = {"median": (low + high) / 2, "low": low, "high": high}
    quartiles = [slowdown - 0.1, slowdown, slowdown + 0.1]
    return {"slowdown": quartiles, "ours": {}, "difference": difference, "differs": []}


def refused(slowdown: float) -> dict:
    """Return the row of a peer at whose peak no plan fits."""
    return {**row(slowdown), "ours": {"error": "no plan fits", "least_bytes": 9}}


def of_eight(count: int, some: dict, other: dict) -> dict:
    """Return eight models with one peer each; `count` of them have the first row."""
    rows = [some] * count + [other] * (8 - count)
    return {str(n): {"peers": {"peer": found}} for n, found in enumerate(rows)}


def test_the_interval_is_that_of_the_median_not_of_the_mean():
    assert interval([0.0] * 29 + [1000.0]) == (0.0, 0.0)
    assert interval([0.0] * 15 + [1.0] * 15) == (0.0, 1.0)


def test_the_interval_is_narrower_for_more_pairs():
    narrow, wide = (
        high - low
        for low, high in (interval([n / c for n in range(c)]) for c in (300, 30))
    )
    assert 0 < narrow < wide < 0.5


def test_the_fastest_peer_is_the_one_of_the_least_median():
    rows = {"a": row(1.3), "b": row(1.1), "c": {"error": "it fails"}}
    assert fastest({"peers": rows}) == "b"
    assert fastest({"peers": {"c": {"error": "it fails"}}}) is None


@pytest.mark.parametrize(("count", "said"), [(6, "met"), (5, "NOT met")])
def test_six_models_of_eight_must_be_ahead(count: int, said: str):
    ahead, level = row(1.2, -0.06, -0.031), row(1.2, -0.06, -0.029)
    first, *_ = verdicts(of_eight(count, ahead, level))
    assert f"{count} of 8 models" in first
    assert first.endswith(f"bound 6: {said}")


@pytest.mark.parametrize(
    ("found", "is_behind"),
    [(row(1.2, 0.021, 0.1), True), (row(1.2, 0.019, 0.1), False), (refused(1.2), True)],
    ids=["slower", "level", "refused"],
)
def test_no_model_may_be_behind_or_without_a_plan(found: dict, is_behind: bool):
    _, second, *_ = verdicts(of_eight(1, found, row(1.2, -0.06, -0.04)))
    assert second.endswith("bound none: NOT met" if is_behind else "bound none: met")
    assert (": 0;" in second) == is_behind


def test_only_the_fastest_peer_decides_and_the_others_are_named():
    rows = {"fast": row(1.1, -0.06, -0.04), "slow": row(1.3, 0.05, 0.06)}
    first, second, third, *_ = verdicts({"Model": {"peers": rows}})
    assert "1 of 1 models (Model)" in first
    assert second.endswith("none; bound none: met")
    assert third.endswith("Model (slow)")


def test_rounds_time_every_case_once_each():
    calls = {"a": 0, "b": 0}

    def case(name: str) -> None:
        calls[name] += 1
        sum(range(20_000))

    cases = {name: partial(case, name) for name in calls}
    found = rounds_in_turns(cases, seconds=0, batch_s=0, least_rounds=7)
    assert [len(samples) for samples in found.values()] == [7, 7]
    assert calls["a"] == calls["b"]


def make() -> tuple:
    """Return a GPT of three small blocks."""
    return gpt(blocks=3, width=32, heads=2, batch=4, length=32)


SUBJECT = Subject(make, ("blocks",), switches=False)


def test_every_model_has_torchs_peers_and_transformers_its_own():
    of_torch = {"torch checkpoint", "torch SAC, matmuls"}
    for subject in SUBJECTS.values():
        own = {f"transformers, every {n}" for n in (1, 2, 3) if subject.switches}
        assert peers(subject).keys() - {"torch_remat, matmuls"} == of_torch | own


def test_a_peer_runs_each_block_twice_and_leaves_the_plain_step():
    torch.manual_seed(0)
    arms = Arms(*make())
    found = arms.add_peer("torch", peers(SUBJECT)["torch checkpoint"])
    assert found["differs"] == []
    assert found["peak_of_plain"] < 1
    calls = []
    model = arms.steps["torch"].model
    for block in model.modules():
        if isinstance(block, GPTBlock):
            block.mlp_norm.register_forward_hook(lambda *_: calls.append(1))
    arms.steps["torch"].run()
    assert len(calls) == 6


def test_a_peer_that_fails_is_a_row_with_its_error_and_no_step():
    def fail(model: object) -> None:
        raise ValueError("not for this model")

    arms = Arms(*make())
    assert arms.add_peer("bad", fail) == {"error": "ValueError: not for this model"}
    assert list(arms.steps) == [PLAIN]


@pytest.mark.slow
def test_ours_takes_at_most_what_it_is_given_and_says_the_least_where_none_fits():
    torch.manual_seed(0)
    arms = Arms(*make())
    most = arms.plain_peak_bytes * 8 // 10
    assert arms.add_ours(most)["peak_bytes"] <= most
    assert mb.peak(arms.steps[ours(most)].run).peak_bytes <= most
    assert arms.add_ours(1)["least_bytes"] > 1
    assert list(arms.steps) == [PLAIN, ours(most)]


@pytest.mark.slow
def test_each_peer_has_a_difference_from_ours():
    found = measure(SUBJECT, seconds=0, least_rounds=3)
    assert found["rounds"] == 3
    for peer in found["peers"].values():
        assert peer["ours"]["peak_bytes"] <= peer["peak_bytes"]
        gap = peer["difference"]
        assert gap["low"] <= gap["median"] <= gap["high"]
