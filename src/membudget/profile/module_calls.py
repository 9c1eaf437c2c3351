"""Note the calls of a model's modules: where the forward of each begins and ends.

A region runs a module's `forward`, so what the module's own hooks do lies outside of
the call: FSDP gathers parameters in such hooks, and tensor parallelism communicates.

    hooks of the module ─> begin ─> forward ─> end ─> hooks of the module
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from membudget._torch_modules import has_forward_hooks
from membudget.ops import tensors_in

Enter = Callable[[str, list[Tensor]], int | None]
Leave = Callable[[int], None]


@contextmanager
def noting_calls(
    modules: Mapping[str, Module], enter: Enter, leave: Leave
) -> Iterator[None]:
    """Note the calls of modules that run in the context.

    Args:
        modules: The modules, by path.
        enter: Called with the path of a module and the tensors among its arguments when
            its forward begins; returns a number for the call, or `None` to skip it.
        leave: Called with that number when the forward has returned.
    """
    noting = _Noting(modules, enter, leave)
    with ExitStack() as stack:
        for handle in noting.hooks():
            stack.callback(handle.remove)
        yield


class _Noting:
    """Notes calls, and which of them have not ended.

    Attributes:
        hooked: The modules with hooks of their own, within which calls are noted.
    """

    def __init__(self, modules: Mapping[str, Module], enter: Enter, leave: Leave):
        self._paths = {id(module): path for path, module in modules.items()}
        self._enter, self._leave = enter, leave
        self._open: list[tuple[str, int]] = []
        self.hooked = [m for m in modules.values() if has_forward_hooks(m)]
        self._within = {id(module) for module in self.hooked}

    def __deepcopy__(self, memo: dict[int, object]) -> _Noting:
        """Return itself: a step that copies a hooked module copies its hooks."""
        return self

    def hooks(self) -> Iterator[RemovableHandle]:
        """Register the hooks one by one: a scripted module may refuse its own."""
        yield register_module_forward_pre_hook(self.begin_unhooked)
        yield register_module_forward_hook(self.end_unhooked)
        for module in self.hooked:
            yield module.register_forward_pre_hook(self.begin)
            yield module.register_forward_hook(self.end, prepend=True)

    def begin(self, module: Module, args: Any) -> None:
        path = self._paths.get(id(module))
        if path is None:
            return
        number = self._enter(path, list(tensors_in(args)))
        if number is not None:
            self._open.append((path, number))

    def end(self, module: Module, args: Any, output: Any) -> None:
        path = self._paths.get(id(module))
        # A module that has no path may wrap one that has.
        while path is not None and self._open:
            left, number = self._open.pop()
            self._leave(number)
            if left == path:
                break

    def begin_unhooked(self, module: Module, args: Any) -> None:
        if id(module) not in self._within:
            self.begin(module, args)

    def end_unhooked(self, module: Module, args: Any, output: Any) -> None:
        if id(module) not in self._within:
            self.end(module, args, output)
