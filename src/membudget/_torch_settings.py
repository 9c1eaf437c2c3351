"""Save and restore all torch settings that affect the choice of kernels.

Every region reads all settings in its forward and again in its recompute. Reading all
settings through torch's private C getters, in one generated function, takes only 0.5 µs
more than reading the attention, matmul and determinism settings alone. Settings that
only CUDA kernels read are omitted if torch was built without CUDA.

Not covered, because torch has no getters for them: kernel overrides that were removed
through `torch.backends.python_native`, and the workspaces of cuBLAS handles.

Float32 precision (IEEE, TF32, ...) is the hard part: torch keeps a precision per
backend and kind of operator, set through `fp32_precision`. An unset precision ("none")
inherits its backend's `all`, which inherits the global `all`. The older functions
(`set_float32_matmul_precision`, `cudnn.allow_tf32`) set several precisions at once and
remember their own values; their getters raise if the old and the new API disagree. All
getters return the effective precision, not the one that was set. The precision that was
set is found by reading it while everything that it could inherit from is unset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Settings = tuple[Any, ...]
Undo = Callable[..., None]  # Takes a function and its arguments.
Key = tuple[str, str]  # Backend and kind of operator.

_C: Any = torch._C
_get_precision: Callable[[str, str], str] = _C._get_fp32_precision_getter
_set_precision: Callable[[str, str, str], None] = _C._set_fp32_precision_setter

_GENERIC = ("generic", "all")
_KINDS = ("matmul", "conv", "rnn")
_ONEDNN = tuple(("mkldnn", kind) for kind in _KINDS)
_CUDA = tuple(("cuda", kind) for kind in _KINDS)

# CUDA's precisions are derived from the older getters, unless those raise.
_OLDER: dict[str, Callable[[Any], None]] = {
    "_get_float32_matmul_precision()": _C._set_float32_matmul_precision,
}
if torch.backends.cuda.is_built():
    _OLDER["_get_cudnn_allow_tf32()"] = _C._set_cudnn_allow_tf32

_PRECISIONS = (*_OLDER, *(f"_get_fp32_precision_getter{key}" for key in _ONEDNN))


def _read_precisions() -> tuple[str, ...]:
    """Return the effective float32 precisions; used if the older getters raise."""
    return tuple(_get_precision(*key) for key in _ONEDNN + _CUDA)


def _bring_back_precisions(
    wanted: tuple[Any, ...], now: tuple[Any, ...], undo: Callable[..., None]
) -> None:
    """Restore float32 precisions read through `_PRECISIONS` or `_read_precisions`."""
    _undo_all(undo)
    if len(wanted) == len(now) == len(_PRECISIONS):
        for writer, value, before in zip(_OLDER.values(), wanted, now, strict=False):
            if value != before:
                undo(writer, before)
                writer(value)
    in_force = _in_force(wanted)
    # Defaults first: they change through a parent, which others may inherit, too.
    for key in sorted(in_force, key=_is_default, reverse=True):
        _put_in_force(key, in_force[key])


def _in_force(read: tuple[Any, ...]) -> dict[Key, str]:
    """Return the precisions that were read, keyed by backend and kind of operator."""
    if len(read) != len(_PRECISIONS):
        return dict(zip(_ONEDNN + _CUDA, read, strict=True))
    matmul, *cudnn = read[: len(_OLDER)]
    by_key = dict(zip(_ONEDNN, read[len(_OLDER) :], strict=True))
    by_key[_CUDA[0]] = "ieee" if matmul == "highest" else "tf32"
    for allow_tf32 in cudnn:
        by_key |= dict.fromkeys(_CUDA[1:], "tf32" if allow_tf32 else "ieee")
    return by_key


def _put_in_force(key: Key, value: str) -> None:
    # Kernels treat "none" as "ieee", but "ieee" does not inherit.
    now = _get_precision(*key)
    if now == value or {now, value} == {"none", "ieee"}:
        return
    if _is_default(key):
        key = (key[0], "all")
    _set_precision(*key, "ieee" if value == "none" else value)


def _undo_all(undo: Callable[..., None]) -> None:
    """Register undo calls that restore every precision exactly as it was set."""
    for key in (("mkldnn", "all"), ("cuda", "all"), *_ONEDNN, *_CUDA):
        if not _is_default(key):
            with _unset(_followed_by(key)):
                undo(_set_precision, *key, _get_precision(*key))


def _is_default(key: Key) -> bool:
    """Return whether a precision was never set and so inherits or falls back to "tf32".

    cuDNN's precisions start out unset, a state that no setter can restore; therefore
    only the settings that they inherit from are changed.
    """
    if key[0] != "cuda" or key[1] == "all":
        return False
    with _unset(_followed_by(key)):
        if _get_precision(*key) != "tf32":
            return False
        _set_precision("cuda", "all", "ieee")
        return _get_precision(*key) == "ieee"


def _followed_by(key: Key) -> tuple[Key, ...]:
    return (_GENERIC,) if key[1] == "all" else (_GENERIC, (key[0], "all"))


@contextmanager
def _unset(keys: tuple[Key, ...]) -> Iterator[None]:
    """Unset precisions temporarily; none may inherit from one that is listed later."""
    before = []
    try:
        for key in keys:
            before.append((key, _get_precision(*key)))
            _set_precision(*key, "none")
        yield
    finally:
        for key, value in before:
            _set_precision(*key, value)


EINSUM: dict[str, Any] = vars(vars(torch.backends.opt_einsum)["m"])
MHA: dict[str, Any] = vars(torch.backends.mha)

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
    """Return the setter of every setting, keyed by the expression that reads it."""
    writers: dict[str, Callable[[Any], Any]] = {
        "get_default_dtype()": torch.set_default_dtype,
        # Reductions are split by the number of threads.
        "get_num_threads()": torch.set_num_threads,
        # Half of it is subnormal, so a thread that flushes subnormals reads zero, even
        # for Python floats. Torch has no getter.
        "SMALLEST_NORMAL * 0.5 == 0.0": torch.set_flush_denormal,
        "EINSUM['enabled']": lambda value: EINSUM.update(enabled=value),
        "EINSUM['strategy']": lambda value: EINSUM.update(strategy=value),
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
    """Compile expressions into one function; a loop would add 0.2 µs per call."""
    names = {
        **vars(_C),
        "SMALLEST_NORMAL": 2.2250738585072014e-308,
        "EINSUM": EINSUM,
        "MHA": MHA,
    }
    source = f"lambda: ({', '.join(expressions)},)"
    reader: Callable[[], Settings] = eval(source, names)
    return reader


_WRITERS = _writers()
_COUNT = len(_WRITERS)
_read_plain = _unrolled(_WRITERS)
_read_all = _unrolled((*_WRITERS, *_PRECISIONS))


def read() -> Settings:
    """Return all settings that affect the choice of kernels, for `bring_back`."""
    try:
        return _read_all()
    except RuntimeError:  # Only torch's newer names can read these float32 precisions.
        return _read_plain() + _read_precisions()


def bring_back(wanted: Settings, now: Settings, undo: Undo) -> None:
    """Restore every setting whose current value differs from the wanted value.

    Args:
        wanted: Settings to restore, as returned by `read`.
        now: Current settings, as returned by `read`.
        undo: Called before each change with a function that reverts the change, and its
            arguments; the caller must run these functions newest first.
    """
    for writer, value, before in zip(_WRITERS.values(), wanted, now, strict=False):
        if value != before:
            undo(writer, before)
            writer(value)
    if wanted[_COUNT:] != now[_COUNT:]:
        _bring_back_precisions(wanted[_COUNT:], now[_COUNT:], undo)
