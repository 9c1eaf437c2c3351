"""Take the shards of a model out of the way while a call of it is recorded.

The rank's own shards hold what is trained, and FSDP is about to run, or runs, its real
forward. The recording gets units of fake tensors that communicate nothing, so that no
other rank has to record at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch.nn import Module

from membudget._torch_fsdp import is_part_of_unit, units_replaced
from membudget.errors import OptionError
from membudget.profile.fake import fake_tensors, twin
from membudget.sharding import has_fake_shards, is_fully_sharded


@contextmanager
def without_shards(model: Module) -> Iterator[None]:
    """Let a model that `fully_shard` has sharded have fake shards, if it has others."""
    with ExitStack() as stack:
        if is_fully_sharded(model) and not has_fake_shards(model):
            if is_part_of_unit(model):
                raise _part_of_unit(model)
            with fake_tensors([]):  # In whose mode the twins are fake.
                stack.enter_context(units_replaced(model, twin))
        yield


def _part_of_unit(model: Module) -> OptionError:
    return OptionError(
        f"{type(model).__name__} is part of a model that fully_shard shards, whose "
        "other parameters FSDP gathers and frees together with those of this part: "
        "give budget() the module that the loop calls"
    )
