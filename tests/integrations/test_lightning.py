"""What the callback puts its budget on; tests/field trains with Lightning itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import membudget as mb
from membudget.attach import has_region
from membudget.integrations.lightning import BudgetCallback, parts_of


class Base:
    """Stands in for Lightning's class of callbacks."""


@pytest.fixture(autouse=True)
def _library(monkeypatch):
    """Stand in for Lightning, of which the callback itself calls nothing."""
    monkeypatch.setitem(
        sys.modules, "lightning.pytorch", SimpleNamespace(Callback=Base)
    )
    monkeypatch.setitem(sys.modules, "lightning", SimpleNamespace())


class Both(nn.Module):
    """Stands in for a LightningModule with several children."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.decoder = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.loss = nn.MSELoss()

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


def trainer_of(model: nn.Module, optimizers: int = 1) -> Any:
    made = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(optimizers)]
    return SimpleNamespace(optimizers=made)


@pytest.fixture
def begin() -> Iterator[Callable[..., BudgetCallback]]:
    """Begin trainings, whose budgets are closed after the test."""
    callbacks = []

    def one(model: nn.Module, optimizers: int = 1, **options: Any) -> BudgetCallback:
        callbacks.append(BudgetCallback("1GiB", **options))
        callbacks[-1].on_train_start(trainer_of(model, optimizers), model)
        return callbacks[-1]

    yield one
    for callback in callbacks:
        callback.close()


def planned(callback: BudgetCallback) -> list[str]:
    assert callback.fitted is not None
    return [s.model for s in callback.fitted.status().situations]


def carrying(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if has_region(module)]


def test_without_lightning_the_callback_says_what_to_install(monkeypatch):
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        mb.MissingExtraError, match=r'pip install "membudget\[lightning\]"'
    ):
        BudgetCallback("1GiB")


def test_the_callback_is_one_of_the_package_in_use(monkeypatch):
    assert isinstance(BudgetCallback("1GiB"), Base)
    older = type("Older", (), {})
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    monkeypatch.setitem(
        sys.modules, "pytorch_lightning", SimpleNamespace(Callback=older)
    )
    assert isinstance(BudgetCallback("1GiB"), older)


def test_the_library_is_imported_without_lightning():
    code = (
        "import sys, membudget.integrations.lightning; "
        "print({'lightning', 'pytorch_lightning'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def test_a_module_that_calls_itself_is_planned_as_a_whole(begin):
    model = Both()
    callback = begin(model)
    model(torch.ones(2, 8)).sum().backward()
    assert planned(callback) == ["Both"]
    assert carrying(model) == [""]


def test_children_that_are_called_are_planned_each(begin):
    model = Both()
    callback = begin(model)
    model.decoder(model.encoder(torch.ones(2, 8))).sum().backward()
    assert planned(callback) == ["Sequential", "Sequential"]
    assert carrying(model) == ["encoder", "decoder"]


def test_with_several_optimizers_the_children_are_planned(begin):
    model = Both()
    callback = begin(model, optimizers=2)
    model(torch.ones(2, 8)).sum().backward()
    assert planned(callback) == ["Sequential", "Sequential"]


def test_the_only_child_with_parameters_is_planned(begin):
    model = nn.Sequential(Both(), nn.ReLU())
    callback = begin(model)
    model(torch.ones(2, 8)).sum().backward()
    assert planned(callback) == ["Both"]


def test_the_user_may_name_the_modules(begin):
    model = Both()
    callback = begin(model, modules="encoder")
    model(torch.ones(2, 8)).sum().backward()
    assert planned(callback) == ["Sequential"]
    assert carrying(model) == ["encoder"]


def test_a_name_of_no_module_is_refused(begin):
    with pytest.raises(mb.OptionError, match="holds no module 'coder'; its children"):
        begin(Both(), modules=["coder"])


def test_a_call_without_gradients_decides_nothing(begin):
    model = Both()
    callback = begin(model)
    with torch.no_grad():
        model.encoder(torch.ones(2, 8))
    assert callback.fitted is None
    model(torch.ones(2, 8)).sum().backward()
    assert planned(callback) == ["Both"]


def test_a_step_that_calls_none_of_them_is_told_so(begin):
    model = Both()
    callback = begin(model)
    model.encoder[0](torch.ones(2, 8)).sum().backward()
    with pytest.warns(
        mb.BudgetWarning, match="called neither the module itself nor one of its"
    ):
        callback.on_train_batch_end(None, model, None, None, 0)
    assert carrying(model) == []
    callback.on_train_batch_end(None, model, None, None, 1)  # Once is enough.


@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.parametrize("how", ["end", "exception"])
def test_nothing_stays_on_the_module_after_the_training(begin, is_called, how):
    model = Both()
    callback = begin(model)
    if is_called:
        model(torch.ones(2, 8)).sum().backward()
    if how == "end":
        callback.on_train_end(None, model)
    else:
        callback.on_exception(None, model, KeyboardInterrupt())
    assert carrying(model) == []
    assert type(model) is Both


def test_a_callback_serves_one_training_after_another(begin):
    model, other = Both(), Both()
    callback = begin(model)
    model(torch.ones(2, 8)).sum().backward()
    first = callback.fitted
    callback.on_train_start(trainer_of(other), other)
    assert carrying(model) == []
    other(torch.ones(2, 8)).sum().backward()
    assert callback.fitted is not first
    assert carrying(other) == [""]


def test_containers_are_never_called_so_what_they_hold_is():
    blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    model = nn.Sequential(blocks, nn.ModuleDict({"head": nn.Linear(8, 8)}))
    assert len(list(parts_of(model))) == 3


def test_a_child_that_another_holds_is_no_part_of_its_own():
    model = Both()
    model.first = model.encoder[0]  # As `self.backbone = self.model.backbone`.
    assert list(parts_of(model)) == [model.encoder, model.decoder]
