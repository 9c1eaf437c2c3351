"""Private torch APIs for setting random numbers as they are drawn.

Kernels are put on the key by which torch finds the device of a factory's tensor. It is
included in every thread, below those that observe operators, and torch registers that
others fall through it, so that nothing else changes where some stand on it. A key that
torch reserves for backends would not do: composite kernels stand on these, by which
operators such as `native_group_norm` compute otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

_KEY = "BackendSelect"
_BELOW: Any = torch._C._dispatch_keyset_full_after(torch._C._dispatch_key_parse(_KEY))


def cover(kernels: Mapping[str, Callable[..., Any]]) -> Callable[[], None]:
    """Call kernels in place of operators of `aten`, in all threads; return the undo.

    A kernel gets the dispatch keys of the call before its arguments, for `below`.
    """
    library: Any = torch.library.Library("aten", "IMPL")
    for name, kernel in kernels.items():
        library.m.impl(name, _KEY, kernel, True)
    uncover: Callable[[], None] = library._destroy
    return uncover


def below(operator: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Call what lies below a kernel of `cover`."""
    return operator.redispatch(keys & _BELOW, *args, **kwargs)
