"""Peers for nested columns: plain Parquet, deltalake and DuckDB, each as its documentation sets it up.

They import nothing of ours. Each is started in a process of its own by `bench.peer`, with an Arrow file of rows and a
folder of its own. A call writes all of the rows in four pieces, makes one of them, or reads them all into Arrow.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from bench.peer import Ready

PIECES = 4


def pieces(source: str) -> list[pa.Table]:
    """The rows of an Arrow file, in four."""
    with pa.OSFile(source) as file:
        rows = pa.ipc.open_file(file).read_all()
    step = -(-len(rows) // PIECES)
    return [rows.slice(start, step) for start in range(0, len(rows), step)]


@contextmanager
def parquet(source: str, folder: str) -> Iterator[Ready]:
    """A file for each piece. What makes one of them reads all and writes them again, in key order."""
    given, root = pieces(source), Path(folder)
    files = [root / f"{at}.parquet" for at in range(len(given))]

    def append() -> None:
        for rows, file in zip(given, files, strict=True):
            pq.write_table(rows, file)

    def compact() -> None:
        pq.write_table(pa.concat_tables(map(pq.read_table, files)).sort_by("id"), root / "one.parquet")

    calls = {"append": append, "compact": compact, "read": lambda: pq.read_table(root / "one.parquet").num_rows}
    yield Ready(f"pyarrow {pa.__version__}, its defaults: snappy, dictionaries, statistics; not synced", calls)


@contextmanager
def delta(source: str, folder: str) -> Iterator[Ready]:
    """A Delta table, made anew for each round of appends."""
    import deltalake  # noqa: PLC0415 - only its process needs it

    given, place = pieces(source), f"{folder}/delta"

    def append() -> None:
        shutil.rmtree(place, ignore_errors=True)
        for rows in given:
            deltalake.write_deltalake(place, rows, mode="append")

    calls = {
        "append": append,
        "compact": lambda: deltalake.DeltaTable(place).optimize.compact() and None,
        "read": lambda: deltalake.DeltaTable(place).to_pyarrow_table().num_rows,
    }
    yield Ready(f"deltalake {deltalake.__version__}, its defaults, all cores; compaction does not sort", calls)


@contextmanager
def duck(source: str, folder: str) -> Iterator[Ready]:
    """DuckDB over Parquet files, with one thread."""
    import duckdb  # noqa: PLC0415 - only its process needs it

    given, connection = pieces(source), duckdb.connect(config={"threads": 1})

    def append() -> None:
        for at, rows in enumerate(given):
            connection.from_arrow(rows).write_parquet(f"{folder}/{at}.parquet")

    def compact() -> None:
        files = [f"{folder}/{at}.parquet" for at in range(len(given))]
        connection.read_parquet(files).order("id").write_parquet(f"{folder}/one.parquet")

    def read() -> int:
        return int(connection.read_parquet(f"{folder}/one.parquet").to_arrow_table().num_rows)

    calls = {"append": append, "compact": compact, "read": read}
    yield Ready(f"duckdb {duckdb.__version__}, one thread; write_parquet, sorted where it makes one", calls)
