"""What a batch means to a step: the model's arguments, and what the loss is given.

    batch                     model is called      loss is called
    tensor, list, object      model(batch)         loss_fn(output, batch)
    mapping                   model(**batch)       loss_fn(output, batch)
    tuple                     model(*batch)        loss_fn(output, batch)
    pair (inputs, targets)    model(inputs)        loss_fn(output, targets)

A tuple or list of two is a pair if a loss is given that is a module or a function of
`torch.nn.functional`, or if the model cannot be called with two arguments.

`call_make` makes model and batch by calling the user's function.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.utils.data import DataLoader

from membudget.errors import OptionError
from membudget.state.snapshot import State
from membudget.text import dtype_name


def first_batch(batch: Any) -> Any:
    """Return the first batch of a `DataLoader`; anything else as it is.

    Random number generators are left as they were. A list of a loader becomes a tuple.

    Raises:
        OptionError: If the loader is empty.
    """
    if not isinstance(batch, DataLoader):
        return batch
    # Starting an iterator draws a seed, and a sampler may shuffle.
    streams = State([("generator", batch.generator)])
    try:
        first = next(iter(batch), batch)
    finally:
        streams.restore()
    if first is batch:
        raise OptionError("the DataLoader is empty: a step needs one batch")
    return tuple(first) if type(first) is list else first


def call_model(model: Module, inputs: Any) -> Any:
    """Call a model on a tuple of arguments, a mapping of keywords, or one argument.

    A list, a dataclass and a named tuple are one argument.
    """
    if isinstance(inputs, Mapping) and not dataclasses.is_dataclass(inputs):
        return model(**inputs)
    if type(inputs) is tuple:
        return model(*inputs)
    return model(inputs)


def could_be_pair(batch: Any, loss_fn: Any) -> bool:
    """Return whether a batch might be `(inputs, targets)`."""
    return loss_fn is not None and type(batch) in (tuple, list) and len(batch) == 2


def is_pair(model: Module, batch: Any, loss_fn: Any) -> bool:
    """Return whether a batch is taken as `(inputs, targets)`."""
    if not could_be_pair(batch, loss_fn):
        return False
    if isinstance(loss_fn, Module) or _is_functional(loss_fn):
        return True
    if type(batch) is list:  # It may be the only argument.
        return False
    try:
        inspect.signature(model.forward).bind(*batch)
    except TypeError:
        return True
    return False


def _is_functional(loss_fn: Any) -> bool:
    return getattr(loss_fn, "__module__", "") == "torch.nn.functional"


def explain_call(error: Exception, model: Module, batch: Any, loss_fn: Any) -> None:
    """Say in a failed step's error how the model was called with the batch.

    Raises:
        OptionError: If the batch could also be meant the other way: as a pair, or as
            two arguments.
    """
    if could_be_pair(batch, loss_fn):
        raise _pair_error(batch, is_pair(model, batch, loss_fn), error) from error
    error.add_note(f"The step called {call_text(model, batch, loss_fn)}.")


def _pair_error(batch: Any, taken_as_pair: bool, error: Exception) -> OptionError:
    """Return the error for a pair taken for two arguments, or the other way round."""
    first, second = map(_described, batch)
    calls = "model(inputs) and loss_fn(output, targets)"
    if not taken_as_pair:
        shown = "*batch" if type(batch) is tuple else "batch"
        calls = f"model({shown}) and loss_fn(output, batch)"
    return OptionError(
        f"the batch ({first}, {second}) was used as {calls}, which failed with "
        f"{type(error).__name__}: {error}. To choose, pass a step function with "
        "modules=model: `lambda: loss_fn(model(inputs), targets).backward()` or "
        "`lambda: loss_fn(model(*batch), batch).backward()`"
    )


def call_text(model: Module, batch: Any, loss_fn: Any = None) -> str:
    """Return in words how a step calls a model with a batch that is no pair.

    Example:
        >>> import torch
        >>> call_text(Module(), (torch.ones(2, 3), 4))
        'Module(*batch) with float32[2, 3], int'
    """
    name = type(model).__name__
    if loss_fn is None and callable(getattr(model, "training_step", None)):
        return f"training_step(batch, 0) of {name} with {_described(batch)}"
    if isinstance(batch, Mapping) and not dataclasses.is_dataclass(batch):
        items = (f"{key}={_described(item)}" for key, item in batch.items())
        return f"{name}(**batch) with {', '.join(items)}"
    if type(batch) is tuple:
        return f"{name}(*batch) with {', '.join(map(_described, batch))}"
    return f"{name}(batch) with {_described(batch)}"


def _described(item: Any) -> str:
    if isinstance(item, Tensor):
        return f"{dtype_name(item.dtype)}{list(item.shape)}"
    return type(item).__name__


def call_make(make: Callable[..., Any], sizes: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Call `make` with some sizes, and return model, batch and loss function.

    Raises:
        OptionError: If `make` does not accept the sizes, or returns something else.
    """
    name = getattr(make, "__name__", "make")
    try:
        inspect.signature(make).bind(**sizes)
    except TypeError as error:
        given = ", ".join(f"{key}={value!r}" for key, value in sizes.items())
        raise OptionError(f"{name}({given}) cannot be called: {error}") from error
    made = make(**sizes)
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise _made_otherwise(name, f"a {type(made).__name__}")
    model, batch, *loss = made
    if not isinstance(model, Module) or not (loss in ([], [None]) or callable(*loss)):
        kinds = ", ".join(type(one).__name__ for one in made)
        raise _made_otherwise(name, f"({kinds})")
    return model, batch, loss[0] if loss else None


def _made_otherwise(name: str, found: str) -> OptionError:
    return OptionError(
        f"{name} must return (model, batch) or (model, batch, loss_fn); it returned "
        f"{found}"
    )
