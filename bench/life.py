"""A table after a life of changes: reads of it, as it is and as it was, beside deltalake, DuckLake and pyiceberg.

A load, then upserts of 1,000 keys (a third of them new, the others by Zipf), a delete of some keys after each tenth,
and each side's maintenance after each fiftieth; all history is kept. Then whole scans, filtered scans, look-ups, scans
as of 20 earlier versions, and the changes between two. Each side opens its table again for each read (once for all the
versions), on the local disk. A cold scan is one after the system has forgotten what it read of files, which takes root.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bench.figures import Figure, beside, timed
from bench.merges import LAKE, MIB, install_ducklake
from bench.peer import Peer, Ready

FULL, LONG, FEW, QUICK = (1_000_000, 100), (2_000_000, 500), (1_000_000, 20), (50_000, 20)
KEYS, NEW, DELETED = 1_000, 333, 100
DELETES, MAINTAINS = 10, 50
VERSIONS = 20
ROUNDS = 5
BELOW = 10_000
READS = ("scan", "filtered scan", "look-up", "versions")
PEERS = {"deltalake": (*READS, "changes"), "ducklake": READS}
"""What is asked of each. DuckLake's `table_changes` over 25 of 100 changes to 1 M rows waited without end or work."""
CACHES = Path("/proc/sys/vm/drop_caches")


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


def life(quick: bool) -> list[Figure]:
    """Seconds of each kind of read beside each peer."""
    return _life(*(QUICK if quick else FULL))


def life_long(quick: bool) -> list[Figure]:
    """The same of a longer life."""
    return _life(*(QUICK if quick else LONG))


def life_pyiceberg(quick: bool) -> list[Figure]:
    """The same of a shorter life beside pyiceberg, whose upserts take seconds, and which reads no changes."""
    return _life(*(QUICK if quick else FEW), peers={"pyiceberg": READS})


def _life(rows: int, steps: int, peers: Mapping[str, Sequence[str]] = PEERS) -> list[Figure]:
    install_ducklake()
    found: list[Figure] = []
    with TemporaryDirectory(prefix="persist-life-") as folder:
        calls = ours(folder, rows, steps)
        live = timed(calls["live"])
        for peer, reads in peers.items():
            with Peer(f"bench.life:{peer}", folder, rows, steps) as other:
                note = f"{rows:,} rows, then {steps} upserts"
                theirs = other.run(call="live")[0]
                found.append(Figure("life: all changes", live, theirs, "s", peer, note=note, settings=other.settings))
                if (have := calls["scan"]()) != other.ask("scan"):
                    raise SystemExit(f"{peer} has {other.answer} rows, not {have}")
                for read in reads:
                    mine, its = beside(partial(timed, calls[read]), partial(_once, other, read), ROUNDS)
                    most = 1.2 if (peer, read) == ("deltalake", "scan") else None
                    found.append(Figure(f"life: {read}", mine * 1e3, its * 1e3, "ms", peer, at_most=most))
                if os.access(CACHES, os.W_OK):
                    mine, its = beside(
                        partial(_cold, partial(timed, calls["scan"])),
                        partial(_cold, partial(_once, other, "scan")),
                        ROUNDS,
                    )
                    found.append(Figure("life: cold scan", mine * 1e3, its * 1e3, "ms", peer))
    return found


def _cold(read: Callable[[], float]) -> float:
    """The seconds of a read, of which the system has nothing in memory."""
    os.sync()
    CACHES.write_text("1")
    return read()


def ours(folder: str, rows: int, steps: int) -> dict[str, Callable[[], object]]:
    """What is measured of ours."""
    import persist_lib as persist  # noqa: PLC0415 - the peers do not load it

    url, kinds = f"file:{folder}/ours", persist.Schema({"k": "int64"}, {"a": "int64", "b": "string"})

    def live() -> None:
        with persist.open(url) as client, client.open_writer("t", kinds) as write:
            write.compare_and_append(loads(rows), 0, 1)
            for step in range(1, steps + 1):
                table, deleted = changes(rows, step)
                ends.append(write.upsert(table).time or 0)
                if deleted.size:
                    write.delete(pa.table({"k": deleted}))
                if step % MAINTAINS == 0:
                    client.maintain("t")

    def scans(*asked: dict[str, Any]) -> int:
        found = 0
        with persist.open(url) as client, client.open_reader("t") as read:
            for words in asked:
                with read.snapshot(**words) as snapshot:
                    found += snapshot.to_arrow().num_rows
        return found

    def between() -> int:
        start, end = ends[steps // 4], ends[steps // 2]
        with persist.open(url) as client, client.open_reader("t") as read, read.changes(start, end) as found:
            return found.to_arrow().num_rows

    ends: list[int] = []
    return {
        "live": live, "scan": lambda: scans({}), "changes": between,
        "filtered scan": lambda: scans({"filter": pc.field("a") < BELOW}),
        "look-up": lambda: scans({"keys": pa.table({"k": looked_up(rows)})}),
        "versions": lambda: scans(*({"as_of": ends[at]} for at in _some(steps))),
    }  # fmt: skip


def _once(peer: Peer, call: str) -> float:
    return peer.run(call=call)[0]


def _some(steps: int) -> list[int]:
    return [steps * at // VERSIONS for at in range(VERSIONS)]


@contextmanager
def deltalake(folder: str, rows: str, steps: str) -> Iterator[Ready]:
    """A Delta table."""
    import deltalake as peer  # noqa: PLC0415 - only its process needs it

    place, count, last = f"{folder}/delta", int(rows), int(steps)
    versions: list[int] = []

    def opened(version: int | None = None) -> peer.DeltaTable:
        return peer.DeltaTable(place, version=version)

    def live() -> None:
        said = {"delta.enableChangeDataFeed": "true"}
        for table in loads(count):
            peer.write_deltalake(place, table, mode="append", configuration=said)
        table = opened()
        for step in range(1, last + 1):
            source, deleted = changes(count, step)
            merging = table.merge(source, predicate="t.k = s.k", source_alias="s", target_alias="t")
            merging.when_matched_update_all().when_not_matched_insert_all().execute()
            versions.append(table.version())
            if deleted.size:
                table.delete(f"k in ({', '.join(map(str, deleted))})")
            if step % MAINTAINS == 0:
                table.optimize.compact()

    def between() -> int:
        start, end = versions[last // 4] + 1, versions[last // 2]
        return len(pa.table(opened().load_cdf(starting_version=start, ending_version=end)))

    yield Ready(
        f"deltalake {peer.__version__}, its defaults but for the change data feed, all cores; maintenance is "
        "optimize.compact",
        {
            "live": live, "changes": between,
            "scan": lambda: opened().to_pyarrow_table().num_rows,
            "filtered scan": lambda: opened().to_pyarrow_dataset().to_table(filter=pc.field("a") < BELOW).num_rows,
            "look-up": lambda: opened().to_pyarrow_table(filters=[("k", "in", looked_up(count))]).num_rows,
            "versions": lambda: sum(opened(versions[at]).to_pyarrow_table().num_rows for at in _some(last)),
        },
    )  # fmt: skip


@contextmanager
def ducklake(folder: str, rows: str, steps: str) -> Iterator[Ready]:
    """A DuckLake table."""
    sys.path.insert(0, str(LAKE))
    import duckdb  # noqa: PLC0415 - of another version than ours

    place, count, last = Path(folder, "ducklake"), int(rows), int(steps)
    (place / "data").mkdir(parents=True)
    (extension,) = (LAKE / "duckdb_extension_ducklake").rglob("*.duckdb_extension")
    versions: list[int] = []

    @contextmanager
    def opened() -> Iterator[duckdb.DuckDBPyConnection]:
        with duckdb.connect() as connection:
            connection.execute(f"load '{extension}'")
            connection.execute(f"attach 'ducklake:{place}/catalog.ducklake' as lake (data_path '{place}/data/')")
            yield connection

    def asked(*queries: str) -> int:
        with opened() as connection:
            tables: list[pa.Table] = [connection.execute(query).to_arrow_table() for query in queries]
        return sum(len(table) for table in tables)

    def live() -> None:
        with opened() as connection:
            connection.execute("create table lake.t (k bigint, a bigint, b varchar)")
            for source in loads(count):
                connection.register("source", source)
                connection.execute("insert into lake.t select * from source")
            for step in range(1, last + 1):
                source, deleted = changes(count, step)
                connection.register("source", source)
                connection.execute(
                    "merge into lake.t t using source s on t.k = s.k when matched then update set a = s.a, b = s.b "
                    "when not matched then insert values (s.k, s.a, s.b)"
                )
                [(version,)] = connection.execute("select max(snapshot_id) from lake.snapshots()").fetchall()
                versions.append(version)
                if deleted.size:
                    connection.execute("delete from lake.t where list_contains(?, k)", [deleted.tolist()])
                if step % MAINTAINS == 0:
                    connection.execute("call ducklake_merge_adjacent_files('lake')")

    yield Ready(
        f"DuckLake of duckdb {duckdb.__version__}, its defaults, all cores, catalog in a DuckDB file; maintenance is "
        "ducklake_merge_adjacent_files",
        {
            "live": live,
            "scan": lambda: asked("from lake.t"),
            "filtered scan": lambda: asked(f"from lake.t where a < {BELOW}"),
            "look-up": lambda: asked(f"from lake.t where k in ({', '.join(map(str, looked_up(count)))})"),
            "versions": lambda: asked(*(f"from lake.t at (version => {versions[at]})" for at in _some(last))),
        },
    )  # fmt: skip


@contextmanager
def pyiceberg(folder: str, rows: str, steps: str) -> Iterator[Ready]:
    """An Iceberg table."""
    import pyiceberg as peer  # noqa: PLC0415 - only its process needs it
    from pyiceberg.catalog.sql import SqlCatalog  # noqa: PLC0415
    from pyiceberg.expressions import In, LessThan  # noqa: PLC0415
    from pyiceberg.table import Table  # noqa: PLC0415

    place, count, last = Path(folder, "iceberg"), int(rows), int(steps)
    place.mkdir()
    versions: list[int] = []

    def opened() -> Table:
        catalog = SqlCatalog("bench", uri=f"sqlite:///{place}/catalog.db", warehouse=f"file://{place}")
        catalog.create_namespace_if_not_exists("bench")
        return catalog.create_table_if_not_exists("bench.t", schema=table_of(np.arange(1), 0).schema)

    def live() -> None:
        table = opened()
        for source in loads(count):
            table.append(source)
        for step in range(1, last + 1):
            source, deleted = changes(count, step)
            table.upsert(source, join_cols=["k"])
            versions.append(table.metadata.current_snapshot_id or 0)
            if deleted.size:
                table.delete(In(term="k", literals=deleted.tolist()))

    def scanned(*found: int, **words: Any) -> int:
        table = opened()
        return sum(table.scan(snapshot_id=version, **words).to_arrow().num_rows for version in found or [None])

    yield Ready(
        f"pyiceberg {peer.__version__}, its defaults (copy on write), SQL catalog on SQLite; it has no maintenance "
        "that rewrites data",
        {
            "live": live,
            "scan": scanned,
            "filtered scan": lambda: scanned(row_filter=LessThan(term="a", value=BELOW)),
            "look-up": lambda: scanned(row_filter=In(term="k", literals=looked_up(count))),
            "versions": lambda: scanned(*(versions[at] for at in _some(last))),
        },
    )
