"""A stage of a pipeline that can recompute a micro-batch before its gradient comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from membudget._torch_stage import BufferlessStage
from membudget.apply import Applied
from membudget.engine.controls import Regions, collect_regions, disable_checkpointing
from membudget.errors import CheckpointError, OptionError, OptionTypeError
from membudget.pipeline.event_log import EventLog
from membudget.planner.pipeline_order import PipelineAction, PipelineOrder

_REENTRANT = ("CheckpointFunctionBackward", "_ReentrantBackward")
"""Autograd nodes of reentrant regions: torch's, and ours."""


class RecomputingStage(BufferlessStage):
    """A stage that collects its regions, recomputes them on demand and logs events.

    Attributes:
        applied: The regions that `split` has put on the stage's blocks, if any.
    """

    applied: Applied | None = None
    _order: PipelineOrder
    _log: EventLog
    _regions: dict[int, Regions]
    _is_checked: bool

    @classmethod
    def of(cls, stage: PipelineStage) -> RecomputingStage:
        """Return a stage as one of this class: the same object.

        Raises:
            OptionTypeError: The stage is of another class than torch's `PipelineStage`,
                or has run already.
        """
        if isinstance(stage, RecomputingStage):
            return stage
        if type(stage) not in (PipelineStage, BufferlessStage):
            raise OptionTypeError(
                f"a stage is a torch.distributed.pipelining.PipelineStage, or comes "
                f"from membudget.pipeline.split; got {type(stage).__name__}"
            )
        if stage.args_recv_info:
            raise OptionTypeError(
                f"stage {stage.stage_index} has run under another schedule, which made "
                f"its receive buffers: give each schedule a stage of its own"
            )
        stage.__class__ = cls
        assert isinstance(stage, RecomputingStage)
        return stage

    def join(self, order: PipelineOrder, log: EventLog) -> None:
        """Take part in a schedule."""
        self._order, self._log = order, log
        self._regions = {}
        self._is_checked = False

    def noted(self, kind: Any, micro_batch: int) -> Any:
        """Log what runs in this block as an action of this stage."""
        return self._log.noted(PipelineAction(kind, self.stage_index, micro_batch))

    def recompute(self, micro_batch: int) -> None:
        """Recompute now what the backward pass of a micro-batch needs."""
        regions = self._regions.get(micro_batch)
        if regions is not None:
            with self.noted("recompute", micro_batch):
                regions.recompute()

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run the forward of a micro-batch, and collect its regions."""
        with self.noted("forward", fwd_chunk_id), self._collecting(fwd_chunk_id):
            output = super().forward_one_chunk(
                fwd_chunk_id, args, kwargs, save_forward_output
            )
        if self.has_backward and not self._is_checked:
            self._is_checked = True
            self.check_outputs(self.fwd_cache[fwd_chunk_id][0])
            self._check_regions(fwd_chunk_id)
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run the backward pass of a micro-batch, or its part for the inputs."""
        kind = "backward" if full_backward else "backward_input"
        with self.noted(kind, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward:
            self._regions.pop(bwd_chunk_id, None)
            if loss is not None and not loss._is_view():
                # torch keeps losses to the end of the step, and with each the graph,
                # whose leaf is what the stage has received.
                loss.detach_()
                if loss.untyped_storage().nbytes() > loss.nbytes:
                    loss.data = loss.clone()  # `mse_loss` reduces within its input's.

    def backward_weight_one_chunk(
        self, bwd_chunk_id: int, last_backward: bool = False
    ) -> None:
        """Run the part of a micro-batch's backward pass for the weights."""
        with self.noted("backward_weight", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._regions.pop(bwd_chunk_id, None)

    def clear_runtime_states(self) -> None:
        """Forget what a step that failed has left."""
        super().clear_runtime_states()
        self._regions.clear()

    @contextmanager
    def _collecting(self, micro_batch: int) -> Iterator[None]:
        if not self._order.recomputes(self.stage_index, micro_batch):
            with disable_checkpointing():
                yield
            return
        with collect_regions() as self._regions[micro_batch]:
            yield

    def check_outputs(self, outputs: Sequence[Any]) -> None:
        """Raise if no gradient, or a wrong one, would come through a forward's outputs.

        Raises:
            CheckpointError: The stage has parameters to train, and no output of it
                requires a gradient; or its graph holds a reentrant region.
        """
        parameters = [p for p in self.submod.parameters() if p.requires_grad]
        tensors = [o for o in outputs if isinstance(o, Tensor)]
        if not (parameters and tensors):
            return
        if not any(tensor.requires_grad for tensor in tensors):
            raise CheckpointError(
                f"stage {self.stage_index} has {len(parameters)} trainable parameters, "
                f"and no output that requires a gradient: none of them would be "
                f"trained, nor those of the stages before. The usual cause is a "
                f"reentrant region (use_reentrant=True) on inputs that need no "
                f"gradient: leave use_reentrant out, or pass use_reentrant=False."
            )
        if name := _reentrant_node(tensors):
            raise CheckpointError(
                f"stage {self.stage_index} runs a reentrant region ({name} in its "
                f"autograd graph). Reentrant regions cannot be recomputed ahead, nor "
                f"differentiated for inputs and weights apart: leave use_reentrant "
                f"out, or pass use_reentrant=False."
            )

    def _check_regions(self, micro_batch: int) -> None:
        regions = self._regions.get(micro_batch)
        if regions is not None and not regions.ran:
            raise OptionError(
                f"stage {self.stage_index} is to drop its activations, and no region "
                f"ran in its forward. Put regions on its module with membudget.apply, "
                f"take stages from membudget.pipeline.split, or give the stage "
                f"checkpoint='never'."
            )


def _reentrant_node(outputs: Sequence[Tensor]) -> str:
    """Return the name of a reentrant region's node in a graph, or an empty string."""
    waiting: list[Any] = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen: set[torch.autograd.graph.Node] = set(waiting)
    while waiting:
        node = waiting.pop()
        if node.name() in _REENTRANT:
            return str(node.name())
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return ""
