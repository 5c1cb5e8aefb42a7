"""The files to read: folders, patterns and prefixes become a list of files, each in one version.

    orders.csv   ./folder   './folder/2026-*/*.csv.gz'   file:/data/orders   s3://bucket/prefix/   's3://bucket/2026-*.jsonl.gz?region=…'

A folder or prefix is searched in depth. In one, only names that end as the format's files do are taken (`SUFFIXES`,
also with .gz or .zst), and none that begins with `.` or `_`. A file that is named itself is taken whatever it is
called.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl, unquote

import msgspec

from jobs.ingesting.settings import Format
from persist_lib.errors import InvalidUsage, NotFound
from persist_lib.location.wrap.deadline import retry
from persist_lib.runtime.ambient import Runtime

SUFFIXES: dict[Format, tuple[str, ...]] = {
    "csv": (".csv", ".tsv", ".txt"), "jsonl": (".jsonl", ".ndjson", ".json"), "parquet": (".parquet", ".pq"),
    "debezium": (".jsonl", ".ndjson", ".json"),
}  # fmt: skip
COMPRESSED = (".gz", ".zst")
WILD = "*?["
PATIENCE_S = 7.0
"""How long a failed request is sent again."""
T = TypeVar("T")


class File(msgspec.Struct, frozen=True, array_like=True):
    """One version of a file. Another has another `etag`: S3's own, or the time of the last change and the size."""

    path: str
    size: int
    etag: str
    options: str = ""
    """Of S3: the endpoint, region and the like, as in a URL's query. No part of the file's name."""

    @property
    def compression(self) -> str | None:
        """`.gz`, `.zst` or None, by its name."""
        return next((suffix for suffix in COMPRESSED if self.path.lower().endswith(suffix)), None)


class Found(NamedTuple):
    """The files in the order of their names, and how many names in folders do not look like the format's."""

    files: list[File]
    left_out: int


def find_files(inputs: Sequence[str], format: Format) -> Found:  # noqa: A002 - the option is called so
    """List the inputs. Raises NotFound for one that does not exist or holds no file of the format."""
    found: dict[str, File] = {}
    left_out = 0
    for given in inputs:
        if not isinstance(given, str) or not given.strip():
            raise InvalidUsage(f"an input is a file, a folder, a pattern or an s3:// URL: got {given!r}")
        listing = _on_s3(given) if given.startswith(("s3://", "s3+cas://")) else _on_disk(given)
        files, others = _chosen(given, listing, format)
        left_out += others
        found |= {file.path: file for file in files}
    return Found([found[path] for path in sorted(found)], left_out)


class _Listing(NamedTuple):
    """What an input names: some files, or those in a folder. `root` is what comes before their own names."""

    files: list[File]
    is_folder: bool
    root: str


def _chosen(given: str, listing: _Listing, format_: Format) -> tuple[list[File], int]:
    if not listing.is_folder:
        return listing.files, 0
    endings = tuple(
        suffix + packed
        for suffix in SUFFIXES[format_]
        for packed in ("", *(COMPRESSED if format_ != "parquet" else ()))
    )
    visible = [file for file in listing.files if not _is_hidden(file.path[len(listing.root) :])]
    taken = [file for file in visible if file.path.lower().endswith(endings)]
    if not taken:
        raise NotFound(
            f"{given}: there is no file that ends in {', '.join(SUFFIXES[format_])} there ({len(visible)} others are)"
        )
    return taken, len(visible) - len(taken)


def _is_hidden(name: str) -> bool:
    return any(part.startswith((".", "_")) for part in name.split("/") if part)


def _on_disk(given: str) -> _Listing:
    path = unquote(given.removeprefix("file:").removeprefix("//")) if given.startswith("file:") else given
    text = os.path.abspath(path)  # noqa: PTH100 - Path.resolve would follow links, and the name is what is remembered
    if Path(text).is_file():
        return _Listing([local_file(text)], False, text)
    if Path(text).is_dir():
        files = [local_file(os.path.join(folder, name)) for folder, _, names in os.walk(text) for name in names]  # noqa: PTH118
        return _Listing([file for file in files if file.size], True, text)
    if any(letter in text for letter in WILD):
        root = Path(text[: min(text.find(letter) for letter in WILD if letter in text)]).parent
        pattern = os.path.relpath(text, root)
        files = [local_file(str(one)) for one in root.glob(pattern) if one.is_file()]
        if not files:
            raise NotFound(f"{given}: no file matches")
        return _Listing(files, False, str(root))
    raise NotFound(f"{given}: there is no such file or folder")


def local_file(path: str) -> File:
    """The file as it is now."""
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise InvalidUsage(
            f"{path!a}: the name of this file is not UTF-8, so it cannot be remembered; rename it"
        ) from error
    said = os.stat(path)  # noqa: PTH116
    return File(path, said.st_size, f"{said.st_mtime_ns:x}-{said.st_size:x}")


def _on_s3(given: str) -> _Listing:
    place, _, options = given.partition("?")
    place = "s3://" + place.split("://", 1)[1]
    bucket, _, key = place.removeprefix("s3://").partition("/")
    wild = min((key.find(letter) for letter in WILD if letter in key), default=-1)
    prefix = key if wild < 0 else key[:wild]
    files = list(_list_s3(bucket, prefix, options, given))
    if wild >= 0:
        matching = [file for file in files if fnmatchcase(file.path.removeprefix(f"s3://{bucket}/"), key)]
        if not matching:
            raise NotFound(f"{given}: no object matches")
        return _Listing(matching, False, place)
    if whole := [file for file in files if file.path == place]:
        return _Listing(whole, False, place)
    folder = place if place.endswith("/") or not key else place + "/"
    return _Listing([file for file in files if file.path.startswith(folder) and file.size], True, folder)


def _list_s3(bucket: str, prefix: str, options: str, given: str) -> Iterator[File]:
    found = asking_s3(bucket, options, lambda s3: [*s3.entries(prefix, f"list {given}")])
    return (File(f"s3://{bucket}/{one.name}", one.size, one.version.strip('"'), options) for one in found)


_stores: dict[tuple[str, str], Any] = {}


def asking_s3(bucket: str, options: str, ask: Callable[[Any], T]) -> T:
    """Ask the objects of a bucket, reached with the options of a URL, again after failures that may pass."""
    from persist_lib.location.s3.client import Target, parse_url  # noqa: PLC0415 - boto3 is an extra
    from persist_lib.location.s3.objects import S3Objects  # noqa: PLC0415

    parse_url(f"s3://{bucket}/?{options}" if options else f"s3://{bucket}/")
    if (bucket, options) not in _stores:
        _stores[bucket, options] = S3Objects(Target(bucket, "", dict(parse_qsl(options))))
    objects, deadline = _stores[bucket, options], Runtime().deadline(PATIENCE_S)
    return retry(lambda: ask(objects), is_idempotent=True, deadline=deadline)
