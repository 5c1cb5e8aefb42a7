"""Peers that are one plain call of a library: a SQLite transaction, a Parquet file written or read, a synced append.

They import nothing of ours. Each is started in a process of its own by `bench.peer`.
"""

from __future__ import annotations

import os
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


@contextmanager
def synced_appends(path: str, size: str) -> Iterator[Ready]:
    """One write of `size` bytes to the end of a file, and an fsync."""
    data = b"x" * int(size)
    with Path(path).open("ab", buffering=0) as file:

        def append() -> None:
            file.write(data)
            os.fsync(file.fileno())

        yield Ready(f"a file opened for appending, {size} bytes a write, fsync after each", {"run": append})


@contextmanager
def lmdb_puts(path: str, size: str) -> Iterator[Ready]:
    """One put of a value of `size` bytes in a transaction of its own."""
    import lmdb  # noqa: PLC0415 - the other peers of this module run without it

    numbers, data = iter(range(10**9)), b"x" * int(size)
    with closing(lmdb.open(path, map_size=8 << 30)) as environment:

        def put() -> None:
            with environment.begin(write=True) as transaction:
                transaction.put(next(numbers).to_bytes(8, "big"), data)

        yield Ready(
            f"lmdb {lmdb.__version__}, its defaults: synced at each commit; a value of {size} bytes a transaction",
            {"run": put},
        )


@contextmanager
def plain_reads(path: str, count: str, size: str) -> Iterator[Ready]:
    """Read a file of records, each behind its length, one after the other."""
    target, record = Path(path), b"x" * int(size)
    target.write_bytes((len(record).to_bytes(4, "big") + record) * int(count))

    def read() -> int:
        found = 0
        with target.open("rb") as file:
            while head := file.read(4):
                found += len(file.read(int.from_bytes(head, "big")))
        return found

    yield Ready(f"a file of {count} records of {size} bytes behind their lengths, read one by one", {"run": read})
