"""What the example programs share: a progress bar, and failures that end in a sentence and an exit code.

Exit codes: 0 done, 1 failed, 2 wrong arguments, 3 the source is not the one that was ingested before, 4 the shard's
contents differ from the source, 130 interrupted (run the same command again to continue).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import persist_lib as persist
from examples.failures import Failed

errors = Console(stderr=True, soft_wrap=True, highlight=False)


Advance = Callable[[int], None]


@contextmanager
def progress(what: str, total: int, *, shown: bool = True) -> Iterator[Advance]:
    """Show a progress bar on standard error. The yielded function advances it."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors, disable=not shown) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def run(program: Callable[[], None]) -> int:
    """Run a program and return its exit code. Expected failures are printed as one sentence on standard error."""
    try:
        program()
    except Failed as failure:
        return _say(str(failure), failure.exit_code)
    except persist.UpperMismatch as failure:
        return _say(f"{failure}. Another process appends to this shard; wait for it, then run this again", 1)
    except (persist.PersistError, OSError) as failure:
        return _say(f"{type(failure).__name__}: {failure}", 1)
    except KeyboardInterrupt:
        return _say("interrupted; run the same command again to continue", 130)
    return 0


def positive(text: str) -> int:
    """An argument that must be a whole number above zero; `1_000_000` is one."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _say(message: str, code: int) -> int:
    errors.print(message, markup=False, style="red")
    return code
