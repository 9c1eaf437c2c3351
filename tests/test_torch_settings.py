"""Each setting that chooses kernels is read, set, and brought back.

If a test fails after an upgrade of torch, a private name in `_torch_settings` has gone
or changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from membudget import _torch_settings
from tests.settings import EXPRESSIONS, change, kept

backends: Any = torch.backends
deterministic: Any = torch.utils.deterministic

PUBLIC: dict[str, Callable[[], Any]] = {
    "get_default_dtype()": torch.get_default_dtype,
    "get_num_threads()": torch.get_num_threads,
    "MHA['_is_fastpath_enabled']": backends.mha.get_fastpath_enabled,
    "_get_deterministic_algorithms()": torch.are_deterministic_algorithms_enabled,
    "_get_deterministic_algorithms_warn_only()": (
        torch.is_deterministic_algorithms_warn_only_enabled
    ),
    "_get_deterministic_fill_uninitialized_memory()": (
        lambda: deterministic.fill_uninitialized_memory
    ),
    "_get_mkldnn_enabled()": lambda: backends.mkldnn.enabled,
    "_get_mkldnn_deterministic()": lambda: backends.mkldnn.deterministic,
    "_get_cudnn_enabled()": lambda: backends.cudnn.enabled,
    "_get_cudnn_benchmark()": lambda: backends.cudnn.benchmark,
    "_get_cudnn_deterministic()": lambda: backends.cudnn.deterministic,
    "_get_flash_sdp_enabled()": backends.cuda.flash_sdp_enabled,
    "_get_mem_efficient_sdp_enabled()": backends.cuda.mem_efficient_sdp_enabled,
    "_get_math_sdp_enabled()": backends.cuda.math_sdp_enabled,
    "_get_cudnn_sdp_enabled()": backends.cuda.cudnn_sdp_enabled,
    "_get_math_sdp_allow_fp16_bf16_reduction()": (
        backends.cuda.fp16_bf16_reduction_math_sdp_allowed
    ),
    "_get_float32_matmul_precision()": torch.get_float32_matmul_precision,
    "EINSUM['enabled']": lambda: backends.opt_einsum.enabled,
    "EINSUM['strategy']": lambda: backends.opt_einsum.strategy,
}

ELSEWHERE = (
    # CUDA alone reads them; brought back where torch has CUDA.
    *(*_torch_settings._FLAGS_OF_CUDA, *_torch_settings._PAIRS_OF_CUDA),
    *("cudnn_allow_tf32", "cublas_allow_tf32", "onednn_allow_tf32"),
    *("dispatch_mode", "torch_function_state", "default_device"),
    *("autograd_fallback_mode", "backcompat_broadcast_warn", "backcompat_keepdim_warn"),
    *("warnAlways", "thread_name", "tracing_state", "value_trace", "tensor_metadata"),
    *("graph_exec_group", "dtensor_allow_implicit_replication"),
    "graph_executor_optimize",
)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_setting_is_what_torch_says_in_public(name: str) -> None:
    position = EXPRESSIONS.index(name)
    with kept():
        for _ in range(2):
            value = _torch_settings.read()[position]
            assert value == PUBLIC[name]()
            change(name)
        assert _torch_settings.read()[position] == PUBLIC[name]()


def test_flushing_of_subnormal_numbers_is_read() -> None:
    position = EXPRESSIONS.index("SMALLEST_NORMAL * 0.5 == 0.0")
    with kept():
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor flushes no subnormal numbers")
        assert _torch_settings.read()[position]
        torch.set_flush_denormal(False)
        assert not _torch_settings.read()[position]


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_a_setting_is_brought_back_and_undone(name: str) -> None:
    undone: list[Any] = []
    with kept():
        wanted = _torch_settings.read()
        change(name)
        changed = _torch_settings.read()
        assert changed != wanted
        bring_back = _torch_settings.bring_back
        bring_back(wanted, changed, lambda *undo: undone.append(undo))
        assert as_kernels_see(_torch_settings.read()) == as_kernels_see(wanted)
        for function, *args in reversed(undone):
            function(*args)
        assert _torch_settings.read() == changed


def as_kernels_see(settings: tuple[Any, ...]) -> list[Any]:
    """Return settings without the two names of one precision."""
    return ["ieee" if value == "none" else value for value in settings]


def test_what_does_not_differ_is_left_alone() -> None:
    undone: list[Any] = []
    now = _torch_settings.read()
    _torch_settings.bring_back(now, now, undone.append)
    assert undone == []


def test_nothing_of_torch_is_forgotten() -> None:
    # A new switch of torch's comes as a reader and a setter of one name. What is not
    # here chooses no kernel: it is about autograd, tracing, warnings or threads' names.
    named = " ".join(EXPRESSIONS) + " ".join(ELSEWHERE)
    pairs = [
        name.removeprefix("_get_")
        for name in dir(torch._C)
        if name.startswith("_get_") and hasattr(torch._C, name.replace("get", "set", 1))
    ]
    assert [name for name in pairs if name not in named] == []
