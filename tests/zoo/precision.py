"""Cases under autocast and other settings that surround the forward alone."""

from __future__ import annotations

from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from tests.devices import device_type
from tests.zoo.case import Call, case, leaf


def _bf16(enabled: bool = True) -> torch.autocast:
    return torch.autocast(device_type(), torch.bfloat16, enabled=enabled)


def _network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.2), nn.Linear(8, 6)
    )


@case()
def autocast_around() -> Call:
    return Call(_network(), (leaf(5, 6),), around=_bf16)


@case()
def autocast_inside() -> Call:
    model = _network()

    def function(x: Tensor) -> Tensor:
        with _bf16():
            y = model(x)
        return model(y.float())

    return Call(function, (leaf(5, 6),), state={"model": model})


@case()
def autocast_switched_off_inside() -> Call:
    model = _network()

    def function(x: Tensor) -> Tensor:
        y = model(x)
        with _bf16(enabled=False):
            y = model(y.float())
        return model(y)

    return Call(function, (leaf(5, 6),), state={"model": model}, around=_bf16)


@case()
def half_precision_parameters() -> Call:
    model = _network().to(torch.bfloat16)
    return Call(model, (leaf(5, 6, dtype=torch.bfloat16),))


class _DefaultDtype:
    """Set the default dtype for a while."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self.before)


@case(torch="raises", torch_says="different metadata")
def default_dtype_around() -> Call:
    def function(x: Tensor) -> Tensor:
        return (x * torch.ones(6)).sin()

    return Call(function, (leaf(5, 6),), around=lambda: _DefaultDtype(torch.float64))


_SCALE: ContextVar[float] = ContextVar("scale", default=1.0)


class _Scaled:
    """Set the context variable for a while."""

    def __enter__(self) -> None:
        self.token: Token[float] = _SCALE.set(3.0)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _SCALE.reset(self.token)


@case(torch="wrong")
def context_variable_around() -> Call:
    return Call(lambda x: (x * _SCALE.get()).sin(), (leaf(5, 6),), around=_Scaled)


class _SineIsCosine(TorchFunctionMode):
    """Compute the cosine where the sine is asked for."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.sin:
            func = torch.Tensor.cos
        return func(*args, **(kwargs or {}))


@case(torch="wrong")
def function_mode_around() -> Call:
    return Call(lambda x: x.sin().exp(), (leaf(5, 6),), around=_SineIsCosine)


# The emulated device has no other attention than this one.
@case(
    torch="raises",
    torch_says="different metadata|different number",
    torch_on_emu="right",
)
def attention_kernel_around() -> Call:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    return Call(
        function,
        tuple(leaf(2, 2, 5, 4) for _ in range(3)),
        around=lambda: sdpa_kernel(SDPBackend.MATH),
    )
