"""What decides a profile has a part in its key, and what does not has none."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from membudget._torch_accelerator import name_of
from membudget.profile import devices, key
from membudget.profile.devices import DEVICES, processor_model, processor_name
from membudget.profile.key import key_of
from membudget.state.code import IndescribableError
from membudget.step import ABSENT, Step, step_of

SCALE = 3.0


def helper(x: Tensor) -> Tensor:
    return x * SCALE


class Net(nn.Module):
    """A model with an attribute, a buffer and a helper function."""

    shift: Tensor

    def __init__(self, width: int = 8, **attributes: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 4)
        self.register_buffer("shift", torch.zeros(4))
        self.mode = "a"
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return helper(self.last(F.gelu(self.first(x)))) + self.shift


def loss_fn(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def key_with(
    model: nn.Module | None = None,
    batch: Any = None,
    loss: Any = loss_fn,
    **options: Any,
) -> str:
    """Return the key of a step, of which some part is another one."""
    step = Step(model or Net(), torch.zeros(2, 4) if batch is None else batch, loss)
    given: dict[str, Any] = {"optimizer": None, "fake": False, "device": None}
    return key_of(step, **{**given, **options})


def changed(change: Callable[[Net], Any]) -> nn.Module:
    model = Net()
    change(model)
    return model


def other_strides(model: Net) -> None:
    weight = model.first.weight.detach()
    model.first.weight = nn.Parameter(weight.t().contiguous().t())


def tie(model: Net) -> None:
    model.second = model.first


class Otherwise(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.first(x)))


def squared(scale: float) -> Callable[[Tensor, Any], Tensor]:
    return lambda output, batch: output.square().mean() * scale


def adam(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(Net().parameters(), **options)


class OwnSGD(torch.optim.SGD):
    pass


CHANGES: dict[str, Callable[[], str]] = {
    "an attribute": lambda: key_with(Net(mode="b")),
    "an attribute more": lambda: key_with(Net(chunks=2)),
    "a width": lambda: key_with(Net(9)),
    "a class": lambda: key_with(Otherwise()),
    "evaluation": lambda: key_with(Net().eval()),
    "a frozen parameter": lambda: key_with(
        changed(lambda m: m.first.weight.requires_grad_(False))
    ),
    "a dtype": lambda: key_with(Net().double()),
    "a device": lambda: key_with(Net().to("meta")),
    "a buffer": lambda: key_with(changed(lambda m: m.register_buffer("more", None))),
    "a shape of a buffer": lambda: key_with(Net(shift=torch.zeros(1, 4))),
    "strides": lambda: key_with(changed(other_strides)),
    "a shared layer": lambda: key_with(changed(tie)),
    "a hook": lambda: key_with(
        changed(lambda m: m.register_forward_hook(lambda *args: None))
    ),
    "a forward": lambda: key_with(Net(forward=helper)),
    "a shape of the batch": lambda: key_with(batch=torch.zeros(3, 4)),
    "a dtype of the batch": lambda: key_with(batch=torch.zeros(2, 4).half()),
    "a batch with gradient": lambda: key_with(
        batch=torch.zeros(2, 4, requires_grad=True)
    ),
    "a tuple": lambda: key_with(batch=(torch.zeros(2, 4),)),
    "a mapping": lambda: key_with(batch={"x": torch.zeros(2, 4)}),
    "a number in the batch": lambda: key_with(batch={"x": torch.zeros(2, 4), "n": 2}),
    "another number in the batch": lambda: key_with(
        batch={"x": torch.zeros(2, 4), "n": 3}
    ),
    "no loss": lambda: key_with(loss=None),
    "a loss": lambda: key_with(loss=F.mse_loss),
    "a loss that closed over 1": lambda: key_with(loss=squared(1.0)),
    "a loss that closed over 2": lambda: key_with(loss=squared(2.0)),
    "a module as loss": lambda: key_with(loss=nn.MSELoss()),
    "another reduction": lambda: key_with(loss=nn.MSELoss(reduction="sum")),
    "fake": lambda: key_with(fake=True),
    "another processor": lambda: key_with(device=DEVICES["h100"]),
    "one more": lambda: key_with(device=DEVICES["a100"]),
    "a class of optimizers": lambda: key_with(optimizer=torch.optim.Adam),
    "another class": lambda: key_with(optimizer=torch.optim.SGD),
    "a class of the user": lambda: key_with(optimizer=OwnSGD),
    "an optimizer": lambda: key_with(optimizer=adam()),
    "an option of it": lambda: key_with(optimizer=adam(amsgrad=True)),
    "another option": lambda: key_with(optimizer=adam(foreach=False)),
}


def test_every_part_of_a_step_has_a_part_in_its_key():
    keys = {name: make() for name, make in CHANGES.items()} | {"": key_with()}
    for name, make in CHANGES.items():
        assert make() == keys[name], name
    assert len(set(keys.values())) == len(keys)


@pytest.mark.parametrize(
    "context",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
        lambda: torch.autocast("cpu", torch.float16),
        lambda: torch.device("meta"),
        lambda: nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH),
    ],
)
def test_settings_have_a_part_in_the_key(context):
    step = Step(Net(), torch.zeros(2, 4), None)
    before = key_of(step, None, False, None)
    with context():
        other = key_of(step, None, False, None)
    assert other != before == key_of(step, None, False, None)


@pytest.mark.parametrize(
    ("write", "read", "value"),
    [
        (torch.set_num_threads, torch.get_num_threads, 2),
        (torch.set_default_dtype, torch.get_default_dtype, torch.bfloat16),
        (
            torch.use_deterministic_algorithms,
            torch.are_deterministic_algorithms_enabled,
            True,
        ),
    ],
)
def test_settings_of_the_process_have_a_part_in_the_key(write, read, value):
    step, before = Step(Net(), torch.zeros(2, 4), None), read()
    first = key_of(step, None, False, None)
    try:
        write(value)
        other = key_of(step, None, False, None)
    finally:
        write(before)
    assert other != first == key_of(step, None, False, None)


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (key, "processor_name", lambda: "another"),
        (key, "name_of", lambda device: "another"),
        (key, "_own_digest", lambda: "another"),
        (torch, "__version__", "another"),
        (platform, "python_version", lambda: "another"),
        (torch.accelerator, "is_available", lambda: "another"),
        (sys.modules[__name__], "SCALE", 4.0),
        (sys.modules[__name__], "helper", F.relu),
        (Net, "forward", Otherwise.forward),
    ],
)
def test_machine_versions_and_code_have_a_part_in_the_key(
    monkeypatch, owner, name, value
):
    before = key_with()
    monkeypatch.setattr(owner, name, value)
    assert key_with() != before


def test_what_a_step_leaves_behind_has_no_part_in_its_key():
    model, batch = Net(), torch.zeros(2, 4)
    before = key_with(model, batch)
    assert before == key_with()
    step = Step(model, batch, loss_fn)
    step.run()
    assert key_of(step, None, False, None) == before
    with torch.no_grad():
        batch.fill_(1)
        model.first.weight.fill_(1)
    torch.manual_seed(5)
    assert key_of(step, None, False, None) == before


def test_a_learning_rate_has_no_part_in_the_key():
    optimizer = adam()
    before = key_with(optimizer=optimizer)
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["initial_lr"] = 5.0
    assert key_with(optimizer=optimizer) == before


def test_a_loaded_state_of_an_optimizer_has_no_part_in_the_key():
    """It brings copies of the options, in another order."""
    saved, loaded = adam(), adam()
    loaded.load_state_dict(saved.state_dict())
    assert [*loaded.param_groups[0]] != [*saved.param_groups[0]]
    assert key_with(optimizer=loaded) == key_with(optimizer=saved)


def test_a_step_of_the_user_is_described_by_its_code():
    def key_of_step(more: float, text: str = "a") -> str:
        model, x = Net(), torch.zeros(2, 4)

        def step() -> None:
            (model(x).sum() * more).backward()

        def other() -> None:
            model(x).sum().backward()

        function = step if text == "a" else other
        return key_of(step_of(function, ABSENT, None, model), None, False, None)

    keys = [key_of_step(1.0), key_of_step(2.0), key_of_step(1.0, "b"), key_with()]
    assert len(set(keys)) == len(keys)
    assert key_of_step(1.0) == keys[0]


class Functions(TorchFunctionMode):
    """A mode of the user."""


class Operators(TorchDispatchMode):
    """Another."""


@pytest.mark.parametrize(
    ("context", "why"),
    [
        (Functions, "it runs under a Functions"),
        (Operators, "it runs under a Operators"),
        (torch.autograd.profiler.profile, "a profiler is running"),
    ],
)
def test_there_is_no_key_where_something_unknown_decides(context, why):
    step = Step(Net(), torch.zeros(2, 4), None)
    with context(), pytest.raises(IndescribableError, match=why):
        key_of(step, None, False, None)


def test_there_is_no_key_in_a_process_group(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(IndescribableError, match="all ranks of a process group"):
        key_with()


def test_machine_and_devices_say_what_they_are():
    assert torch.backends.cpu.get_cpu_capability() in processor_name()
    assert name_of(torch.device("cpu")) == ""
    assert name_of(torch.device("meta")) == "meta"
    assert key._own_digest() == key._own_digest.__wrapped__()


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("processor\t: 0\nmodel name\t: AMD EPYC \nmodel name\t: B\n", "AMD EPYC"),
        ("processor\t: 0\nBogoMIPS\t: 50.00\n", "arm"),
        (None, "arm"),
    ],
)
def test_the_model_of_the_processors_is_the_kernel_s_or_the_system_s(
    monkeypatch, tmp_path, text, model
):
    file = tmp_path / "cpuinfo"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(devices, "Path", lambda path: file)
    monkeypatch.setattr(platform, "processor", lambda: "arm")
    assert processor_model() == model


@pytest.mark.cuda
def test_a_device_is_described_by_its_properties():
    found = name_of(torch.device("cuda"))
    assert torch.cuda.get_device_name() in found
