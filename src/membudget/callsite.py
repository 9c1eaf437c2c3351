"""Find the module, call and source line that the user's program is executing.

All information is read from the Python stack, without dispatch modes or patches. In a
pack hook, for example, the outer frames belong to the code whose tensor autograd saves.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Mapping
from types import CodeType, FrameType

import torch

from membudget._torch import module_call_codes


class CallSite:
    """A location in the user's program: module, call and source line.

    Attributes:
        module_path: Name of the innermost running module; if the name is unknown, the
            module's class name.
        operator: Source text of the call that the innermost frame is evaluating.
        line: Innermost line of user code, as `"file.py:12"`.
    """

    __slots__ = ("line", "module_path", "operator")

    def __init__(self, frame: FrameType | None, module_names: Mapping[int, str]):
        """Walk the Python stack outwards, starting at `frame`."""
        self.operator = _expression(frame) if frame is not None else ""
        self.module_path = ""
        self.line = ""
        codes = module_call_codes()
        while frame is not None:
            if not self.line and not is_internal(frame.f_code):
                self.line = _line(frame.f_code, frame.f_lineno)
            if not self.module_path and frame.f_code in codes:
                module = frame.f_locals["self"]
                known = module_names.get(id(module))
                self.module_path = known or type(module).__name__
            if self.line and self.module_path:
                return
            frame = frame.f_back


def running_module(names: Mapping[int, str]) -> str:
    """Return the name of the innermost running module that `names` lists, or `""`."""
    codes = module_call_codes()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in codes:
            name = names.get(id(frame.f_locals["self"]))
            if name is not None:
                return name
        frame = frame.f_back
    return ""


def place_of(names: Mapping[int, str]) -> tuple[str, str]:
    """Return the innermost running module's name and the current line of user code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_internal(frame.f_code):
        frame = frame.f_back
    line = "" if frame is None else _line(frame.f_code, frame.f_lineno)
    return running_module(names), line


def user_line(error: BaseException) -> str:
    """Return the innermost line of user code in an error's traceback."""
    line = "the step"
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not is_internal(code):
            line = _line(code, trace.tb_lineno)
        trace = trace.tb_next
    return line


def _line(code: CodeType, number: int) -> str:
    return f"{os.path.basename(code.co_filename)}:{number}"


# The folders of torch and membudget, in this order.
_INTERNAL = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (torch.__file__, __file__)
)


def is_internal(code: CodeType) -> bool:
    """Return whether code belongs to torch or to membudget."""
    return code.co_filename.startswith(_INTERNAL)


def calling_frame() -> FrameType | None:
    """Return the innermost stack frame outside membudget that names the operator."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_INTERNAL[1]):
        frame = frame.f_back
    return frame and naming_frame(frame)


def naming_frame(caller: FrameType) -> FrameType:
    """Return the frame that names the operator which `caller` calls.

    Function modes, of which a default device is one, and classes of tensors come
    between: torch calls their `__torch_function__`, and that calls the operator.
    """
    while caller.f_code.co_name == "__torch_function__" and caller.f_back is not None:
        caller = caller.f_back
    return caller


def _expression(frame: FrameType) -> str:
    """Return the source text of the expression that `frame` is evaluating."""
    positions = list(frame.f_code.co_positions())
    # `f_lasti` is a byte offset; every entry covers two bytes of bytecode.
    line, end_line, start, end = positions[frame.f_lasti // 2]
    if line is None or start is None or end is None:
        return frame.f_code.co_name
    text = linecache.getline(frame.f_code.co_filename, line)
    expression = text[start : end if end_line == line else None].strip()
    return expression[:80] or frame.f_code.co_name


def fills_what_it_saved(caller: FrameType) -> bool:
    """Return whether the current operator saves a tensor before computing its content.

    RReLU saves its noise before drawing it (pytorch/pytorch#193671), so a recompute
    that stops at the save would return uninitialised memory. RReLU is recognised by its
    name in the calling Python code.
    """
    return "rrelu" in naming_frame(caller).f_code.co_names
