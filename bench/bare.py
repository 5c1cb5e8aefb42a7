"""Peers that are one plain call of a library: a SQLite transaction, a Parquet file written, a Parquet file read.

They import nothing of ours. Each is started in a process of its own by `bench.peer`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from bench.bare_log import SETTINGS, BareLog
from bench.peer import Ready


@contextmanager
def sqlite_transactions(path: str, size: str) -> Iterator[Ready]:
    """One insert of a row of `size` bytes in a durable transaction of its own."""
    import apsw  # noqa: PLC0415 - the other peers of this module run without it

    connection = apsw.Connection(path)
    for pragma in ("journal_mode=WAL", "synchronous=FULL"):
        list(connection.execute(f"PRAGMA {pragma}"))
    connection.execute("CREATE TABLE log (key TEXT, seqno INTEGER, data BLOB, PRIMARY KEY (key, seqno))")
    numbers, data = iter(range(10**9)), b"x" * int(size)

    def insert() -> None:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO log VALUES ('small', ?, ?)", (next(numbers), data))
        connection.execute("COMMIT")

    with closing(connection):
        yield Ready(
            f"SQLite {apsw.sqlite_lib_version()}, WAL, synchronous=FULL, a row of {size} bytes a transaction, "
            "statements cached",
            {"run": insert},
        )


@contextmanager
def write_table(source: str) -> Iterator[Ready]:
    """`pyarrow.parquet.write_table` of the table that an Arrow file holds, all of it in memory."""
    with pa.OSFile(source) as file:
        table = pa.ipc.open_file(file).read_all()
    target = Path(source).with_suffix(".parquet")
    yield Ready(
        f"pyarrow {pa.__version__}, its defaults: snappy, dictionaries, statistics; not synced, not sorted",
        {"run": lambda: pq.write_table(table, target)},
    )


@contextmanager
def read_table(source: str) -> Iterator[Ready]:
    """`pyarrow.parquet.read_table` of a file that `write_table` has written."""
    pool = pa.default_memory_pool().backend_name
    yield Ready(
        f"pyarrow {pa.__version__}, its defaults: {pa.cpu_count()} threads, pre-buffered, {pool}; the file is snappy, "
        "with dictionaries, in row groups of 1 Mi rows",
        {"run": lambda: pq.read_table(source)},
    )


@contextmanager
def postgres_log(url: str, size: str) -> Iterator[Ready]:
    """Append one row by a bare compare-and-set."""
    log = BareLog.create(url, int(size))

    def append() -> int:
        log.try_append()
        return log.seqno

    with closing(log):
        yield Ready(SETTINGS + log.durability(), {"run": append})
