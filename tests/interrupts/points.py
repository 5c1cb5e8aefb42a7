"""Interrupts at every place at which CPython looks for a signal.

A signal is handled between two instructions of the main thread: at the start of a function, when a generator is
resumed, when a loop goes round, and after a call of what is written in C. Nowhere else. So these places are finer than
lines, as a line may hold several calls, and truer: a tracer that raises at each line also raises at the end of a `with`
block, just before a C lock would be released, where no signal ever comes. CPython's tracer or profiler is called just
where the interpreter would have looked, and an exception that it raises goes the same way as one of a handler.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Self

import pytest

JUMPS = {"JUMP_BACKWARD", "POP_JUMP_BACKWARD_IF_FALSE", "POP_JUMP_BACKWARD_IF_TRUE", "POP_JUMP_BACKWARD_IF_NONE",
         "POP_JUMP_BACKWARD_IF_NOT_NONE"}  # fmt: skip
RESUME = dis.opmap["RESUME"]
CALLS = {"CALL", "CALL_FUNCTION_EX"}
OUTSIDE = ("tests/interrupts", "_pytest", "/pytest")
AT_A_DEATH = (("weakref.py", "remove"), ("_weakrefset.py", "_remove"))
"""Called when an object dies, at whatever place the collector chooses. Python tells nobody of an interrupt in there."""

only_on_cpython_3_11 = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="where signals are looked for is another matter in each version of CPython"
)


class _Code:
    """The places in one code object."""

    def __init__(self, code: CodeType) -> None:
        at_a_death = any(code.co_filename.endswith(file) and code.co_name == name for file, name in AT_A_DEATH)
        self.is_outside = at_a_death or any(part in code.co_filename for part in OUTSIDE)
        instructions = [(one.offset, one.opname) for one in dis.get_instructions(code)]
        self.jumps = {offset for offset, name in instructions if name in JUMPS}
        self.calls = {offset for offset, name in instructions if name in CALLS}
        self._covered = [(e.start, e.end, e.target) for e in dis._parse_exception_table(code)]  # type: ignore[attr-defined]

    def target(self, offset: int) -> int | None:
        """Where an exception at this offset is caught."""
        return next((target for start, end, target in self._covered if start <= offset < end), None)


class Interrupter:
    """Counts the places that the main thread comes to in the block, and raises KeyboardInterrupt at the one with number
    `at` (None: it only counts). `where` says which one that was."""

    _codes: dict[CodeType, _Code] = {}  # noqa: RUF012 - one for all

    def __init__(self, at: int | None, *, owner: Callable[[FrameType], bool] | None = None) -> None:
        self._at = at
        self._owner = owner
        self.count = 0
        self.where: str | None = None
        self._calling: dict[FrameType, tuple[int, bool]] = {}

    @property
    def has_struck(self) -> bool:
        return self.where is not None

    def __enter__(self) -> Self:
        sys.setprofile(self._profile)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        sys.setprofile(None)
        self._calling.clear()

    def _code(self, frame: FrameType) -> _Code:
        code = frame.f_code
        found = self._codes.get(code)
        if found is None:
            found = self._codes[code] = _Code(code)
        return found

    def _here(self, frame: FrameType, why: str) -> None:
        if self.has_struck or (self._owner is not None and not self._owner(frame)):
            return
        if self.count == self._at:
            stack, walked = [], frame
            while walked is not None and not self._code(walked).is_outside:
                name = walked.f_code.co_filename.rpartition("/")[2]
                stack.append(f"{name}:{walked.f_lineno} {walked.f_code.co_qualname}")
                walked = walked.f_back  # type: ignore[assignment]
            self.where = f"{why} at {' < '.join(stack[:5])}"
            raise KeyboardInterrupt(self.where)
        self.count += 1

    def _trace(self, frame: FrameType, event: str, _arg: Any) -> Any:
        code = self._code(frame)
        if self.has_struck or code.is_outside:
            return None
        # A class that is called enters its constructor through C, after which the interpreter looks; a function is not.
        if (back := frame.f_back) is not None and back in self._calling and frame.f_code.co_name != "__init__":
            self._calling[back] = (self._calling[back][0], False)
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if frame.f_code.co_code[frame.f_lasti] != RESUME or frame.f_code.co_code[frame.f_lasti + 1] < 2:
            self._here(frame, "entered")
        return self._opcode

    def _opcode(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "opcode":
            code, offset = self._code(frame), frame.f_lasti
            called = self._calling.pop(frame, None)
            if called is not None and called[1] and code.target(called[0]) == code.target(offset):
                self._here(frame, "called")
            if offset in code.calls:
                self._calling[frame] = (offset, True)
            if offset in code.jumps:
                self._here(frame, "loop")
        return self._opcode

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_return" and not self.has_struck and not self._code(frame).is_outside:
            if frame in self._calling:
                self._calling[frame] = (self._calling[frame][0], False)
            self._here(frame, f"after {getattr(arg, '__name__', arg)}")
