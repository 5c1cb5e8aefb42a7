"""What the processes below this one use: the JVM of a Spark session, and its Python workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds of the JVM and of the Python workers, and the most memory (MiB) that one worker had resident."""

    jvm_s: float = 0.0
    workers_s: float = 0.0
    peak_mib: float = 0.0

    def __sub__(self, before: Usage) -> Usage:
        return Usage(self.jvm_s - before.jvm_s, self.workers_s - before.workers_s, self.peak_mib)


def used() -> Usage:
    """What they used so far, and those that have ended and were waited for."""
    jvm = workers = peak = 0.0
    for pid in below(os.getpid()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            seconds = _cpu_seconds(pid)
            if b"pyspark.daemon" in command:
                workers, peak = workers + seconds, max(peak, _peak_mib(pid))
            elif b"java" in command.partition(b"\0")[0]:
                jvm += seconds
        except (OSError, ValueError):
            continue  # it has just ended
    return Usage(jvm, workers, peak)


def below(pid: int) -> Iterator[int]:
    """The processes that this one started, and those that they did. A peer is none of them, nor is what is below it."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(folder.name))
    waiting = [pid]
    while waiting:
        found = [child for child in children.get(waiting.pop(), []) if not _is_peer(child)]
        yield from found
        waiting += found


def _is_peer(pid: int) -> bool:
    try:
        return b"bench.peer\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True  # it has just ended


def _cpu_seconds(pid: int) -> float:
    """User and system time, also of children that have ended: workers that Spark stopped count for their daemon."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / TICKS


def _peak_mib(pid: int) -> float:
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 1024
