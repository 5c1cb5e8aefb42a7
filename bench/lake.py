"""Table formats as peers: deltalake and pyiceberg, on S3 and on a local disk, each as its documentation sets it up.

They import nothing of ours. Each is started in a process of its own by `bench.peer`; credentials come from the
environment, as both look for them there. Rows come from an Arrow file, `appends` slices of it, each appended by itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyarrow as pa

from bench.peer import Ready


def slices(source: str, appends: int) -> list[pa.Table]:
    """The rows of an Arrow file, an append's worth each."""
    with pa.OSFile(source) as file:
        rows = pa.ipc.open_file(file).read_all()
    return [rows.slice(start, len(rows) // appends) for start in range(0, len(rows), len(rows) // appends)]


def each(append: Callable[[pa.Table], object], source: str, appends: int) -> Callable[[], None]:
    """A call that appends them all, one after the other."""

    def ingest() -> None:
        for table in slices(source, appends):
            append(table)

    return ingest


@contextmanager
def delta(url: str, bucket: str, source: str, appends: str) -> Iterator[Ready]:
    """A Delta table, appended to by a handle that is kept open."""
    import deltalake  # noqa: PLC0415 - only its process needs it

    place = f"s3://{bucket}/delta"
    options = {"AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true", "AWS_CONDITIONAL_PUT": "etag"}
    schema = slices(source, int(appends))[0].schema
    table = deltalake.DeltaTable.create(place, schema, storage_options=options)

    def scan() -> int:
        return deltalake.DeltaTable(place, storage_options=options).to_pyarrow_table().num_rows

    def compact() -> None:
        table.optimize.compact()
        table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)

    yield Ready(
        f"deltalake {deltalake.__version__}, its defaults, a checkpoint each 100 commits; commits by conditional PUT "
        "(ETag), handle kept open; compaction is optimize.compact and vacuum(0)",
        {
            "ingest": each(lambda rows: deltalake.write_deltalake(table, rows, mode="append"), source, int(appends)),
            "scan": scan,
            "compact": compact,
        },
    )


@contextmanager
def local_delta(*folders: str) -> Iterator[Ready]:
    """Delta tables on a local disk, each opened again. `scan` reads the first; `optimize` does one after the other."""
    import deltalake  # noqa: PLC0415 - only its process needs it

    left = iter(folders)

    def optimize() -> None:
        deltalake.DeltaTable(next(left)).optimize.compact()

    yield Ready(
        f"deltalake {deltalake.__version__}, its defaults, all cores, opened again each time",
        {"scan": lambda: deltalake.DeltaTable(folders[0]).to_pyarrow_table().num_rows, "optimize": optimize},
    )


@contextmanager
def iceberg(url: str, bucket: str, source: str, appends: str, folder: str) -> Iterator[Ready]:
    """An Iceberg table, appended to by a handle that is kept open."""
    import pyiceberg  # noqa: PLC0415 - only its process needs it
    from pyiceberg.catalog.sql import SqlCatalog  # noqa: PLC0415

    properties = {
        "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"s3://{bucket}/iceberg", "s3.endpoint": url,
        "s3.region": os.environ["AWS_DEFAULT_REGION"],
    }  # fmt: skip
    catalog = SqlCatalog("bench", **properties)
    catalog.create_namespace("bench")
    table = catalog.create_table("bench.bulk", slices(source, int(appends))[0].schema)

    def scan() -> int:
        return int(SqlCatalog("bench", **properties).load_table("bench.bulk").scan().to_arrow().num_rows)

    yield Ready(
        f"pyiceberg {pyiceberg.__version__}, its defaults (FastAppend, pyarrow's FileIO), SQL catalog on SQLite, "
        "handle kept open; compaction is an overwrite with what it reads, as it has none",
        {
            "ingest": each(table.append, source, int(appends)),
            "scan": scan,
            "compact": lambda: table.overwrite(table.scan().to_arrow()),
        },
    )
