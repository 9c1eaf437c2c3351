"""Private names of torch.distributed, each with the reason.

As in `_torch`, nothing else imports or reads these names.
"""

from __future__ import annotations

from typing import Any


def fake_store() -> Any:
    """Return the store of a fake process group, whose collectives return at once.

    The backend `"fake"` is registered by the module of this class; no public name makes
    a group whose other processes do not exist.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def forget_meshes() -> None:
    """Clear what DTensors know of operators, which refers to meshes of earlier groups.

    A mesh of a later group may be equal to one of them, whose group is gone: DTensor's
    caches then return that one. The function that clears them is for debugging.
    """
    from torch.distributed.tensor import debug

    debug._clear_sharding_prop_cache()


def wrapper_in_forward() -> Any:
    """Return the DistributedDataParallel whose forward is running; `None` without one.

    Nothing in a module tells that DDP wraps it.
    """
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel._active_ddp_module


def common_store() -> Any:
    """Return the store through which the ranks of the default group have met.

    A rank reads there why another one has left, when no collective can tell it any
    more. `init_process_group` keeps the store, and no public name returns it.
    """
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()
