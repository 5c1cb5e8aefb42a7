"""The changes of a life, which all sides make, and the peers that make them: deltalake, DuckLake and pyiceberg.

Nothing of ours is imported here. Each peer gets a folder, the address of an S3 server with a bucket of its name (or
nothing, for data on the local disk), and how many rows and upserts there are, after how many of them upkeep comes, and
how many earlier versions are read. Credentials come from the environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bench.merges import LAKE, MIB
from bench.peer import Ready

if TYPE_CHECKING:
    import duckdb

KEYS, NEW, DELETED = 1_000, 333, 100
DELETES = 10
BELOW = 10_000
NAMES = ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "DEFAULT_REGION")


def table_of(keys: np.ndarray, step: int) -> pa.Table:
    """Rows for these keys, other ones in each step."""
    notes = np.char.add("note ", ((keys * 104_729 + step) % 1_000_003).astype(str))
    return pa.table({"k": keys, "a": (keys * 7919 + step) % 100_000, "b": pa.array(notes)})


def loads(rows: int) -> Iterator[pa.Table]:
    """The rows that are there before the first change."""
    return (table_of(np.arange(start, min(start + MIB, rows)), 0) for start in range(0, rows, MIB))


def changes(rows: int, step: int) -> tuple[pa.Table, np.ndarray]:
    """What one step upserts, and the keys that it deletes then."""
    random, there = np.random.default_rng(step), rows + (step - 1) * NEW
    by_zipf = random.zipf(1.2, 4 * KEYS) * 7_919 % there
    old = np.unique(np.concatenate([by_zipf, random.choice(there, KEYS, replace=False)])[: KEYS * 2])
    chosen = np.sort(random.choice(old, KEYS - NEW, replace=False))
    deleted = random.choice(there, DELETED, replace=False) if step % DELETES == 0 else np.empty(0, np.int64)
    return table_of(np.concatenate([chosen, np.arange(there, there + NEW)]), step), np.sort(deleted)


def looked_up(rows: int) -> list[int]:
    """The keys of a look-up."""
    return [int(key) for key in np.random.default_rng(0).choice(rows, 3, replace=False)]


def stretches(rows: str, steps: str, every: str) -> Iterator[Iterator[tuple[pa.Table, np.ndarray]]]:
    """The changes before the first upkeep, those before the second, and so on."""
    for start in range(0, int(steps), int(every)):
        yield (changes(int(rows), step) for step in range(start + 1, start + int(every) + 1))


def among(ends: Sequence[int], some: str) -> list[int]:
    """So many of the versions, evenly spread."""
    return [ends[len(ends) * part // int(some)] for part in range(int(some))]


@contextmanager
def deltalake(folder: str, endpoint: str, rows: str, steps: str, every: str, some: str) -> Iterator[Ready]:
    """A Delta table."""
    import deltalake as peer  # noqa: PLC0415 - only its process needs it

    place, options = f"{folder}/table", None
    if endpoint:
        place = "s3://deltalake/life"
        options = {"AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true", "AWS_CONDITIONAL_PUT": "etag"}
    left, count = stretches(rows, steps, every), int(rows)
    versions: list[int] = []
    open_: list[peer.DeltaTable] = []

    def opened(version: int | None = None) -> peer.DeltaTable:
        return peer.DeltaTable(place, version=version, storage_options=options)

    def load() -> None:
        said = {"delta.enableChangeDataFeed": "true"}
        for table in loads(count):
            peer.write_deltalake(place, table, mode="append", configuration=said, storage_options=options)

    def upserts() -> None:
        table = opened()
        for source, deleted in next(left):
            merging = table.merge(source, predicate="t.k = s.k", source_alias="s", target_alias="t")
            merging.when_matched_update_all().when_not_matched_insert_all().execute()
            versions.append(table.version())
            if deleted.size:
                table.delete(f"k in ({', '.join(map(str, deleted))})")

    def upkeep() -> None:
        table = opened()
        table.optimize.compact()
        table.create_checkpoint()

    def between() -> int:
        start, end = versions[len(versions) // 4] + 1, versions[len(versions) // 2]
        return len(pa.table(opened().load_cdf(starting_version=start, ending_version=end)))

    def warm() -> int:
        if not open_:
            open_.append(opened())
        open_[0].update_incremental()
        return int(open_[0].to_pyarrow_table().num_rows)

    yield Ready(
        f"deltalake {peer.__version__}, its defaults but for the change data feed, all cores; upkeep is "
        "optimize.compact and create_checkpoint; on S3 commits are conditional PUTs (ETag)",
        {
            "load": load, "upserts": upserts, "upkeep": upkeep, "changes": between, "warm scan": warm,
            "scan": lambda: opened().to_pyarrow_table().num_rows,
            "filtered scan": lambda: opened().to_pyarrow_dataset().to_table(filter=pc.field("a") < BELOW).num_rows,
            "look-up": lambda: opened().to_pyarrow_table(filters=[("k", "in", looked_up(count))]).num_rows,
            "versions": lambda: sum(opened(version).to_pyarrow_table().num_rows for version in among(versions, some)),
        },
    )  # fmt: skip


@contextmanager
def _lake(folder: str, endpoint: str) -> Iterator[duckdb.DuckDBPyConnection]:
    """DuckLake as `lake`, with its catalog in a DuckDB file."""
    import duckdb  # noqa: PLC0415 - of another version than ours

    with duckdb.connect() as connection:
        for extension in ("ducklake", "httpfs") if endpoint else ("ducklake",):
            (file,) = (LAKE / f"duckdb_extension_{extension}").rglob("*.duckdb_extension")
            connection.execute(f"load '{file}'")
        if endpoint:
            id_, secret, region = (
                os.environ[f"AWS_{word}"] for word in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "DEFAULT_REGION")
            )
            connection.execute(
                f"create secret (type s3, key_id '{id_}', secret '{secret}', region '{region}', "
                f"endpoint '{endpoint.removeprefix('http://')}', url_style 'path', use_ssl false)"
            )
        data = "s3://ducklake/life/" if endpoint else f"{folder}/data/"
        connection.execute(f"attach 'ducklake:{folder}/catalog.ducklake' as lake (data_path '{data}')")
        yield connection


@contextmanager
def ducklake(folder: str, endpoint: str, rows: str, steps: str, every: str, some: str) -> Iterator[Ready]:
    """A DuckLake table."""
    sys.path.insert(0, str(LAKE))
    import duckdb  # noqa: PLC0415 - of another version than ours

    left, count = stretches(rows, steps, every), int(rows)
    versions: list[int] = []
    open_: list[duckdb.DuckDBPyConnection] = []
    opened = partial(_lake, folder, endpoint)

    def asked(*queries: str) -> int:
        with opened() as connection:
            tables: list[pa.Table] = [connection.execute(query).to_arrow_table() for query in queries]
        return sum(len(table) for table in tables)

    def load() -> None:
        with opened() as connection:
            connection.execute("create table lake.t (k bigint, a bigint, b varchar)")
            for source in loads(count):
                connection.register("source", source)
                connection.execute("insert into lake.t select * from source")

    def upserts() -> None:
        with opened() as connection:
            for source, deleted in next(left):
                connection.register("source", source)
                connection.execute(
                    "merge into lake.t t using source s on t.k = s.k when matched then update set a = s.a, b = s.b "
                    "when not matched then insert values (s.k, s.a, s.b)"
                )
                [(version,)] = connection.execute("select max(snapshot_id) from lake.snapshots()").fetchall()
                versions.append(version)
                if deleted.size:
                    connection.execute("delete from lake.t where list_contains(?, k)", [deleted.tolist()])

    def upkeep() -> None:
        with opened() as connection:
            connection.execute("checkpoint lake")

    with ExitStack() as stack:

        def warm() -> int:
            if not open_:
                open_.append(stack.enter_context(opened()))
            table: pa.Table = open_[0].execute("from lake.t").to_arrow_table()
            return len(table)

        yield Ready(
            f"DuckLake of duckdb {duckdb.__version__}, its defaults, all cores, catalog in a DuckDB file; upkeep is "
            "CHECKPOINT, which expires no snapshot unless asked to",
            {
                "load": load, "upserts": upserts, "upkeep": upkeep, "warm scan": warm,
                "scan": lambda: asked("from lake.t"),
                "filtered scan": lambda: asked(f"from lake.t where a < {BELOW}"),
                "look-up": lambda: asked(f"from lake.t where k in ({', '.join(map(str, looked_up(count)))})"),
                "versions": lambda: asked(*(f"from lake.t at (version => {one})" for one in among(versions, some))),
            },
        )  # fmt: skip


@contextmanager
def pyiceberg(folder: str, endpoint: str, rows: str, steps: str, every: str, some: str) -> Iterator[Ready]:
    """An Iceberg table."""
    import pyiceberg as peer  # noqa: PLC0415 - only its process needs it
    from pyiceberg.catalog.sql import SqlCatalog  # noqa: PLC0415
    from pyiceberg.expressions import In, LessThan  # noqa: PLC0415
    from pyiceberg.table import Table  # noqa: PLC0415

    left, count = stretches(rows, steps, every), int(rows)
    versions: list[int] = []
    open_: list[Table] = []
    options = {"warehouse": f"file://{folder}"}
    if endpoint:
        options = {
            "warehouse": "s3://pyiceberg/life", "s3.endpoint": endpoint, "s3.region": os.environ["AWS_DEFAULT_REGION"],
        }  # fmt: skip

    def opened() -> Table:
        catalog = SqlCatalog("bench", uri=f"sqlite:///{folder}/catalog.db", **options)
        catalog.create_namespace_if_not_exists("bench")
        return catalog.create_table_if_not_exists("bench.t", schema=table_of(np.arange(1), 0).schema)

    def load() -> None:
        table = opened()
        for source in loads(count):
            table.append(source)

    def upserts() -> None:
        table = opened()
        for source, deleted in next(left):
            table.upsert(source, join_cols=["k"])
            versions.append(table.metadata.current_snapshot_id or 0)
            if deleted.size:
                table.delete(In(term="k", literals=deleted.tolist()))

    def scanned(*found: int, **words: Any) -> int:
        table = opened()
        return sum(table.scan(snapshot_id=version, **words).to_arrow().num_rows for version in found or [None])

    def warm() -> int:
        if not open_:
            open_.append(opened())
        return int(open_[0].refresh().scan().to_arrow().num_rows)

    yield Ready(
        f"pyiceberg {peer.__version__}, its defaults (copy on write), SQL catalog on SQLite; it has no upkeep that "
        "rewrites data",
        {
            "load": load, "upserts": upserts, "upkeep": lambda: None, "warm scan": warm,
            "scan": scanned,
            "filtered scan": lambda: scanned(row_filter=LessThan(term="a", value=BELOW)),
            "look-up": lambda: scanned(row_filter=In(term="k", literals=looked_up(count))),
            "versions": lambda: scanned(*among(versions, some)),
        },
    )  # fmt: skip
