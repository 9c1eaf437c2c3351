"""A stage of `torch.distributed.pipelining` without receive buffers of its own.

torch's stage makes two buffers per micro-batch in the first step, and keeps them. Here
each lives from its receive to its use. What is overridden is private to torch; the
names that are imported stand in `_torch_pipelining`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from membudget._torch_pipelining import ReceiveInfo, buffer_like


class BufferlessStage(PipelineStage):
    """A stage whose receive buffers live from their receive to their use."""

    def _setup_forward_recv_info(
        self, num_microbatches: int, has_backward: bool
    ) -> None:
        metas = self._stage_meta.inputs or ()
        for number in range(num_microbatches):
            self.args_recv_info[number] = tuple(
                self._without_buffer(meta, self.stage_index - 1) for meta in metas
            )

    def _create_grad_recv_info(self, act_send_info: Any) -> tuple[Any, ...]:
        if self.is_last:
            return ()
        metas = self._stage_meta.output_grads or ()
        return tuple(self._without_buffer(m, self.stage_index + 1) for m in metas)

    def _without_buffer(self, meta: Any, source: int) -> Any:
        is_given = source < 0  # The first stage's inputs come from the caller.
        return ReceiveInfo(
            f"from stage {source}",
            None if is_given else source,
            None,
            meta,
            is_root_arg=is_given,
        )

    def _make_buffers(self, infos: Iterable[Any]) -> None:
        for info in infos:
            if info.tensor_meta is not None and not info.is_root_arg:
                info.buffer = buffer_like(info.tensor_meta, self.device)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of a micro-batch's activations, into new buffers."""
        self._make_buffers(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of a micro-batch's gradients, into new buffers."""
        if self.has_backward and not self.is_last:
            self._make_buffers(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        """Take gradients from the next stage on this rank; a missing one is zero."""
        infos = self.grad_recv_info[mb_index]
        for info, gradient in zip(infos, next_stage_bwd_outputs, strict=True):
            if gradient is None:
                self._make_buffers([info])
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Any, ...]:
        found: tuple[Any, ...] = super()._retrieve_recv_activations(fwd_chunk_id)
        _forget_buffers(self.args_recv_info[fwd_chunk_id])
        return found

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Any, ...]:
        found: tuple[Any, ...] = super()._retrieve_recv_grads(bwd_chunk_id)
        _forget_buffers(self.grad_recv_info[bwd_chunk_id])
        return found

    @property
    def inferred_outputs(self) -> tuple[Tensor, ...]:
        """The outputs of the forward from which torch infers shapes, while it does."""
        return self._fwd_outputs_for_bwd_meta or ()

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        self.check_outputs(self.inferred_outputs)
        return super()._prepare_backward_infra(*args, **kwargs)

    def check_outputs(self, outputs: Sequence[Any]) -> None:
        """Raise if no gradient can come through a forward's outputs."""


def _forget_buffers(infos: Iterable[Any]) -> None:
    for info in infos:
        info.buffer = None
