"""torch's own tables of operators and modules, and fresh copies of their samples."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@contextmanager
def _torch_left_alone() -> Iterator[None]:
    """Undo what importing torch's test helpers does to torch.

    They freeze the backend flags and wrap the calls of scripted functions, for the
    whole process: other tests would run under another torch.
    """
    calls = [(c, c.__call__) for c in (torch._C.ScriptFunction, torch._C.ScriptMethod)]
    try:
        yield
    finally:
        # `torch.backends` is an object that stands for the module, and has no names.
        names = torch.backends.flags_frozen.__globals__
        names["__allow_nonbracketed_mutation_flag"] = True
        assert not torch.backends.flags_frozen()
        for owner, call in calls:
            owner.__call__ = call  # type: ignore[method-assign]


with _torch_left_alone():
    from torch.testing._internal import common_methods_invocations
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db


def _unseeded(operator: Any, *args: Any, **kwargs: Any) -> Any:
    return operator(*args, **kwargs)


# The table calls random operators with a seed of their own, so that each call draws the
# same: nobody would notice a random stream that is not put back.
vars(common_methods_invocations)["wrapper_set_seed"] = _unseeded

DEVICE = "cpu"  # By whose data types operators are chosen.
DTYPES = (torch.float32, torch.bfloat16, torch.complex64)
SHARE = 8
"""One in so many operators belongs to the share that every test run takes."""


def differentiable_operators() -> list[Any]:
    """Return every operator of torch's table that autograd differentiates here."""
    return [
        info
        for info in op_db
        if info.supports_autograd
        and any(info.supports_dtype(dtype, DEVICE) for dtype in DTYPES)
    ]


def modules() -> list[Any]:
    """Return every module of torch's table."""
    return list(module_db)


def is_in_share(name: str) -> bool:
    """Return whether an operator or module belongs to the share, by its name alone."""
    return zlib.crc32(name.encode()) % SHARE == 0


def copied(values: Any) -> Any:
    """Copy every tensor in a sample, with its layout, as a leaf."""
    return pytree.tree_map_only(Tensor, _copied, values)


def _copied(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided:
        copy = tensor.detach().clone()
    else:
        # Not `clone`, which would close the gaps of a non-contiguous tensor.
        content, offset = tensor.untyped_storage().clone(), tensor.storage_offset()
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        copy = empty.set_(content, offset, tensor.shape, tensor.stride())
        copy = copy.conj() if tensor.is_conj() else copy
        copy = torch._neg_view(copy) if tensor.is_neg() else copy
    return copy.requires_grad_(tensor.requires_grad)
