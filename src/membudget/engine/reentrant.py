"""The classic variant of a region: an `autograd.Function` (`use_reentrant=True`).

The forward runs the function without building a graph; the backward runs the function
again with a graph and backpropagates through that graph; no hook runs per saved tensor.
Other implementations silently lose gradients when their limits are violated; membudget
raises a `ReentrantLimitError`. A reentrant region has five limits:

* if the function has trainable parameters, a tensor argument must require a gradient;
* tensors that require a gradient must be passed directly, not inside a container;
* the output must be a tensor, or a tuple or list of tensors and other values;
* at least one output must depend on a tensor that requires a gradient;
* `torch.autograd.grad`, `backward(inputs=...)` and double backward are not supported.

Unlike other regions, a reentrant region may give gradients that differ from plain
autograd's in the last bit. An input of a reentrant region receives its gradient as one
sum; plain autograd adds the gradient of each use separately, possibly in another order.
Floating-point addition is not associative, so tensors also used outside the region,
such as shared parameters, may get different gradients, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from membudget._torch import is_whole_backward, tree_iter
from membudget.engine.controls import RECOMPUTING
from membudget.engine.messages import rewritten_error
from membudget.engine.options import RegionOptions, Statistics
from membudget.engine.surroundings import Surroundings
from membudget.errors import ReentrantLimitError
from membudget.scope import Scope
from membudget.state.identity import version_of

_REMEDY = "Leave use_reentrant out: the default engine has no such limit."


class _ReentrantCall:
    """Data about one call of a reentrant region, needed in its backward pass."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: RegionOptions,
    ):
        self.function = function
        self.sequence: type | None = None
        self.statistics: Statistics | None = None
        self.names = [*range(len(args)), *kwargs]
        values = (*args, *kwargs.values())
        self.positions = [i for i, v in enumerate(values) if isinstance(v, Tensor)]
        self.others = tuple(None if isinstance(a, Tensor) else a for a in args)
        self.keywords = {
            k: None if isinstance(v, Tensor) else v for k, v in kwargs.items()
        }
        # Autograd saves the tensors; everything else is held as in any region.
        self.surroundings = Surroundings(function, self.others, self.keywords, options)

    def run(
        self, others: Sequence[Any], keywords: dict[str, Any], tensors: Sequence[Tensor]
    ) -> Any:
        """Call the function with `tensors` inserted at their argument positions."""
        values = [*others, *keywords.values()]
        for position, tensor in zip(self.positions, tensors, strict=True):
            values[position] = tensor
        named = dict(zip(keywords, values[len(others) :], strict=True))
        return self.function(*values[: len(others)], **named)


class _Reentrant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _ReentrantCall, *tensors: Tensor) -> Any:
        ctx.call = call
        # An undefined gradient must stay undefined, as in the plain step.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        versions = [version_of(tensor) for tensor in tensors]
        output = call.run(call.others, call.keywords, tensors)
        call.surroundings.finish()
        _check_grown(call)
        for position, tensor, version in zip(
            call.positions, tensors, versions, strict=True
        ):
            if version_of(tensor) != version:
                raise rewritten_error(f"argument {call.names[position]!r}")
        _check_output(output)
        if isinstance(output, tuple | list):
            # `apply` returns only plain tuples; `run_reentrant` restores the type.
            call.sequence = type(output)
            return tuple(output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if not is_whole_backward():
            raise ReentrantLimitError(
                "a region with use_reentrant=True cannot take part in "
                f"torch.autograd.grad() or backward(inputs=...). {_REMEDY}"
            )
        if torch.is_grad_enabled():
            raise ReentrantLimitError(
                "a region with use_reentrant=True cannot be differentiated twice "
                f"(create_graph=True). {_REMEDY}"
            )
        inputs = [
            saved.detach().requires_grad_(saved.requires_grad)
            for saved in ctx.saved_tensors
        ]
        _differentiate(ctx.call, inputs, gradients)
        return (None, *(leaf.grad for leaf in inputs))  # None for `call`.


def _differentiate(
    call: _ReentrantCall, inputs: list[Tensor], gradients: tuple[Tensor | None, ...]
) -> None:
    """Rerun the function with a graph, and backpropagate the gradients through it."""
    if call.statistics is not None:
        call.statistics.recomputes += 1
    outputs: list[Any] = []

    def rerun() -> None:
        with Scope() as ambient:
            others, keywords = call.surroundings.arguments.rebuild()
            call.surroundings.enter_ambient(ambient)
            with torch.enable_grad():
                output = call.run(others, keywords, inputs)
            outputs.extend(output if isinstance(output, tuple | list) else [output])

    # Buffers keep the forward's content until the backward is done; autocast ends
    # earlier, because it would cast the operators of the backward.
    with Scope() as state:
        call.surroundings.enter_state(state)
        me = get_ident()
        RECOMPUTING.append(me)
        try:
            call.surroundings.run_in_context(rerun)
        finally:
            RECOMPUTING.remove(me)
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if isinstance(output, Tensor)
            and output.requires_grad
            and gradient is not None
        ]
        if pairs:
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        elif any(gradient is not None for gradient in gradients):
            raise ReentrantLimitError(
                "a gradient reached a region with use_reentrant=True, but no output "
                "that got one depends on a tensor that requires a gradient (was it "
                f"detached, or made under no_grad?). {_REMEDY}"
            )


def run_reentrant(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: RegionOptions,
    statistics: Statistics | None,
) -> Any:
    """Run a function as a region of the classic, reentrant variant.

    Raises:
        ReentrantLimitError: A gradient would be lost.
    """
    call = _ReentrantCall(function, args, kwargs, options)
    _check_hidden(call)
    if call.surroundings.is_lazy:
        raise ReentrantLimitError(
            "a region with use_reentrant=True holds parameters that a lazy module has "
            "not initialised yet: run one forward outside of every region first. "
            f"{_REMEDY}"
        )
    values = (*args, *kwargs.values())
    tensors = [values[i] for i in call.positions]
    if not any(tensor.requires_grad for tensor in tensors):
        if call.surroundings.trainable:
            raise ReentrantLimitError(
                "no tensor argument of a region with use_reentrant=True requires a "
                "gradient, so the parameters that the function trains would get none. "
                f"{_REMEDY}"
            )
        return function(*args, **kwargs)
    call.statistics = statistics
    if statistics is not None:
        statistics.forwards += 1
    output = _Reentrant.apply(call, *tensors)  # type: ignore[no-untyped-call]
    return call.sequence(output) if call.sequence is not None else output


def _check_hidden(call: _ReentrantCall) -> None:
    for name, value in zip(
        call.names, (*call.others, *call.keywords.values()), strict=True
    ):
        if any(isinstance(t, Tensor) and t.requires_grad for t in tree_iter(value)):
            raise ReentrantLimitError(
                f"argument {name!r} of a region with use_reentrant=True holds a tensor "
                "that requires a gradient; only tensors that are arguments themselves "
                f"get one. {_REMEDY}"
            )


def _check_grown(call: _ReentrantCall) -> None:
    """Reject tensors that the function stored in a container argument."""
    arguments = call.surroundings.arguments
    if arguments.is_nested and _count_tensors(
        (call.others, call.keywords)
    ) > _count_tensors(arguments.rebuild()):
        raise ReentrantLimitError(
            "a region with use_reentrant=True put tensors into a list or dict that it "
            f"was given; no gradient would reach them. {_REMEDY}"
        )


def _count_tensors(tree: Any) -> int:
    return sum(isinstance(leaf, Tensor) for leaf in tree_iter(tree))


def _check_output(output: Any) -> None:
    items = output if isinstance(output, tuple | list) else [output]
    for item in items:
        if not isinstance(item, Tensor) and any(
            isinstance(leaf, Tensor) for leaf in tree_iter(item)
        ):
            raise ReentrantLimitError(
                "a region with use_reentrant=True returned tensors inside a "
                f"{type(item).__name__}; only a tensor, or a tuple or list of tensors, "
                f"is differentiated. {_REMEDY}"
            )
