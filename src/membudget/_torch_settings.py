"""The settings of torch that choose kernels: read all at once, and restored.

Every region reads all of them in its forward and again in its recompute, so the readers
are torch's private C functions, unrolled into one tuple: 0.5 µs more than the settings
of attention, matmul and determinism alone. Settings that only CUDA kernels read are
omitted where torch was built without CUDA.

Not covered, because torch has no reader: overrides that `torch.backends.python_native`
removes, and workspaces of a cuBLAS handle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from membudget import _torch_precision as precision

Settings = tuple[Any, ...]
Undo = Callable[..., None]  # Takes a function and its arguments.

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
    """Return the setter of each setting, by the expression that reads it."""
    writers: dict[str, Callable[[Any], Any]] = {
        "get_default_dtype()": torch.set_default_dtype,
        # Reductions are split by the number of threads.
        "get_num_threads()": torch.set_num_threads,
        # Half of it is subnormal: zero in a thread that flushes subnormal numbers, also
        # for Python's floats. There is no other reader.
        "SMALLEST_NORMAL * 0.5 == 0.0": torch.set_flush_denormal,
        "EINSUM['enabled']": lambda value: _EINSUM.update(enabled=value),
        "EINSUM['strategy']": lambda value: _EINSUM.update(strategy=value),
        "MHA['_is_fastpath_enabled']": torch.backends.mha.set_fastpath_enabled,
        "_get_deterministic_algorithms()": _set_deterministic,
        "_get_deterministic_algorithms_warn_only()": _set_warn_only,
        "_get_sdp_priority_order()": _C._set_sdp_priority_order,
    }
    for name in _ATTENTION:
        # The oldest supported torch lacks some of them.
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
    """Return a function that evaluates all of them; a loop would cost 0.2 µs more."""
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
    except RuntimeError:  # Only torch's newer names can read these float32 precisions.
        return _read_plain() + precision.read_each()


def bring_back(wanted: Settings, now: Settings, undo: Undo) -> None:
    """Restore the settings that differ.

    Args:
        wanted: The settings to restore.
        now: The present settings.
        undo: Receives, before each change, the function and arguments that undo it; to
            be called newest first.
    """
    for writer, value, before in zip(_WRITERS.values(), wanted, now, strict=False):
        if value != before:
            undo(writer, before)
            writer(value)
    if wanted[_COUNT:] != now[_COUNT:]:
        precision.bring_back(wanted[_COUNT:], now[_COUNT:], undo)
