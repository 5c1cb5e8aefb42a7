"""Where the time of a run of tests goes: seconds by the clock and of CPU, by folder, file, fixture and kind of start.

PERSIST_DURATIONS=folder has each worker write what it measured there, one JSON line a phase of a test;
`python -m tests.durations folder` prints the tables, and with `--dear` it rewrites the list of dear tests. CPU is that
of the worker and of all processes below it: what a JVM or a server that outlives the test does counts where it is done.
What is left of the clock's seconds is waiting.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.circles import DEAR

VARIABLE = "PERSIST_DURATIONS"

Row = dict[str, Any]
TICKS = os.sysconf("SC_CLK_TCK")
LISTDIR = os.listdir
"""As it is before a test breaks it."""


def _cpu() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime + _below(os.getpid())


def _below(pid: int) -> float:
    """The CPU of the processes below one that still run, and of their children that have ended."""
    spent = 0.0
    try:
        threads = LISTDIR(f"/proc/{pid}/task")
    except OSError:  # the process has ended
        return spent
    for thread in threads:
        try:
            children = Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
        except OSError:  # the thread has ended
            continue
        for child in children:
            try:
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            spent += sum(map(int, fields[11:15])) / TICKS + _below(int(child))
    return spent


class Recorder:
    """Writes a line for each phase of each test, each fixture that is made, and each process that is started."""

    def __init__(self, folder: Path) -> None:
        """Into `folder`, which is made."""
        folder.mkdir(parents=True, exist_ok=True)
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        self._out = (folder / f"{worker}-{os.getpid()}.jsonl").open("a", encoding="utf-8")
        self._owner = os.getpid()
        self._test = ""
        self._slept = 0.0
        self._count_starts()
        self._count_sleeps()

    def _write(self, **row: object) -> None:
        if os.getpid() == self._owner:
            self._out.write(json.dumps(row) + "\n")
            self._out.flush()

    def _count_starts(self) -> None:
        """Each process that Python starts is a line: what it runs, and in which test."""
        start = subprocess.Popen.__init__

        def counted(popen: Any, args: Any, *rest: Any, **named: Any) -> None:
            began = time.perf_counter()
            start(popen, args, *rest, **named)
            words = [args] if isinstance(args, str | bytes | Path) else list(args)
            self._write(kind="process", test=self._test, what=_program(words), wall=time.perf_counter() - began)

        subprocess.Popen.__init__ = counted  # type: ignore[method-assign, assignment]

    def _count_sleeps(self) -> None:
        """What the main thread sleeps by `time.sleep` is added up by phase."""
        sleep = time.sleep

        def counted(seconds: Any) -> None:
            self._slept += seconds if threading.current_thread() is threading.main_thread() else 0
            sleep(seconds)

        time.sleep = counted

    def _measured(self, kind: str, **named: object) -> Iterator[None]:
        wall, cpu, slept = time.perf_counter(), _cpu(), self._slept
        yield
        spent = {"wall": time.perf_counter() - wall, "cpu": _cpu() - cpu, "slept": self._slept - slept}
        self._write(kind=kind, **named, **spent)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        """Fixtures are measured one by one too."""
        self._test = item.nodeid
        yield from self._measured("setup", test=item.nodeid)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """The test itself."""
        yield from self._measured("call", test=item.nodeid)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        """What is stopped behind it."""
        yield from self._measured("teardown", test=item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """What failed, at once: with several workers pytest tells it at the end."""
        if report.failed:
            self._write(kind="failed", test=report.nodeid, when=report.when, why=str(report.longrepr)[-3000:])

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Iterator[None]:
        """One fixture, with those that it asks for only where they are made by it."""
        yield from self._measured("fixture", test=self._test, what=f"{fixturedef.argname} ({fixturedef.scope})")


def _program(words: list[Any]) -> str:
    """What a command line starts, short: `python -m persist_lib.cli`, `java`, `postgres`."""
    texts = [str(word) for word in words]
    name = Path(texts[0]).name
    if not name.startswith("python"):
        return name
    for place, word in enumerate(texts[1:], start=1):
        if word == "-c":
            return "python -c"
        if word == "-m":
            return f"python -m {texts[place + 1]}"
        if not word.startswith("-"):
            return f"python {Path(word).name}"
    return "python"


def read(folder: Path) -> list[Row]:
    """All lines that the workers of a run wrote."""
    return [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]


def _table(title: str, rows: Iterable[Row], key: Callable[[Row], str], most: int) -> str:
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0, 0])
    for row in rows:
        entry = sums[key(row)]
        entry[0] += row["kind"] not in {"setup", "teardown"}
        for place, name in enumerate(("wall", "cpu", "slept"), start=1):
            entry[place] += row.get(name, 0.0)
    lines = [f"| {title} | count | seconds | of CPU | asleep |", "|---|---:|---:|---:|---:|"]
    lines += [
        f"| {name} | {count:.0f} | {wall:.1f} | {cpu:.1f} | {slept:.1f} |"
        for name, (count, wall, cpu, slept) in sorted(sums.items(), key=lambda item: -item[1][1])[:most]
    ]
    return "\n".join(lines)


def _file(row: Row) -> str:
    return str(row["test"]).split("::", 1)[0]


def _folder(row: Row) -> str:
    parts = _file(row).split("/")
    return "/".join(parts[: 3 if parts[1:2] == ["unit"] else 2])


def tables(rows: list[Row]) -> str:
    """The tables, as Markdown."""
    phases = [row for row in rows if row["kind"] in {"setup", "call", "teardown"}]
    fixtures = [row for row in rows if row["kind"] == "fixture"]
    starts = [row for row in rows if row["kind"] == "process"]
    return "\n\n".join(
        (
            _table("all", phases, lambda row: str(row["kind"]), 3),
            _table("folder", phases, _folder, 60),
            _table("file", phases, _file, 40),
            _table("test", phases, lambda row: str(row["test"]), 40),
            _table("fixture", fixtures, lambda row: str(row["what"]), 20),
            _table("process started", starts, lambda row: str(row["what"]), 20),
        )
    )


def write_dear(rows: list[Row], least: float = 1.0) -> None:
    """Rewrite tests/dear.txt: functions by file, with their CPU seconds. What did not run keeps its line."""
    spent: dict[str, float] = defaultdict(float)
    for row in rows:
        if row["kind"] in {"setup", "call", "teardown"}:
            spent[str(row["test"]).partition("[")[0]] += row["cpu"]
    before = (line.split(" ", 1) for line in DEAR.read_text().splitlines())
    spent = {**{function: float(seconds) for seconds, function in before}, **spent}
    dear = sorted(function for function, seconds in spent.items() if seconds >= least)
    DEAR.write_text("".join(f"{spent[function]:.1f} {function}\n" for function in dear))


if __name__ == "__main__":
    if "--dear" in sys.argv:
        write_dear(read(Path(sys.argv[1])))
    else:
        print(tables(read(Path(sys.argv[1]))))
