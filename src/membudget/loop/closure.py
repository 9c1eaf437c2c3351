"""Notice the end of a closure, in which an optimizer's step runs micro-batches.

LBFGS needs one; Lightning gives one to every optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


def followed(
    args: tuple[Any, ...], kwargs: dict[str, Any], after: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of an optimizer's step, `after` called behind the closure.

    Args:
        args: Positional arguments, with the optimizer.
        kwargs: Keyword arguments.
        after: Called each time that the closure has returned.

    Returns:
        Other arguments; `None` if there is no closure, as a hook of torch returns.
    """
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": _followed(kwargs["closure"], after)}
    if args[1:2] and callable(args[1]):
        return (args[0], _followed(args[1], after), *args[2:]), kwargs
    return None


def _followed(closure: Callable[[], Any], after: Callable[[], None]) -> Any:
    @wraps(closure)
    def run() -> Any:
        found = closure()
        after()
        return found

    return run
