"""DuckDB as a peer of the kernel: one query that reads sorted runs, adds them up and writes one sorted Parquet file.

It imports nothing of ours, and is started in a process of its own by `bench.peer`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import duckdb

from bench.figures import peak_mib
from bench.peer import Ready

SETTINGS = {"threads": "1", "memory_limit": "'1GB'", "preserve_insertion_order": "false"}
QUERY = """
    COPY (SELECT key, state, amount, greatest(_time, {since}::UBIGINT) AS _time, sum(_diff)::BIGINT AS _diff
          FROM read_parquet('{source}/*.parquet') GROUP BY ALL HAVING sum(_diff) <> 0 ORDER BY 1, 2, 3, 4)
    TO '{target}' (FORMAT parquet)
"""


@contextmanager
def consolidate(root: str, since: str) -> Iterator[Ready]:
    """Merge the runs of a folder. Afterwards it tells its CPU seconds and its peak memory (MiB)."""
    folder = Path(root)
    said = ", ".join(f"{name}={value}" for name, value in SETTINGS.items())
    query = QUERY.format(source=folder / "runs", target=folder / "duckdb.parquet", since=since)
    with closing(duckdb.connect()) as connection:
        for name, value in {**SETTINGS, "temp_directory": f"'{folder / 'spill'}'"}.items():
            connection.execute(f"SET {name}={value}")

        def run() -> int:
            [(rows,)] = connection.execute(query).fetchall()
            return int(rows)

        yield Ready(
            f"DuckDB {duckdb.__version__}, {said}: ours is one core within 1 GiB, too; it spills to the same disk",
            {"run": run, "cpu": time.process_time, "peak": peak_mib},
        )
