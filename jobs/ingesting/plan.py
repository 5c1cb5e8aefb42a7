"""From a list of files to groups of tasks: the same for the same list and settings, so that a killed run continues.

A chunk is a range of bytes of one file, or a whole one. A task is one chunk, or several small ones. A group is what
one commit appends: its number is the sequence number of the producer, which a shard takes once.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from jobs.ingesting.inputs import File
from jobs.ingesting.settings import Settings


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """What starts in `[start, end)` of the file at this place in the list; without an end, all from `start`."""

    file: int
    start: int = 0
    end: int | None = None


class Task(msgspec.Struct, frozen=True, array_like=True):
    """The chunks that one task reads, one after the other."""

    chunks: tuple[Chunk, ...]


class Group(msgspec.Struct, frozen=True):
    """What one commit appends."""

    number: int
    tasks: tuple[Task, ...]
    size: int

    @property
    def chunks(self) -> list[Chunk]:
        """In their order."""
        return [chunk for task in self.tasks for chunk in task.chunks]


def chunks_of(number: int, file: File, settings: Settings) -> list[Chunk]:
    """The chunks of one file. One that is compressed, or whose quoted values hold line ends, cannot be cut."""
    if file.compression is not None or (settings.format == "csv" and settings.multiline):
        return [Chunk(number)]
    starts = range(0, max(1, file.size), settings.chunk_bytes)
    return [
        Chunk(number, start, start + settings.chunk_bytes if start + settings.chunk_bytes < file.size else None)
        for start in starts
    ]


def size_of(chunk: Chunk, files: Sequence[File]) -> int:
    """The bytes that a chunk reads, as stored."""
    size = files[chunk.file].size
    return (size if chunk.end is None else chunk.end) - chunk.start


def plan_groups(
    files: Sequence[File], settings: Settings, first: int, starts: Sequence[int] | None = None
) -> list[Group]:
    """The groups of a run, numbered from `first`.

    `starts` are the places of files with which groups begin (Debezium: where no transaction continues); without it,
    groups are cut between any chunks once they have `group_bytes`.
    """
    groups: list[Group] = []
    waiting: list[Chunk] = []
    size = 0

    def close() -> None:
        nonlocal waiting, size
        if waiting:
            groups.append(Group(first + len(groups), _tasks(waiting, files, settings), size))
            waiting, size = [], 0

    for number, file in enumerate(files):
        if starts is not None and number in starts:
            close()
        for chunk in chunks_of(number, file, settings):
            waiting.append(chunk)
            size += size_of(chunk, files)
            if starts is None and size >= settings.group_bytes:
                close()
    close()
    return groups


def _tasks(chunks: Sequence[Chunk], files: Sequence[File], settings: Settings) -> tuple[Task, ...]:
    tasks: list[Task] = []
    waiting: list[Chunk] = []
    size = 0
    for chunk in chunks:
        more = size_of(chunk, files)
        if waiting and size + more > settings.chunk_bytes:
            tasks.append(Task(tuple(waiting)))
            waiting, size = [], 0
        waiting.append(chunk)
        size += more
    if waiting:
        tasks.append(Task(tuple(waiting)))
    return tuple(tasks)
