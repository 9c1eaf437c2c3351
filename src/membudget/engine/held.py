"""Hold one tensor argument of a region so that a recompute can use it.

Tensor arguments are stored as detached aliases, so that a region does not keep the
graph of its inputs alive. If saved-tensor hooks are active around the region, they pack
its tensor arguments: an offloader moves the tensors, and an outer region drops them.
Parameters are stored as they are, not as aliases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.forward_ad import make_dual, unpack_dual
from torch.nn import Parameter

from membudget._torch import is_forward_ad_on, top_saved_tensors_hooks
from membudget._torch_accelerator import enter_stream, stream_of
from membudget.scope import Scope
from membudget.state.bits import SKIPPED, Fingerprint, content_of
from membudget.state.identity import address_of, storage_of, version_of

ArgumentPlace = tuple[Any, Any]

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""Saved-tensor hooks: pack and unpack."""


def stride_of(tensor: Tensor) -> tuple[int, ...] | None:
    """Return a tensor's stride; `None` for layouts without strides, such as sparse."""
    return tensor.stride() if tensor.layout is torch.strided else None


def with_stride(tensor: Tensor, stride: tuple[int, ...] | None) -> Tensor:
    """Return `tensor` in the memory layout it had before saved-tensor hooks packed it.

    `torch.autograd.graph.save_on_cpu` returns contiguous tensors. A kernel may round
    differently in another layout, so that the recompute would not be bit-identical.
    """
    if stride is None or tensor.stride() == stride:
        return tensor
    # An expanded dimension is one element seen many times.
    once = tensor[tuple(slice(0, 1) if s == 0 else slice(None) for s in stride)]
    laid_out = torch.empty_strided(
        once.shape, stride, dtype=tensor.dtype, device=tensor.device
    )
    return laid_out.copy_(once).expand(tensor.shape)


class Packed:
    """A tensor packed by the saved-tensor hooks around a region.

    Saved-tensor hooks may keep the packed tensor itself or a copy. If unpacking returns
    the original storage, it is not a copy, so its version must not have changed. The
    hooks unpack on the stream on which they packed, as autograd has it.
    """

    __slots__ = ("_packed", "_storage", "_stream", "_stride", "_unpack", "_version")

    is_unpacked_once = True  # In one backward pass: other libraries' hooks may refuse.

    def __init__(self, tensor: Tensor, hooks: Hooks):
        """Pack `tensor` with the first of two hooks."""
        pack, self._unpack = hooks
        self._storage = ref(storage_of(tensor))
        self._version = version_of(tensor)
        self._stride = stride_of(tensor)
        self._stream = stream_of(tensor.device)
        self._packed = pack(tensor.detach())

    def unpacked(self) -> tuple[Tensor, bool]:
        """Unpack the tensor; also return whether it was written to after packing."""
        with Scope() as scope:
            if self._stream is not None:
                enter_stream(self._stream, scope)
            tensor = self._unpack(self._packed)
            # An alias made below autograd counts its own versions, from 0.
            is_changed = (
                version_of(tensor) > self._version
                and address_of(tensor) != 0
                and storage_of(tensor) is self._storage()
            )
            return with_stride(tensor, self._stride).detach(), is_changed


def _place_name(place: ArgumentPlace) -> str:
    owner, key = place
    return f"argument {key!r}" if owner is None else f"{_place_name(owner)}[{key!r}]"


class HeldTensor:
    """A tensor argument that requires a gradient, stored for recomputes.

    Attributes:
        alias: A detached alias of the tensor, which shares its version counter.
        place: The argument's position as nested (owner, key) pairs; see `name`.
        version: The tensor's version when the region began.
        changed_by_region: Whether the region's function wrote to the tensor.
        content: Fingerprint taken when the region began; set only in verified calls.
    """

    __slots__ = ("alias", "changed_by_region", "content", "place", "version")

    alias: Tensor
    content: Fingerprint

    def __init__(self, tensor: Tensor, place: ArgumentPlace):
        """Store a detached alias of `tensor`, and the tensor's current version."""
        self.alias = tensor.detach()
        self.place = place
        # Not the tensor's: one of inference mode has no version, but its alias has.
        self.version = version_of(self.alias)
        self.changed_by_region = False

    @property
    def device(self) -> torch.device:
        """The device of the tensor when it was passed to the region."""
        return self.alias.device

    @property
    def name(self) -> str:
        """The argument's position as text: `argument 0` or `argument 'cache'['k']`."""
        return _place_name(self.place)

    def given(self) -> Tensor | None:
        """Return the tensor or an alias of it; `None` if the tensor was freed."""
        return self.alias

    def begin_check(self) -> None:
        """Fingerprint the tensor before the function runs."""
        given = self.given()
        self.content = SKIPPED if given is None else content_of(given)

    def end_check(self) -> None:
        """Detect whether the function wrote to the tensor without a version bump."""
        given = self.given()
        if given is not None and content_of(given) != self.content:
            self.changed_by_region = True

    def note_forward_end(self) -> None:
        """Record, when the forward ends, whether the function wrote to the tensor."""
        self.changed_by_region = self.has_changed()

    def has_changed(self) -> bool:
        """Return whether the tensor was written to after the region began.

        Replacing the tensor's storage (`x.data = y`) does not count as a write, because
        the region keeps an alias of the old storage.
        """
        return version_of(self.alias) != self.version or self.changed_by_region

    def rebuild(self) -> Tensor:
        """Return the tensor as a new autograd leaf."""
        return self.alias.detach().requires_grad_()


class _HeldParameter(HeldTensor):
    """A parameter argument, stored as it is, so that a recompute's graph ends in it."""

    __slots__ = ("_address",)

    def __init__(self, tensor: Tensor, place: ArgumentPlace):
        self.alias = tensor
        self.place = place
        self.version = version_of(tensor)
        self.changed_by_region = False
        self._address = address_of(tensor)

    def has_changed(self) -> bool:
        """Return whether the parameter was written to or its storage was replaced."""
        return super().has_changed() or address_of(self.alias) != self._address

    def rebuild(self) -> Tensor:
        return self.alias


class _HeldConstant(HeldTensor):
    """An argument that requires no gradient; recomputes use the original if alive."""

    __slots__ = ("_origin",)

    def __init__(self, tensor: Tensor, place: ArgumentPlace):
        super().__init__(tensor, place)
        self._origin = ref(tensor)

    def rebuild(self) -> Tensor:
        origin = self._origin()
        # After `x.data = y`, the caller's object has another storage.
        if origin is None or address_of(origin) != address_of(self.alias):
            return self.alias.detach()
        return origin


class _HeldDual(HeldTensor):
    """A tensor argument with a forward-mode tangent, which `detach` would drop."""

    __slots__ = ("_requires_grad", "_tangent")

    def __init__(self, tensor: Tensor, place: ArgumentPlace):
        super().__init__(tensor, place)
        self._requires_grad = tensor.requires_grad
        self._tangent = unpack_dual(tensor).tangent

    def rebuild(self) -> Tensor:
        tensor = self.alias.detach().requires_grad_(self._requires_grad)
        return tensor if self._tangent is None else make_dual(tensor, self._tangent)


class _HeldPacked(HeldTensor):
    """A tensor argument packed by the saved-tensor hooks around the region."""

    __slots__ = ("_device", "_given", "_packed", "_requires_grad")

    def __init__(self, tensor: Tensor, place: ArgumentPlace):
        hooks = top_saved_tensors_hooks()
        assert hooks is not None, "kind_of chooses this class under hooks alone"
        self._device = tensor.device
        self._requires_grad = tensor.requires_grad
        self._packed = Packed(tensor, hooks)
        self._given = ref(tensor)
        self.place = place
        self.version = version_of(tensor)
        self.changed_by_region = False

    @property
    def device(self) -> torch.device:
        return self._device

    def given(self) -> Tensor | None:
        """Return the original tensor; `None` once its caller has freed it."""
        return self._given()

    def note_forward_end(self) -> None:
        """Record, when the forward ends, whether the function wrote to the tensor."""
        given = self._given()
        if given is not None:
            self.changed_by_region = version_of(given) != self.version

    def has_changed(self) -> bool:
        """Return whether the forward or `rebuild` detected a write to the tensor."""
        return self.changed_by_region or hasattr(self, "alias")

    def rebuild(self) -> Tensor:
        """Unpack the tensor with the hooks that packed it."""
        tensor, is_changed = self._packed.unpacked()
        if is_changed:
            # The storage is the same, so this holds no extra memory.
            self.alias = tensor.detach()
        return tensor.requires_grad_(self._requires_grad)


def nothing_surrounds() -> bool:
    """Return whether neither saved-tensor hooks nor forward-mode AD is active."""
    return not is_forward_ad_on() and top_saved_tensors_hooks() is None


def kind_of(tensor: Tensor, nothing_surrounds: bool) -> type[HeldTensor]:
    """Select the class that stores a tensor argument for recomputes."""
    # The `isinstance` of Parameter alone takes 0.7 µs.
    if type(tensor) is not Tensor and isinstance(tensor, Parameter):
        return _HeldParameter
    if not nothing_surrounds:
        return _HeldDual if is_forward_ad_on() else _HeldPacked
    return HeldTensor if tensor.requires_grad else _HeldConstant
