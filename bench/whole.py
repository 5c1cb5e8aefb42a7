"""The whole life of a table on a local disk: appends, maintenance, scans; beside deltalake, pyiceberg and DuckLake.

All sides append the same lineitems, so many at a time, each by a handle that is kept open; do what their documentation
says keeps a table small; and read all of it into Arrow by a handle that is opened again, before that and after it. Ours
also sorts by key, consolidates, keeps fingerprints and digests, and syncs what it acknowledges; the peers do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa

import persist_lib as persist
from bench import tpch
from bench.figures import Figure, timed
from bench.lake import each, slices
from bench.merges import LAKE, install_ducklake
from bench.peer import Peer, Ready

SCALE, APPENDS = 0.25, 50
QUICK_SCALE, QUICK_APPENDS = 0.01, 10
SCANS = 3
STEPS = ("append", "scan appended", "maintain", "scan maintained")
PEERS = ("deltalake", "pyiceberg", "ducklake")


def whole(quick: bool) -> list[Figure]:
    """Seconds of each step, and bytes on disk at the end, beside each of the three."""
    scale, appends = (QUICK_SCALE, QUICK_APPENDS) if quick else (SCALE, APPENDS)
    install_ducklake()
    found: list[Figure] = []
    with TemporaryDirectory(prefix="persist-whole-") as folder:
        source = f"{folder}/rows.arrow"
        rows = tpch.lineitems(tpch.initial(scale))
        with pa.OSFile(source, "wb") as sink, pa.ipc.new_file(sink, rows.schema) as file:
            file.write_table(rows)
        note = f"{len(rows):,} lineitems in {appends} appends"
        for peer in PEERS:
            theirs, settings = _of_peer(peer, f"{folder}/{peer}", source, appends, len(rows))
            ours = _ours(f"{folder}/ours-{peer}", source, appends, len(rows))  # again each time, next to the peer
            for step, value in ours.items():
                unit = "MiB" if step == "bytes" else "s"
                found.append(Figure(f"whole: {step}", value, theirs[step], unit, peer, note=note, settings=settings))
    return found


def _steps(calls: Mapping[str, Callable[[], float]], folder: str) -> dict[str, float]:
    found = {step: calls[step]() for step in STEPS}
    return found | {"bytes": sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file()) / 2**20}


def _of_peer(peer: str, folder: str, source: str, appends: int, rows: int) -> tuple[dict[str, float], str]:
    Path(folder).mkdir()
    with Peer(f"bench.whole:{peer}", folder, source, appends) as other:

        def scan() -> float:
            seconds = sorted(other.run(SCANS, "scan"))[SCANS // 2]
            if other.answer != rows:
                raise SystemExit(f"{peer} has {other.answer} rows, not {rows}")
            return seconds

        calls = {
            "append": lambda: other.run(call="append")[0], "scan appended": scan,
            "maintain": lambda: other.run(call="maintain")[0], "scan maintained": scan,
        }  # fmt: skip
        return _steps(calls, folder), other.settings


def _ours(folder: str, source: str, appends: int, rows: int) -> dict[str, float]:
    with persist.open(f"file:{folder}") as client, client.open_writer("lineitem", tpch.LINEITEM) as write:

        def scan() -> float:
            return sorted(timed(once) for _ in range(SCANS))[SCANS // 2]

        def once() -> None:
            with persist.open(f"file:{folder}") as other, other.open_reader("lineitem") as read:
                found = read.snapshot().to_arrow().num_rows
            if found != rows:
                raise SystemExit(f"the shard has {found} rows, not {rows}")

        client.set_retention("lineitem", 0)
        calls = {
            "append": lambda: timed(each(write.append_now, source, appends)), "scan appended": scan,
            "maintain": lambda: timed(lambda: client.maintain("lineitem")), "scan maintained": scan,
        }  # fmt: skip
        return _steps(calls, folder)


@contextmanager
def deltalake(folder: str, source: str, appends: str) -> Iterator[Ready]:
    """A Delta table."""
    import deltalake as peer  # noqa: PLC0415 - only its process needs it

    place = f"{folder}/table"
    table = peer.DeltaTable.create(place, slices(source, int(appends))[0].schema)

    def maintain() -> None:
        table.optimize.compact()
        table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)

    yield Ready(
        f"deltalake {peer.__version__}, its defaults, local disk; maintenance is optimize.compact and vacuum(0)",
        {
            "append": each(lambda rows: peer.write_deltalake(table, rows, mode="append"), source, int(appends)),
            "scan": lambda: peer.DeltaTable(place).to_pyarrow_table().num_rows,
            "maintain": maintain,
        },
    )


@contextmanager
def pyiceberg(folder: str, source: str, appends: str) -> Iterator[Ready]:
    """An Iceberg table."""
    import pyiceberg as peer  # noqa: PLC0415 - only its process needs it
    from pyiceberg.catalog.sql import SqlCatalog  # noqa: PLC0415

    where = {"uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}/warehouse"}
    catalog = SqlCatalog("bench", **where)
    catalog.create_namespace("bench")
    table = catalog.create_table("bench.lineitem", slices(source, int(appends))[0].schema)
    yield Ready(
        f"pyiceberg {peer.__version__}, its defaults (FastAppend, pyarrow's FileIO), SQL catalog on SQLite, local "
        "disk; it has no compaction, so maintenance is an overwrite with what it reads, which leaves the old files",
        {
            "append": each(table.append, source, int(appends)),
            "scan": lambda: len(SqlCatalog("bench", **where).load_table("bench.lineitem").scan().to_arrow()),
            "maintain": lambda: table.overwrite(table.scan().to_arrow()),
        },
    )


@contextmanager
def ducklake(folder: str, source: str, appends: str) -> Iterator[Ready]:
    """A DuckLake table."""
    import sys  # noqa: PLC0415

    sys.path.insert(0, str(LAKE))
    import duckdb  # noqa: PLC0415 - of another version than ours

    (extension,) = (LAKE / "duckdb_extension_ducklake").rglob("*.duckdb_extension")

    def opened() -> duckdb.DuckDBPyConnection:
        connection = duckdb.connect()
        connection.execute(f"load '{extension}'")
        connection.execute(f"attach 'ducklake:{folder}/catalog.ducklake' as lake (data_path '{folder}/data/')")
        return connection

    kept = [opened()]
    kept[0].register("source", slices(source, int(appends))[0].slice(0, 0))
    kept[0].execute("create table lake.lineitem as select * from source")

    def append(rows: pa.Table) -> None:
        kept[0].register("source", rows)
        kept[0].execute("insert into lake.lineitem select * from source")

    def scan() -> int:
        kept[0].close()  # another handle cannot open the catalog meanwhile
        kept[0] = opened()
        table: pa.Table = kept[0].execute("from lake.lineitem").to_arrow_table()
        return int(table.num_rows)

    def maintain() -> None:
        kept[0].execute("call ducklake_merge_adjacent_files('lake')")
        kept[0].execute("call ducklake_expire_snapshots('lake', older_than => now())")
        kept[0].execute("call ducklake_cleanup_old_files('lake', cleanup_all => true)")

    yield Ready(
        f"DuckLake of duckdb {duckdb.__version__}, its defaults, all cores, catalog in a DuckDB file, local disk; "
        "maintenance merges adjacent files, expires all snapshots but the newest and cleans up",
        {"append": each(append, source, int(appends)), "scan": scan, "maintain": maintain},
    )
