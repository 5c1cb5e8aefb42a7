"""Reads a folder of files of lines as a source: growing files, rotated ones, new ones, packed ones.

Each file is a partition, and a message's address is the offset of its line in what is unpacked. Only whole lines are
messages. `identity` says which file a partition is:

- "path": the one with this path. Another file in its place, or one that was cut, is Diverged.
- "first line": the one that begins with this line, under whatever name, packed or not. So a log that is renamed, copied
  or packed when it is rotated stays the same partition, and the one that follows under its old name is a new one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Literal

import pyarrow as pa
import xxhash

from persist_lib.errors import Determinate, Diverged, Gone, NotFound
from persist_lib.sources.files.contents import BOM, DAMAGED, Contents, Packed, check_of, end_of, line_end, tables
from persist_lib.sources.files.folders import File, Folder, Opened, readable
from persist_lib.sources.protocol import START, Lag, Mark, Unread

Identity = Literal["path", "first line"]
LONGEST_FIRST_LINE = 64 << 10
ROTATED = re.compile(r"([.-][0-9][0-9t:_]*)+$")
"""What is put behind the name of a log when it is rotated."""
ATTEMPTS = 3
"""How often a file is looked for that is not where it was: one that is being renamed may be in no list."""
REMEMBERED = 100_000
"""Files whose first lines are remembered."""


class FolderReader:
    """What readers of a folder have in common. They leave files where they are: who made them takes them away."""

    _counts = "bytes"
    """What addresses count, as a field of `Lag`."""

    def __init__(self, folder: Folder, suffixes: tuple[str, ...]) -> None:
        self._folder, self._suffixes = folder, suffixes
        self._files: dict[str, File] = {}

    def _left(self, file: File, at: int) -> int:
        """How much of a file is beyond an address, by the last look."""
        raise NotImplementedError

    def lag(self, marks: Mapping[str, Mark]) -> Mapping[str, int]:
        found = {name: self._left(file, marks.get(name, START).address) for name, file in self._files.items()}
        return {name: left for name, left in found.items() if left > 0}

    def lags(self, marks: Mapping[str, Mark]) -> Mapping[str, Lag]:
        return {name: Lag(**{self._counts: left}) for name, left in self.lag(marks).items()}

    def tell(self, marks: Mapping[str, Mark]) -> None: ...

    def close(self) -> None:
        self._folder.close()


class LineFiles(FolderReader):
    """A source reader of files of lines. With `header`, the first line of each file is no message, but its header."""

    _unit = "line"

    def __init__(
        self, folder: Folder, suffixes: tuple[str, ...], *, identity: Identity, header: bool, may_grow: bool
    ) -> None:
        super().__init__(folder, suffixes)
        self._identity, self._header, self._may_grow = identity, header, may_grow and folder.is_growing
        self._first: dict[tuple[str, str], str | None] = {}
        self._sizes: dict[File, int] = {}
        self._packed: tuple[File, Packed] | None = None
        self._unlisted: dict[str, Unread] = {}
        self._problems: dict[File, Unread] = {}
        self._ends: dict[File, Mark] = {}
        self._copies: dict[tuple[File, File], bool] = {}

    def high_watermarks(self, bound: Mapping[str, Mark], most_bytes: int) -> Mapping[str, Mark]:
        """The ends of the last whole lines. Raises Diverged for a file that was cut or replaced."""
        self._files = self._listed()
        found: dict[str, Mark] = {}
        left = max(1, most_bytes)
        for partition, file in self._files.items():
            before = bound.get(partition, START)
            if left <= 0 or self._sizes.get(file, file.size if file.packing is None else -1) == before.address:
                continue
            with self._noting(file), self._contents(file, partition) as contents:
                mark = self._mark(partition, file, contents, before, left)
                self._note(file, contents, mark, before)
                if mark.address > before.address:
                    found[partition] = mark
                    left -= mark.address - before.address
        return found

    @contextmanager
    def _noting(self, file: File) -> Iterator[None]:
        """Remember why a file could not be read. Of one that is gone since it was listed, the next list tells."""
        try:
            yield
        except (FileNotFoundError, NotFound):
            pass
        except OSError as error:
            self._problems[file] = _unreadable(error)

    def unread(self) -> Mapping[str, Unread]:
        return {**self._unlisted, **{file.path: one for file, one in self._problems.items()}}

    def _note(self, file: File, contents: Contents, mark: Mark, before: Mark) -> None:
        """Remember of a file that it is not whole from some place on."""
        self._problems.pop(file, None)
        if not contents.is_whole:
            why = f"it cannot be unpacked from byte {contents.size} on: {contents.damage}"
            self._problems[file] = Unread(why, file.changed_ms)
        elif mark.address == before.address and contents.range(mark.address, mark.address + 1):
            why = f"from byte {mark.address} on it has no whole {self._unit}: write its end, or take may_grow=False"
            self._problems[file] = Unread(why, file.changed_ms)

    def _mark(self, partition: str, file: File, contents: Contents, before: Mark, most: int) -> Mark:
        contents.keep(before.address)
        self._verify(partition, file, contents, before)
        if before.check.endswith(DAMAGED):
            return before
        may_grow = self._may_grow and file.packing is None
        end, damage = self._end(contents, before.address, before.address + most, may_grow=may_grow)
        if contents.size is not None:
            self._sizes[file] = contents.size
        return Mark(end, check_of(contents, end) + damage) if end > before.address else before

    def _end(self, contents: Contents, start: int, limit: int, *, may_grow: bool) -> tuple[int, str]:
        """The end of the last whole message in `[start, limit)`, of one at least; and `DAMAGED` if that is the last."""
        return line_end(contents, start, limit, may_grow=may_grow), ""

    def _verify(self, partition: str, file: File, contents: Contents, mark: Mark) -> None:
        """Raise Diverged if what is before a mark is not what was read before."""
        is_short = contents.size is not None and contents.size < mark.address
        if is_short or (mark.check and check_of(contents, mark.address) != mark.check.removesuffix(DAMAGED)):
            raise Diverged(
                f"the file {file.path} is not what was read before: it was cut or replaced, or changed before byte "
                f"{mark.address}. Nothing of it was written. Put the former file back; if files are rotated by "
                'renaming or copying them, the source needs identity="first line"',
                partition=partition, address=mark.address,
            )  # fmt: skip

    def read(self, partition: str, start: Mark, end: Mark) -> Iterator[pa.Table]:
        if start.address >= end.address:
            return
        for attempt in range(ATTEMPTS):
            file = self._find(partition, end, is_new=attempt > 0)
            try:
                if file is not None:
                    with self._contents(file, partition) as contents:
                        yield from self._read(partition, file, contents, start, end)
                        return
            except (FileNotFoundError, NotFound):  # it was renamed since it was listed, or is gone
                continue
            except OSError as error:
                raise Determinate(f"the file {partition} {_unreadable(error).why}. It is tried again") from error
        raise Gone(
            f"the file {partition} is gone, and its lines from byte {start.address} on are still needed. Nothing of "
            "them was written. Put it back; a file may go once the source says that it is durable",
            partition=partition, address=start.address,
        )  # fmt: skip

    def _read(self, partition: str, file: File, contents: Contents, start: Mark, end: Mark) -> Iterator[pa.Table]:
        contents.keep(start.address)
        self._verify(partition, file, contents, start)
        at, header = start.address, None
        if self._header:
            first = line_end(contents, 0, 1, may_grow=False)
            header = contents.range(0, first).removeprefix(BOM).rstrip(b"\r\n")
            at = max(at, first)
        for table in tables(contents, at, end.address):
            yield table if header is None else _with_header(table, header)
        self._verify(partition, file, contents, end)

    def estimate(self, partition: str, start: int, end: int) -> int:
        del partition
        return end - start

    def _left(self, file: File, at: int) -> int:
        """Of a packed file that was not read to its end, the size as it is stored, at its beginning."""
        is_known = file.packing is None or file in self._sizes or at == 0
        return self._sizes.get(file, file.size) - at if is_known else 0

    def close(self) -> None:
        self._packed = None
        super().close()

    def _listed(self) -> dict[str, File]:
        """The files by partition, in the order of partitions."""
        found: dict[str, File] = {}
        others: list[tuple[str, File]] = []
        files, self._unlisted = readable(self._folder, self._is_ours)
        there = set(files)
        self._problems = {file: one for file, one in self._problems.items() if file in there}
        for file in files:
            partition = self._partition(file)
            if partition is None:
                continue
            if (known := found.get(partition)) is None or _goes_before(file, known):
                found[partition] = file
                others += [] if known is None else [(partition, known)]
            else:
                others.append((partition, file))
        for cache in (self._first, self._ends, self._copies):
            if len(cache) > REMEMBERED:
                cache.clear()
        for partition, file in others:
            self._compare(file, found[partition])
        there = set(found.values())
        self._sizes = {file: size for file, size in self._sizes.items() if file in there}
        return {partition: found[partition] for partition in sorted(found)}

    def _compare(self, file: File, read: File) -> None:
        """Remember of a file that is not read, as another one begins with the same line, whether that has it all."""
        self._problems.pop(file, None)
        if (file, read) not in self._copies:
            with self._noting(file):
                if file not in self._ends:
                    with closing(self._folder.open(file)) as opened:
                        self._ends[file] = end_of(_opened(file, opened))
                with closing(self._folder.open(read)) as opened:
                    contents, end = _opened(read, opened), self._ends[file]
                    contents.keep(end.address)
                    self._copies[file, read] = bool(end.check) and check_of(contents, end.address) == end.check
        if not self._copies.get((file, read), True):
            self._problems[file] = Unread(
                f"it begins with the same line as {read.path}, and is another file: only that one is read"
            )

    def _is_ours(self, file: File) -> bool:
        name = file.plain_path.lower()
        return (name if self._identity == "path" else ROTATED.sub("", name)).endswith(self._suffixes)

    def _partition(self, file: File) -> str | None:
        """Which partition a file is; None as long as that is not known."""
        if self._identity == "path":
            return file.path
        key = file.path, file.version
        if key not in self._first:
            with self._noting(file), self._contents(file) as contents:
                self._first[key] = self._first_line(file, contents)
                if self._first[key] is None:
                    self._note(file, contents, START, START)
        return self._first.get(key)

    def _find(self, partition: str, end: Mark, *, is_new: bool) -> File | None:
        """The file of a partition, by the last list, or by a new one where that cannot have all of it."""
        file = self._files.get(partition)
        if is_new or file is None or (file.packing is None and file.size < end.address):
            self._files = self._listed()
            file = self._files.get(partition)
        return file

    @contextmanager
    def _contents(self, file: File, partition: str | None = None) -> Iterator[Contents]:
        """What is in a file. Of the packed one that was read last, what was unpacked is kept.

        Raises FileNotFoundError if the file is not the partition (any more): it was rotated since it was listed.
        """
        with closing(self._folder.open(file)) as opened:
            contents = Contents(opened) if file.packing is None else self._unpacking(file, opened)
            if partition is not None and self._identity != "path" and self._first_line(file, contents) != partition:
                raise FileNotFoundError(file.path)
            yield contents

    def _unpacking(self, file: File, opened: Opened) -> Packed:
        if self._packed is not None and self._packed[0] == file:
            self._packed[1].reopen(opened)
        else:
            self._packed = (file, Packed(opened, str(file.packing)))
        return self._packed[1]

    def _first_line(self, file: File, contents: Contents) -> str | None:
        """A digest of the first line; None for a file that has none yet."""
        line = contents.first(LONGEST_FIRST_LINE)
        end = line.find(b"\n")
        if end < 0 and len(line) < LONGEST_FIRST_LINE and self._may_grow and file.packing is None:
            return None
        return xxhash.xxh3_128_hexdigest(line[:end] if end >= 0 else line) if line else None


def _opened(file: File, opened: Opened) -> Contents:
    return Contents(opened) if file.packing is None else Packed(opened, file.packing)


def _unreadable(error: OSError) -> Unread:
    return Unread(f"could not be read: {error.strerror or error}")


def _goes_before(file: File, known: File) -> bool:
    """Which of two files of one partition is read: one that is not packed, and the one that has more.

    A log that is copied before it is cut is there twice for a while.
    """
    if (known.packing is None) != (file.packing is None):
        return file.packing is None
    return file.size > known.size


def _with_header(table: pa.Table, header: bytes) -> pa.Table:
    indices = pa.repeat(pa.scalar(0, pa.int8()), table.num_rows)
    names = pa.array([header.decode(errors="replace")])
    return table.append_column("header", pa.DictionaryArray.from_arrays(indices, names))
