"""Standard output and standard error as they really are: pipes whose reader left, a full disk, closed from the start.

A reader that leaves is no failure: `persist shard log orders | head -1` ends quietly. Output that cannot be written is
one. A stream that was closed before the start (`>&-`) is taken for the null device, so that no file that is opened
later gets its number, and with it what is printed.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

STANDARD = (0, 1, 2)


class _Watched(io.FileIO):
    """A file that remembers why writing to it failed, and whether that was printed."""

    failure: OSError | None = None
    is_told = False

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise


def run(program: Callable[[], object]) -> int:
    """Run a program on watched streams, and return its exit status.

    That is 0 if the reader of its output left, 1 if the output could not be written, and otherwise what it exits with.
    """
    fill_closed()
    out, err = _watch(sys.stdout, 1), _watch(sys.stderr, 2)
    status: object = 0
    try:
        try:
            program()
        except SystemExit as ended:
            status = ended.code
        sys.stdout.flush()
    except OSError:
        if out.failure is None and err.failure is None:
            raise
        status = status or 1
        _tell(out)
    if isinstance(out.failure, BrokenPipeError):
        status = 0 if status in (None, 0, 1) else status
    elif out.failure is not None or err.failure is not None:
        status = status or 1
    for number, watched in ((1, out), (2, err)):
        if watched.failure is not None:  # what is still buffered must not fail once more when the process ends
            _to_null(number)
    return status if isinstance(status, int) else int(bool(status))


def fill_closed() -> None:
    """Open the null device in place of each standard stream that was closed before the start."""
    while (number := os.open(os.devnull, os.O_RDWR)) in STANDARD:
        os.set_inheritable(number, True)
    os.close(number)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - a number, and for the whole run
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def told(error: OSError) -> OSError:
    """The same error as a sentence, if it is that of standard output. The caller prints it."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if not isinstance(raw, _Watched) or error is not raw.failure:
        return error
    raw.is_told = True
    return OSError(_sentence(error))


def _sentence(error: OSError) -> str:
    return f"standard output cannot be written: {error.strerror or error}"


def _tell(out: _Watched) -> None:
    if out.failure is None or out.is_told or isinstance(out.failure, BrokenPipeError):
        return
    with suppress(OSError):
        print(f"OSError: {_sentence(out.failure)}", file=sys.stderr, flush=True)


def _watch(stream: TextIO, number: int) -> _Watched:
    """Put a stream in its place whose failures are remembered, of the same encoding and buffering."""
    stream.flush()
    raw = _Watched(number, "w", closefd=False)
    is_line_buffered = number != 1 or stream.isatty()
    text = io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors, line_buffering=is_line_buffered
    )
    setattr(sys, "stdout" if number == 1 else "stderr", text)
    return raw


def _to_null(number: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    os.close(null)
