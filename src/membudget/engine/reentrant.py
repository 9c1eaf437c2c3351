"""The classic variant: a region as an `autograd.Function` (`use_reentrant=True`).

Its forward runs the function without a graph, its backward runs it again with one and
differentiates that. It costs nothing for each saved tensor, and it has limits, each of
which loses gradients in silence elsewhere. Here each is a `ReentrantLimitError`:

* some positional tensor must require a gradient, if there are parameters to train;
* tensors that require a gradient must be positional, not keywords, not nested;
* outputs are a tensor or a tuple or list of tensors and other values;
* `torch.autograd.grad`, `backward(inputs=...)` and double backward are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from membudget._torch import is_whole_backward, tree_iter
from membudget.engine.identity import version_of
from membudget.engine.options import RegionOptions
from membudget.engine.scope import Scope
from membudget.engine.statistics import Statistics
from membudget.engine.surroundings import GuardedSurroundings, Surroundings
from membudget.engine.switches import RECOMPUTING
from membudget.engine.watch import rewritten_error
from membudget.errors import ReentrantLimitError

_REMEDY = "Leave use_reentrant out: the default engine has no such limit."


class _Call:
    """One call of the region: what its backward needs."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: RegionOptions,
    ):
        self.function = function
        self.kwargs = kwargs
        self.sequence: type | None = None
        self.statistics: Statistics | None = None
        self.positions = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
        self.others = tuple(None if isinstance(a, Tensor) else a for a in args)
        # The tensors are autograd's to save; all the rest is held as ever.
        kind = GuardedSurroundings if options.guards else Surroundings
        self.surroundings: Surroundings = kind(function, self.others, kwargs, options)

    def with_tensors(self, others: Sequence[Any], tensors: Sequence[Tensor]) -> Any:
        """Return the positional arguments with `tensors` in their places."""
        args = list(others)
        for position, tensor in zip(self.positions, tensors, strict=True):
            args[position] = tensor
        return args


class _Reentrant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Any:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        args = call.with_tensors(call.others, tensors)
        versions = [version_of(tensor) for tensor in tensors]
        output = call.function(*args, **call.kwargs)
        call.surroundings.finish()
        _check_grown(call)
        for position, tensor, version in zip(
            call.positions, tensors, versions, strict=True
        ):
            if version_of(tensor) != version:
                raise rewritten_error(f"argument {position}")
        _check_output(output)
        if isinstance(output, tuple | list):
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
        return (None, *(leaf.grad for leaf in inputs))


def _differentiate(
    call: _Call, inputs: list[Tensor], gradients: tuple[Tensor | None, ...]
) -> None:
    """Run the function again with a graph and send the gradients through it."""
    if call.statistics is not None:
        call.statistics.recomputes += 1
    outputs: list[Any] = []

    def rerun() -> None:
        with Scope() as ambient:
            others, kwargs = call.surroundings.arguments.rebuild()
            call.surroundings.enter_ambient(ambient)
            with torch.enable_grad():
                output = call.function(*call.with_tensors(others, inputs), **kwargs)
            outputs.extend(output if isinstance(output, tuple | list) else [output])

    # The buffers stay as the graph saw them until it was differentiated; autocast
    # must have ended by then, or it would cast the operators of the backward.
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


def run_reentrant(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: RegionOptions,
    statistics: Statistics | None,
) -> Any:
    """Run one region in the classic way.

    Args:
        function: What the region calls.
        args: Its positional arguments: the tensors that may get a gradient.
        kwargs: Its keyword arguments, none of which may require a gradient.
        options: The region's options.
        statistics: Where to count, if somebody counts.

    Returns:
        What `function` returns.

    Raises:
        ReentrantLimitError: If a gradient would be lost.
    """
    call = _Call(function, args, kwargs, options)
    _check_hidden(args, kwargs)
    if not any(args[i].requires_grad for i in call.positions):
        if call.surroundings.trainable:
            raise ReentrantLimitError(
                "no positional tensor of a region with use_reentrant=True requires a "
                "gradient, so the parameters that the function trains would get none. "
                f"{_REMEDY}"
            )
        return function(*args, **kwargs)
    call.statistics = statistics
    if statistics is not None:
        statistics.forwards += 1
    output = _Reentrant.apply(call, *(args[i] for i in call.positions))  # type: ignore[no-untyped-call]
    return call.sequence(output) if call.sequence is not None else output


def _check_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for owner, values in (("argument", dict(enumerate(args))), ("keyword", kwargs)):
        for key, value in values.items():
            if owner == "argument" and isinstance(value, Tensor):
                continue
            if any(isinstance(t, Tensor) and t.requires_grad for t in tree_iter(value)):
                raise ReentrantLimitError(
                    f"{owner} {key!r} of a region with use_reentrant=True holds a "
                    "tensor that requires a gradient; only positional tensors get "
                    f"one. {_REMEDY}"
                )


def _check_grown(call: _Call) -> None:
    """Refuse tensors that the function left in a container that it was given."""
    before = call.surroundings.arguments.rebuild()
    if _count_tensors((call.others, call.kwargs)) > _count_tensors(before):
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
