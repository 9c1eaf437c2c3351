"""Private torch APIs for setting random numbers as they are drawn.

A kernel is registered on the dispatch key by which torch finds the device for factory
functions. The key is included in every thread, below the one of observers, and all
operators without a kernel on it fall through. The keys of backends would not do:
torch registers composite kernels on those, and `native_group_norm`, for one, would then
compute in another way.

A kernel stays for good once it is registered, and makes its operator some 3 µs slower:
torch looks kernels up without a lock, so that to remove one while another thread calls
it ends in a crash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any

import torch

_KEY = "BackendSelect"
_BELOW: Any = torch._C._dispatch_keyset_full_after(torch._C._dispatch_key_parse(_KEY))
_LOCK = Lock()
_LIBRARIES: list[Any] = []  # Kernels live as long as these.


def cover(kernels: Mapping[str, Callable[..., Any]]) -> None:
    """Call kernels in place of operators of `aten`, in all threads, from now on.

    Later calls do nothing. A kernel gets the dispatch keys of the call, for `below`,
    and then its arguments.
    """
    with _LOCK:
        if not _LIBRARIES:
            library: Any = torch.library.Library("aten", "IMPL")
            for name, kernel in kernels.items():
                library.m.impl(name, _KEY, kernel, True)
            _LIBRARIES.append(library)


def below(operator: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Call what lies below a kernel that was given to `cover`."""
    return operator.redispatch(keys & _BELOW, *args, **kwargs)
