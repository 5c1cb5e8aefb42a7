"""Plans a run: which files are new, what their headers are, and where groups of changes may begin."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Literal

from jobs.ingesting.inputs import File
from jobs.ingesting.journal import Known, Run, new_run, pack_names
from jobs.ingesting.reading import read_range, read_unpacked
from jobs.ingesting.settings import Settings
from persist_lib.config import MIB
from persist_lib.convert.lines.csv_lines import check_names, header_of
from persist_lib.convert.lines.debezium import transaction_of
from persist_lib.convert.lines.decompression import DamagedFile
from persist_lib.convert.lines.line_blocks import cut, cut_records
from persist_lib.errors import InvalidUsage
from persist_lib.schema.schema import Schema

HEADS_AT_ONCE = 16
SHOWN = 5
LOOKS = 10_000
"""Lines that are looked at for one with a transaction."""
Changed = Literal["refuse", "take", "skip"]


class FilesChanged(InvalidUsage):
    """Files that were taken are other versions now. Field: paths."""


def new_files(found: Sequence[File], known: Known, changed: Changed) -> list[File]:
    """Those files that no run took. Raises FilesChanged."""
    others = [file for file in found if known.taken.get(file.path, file.etag) != file.etag]
    if others and changed == "refuse":
        names = ", ".join(file.path for file in others[:SHOWN]) + (
            f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
        )
        raise FilesChanged(
            f"{len(others)} files are not the versions any more that were taken: {names}. Nothing was written. What "
            "was taken stays in the shard "
            "in any case: use --changed skip to leave them, or --changed take to add their rows to those of the "
            "former versions",
            paths=[file.path for file in others],
        )
    again = {file.path for file in others} if changed == "take" else set()
    return [file for file in found if file.path not in known.taken or file.path in again]


def plan_run(
    files: Sequence[File], settings: Settings, schema: Schema, known: Known, bounds: tuple[int, int] | None = None
) -> Run:
    """The next run. Reads the first lines of CSV, and at the borders of groups some lines of changes."""
    names: dict[str, tuple[int, ...]] = {}
    starts = None
    if settings.format == "csv" and settings.names is None:
        with ThreadPoolExecutor(HEADS_AT_ONCE) as pool:
            names = pack_names(list(pool.map(lambda file: _header(file, settings), files)))
        _check_headers(names, files, settings, schema)
    elif settings.format == "csv":
        _check_headers({"\n".join(settings.names or ()): tuple(range(len(files)))}, files, settings, schema)
    if settings.format == "debezium":
        starts = tuple(_starts(files, settings))
    if bounds is not None:
        starts = ()
    return new_run(known, files, settings, schema, names=names, starts=starts, bounds=bounds)


def head(file: File, size: int = MIB) -> bytes:
    """The first bytes of a file, unpacked, up to a line's end if there is one. Raises InvalidUsage for damage."""
    pieces = read_range(file, 0, size) if file.compression is None else read_unpacked(file)
    try:
        found = next(iter(pieces), b"")
    except DamagedFile as damage:
        raise InvalidUsage(
            f"{file.path}: {damage}. Nothing was written; take it out of the inputs", path=file.path
        ) from damage
    is_all = len(found) >= file.size and file.compression is None
    return found if is_all or b"\n" not in found else found[: found.rfind(b"\n") + 1]


def _header(file: File, settings: Settings) -> tuple[str, ...]:
    first = head(file)
    if not first:
        return ()
    cutter = cut_records([first], settings.quote.encode()[0]) if settings.multiline else cut([first], 0, 0, 1)
    line = next(cutter).data
    try:
        return header_of(line if not settings.multiline else line[: line.find(b"\n") + 1], settings)
    except InvalidUsage as error:
        raise InvalidUsage(f"{file.path}: {error.message}. Nothing was written", path=file.path) from error


def _check_headers(
    names: dict[str, tuple[int, ...]], files: Sequence[File], settings: Settings, schema: Schema
) -> None:
    for text, places in names.items():
        header = text.split("\n") if text else []
        if header and (why := check_names(header, settings, schema)):
            raise InvalidUsage(
                f"{len(places)} of {len(files)} files cannot be taken, first {files[places[0]].path}: {why}. Its "
                "columns are "
                f"{', '.join(header)}. Nothing was written; --column NAME=FILES_NAME names columns that are called "
                "otherwise",
                path=files[places[0]].path,
            )


def _starts(files: Sequence[File], settings: Settings) -> list[int]:
    """The files with which groups of changes begin: where the one before has enough, and no transaction continues."""
    starts, size = [], 0
    for number, file in enumerate(files):
        if size >= settings.group_bytes and not _goes_on(files[number - 1], file):
            starts.append(number)
            size = 0
        size += file.size
    return starts


def _goes_on(before: File, after: File) -> bool:
    last = _last_transaction(before)
    return last is not None and last == _transaction(head(after).split(b"\n"))


def _transaction(lines: Iterable[bytes]) -> str | None:
    """That of the first line with one."""
    some = islice(lines, LOOKS)
    return next((found for line in some if line.strip() and (found := transaction_of(line)) is not None), None)


def _last_transaction(file: File) -> str | None:
    tail = b""
    pieces = read_range(file, max(0, file.size - MIB)) if file.compression is None else read_unpacked(file)
    try:
        for piece in pieces:
            tail = (tail + piece)[-MIB:]
    except DamagedFile:
        return None
    return _transaction(reversed(tail.split(b"\n")))
