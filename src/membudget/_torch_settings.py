"""The settings of torch that choose kernels: read all at once, and brought back.

Every region reads all of them in its forward and again in its recompute, so the readers
are torch's private ones, in C, unrolled into one tuple: 0.5 µs more than for the
settings of attention, matmul and determinism alone. Settings that only CUDA kernels
read stand aside where torch was built without CUDA.

Not covered, because torch has no reader for it: the overrides that
`torch.backends.python_native` takes out, and workspaces that a cuBLAS handle has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from membudget import _torch_precision as precision

Settings = tuple[Any, ...]
Undo = Callable[..., None]  # Takes a function and the arguments to call it with.

_C: Any = torch._C
_EINSUM: dict[str, Any] = vars(vars(torch.backends.opt_einsum)["m"])
_MHA: dict[str, Any] = vars(torch.backends.mha)

_FLAGS = (
    *("mkldnn_enabled", "mkldnn_deterministic", "nnpack_enabled", "qengine"),
    *("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic"),
    *(
        "math_sdp_allow_fp16_bf16_reduction",
        "cpu_allow_fp16_reduced_precision_reduction",
    ),
    "deterministic_fill_uninitialized_memory",
)
_FLAGS_OF_CUDA = (
    *("cudnn_depthwise_kernel", "cublas_allow_fp16_accumulation", "miopen_immediate"),
    *("linalg_preferred_backend", "blas_preferred_backend"),
    *("rocm_fa_preferred_backend", "sm_carveout_experimental"),
)
_PAIRS_OF_CUDA = (
    "cublas_allow_fp16_reduced_precision_reduction",
    "cublas_allow_bf16_reduced_precision_reduction",
)
_ATTENTION = ("flash", "mem_efficient", "math", "cudnn", "fa3", "overrideable")


def _set_deterministic(enabled: bool) -> None:
    warn_only = _C._get_deterministic_algorithms_warn_only()
    _C._set_deterministic_algorithms(enabled, warn_only=warn_only)


def _set_warn_only(warn_only: bool) -> None:
    enabled = _C._get_deterministic_algorithms()
    _C._set_deterministic_algorithms(enabled, warn_only=warn_only)


def _writers() -> dict[str, Callable[[Any], Any]]:
    """Return how each setting is set, by the expression that reads it."""
    writers: dict[str, Callable[[Any], Any]] = {
        "get_default_dtype()": torch.set_default_dtype,
        # A reduction is split by the number of threads.
        "get_num_threads()": torch.set_num_threads,
        # Half of it is subnormal: zero in a thread that flushes subnormal numbers,
        # which Python's floats are subject to as well. There is no reader.
        "SMALLEST_NORMAL * 0.5 == 0.0": torch.set_flush_denormal,
        "EINSUM['enabled']": lambda value: _EINSUM.update(enabled=value),
        "EINSUM['strategy']": lambda value: _EINSUM.update(strategy=value),
        "MHA['_is_fastpath_enabled']": torch.backends.mha.set_fastpath_enabled,
        "_get_deterministic_algorithms()": _set_deterministic,
        "_get_deterministic_algorithms_warn_only()": _set_warn_only,
        "_get_sdp_priority_order()": _C._set_sdp_priority_order,
    }
    for name in _ATTENTION:
        # Some are younger than the oldest torch that membudget runs on.
        if writer := getattr(_C, f"_set_sdp_use_{name}", None):
            writers[f"_get_{name}_sdp_enabled()"] = writer
    for name in _FLAGS + _FLAGS_OF_CUDA * torch.backends.cuda.is_built():
        if writer := getattr(_C, f"_set_{name}", None):
            writers[f"_get_{name}()"] = writer
    for name in _PAIRS_OF_CUDA * torch.backends.cuda.is_built():
        writers[f"_get_{name}()"] = _spread(getattr(_C, f"_set_{name}"))
    return writers


def _spread(writer: Callable[..., None]) -> Callable[[Any], None]:
    return lambda pair: writer(*pair)


def _unrolled(expressions: Iterable[str]) -> Callable[[], Settings]:
    """Return a function that reads them all: a loop would cost 0.2 µs more."""
    names = {
        **vars(_C),
        "SMALLEST_NORMAL": 2.2250738585072014e-308,
        "EINSUM": _EINSUM,
        "MHA": _MHA,
    }
    source = f"lambda: ({', '.join(expressions)},)"
    reader: Callable[[], Settings] = eval(source, names)
    return reader


_WRITERS = _writers()
_COUNT = len(_WRITERS)
_read_plain = _unrolled(_WRITERS)
_read_all = _unrolled((*_WRITERS, *precision.EXPRESSIONS))


def read() -> Settings:
    """Return all settings, to compare with others and to `bring_back`."""
    try:
        return _read_all()
    except RuntimeError:  # Precisions of float32 that only torch's newer names tell.
        return _read_plain() + precision.read_each()


def bring_back(wanted: Settings, now: Settings, undo: Undo) -> None:
    """Set what differs.

    Args:
        wanted: The settings to bring back.
        now: The settings as they are.
        undo: Told, before each change, what takes it back: a function and its
            arguments, to be called newest first.
    """
    for writer, value, before in zip(_WRITERS.values(), wanted, now, strict=False):
        if value != before:
            undo(writer, before)
            writer(value)
    if wanted[_COUNT:] != now[_COUNT:]:
        precision.bring_back(wanted[_COUNT:], now[_COUNT:], undo)
