"""What one micro-batch costs a stage of a pipeline, or a block: seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass

from membudget.planner.pipeline_order import PipelineAction, PipelineOrder

COMPUTES = ("forward", "recompute", "backward", "backward_input", "backward_weight")
"""The actions that keep a rank busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """What one micro-batch costs a stage.

    Attributes:
        forward_s: Seconds of a forward.
        backward_s: Seconds of a backward pass, without recomputation.
        recompute_s: Seconds of a recompute.
        weight_s: The part of `backward_s` that computes gradients of weights, where a
            schedule takes the two apart; half of it by default.
        transfer_s: Seconds that a send or a receive keeps the rank from computing.
        static_bytes: Bytes live before the step: parameters, optimizer state.
        gradient_bytes: Bytes of the parameters' gradients, live from the first
            backward pass on; 0 if they are live before the step.
        input_bytes: Bytes of the stage's input, and of its gradient; 0 for the first.
        output_bytes: Bytes of the stage's output, and of its gradient; 0 for the last.
        saved_bytes: Bytes live from the forward to the backward pass, besides the
            input, where the stage drops nothing.
        kept_bytes: The same where it drops its activations: inputs of regions, what
            lies outside of regions, and the output.
        recomputed_bytes: Bytes live from a recompute to the backward pass.
        forward_peak_bytes: Most bytes of a forward above those live when it begins.
        recompute_peak_bytes: The same of a recompute ahead of its backward pass.
        backward_peak_bytes: The same of a backward pass that recomputes nothing.
        lazy_peak_bytes: The same of a backward pass that recomputes on demand.
    """

    forward_s: float
    backward_s: float
    recompute_s: float = 0.0
    weight_s: float | None = None
    transfer_s: float = 0.0
    static_bytes: int = 0
    gradient_bytes: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    saved_bytes: int = 0
    kept_bytes: int = 0
    recomputed_bytes: int = 0
    forward_peak_bytes: int = 0
    recompute_peak_bytes: int = 0
    backward_peak_bytes: int = 0
    lazy_peak_bytes: int = 0

    def seconds(self, order: PipelineOrder, action: PipelineAction) -> float:
        """Return how long an action of the stage takes, without waiting.

        The first stage has no input to differentiate for: its whole backward pass
        runs as that of the weights, as in torch.
        """
        if action.kind == "forward":
            return self.forward_s
        if action.kind == "recompute":
            return self.recompute_s
        weight_s = self.backward_s / 2 if self.weight_s is None else self.weight_s
        if action.stage == 0:
            weight_s = self.backward_s
        lazy_s = self.recompute_s if is_lazy(order, action) else 0.0
        if action.kind == "backward":
            return self.backward_s + lazy_s
        if action.kind == "backward_input":
            return 0.0 if action.stage == 0 else self.backward_s - weight_s + lazy_s
        if action.kind == "backward_weight":
            return weight_s + (lazy_s if action.stage == 0 else 0.0)
        return self.transfer_s if action.kind.startswith(("send", "receive")) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOfPipeline:
    """What one block costs for one micro-batch.

    Attributes:
        forward_s: Seconds of its forward, and of recomputing it.
        backward_s: Seconds of its backward pass, without recomputation.
        static_bytes: Bytes live before the step: parameters, optimizer state.
        gradient_bytes: Bytes of its parameters' gradients.
        saved_bytes: Bytes live from its forward to its backward pass, its output
            included, if it is not recomputed.
        kept_bytes: The same under a region: its output, above all.
        working_bytes: Most bytes of its forward or backward pass above those.
        input_bytes: Bytes of its input, which travels if another rank has made it.
        output_bytes: Bytes of its output, which travels if another rank takes it.
    """

    forward_s: float
    backward_s: float
    static_bytes: int = 0
    gradient_bytes: int = 0
    saved_bytes: int = 0
    kept_bytes: int = 0
    working_bytes: int = 0
    input_bytes: int = 0
    output_bytes: int = 0


def is_lazy(order: PipelineOrder, action: PipelineAction) -> bool:
    """Return whether a backward pass recomputes what no action has recomputed."""
    at = (action.stage, action.micro_batch)
    return order.recomputes(*at) and at not in order.recomputed_ahead
