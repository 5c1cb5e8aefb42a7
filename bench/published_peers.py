"""A DuckDB with its own extensions, in a process that has nothing of ours: published tables beside plain Parquet.

It is installed beside this project's packages, in a folder of its own, as its newest release needs extensions from the
same day (`requirements/readers.txt`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench.peer import Ready, install

ROOT = Path(__file__).parents[1]
READERS, PINS = ROOT / "build" / "readers", ROOT / "requirements" / "readers.txt"
EXTENSIONS = ("httpfs", "avro", "iceberg", "delta")
QUERIES = {
    "Q1": """
        select l_returnflag, l_linestatus, sum(l_quantity), sum(l_extendedprice),
               sum(l_extendedprice * (1 - l_discount)), sum(l_extendedprice * (1 - l_discount) * (1 + l_tax)), count(*)
        from lineitem where l_shipdate <= date '1998-09-02' group by all order by all""",
    "Q3": """
        select l_orderkey, sum(l_extendedprice * (1 - l_discount)) as revenue, o_orderdate, o_shippriority
        from customer, orders, lineitem
        where c_mktsegment = 'BUILDING' and c_custkey = o_custkey and l_orderkey = o_orderkey
          and o_orderdate < date '1995-03-15' and l_shipdate > date '1995-03-15'
        group by all order by revenue desc, o_orderdate, l_orderkey limit 10""",
    "Q6": """
        select sum(l_extendedprice * l_discount) from lineitem
        where l_shipdate >= date '1994-01-01' and l_shipdate < date '1995-01-01'
          and l_discount between 0.05 and 0.07 and l_quantity < 24""",
}
"""Those of TPC-H that ask for few tables."""


def installed() -> bool:
    """Whether DuckDB and its extensions are in their folder; installs them, if that can be."""
    if (READERS / "duckdb_extension_iceberg").is_dir():
        return True
    try:
        install(READERS, PINS)
    except subprocess.CalledProcessError:
        return False
    return True


@contextmanager
def duckdb(places: str) -> Iterator[Ready]:
    """Each query over tables by name, which are the SQL that reads them: `{"iceberg": {"orders": "iceberg_scan(…)"}}`.

    A call is `<of what> <query>`, and answers its rows as text.
    """
    sys.path.insert(0, str(READERS))
    import duckdb as engine  # noqa: PLC0415 - only its process needs it, from that folder

    connection = engine.connect(config={"allow_unsigned_extensions": "true"})
    connection.execute("set autoinstall_known_extensions = false; set autoload_known_extensions = false")
    for name in EXTENSIONS:
        (path,) = READERS.glob(f"duckdb_extension_{name}/extensions/*/{name}.duckdb_extension")
        connection.execute(f"load '{path}'")

    def run(of: str, tables: dict[str, str], query: str) -> str:
        connection.execute(f"create schema if not exists {of}; use {of}")
        for name, sql in tables.items():
            connection.execute(f"create or replace view {name} as from {sql}")
        return as_text(connection.execute(QUERIES[query]).fetchall())

    calls = {
        f"{of} {query}": partial(run, of, tables, query)
        for of, tables in json.loads(places).items()
        for query in QUERIES
    }
    yield Ready(f"DuckDB {engine.__version__}, its defaults", calls)


def as_text(rows: list[Any]) -> str:
    """Rows as text, each value as it prints."""
    return json.dumps([[str(value) for value in row] for row in rows])
