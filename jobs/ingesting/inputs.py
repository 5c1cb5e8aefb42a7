"""The files to read: folders, patterns and prefixes become a list of files, each in one version.

    orders.csv   ./folder   './folder/2026-*/*.csv.gz'   file:/data/orders   s3://bucket/prefix/   's3://bucket/2026-*.jsonl.gz?region=…'
    gs://bucket/prefix/   az://container/prefix/

A folder or prefix is searched in depth. In one, only names that end as the format's files do are taken (`SUFFIXES`,
also with .gz or .zst), and none that begins with `.` or `_`. A file that is named itself is taken whatever it is
called.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

import msgspec

from jobs.ingesting.settings import Format
from persist_lib.errors import InvalidUsage, NotFound
from persist_lib.location.objects.store import objects_at
from persist_lib.location.objects.target import is_on_cloud
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
    """One version of a file. Another has another `etag`: the store's own, or the last change and the size."""

    path: str
    size: int
    etag: str
    options: str = ""
    """Of an object store: the endpoint, region and the like, as in a URL's query. No part of the file's name."""

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
            raise InvalidUsage(
                f"an input is a file, a folder, a pattern or an s3://, gs:// or az:// URL: got {given!r}"
            )
        listing = _on_cloud(given) if is_on_cloud(given.replace("+cas:", ":", 1)) else _on_disk(given)
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


def _on_cloud(given: str) -> _Listing:
    place, _, options = given.partition("?")
    scheme = place.partition(":")[0].removesuffix("+cas")
    place = f"{scheme}://{place.split('://', 1)[1]}"
    bucket, _, key = place.removeprefix(f"{scheme}://").partition("/")
    wild = min((key.find(letter) for letter in WILD if letter in key), default=-1)
    prefix = key if wild < 0 else key[:wild]
    whole_bucket = f"{scheme}://{bucket}/"
    listed = asking_store(whole_bucket, options, lambda store: [*store.entries(prefix, f"list {given}")])
    files = [File(whole_bucket + one.name, one.size, one.version.strip('"'), options) for one in listed]
    if wild >= 0:
        matching = [file for file in files if fnmatchcase(file.path.removeprefix(whole_bucket), key)]
        if not matching:
            raise NotFound(f"{given}: no object matches")
        return _Listing(matching, False, place)
    if whole := [file for file in files if file.path == place]:
        return _Listing(whole, False, place)
    folder = place if place.endswith("/") or not key else place + "/"
    return _Listing([file for file in files if file.path.startswith(folder) and file.size], True, folder)


_stores: dict[tuple[str, str], Any] = {}


def asking_store(bucket: str, options: str, ask: Callable[[Any], T]) -> T:
    """Ask the objects of a bucket, as in `s3://bucket/`, reached by the options of a URL, again if that may help."""
    if (bucket, options) not in _stores:
        _stores[bucket, options] = objects_at(f"{bucket}?{options}" if options else bucket)
    objects, deadline = _stores[bucket, options], Runtime().deadline(PATIENCE_S)
    return retry(lambda: ask(objects), is_idempotent=True, deadline=deadline)
