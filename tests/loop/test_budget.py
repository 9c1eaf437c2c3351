"""One line holds a training loop to a number of bytes, and changes none of its bits."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import membudget as mb
from tests.loop.training import check_held, counted, outcome, tokens, train
from tests.loops.models import Images, Language


def test_a_loop_keeps_its_budget_and_its_bits():
    fitted = check_held([48] * 4, 0.6)
    (status,) = fitted.status().situations
    assert status.uses == 4
    assert 0 < status.last_bytes <= status.left_bytes


def test_autocast_around_all_steps_computes_with_the_casts_of_the_first():
    with torch.autocast("cpu", torch.bfloat16):
        plain, _, _ = outcome(lambda _: nullcontext(), [48] * 3)
        torch.clear_autocast_cache()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", mb.BudgetWarning)
            found, _, _ = outcome(lambda model: mb.budget(model, "80%"), [48] * 3)
    assert all(map(torch.equal, plain, found))


def test_a_share_is_of_the_plain_micro_batch():
    _, _, fitted = outcome(lambda model: mb.budget(model, "60%"), [48] * 3)
    (status,) = fitted.status().situations
    plain = mb.profile(lambda: train(model, [48]), modules=(model := Language()))
    assert status.left_bytes <= 0.6 * plain.peak_bytes * 1.02
    assert status.last_bytes <= status.left_bytes


def test_a_budget_that_cannot_be_met_is_refused_before_the_forward_begins():
    ran = []
    model = Language()
    model.blocks[0].register_forward_pre_hook(lambda *_: ran.append(1))
    with (
        mb.budget(model, 1_000_000_000, optimizer=None) as fitted,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        train(model, [48])
    least = fitted.status().situations[0].left_bytes
    assert least > 0
    ran.clear()
    limit = 1_000_000_000 - least + 1000
    state = [p.clone() for p in model.parameters()]
    with (
        pytest.raises(mb.BudgetError, match="Smallest feasible budget") as caught,
        mb.budget(model, limit),
    ):
        train(model, [48])
    assert caught.value.asked_bytes == limit
    assert caught.value.least_bytes > limit
    assert all(map(torch.equal, state, model.parameters()))
    assert all(p.grad is None for p in model.parameters())


def test_a_loop_that_catches_refusals_is_told_of_them_in_the_report():
    """A `BudgetError` is a `ValueError`, as which a loop may skip a bad batch."""
    model = Language()
    with mb.budget(model, 100_000) as fitted:
        for _ in range(2):
            with suppress(ValueError):
                model(tokens(48))
    assert "2 calls were refused with a BudgetError" in fitted.report()


def test_what_a_refusal_names_is_enough():
    model = Language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    limits = [1_000]
    # Each refusal is for one micro-batch; a later one, with gradients, may need more.
    with suppress(mb.BudgetError):
        while len(limits) < 8:
            try:
                with mb.budget(model, limits[-1], optimizer=optimizer):
                    train(model, [48] * 3, optimizer=optimizer)
                break
            except mb.BudgetError as error:
                limits.append(error.least_bytes)
    assert limits == sorted(set(limits))
    assert len(limits) < 8


@pytest.mark.parametrize("is_known", [False, True])
def test_a_plan_that_held_is_not_refused_because_other_sizes_took_more(is_known):
    """The loss of a short micro-batch takes a larger multiple of its outputs."""

    def run(limit: int, rows: list[int], plan: mb.Plan | None = None) -> mb.Plan:
        blocks = (nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))
        model = nn.Sequential(*blocks, nn.Linear(16, 512))
        with counted(), mb.budget(model, limit, plan=plan) as fitted:
            for count in rows:
                outputs = model(torch.randn(count, 16))
                beside = torch.empty_like(outputs).repeat(1 if count > 64 else 8, 1)
                outputs.sum().backward()
                model.zero_grad()
                del outputs, beside
        return fitted.plan

    # The first one is planned for the loss that is assumed before one was measured.
    with pytest.raises(mb.BudgetError, match="Smallest feasible budget") as caught:
        run(100_000, [256])
    limit = caught.value.least_bytes
    del caught  # Its traceback holds the model.
    if is_known:
        run(limit, [256, 256], plan=run(limit, [256, 64]))
    else:
        run(limit, [256, 64, 256])


@pytest.mark.parametrize("choice", ["warn", "plain"])
def test_a_micro_batch_over_budget_may_run_with_a_warning(choice):
    model = Language()
    with mb.budget(model, 10_000, on_exceed=choice) as fitted:
        with pytest.warns(mb.BudgetWarning, match="no plan fits"):
            logits = model(tokens(16))
        logits.sum().backward()
    (status,) = fitted.status().situations
    assert (status.slowdown == 1.0) == (choice == "plain")


def test_nothing_stays_on_the_model_after_the_loop():
    model = Language()
    classes = [type(m) for m in model.modules()]
    keys = [set(m.__dict__) for m in model.modules()]
    with mb.budget(model, "60%"):
        train(model, [16, 24])
        assert copy.deepcopy(model).blocks[0](torch.ones(1, 2, 32)).shape == (1, 2, 32)
        assert type(pickle.loads(pickle.dumps(model))) is Language
        assert isinstance(model, Language)
    assert [type(m) for m in model.modules()] == classes
    assert [set(m.__dict__) for m in model.modules()] == keys


def test_evaluation_in_the_loop_is_not_planned():
    model = Language()
    with mb.budget(model, "80%") as fitted:
        train(model, [16])
        with torch.no_grad():
            model(tokens(100))
    assert [s.tensors for s in fitted.status().situations] == ["8x16"]


def test_a_call_inside_a_transform_runs_without_a_plan_and_says_so():
    model, ids = Language().eval(), tokens(16)
    parameters = {n: p.detach() for n, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(model, parameters, (ids,)).square().mean()

    plain = torch.func.grad(loss)(parameters)
    with mb.budget(model, "1GiB") as fitted:
        model(ids).square().mean().backward()
        with pytest.warns(mb.BudgetWarning, match="inside a torch.func transform"):
            found = torch.func.grad(loss)(parameters)
        model(ids).square().mean().backward()
    assert all(torch.equal(plain[name], found[name]) for name in plain)
    assert "inside a torch.func transform" in fitted.report()


def test_budgets_do_not_nest():
    model = Language()
    with (
        mb.budget(model, "80%"),
        pytest.raises(mb.OptionError, match=r"budget is open on .*: stop\(\) it first"),
    ):
        mb.budget(model, "80%").start()


def test_compiled_models_are_refused():
    model = Language()
    model.blocks[0].compile(backend="eager")
    with pytest.raises(mb.OptionError, match="compiled"):
        mb.budget(model, "80%").start()


def test_an_unknown_choice_is_refused():
    unknown: Any = "panic"
    with pytest.raises(mb.OptionError, match="on_exceed must be"):
        mb.budget(Language(), "80%", on_exceed=unknown)


def test_a_loop_that_never_calls_the_model_is_told_so():
    model = Language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mb.budget(model, "80%"):
        model.head(model.embed(tokens(4))).sum().backward()
        with pytest.warns(mb.BudgetWarning, match="was never called"):
            optimizer.step()


def test_a_loop_may_train_through_a_step_of_its_own():
    def loop(around: Callable[[nn.Module], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = Images()
        inputs = torch.randn(4, 3, 12, 12)
        named = dict(model.named_parameters())
        with around(model):
            for _ in range(2):
                gradients = torch.autograd.grad(
                    model(inputs).square().mean(),
                    list(named.values()),
                    create_graph=True,
                )
                pairs = zip(named.items(), gradients, strict=True)
                adapted = {name: p - 0.1 * gradient for (name, p), gradient in pairs}
                functional_call(model, adapted, (inputs,)).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain = loop(lambda _: nullcontext())
    with warnings.catch_warnings():  # What keeps a graph is not foreseen.
        warnings.simplefilter("ignore", mb.BudgetWarning)
        found = loop(lambda model: mb.budget(model, "80%", on_exceed="warn"))
    assert all(map(torch.equal, plain, found))


class Reads(Language):
    """Reads a value of a tensor that has gradients."""

    def forward(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        logits = super().forward(tokens, *args, **kwargs)
        return logits * 2 if logits[0, 0, 0].item() > 0 else logits


def test_a_model_that_reads_values_is_recomputed_and_says_so():
    plain, _, _ = outcome(lambda _: nullcontext(), [32] * 3, Reads)
    with pytest.warns(mb.BudgetWarning, match="cannot be recorded"):
        found, _, fitted = outcome(lambda m: mb.budget(m, "70%"), [32] * 3, Reads)
    assert all(map(torch.equal, plain, found))
    status = fitted.status()
    assert status.regions["blocks.0"] == (3, 3)
    assert "cannot be recorded" in str(status)


def test_two_models_share_one_budget():
    def loop(around: Callable[[list[nn.Module]], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        models: list[nn.Module] = [Language(), Language()]
        with around(models):
            for _ in range(2):
                for model in models:
                    train(model, [32])
        return [p.detach() for m in models for p in m.parameters()]

    plain = loop(lambda _: nullcontext())
    assert all(map(torch.equal, plain, loop(lambda ms: mb.budget(ms, "60%"))))


def test_two_forwards_before_one_backward_keep_the_budget():
    def loop(limit: int | None) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        model = Language()
        with (
            counted() as seen,
            mb.budget(model, limit) if limit else nullcontext(),
        ):
            for number in range(3):
                one, other = model(tokens(48, number)), model(tokens(48, number + 9))
                (one * other).square().mean().backward()
                del one, other
                model.zero_grad()
        return [p.detach() for p in model.parameters()], seen.most_bytes

    plain, plain_bytes = loop(None)
    limit = int(0.75 * plain_bytes)
    found, peak_bytes = loop(limit)
    assert all(map(torch.equal, plain, found))
    assert peak_bytes <= limit


def test_the_report_shows_every_situation():
    model = Language()
    with mb.budget(model, "70%") as fitted:
        train(model, [16, 16, 32])
    text = fitted.report()
    assert "budget    70%" in text
    assert "8x16" in text
    assert "8x32" in text
