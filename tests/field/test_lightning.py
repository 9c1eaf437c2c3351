"""Lightning's Trainer under a budget: LightningModules as people write them."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import membudget as mb
from membudget.attach import has_region
from membudget.integrations.lightning import BudgetCallback
from tests.field.held import Trained, begun, held
from tests.field.registry import CASES
from tests.field.vision_operators import import_torchvision

pytestmark = [
    pytest.mark.field,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("error::membudget.BudgetWarning"),
    pytest.mark.xdist_group("lightning"),
]

WIDTH, ROWS = 128, 512
STEPS, SHARE = 4, 0.75


def network(blocks: int = 4) -> nn.Sequential:
    made = (
        nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(2 * WIDTH, WIDTH),
        )
        for _ in range(blocks)
    )
    return nn.Sequential(*made)


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


def lightning(name: str = "lightning.pytorch") -> Any:
    import_torchvision()  # torchmetrics takes it where it is.
    logging.getLogger(name).setLevel(logging.ERROR)
    return importlib.import_module(name)


def own_forward(base: Any) -> Any:
    """Layers in the LightningModule itself, whose forward the step calls."""

    class OwnForward(base):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.ModuleList(network())
            self.head = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = x + block(x)
            return self.head(x)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = F.mse_loss(self(batch), batch)
            self.log("loss", loss, prog_bar=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("validation", F.mse_loss(self(batch), batch))

        def configure_optimizers(self) -> Any:
            optimizer = adam(self)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    return OwnForward()


def one_model(base: Any) -> Any:
    """One model, which the step calls; `forward` is there for predictions."""

    class OneModel(base):
        def __init__(self) -> None:
            super().__init__()
            self.model = network(6)
            self.loss = nn.MSELoss()

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x).softmax(-1)

        def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
            return {"loss": self.loss(self.model(batch), batch)}

        def configure_optimizers(self) -> Any:
            return adam(self)

    return OneModel()


def autoencoder(base: Any) -> Any:
    """An encoder and a decoder, which the step calls; `forward` calls the first."""

    class Autoencoder(base):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = network(), network()

        def forward(self, x: Tensor) -> Tensor:
            return self.encoder(x)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return F.mse_loss(self.decoder(self.encoder(batch)), batch)

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("validation", F.mse_loss(self.decoder(self(batch)), batch))

        def configure_optimizers(self) -> Any:
            return adam(self)

    return Autoencoder()


def gan(base: Any) -> Any:
    """Two models in turn, each with an optimizer; `forward` calls the first."""

    class GAN(base):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator = network()
            self.discriminator = nn.Sequential(network(3), nn.Linear(WIDTH, 1))

        def forward(self, noise: Tensor) -> Tensor:
            return self.generator(noise)

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            one, other = self.optimizers()
            noise = torch.randn_like(batch)
            self.toggle_optimizer(one)
            self.manual_backward(self.loss(self(noise), 1.0))
            one.step()
            one.zero_grad()
            self.untoggle_optimizer(one)
            self.toggle_optimizer(other)
            real = self.loss(batch, 1.0)
            self.manual_backward((real + self.loss(self(noise).detach(), 0.0)) / 2)
            other.step()
            other.zero_grad()
            self.untoggle_optimizer(other)

        def loss(self, x: Tensor, label: float) -> Tensor:
            found = self.discriminator(x)
            labels = torch.full_like(found, label)
            return F.binary_cross_entropy_with_logits(found, labels)

        def configure_optimizers(self) -> Any:
            return [adam(self.generator), adam(self.discriminator)]

    return GAN()


def language_model(base: Any) -> Any:
    """A model of transformers, which returns its loss."""

    class LanguageModel(base):
        def __init__(self) -> None:
            super().__init__()
            made = CASES["llama"].make()
            self.model, self.batch = made.model, made.batch

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = self.model(**self.batch(batch_idx % 3 == 2)).loss
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return adam(self.model)

    return LanguageModel()


MAKERS = (own_forward, one_model, autoencoder, gan, language_model)


def trainer_of(library: Any, callbacks: list[Any], **options: Any) -> Any:
    return library.Trainer(
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        devices=1,
        callbacks=callbacks,
        **options,
    )


def batches(number: int = STEPS * 2) -> Any:
    drawn: Any = [torch.randn(ROWS, WIDTH) for _ in range(number)]
    return torch.utils.data.DataLoader(drawn, batch_size=None)


def trained(make: Callable[[Any], Any], precision: str, limit: int | None) -> Trained:
    """Train a LightningModule."""
    library = lightning()
    peak_bytes, limit = begun(limit)
    torch.manual_seed(0)
    model = make(library.LightningModule)
    callbacks = [] if limit is None else [BudgetCallback(limit)]
    options: dict[str, Any] = {"max_steps": 2 * STEPS}
    if model.automatic_optimization:
        options = {
            "max_steps": STEPS,
            "accumulate_grad_batches": 2,
            "gradient_clip_val": 1.0,
            "val_check_interval": 3,
        }
    trainer = trainer_of(library, callbacks, precision=precision, **options)
    torch.manual_seed(1)
    trainer.fit(model, batches(), batches(1))
    most = peak_bytes()
    assert not any(has_region(module) for module in model.modules())
    weights = [tensor.detach() for tensor in model.state_dict().values()]
    return Trained(weights, most, callbacks[0].fitted if callbacks else None)


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
@pytest.mark.parametrize("make", MAKERS)
def test_a_trainer_keeps_its_budget_and_its_weights(make, precision):
    found = held(partial(trained, make, precision), SHARE)
    assert sum(s.uses for s in found.fitted.status().situations) >= STEPS
    assert found.limit_bytes < 0.95 * found.plain_bytes  # Or plain training keeps it.


def planned(callback: BudgetCallback) -> set[str]:
    assert callback.fitted is not None
    return {s.model for s in callback.fitted.status().situations}


def test_a_callback_serves_two_trainings_and_two_calls_of_fit():
    library = lightning()
    torch.manual_seed(0)
    model = own_forward(library.LightningModule)
    other = autoencoder(library.LightningModule)
    callback = BudgetCallback("1GiB")
    trainer = trainer_of(library, [callback], max_epochs=1)
    trainer.fit(model, batches(2))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, batches(2))
    assert planned(callback) == {"OwnForward"}
    trainer_of(library, [callback], max_epochs=1).fit(other, batches(2))
    assert planned(callback) == {"Sequential"}
    assert not any(has_region(m) for one in (model, other) for m in one.modules())


def test_an_exception_in_training_closes_the_budget():
    library = lightning()
    model = one_model(library.LightningModule)
    model.loss.register_forward_hook(_fails)
    callback = BudgetCallback("1GiB")
    with pytest.raises(RuntimeError, match="in the loss"):
        trainer_of(library, [callback], max_epochs=1).fit(model, batches(2))
    assert callback.fitted is not None
    assert not any(has_region(module) for module in model.modules())


def _fails(module: Any, args: Any, output: Any) -> None:
    raise RuntimeError("in the loss")


def test_the_older_package_serves_as_well():
    library = lightning("pytorch_lightning")
    model = one_model(library.LightningModule)
    callback = BudgetCallback("1GiB")
    trainer_of(library, [callback], max_epochs=1).fit(model, batches(2))
    assert planned(callback) == {"Sequential"}


def test_a_step_that_calls_what_a_child_holds_is_told_so():
    library = lightning()

    base: Any = type(one_model(library.LightningModule))

    class Inside(base):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            for block in self.model:
                batch = block(batch)
            return batch.square().mean()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", mb.BudgetWarning)
        with pytest.warns(
            mb.BudgetWarning, match="called neither the module itself nor one"
        ):
            trainer_of(library, [BudgetCallback("1GiB")], max_epochs=1).fit(
                Inside(), batches(2)
            )
