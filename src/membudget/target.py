"""Python objects that a command line names: the function of a model, an optimizer."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial, wraps
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from membudget.errors import OptionError


def load_target(target: str) -> Callable[..., Any]:
    """Return the function that `file.py:function` names.

    Args:
        target: The path of a Python file, a colon, and the name of a function in it.

    Returns:
        The function. The file is imported as a module, so code under
        `if __name__ == "__main__"` does not run.

    Raises:
        OptionError: If there is no such file or function.
    """
    path_text, _, name = target.rpartition(":")
    path = Path(path_text)
    if not path_text or not name:
        raise OptionError(f"TARGET is file.py:function; got {target!r}")
    if not path.is_file():
        raise OptionError(f"there is no file {path_text!r}, named by TARGET {target!r}")
    spec = spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise OptionError(f"{path_text!r} is not a Python file")
    module = module_from_spec(spec)
    # Let the file import its neighbours, as a script can; register it, so that its
    # classes can be pickled.
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise OptionError(f"{path_text!r} has no function {name!r}")
    return function  # type: ignore[no-any-return]


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
        raise OptionError(
            f"{name} must return (model, batch) or (model, batch, loss_fn); it "
            f"returned a {type(made).__name__}"
        )
    model, batch, *loss = made
    return model, batch, loss[0] if loss else None


def with_sizes(make: Callable[..., Any], chosen: dict[str, Any]) -> Callable[..., Any]:
    """Return `make` with some of its keyword arguments fixed."""
    if not chosen:
        return make
    bound = partial(make, **chosen)

    @wraps(make)
    def made(**sizes: Any) -> Any:
        return bound(**sizes)

    return made


def without_memory(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return `make`, creating its tensors on the meta device.

    Raises:
        OptionError: When called, if the function reads values of tensors.
    """
    import torch

    @wraps(make)
    def made(**sizes: Any) -> Any:
        try:
            with torch.device("meta"):
                return make(**sizes)
        except (NotImplementedError, RuntimeError) as error:
            if "meta" not in str(error):
                raise
            raise OptionError(
                "--fake makes the model on the meta device, where tensors have no "
                f"values, and the function reads some ({error}). Give those tensors "
                "device='cpu', or leave --fake out"
            ) from error

    return made


def optimizer_named(name: str) -> Any:
    """Return the optimizer class of `torch.optim` with a name; case does not matter.

    Raises:
        OptionError: If there is no such optimizer.
    """
    import torch

    classes = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    del classes["optimizer"]
    if name.lower() not in classes:
        raise OptionError(
            f"torch.optim has no optimizer {name!r}: it has {', '.join(classes)}"
        )
    return classes[name.lower()]
