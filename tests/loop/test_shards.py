"""A call of a sharded model is recorded beside its shards, which stay as they are.

The steps run over torch's fake process group, whose collectives return at once, so that
bytes do not depend on gloo's threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import membudget as mb
from membudget._torch import is_fake

if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from membudget._torch_distributed import fake_store, forget_meshes
from membudget._torch_fsdp import is_replaceable, units_told
from membudget.loop.call_recorder import CallRecorder
from membudget.loop.casts import CachedCasts
from membudget.loop.micro_batch import MicroBatchStep
from membudget.loop.regions import RegionSets
from membudget.loop.shards import without_shards
from membudget.profile import profile_step
from membudget.profile.optimizer_step import next_step_bytes
from membudget.state.bits import plain_parts
from tests.behaviours.sharded_models import HALF, WIDTH, Feeds, batch, fsdp2
from tests.situations import Notes

pytestmark = pytest.mark.distributed

RANKS, WIDE = 3, 999
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "not resharded": {"reshard_after_forward": False},
    "in bfloat16": {"mp_policy": HALF},
    "gradients in float64": {
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)
    },
}


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Make this process rank 0 of a group whose other processes do not exist."""
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=RANKS)
    yield init_device_mesh("cpu", (RANKS,))
    dist.destroy_process_group()
    forget_meshes()


def trained(model: nn.Module, x: Tensor) -> nn.Module:
    """Run a step, after which FSDP has made all that it makes once."""
    model(x).backward()
    model.zero_grad()
    return model


def states(model: nn.Module) -> list[Any]:
    """Return, by identity, what each unit's state and each module refers to."""
    units: list[Any] = [m for m in model.modules() if hasattr(m, "_get_fsdp_state")]
    found = [unit._get_fsdp_state() for unit in units]
    found += [group for state in found for group in state._fsdp_param_groups]
    found += [p for of in found[len(units) :] for p in of.fsdp_params]
    noted = [{name: id(value) for name, value in vars(of).items()} for of in found]
    return [*noted, [id(p) for p in model.parameters()]]


def recorded_bytes(model: nn.Module, x: Tensor) -> int:
    with without_shards(model):
        step = MicroBatchStep(model, (x,), {})
        return profile_step(step, fake=True).peak_bytes


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("has_gradients", [False, True])
def test_the_recorded_peak_is_the_measured_one(
    mesh: Any, way: str, has_gradients: bool
) -> None:
    x = batch(0).repeat(8, 4, 1)
    model = trained(fsdp2(Feeds(), mesh, **WAYS[way]), x)
    if has_gradients:
        model(x).backward()
    predicted = recorded_bytes(model, x)

    assert predicted == mb.peak(lambda: model(x).backward()).peak_bytes > 0


def test_gradients_that_have_yet_to_be_reduced_are_there_in_the_recording(
    mesh: Any,
) -> None:
    x = batch(0).repeat(8, 4, 1)
    model: Any = trained(fsdp2(Feeds(), mesh, mp_policy=HALF), x)
    told = units_told(model)
    model.set_requires_gradient_sync(False)
    model(x).backward()
    assert len({told, units_told(model)}) == 2
    model.set_requires_gradient_sync(True)
    predicted = recorded_bytes(model, x)

    assert predicted == mb.peak(lambda: model(x).backward()).peak_bytes


def test_what_is_gathered_before_is_not_in_the_recorded_peak(mesh: Any) -> None:
    x = batch(0).repeat(8, 4, 1)
    model = trained(fsdp2(Wide(), mesh), x)
    whole_bytes = recorded_bytes(model, x)
    with torch.no_grad():
        model(x)  # The model's own parameters stay gathered, as within its forward.
    predicted = recorded_bytes(model, x)

    assert whole_bytes - predicted > 0.9 * WIDE * WIDTH * 4
    assert predicted == mb.peak(lambda: model(x).backward()).peak_bytes


class Wide(Feeds):
    """Feeds with a wide head, which is in the model's own unit."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDE)


def test_everything_is_as_it_was_after_a_recording(mesh: Any) -> None:
    x = batch(0)
    model = trained(fsdp2(Feeds(), mesh), x)
    with torch.no_grad():
        model(x)  # The model's own parameters stay gathered.
    before, weights = states(model), [p.detach().clone() for p in model.parameters()]
    recorded_bytes(model, x)

    assert states(model) == before
    after = [p.detach() for p in model.parameters()]
    assert all(map(torch.equal, parts(weights), parts(after)))


def parts(tensors: list[Tensor]) -> list[Tensor]:
    return [part for tensor in tensors for part in plain_parts(tensor)]


def test_everything_is_as_it_was_after_a_recording_that_fails(mesh: Any) -> None:
    x = batch(0)
    model: Any = trained(fsdp2(Feeds(), mesh), x)
    before = states(model)
    seen = Notes()

    def fail(*_: Any) -> None:
        seen(all(map(is_fake, parts(list(model.blocks[0].parameters())))))
        raise InterruptedError("in the second block")

    handle = model.blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(InterruptedError, match="in the second block"):
        recorded_bytes(model, x)
    handle.remove()

    assert seen.items == [True]
    assert states(model) == before


def test_the_state_that_an_optimizer_makes_is_foreseen_of_the_shards(mesh: Any) -> None:
    x = batch(0)
    model = trained(fsdp2(Feeds(), mesh), x)
    optimizer = torch.optim.AdamW(model.parameters())
    model(x).backward()
    foreseen, _ = next_step_bytes(model, optimizer)
    optimizer.step()
    states = [s for of in optimizer.state.values() for s in of.values()]

    assert foreseen == sum(part.nbytes for part in parts(states))


def test_casts_of_gathered_parameters_that_autocast_caches_are_known(
    mesh: Any,
) -> None:
    x = batch(0)
    model = trained(fsdp2(Feeds(), mesh), x)
    sets, casts = RegionSets(model, 0.01), CachedCasts(model)
    recorder = CallRecorder(model, None, sets, casts)
    with torch.autocast("cpu", torch.bfloat16), recorder.about((x,), {}):
        found = recorder.record()
    storages = found.profile.graph.storages
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    numbers = sum(p.numel() for module in linear for p in module.parameters())

    assert sum(storages[cast].bytes for cast in found.casts) == 2 * numbers


def test_shards_that_are_not_plain_are_told_from_others(mesh: Any) -> None:
    copies = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("copy", "shard"))
    copied = Feeds()
    fully_shard(copied, mesh=copies)

    assert is_replaceable(fsdp2(Feeds(), mesh))
    assert not is_replaceable(copied)
    assert units_told(nn.Linear(2, 2)) == ()
