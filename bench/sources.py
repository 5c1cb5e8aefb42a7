"""JSON lines into the newest row of each key: a source with upserts, beside DuckDB and Spark reading the same file.

What the source does more than its peers: each line gets a time of its own that is committed before it is read, older
rows stay readable, bad lines would be kept with their reasons, and it can be killed at any point, or run twice. The
peers read the file whole and keep the line with the greatest number of each key.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import duckdb
import numpy as np

import persist_lib as persist
from bench.figures import Figure, beside, in_turn, timed
from bench.peer import Peer, Ready
from bench.spark_peer import SETTINGS, users_session
from persist_lib.sources import Files, Meaning, Sources

FULL, QUICK = 1_000_000, 50_000
PER_KEY = 2.5
"""Lines of each key, about."""
ROUNDS = 3
SCHEMA = persist.Schema(
    key={"id": "int64 not null"}, value={"name": "string", "state": "string", "cents": "int64", "n": "int64"}
)
FILE = "lines.jsonl"
KEPT = "PARTITION BY id ORDER BY n DESC"


def sources(quick: bool) -> list[Figure]:
    """Lines a second, from the file to the newest row of each key."""
    lines, rounds = (QUICK, 1) if quick else (FULL, ROUNDS)
    with TemporaryDirectory(prefix="persist-sources-") as folder, persist.open(f"file:{folder}/data") as client:
        keys = write_lines(Path(folder), lines)
        note = f"{lines:,} lines of {keys:,} keys in one file"
        made = client.controller().sources()
        ours, theirs = in_turn(_following(made, folder, keys), _by_duckdb(Path(folder), keys), rounds)
        figures = [
            _figure(
                "duckdb", lines, ours, theirs, f"DuckDB {duckdb.__version__}",
                note + "; DuckDB's database is on the same disk", "its defaults, all cores, read_json with columns",
            )
        ]  # fmt: skip
        with Peer("bench.sources:newest_by_spark", folder) as peer:
            ours, theirs = beside(lambda: timed(_following(made, folder, keys)), lambda: peer.run()[0], rounds)
            figures.append(_figure("spark", lines, ours, theirs, "Spark, to Parquet", note, peer.settings))
        return figures


def _figure(name: str, lines: int, ours: float, theirs: float, peer: str, note: str, settings: str) -> Figure:
    return Figure(
        f"source-jsonl-{name}", lines / ours / 1e6, lines / theirs / 1e6, "M/s", peer, note=note, settings=settings
    )


def write_lines(folder: Path, lines: int) -> int:
    """The file; answers how many keys it has."""
    rng = np.random.default_rng(1)
    ids = rng.integers(0, int(lines / PER_KEY), lines)
    (folder / "in").mkdir()
    with (folder / "in" / FILE).open("w") as file:
        for n, id_ in enumerate(ids.tolist()):
            row = {
                "id": id_,
                "name": f"customer {id_ % 9973}",
                "state": ("open", "paid", "sent")[n % 3],
                "cents": n,
                "n": n,
            }
            file.write(json.dumps(row) + "\n")
    return len(np.unique(ids))


_turns = iter(range(1_000_000))


def _following(made: Sources, folder: str, keys: int) -> Callable[[], None]:
    def once() -> None:
        name = f"orders{next(_turns)}"
        files = Files(place=f"{folder}/in", format="jsonl")
        made.create(name, files, SCHEMA, meaning=Meaning(envelope="upsert"))
        made.run(name, until_idle=True)
        with made.controller.open_reader(name) as reader, reader.snapshot() as rows:
            if (found := sum(table.num_rows for table in rows.batches())) != keys:
                raise SystemExit(f"{found} rows of {keys} keys")

    return once


def _by_duckdb(folder: Path, keys: int) -> Callable[[], None]:
    def once() -> None:
        path = folder / f"{next(_turns)}.duckdb"
        with duckdb.connect(str(path)) as connection:
            columns = "{id: 'BIGINT', name: 'VARCHAR', state: 'VARCHAR', cents: 'BIGINT', n: 'BIGINT'}"
            connection.execute(
                f"CREATE TABLE orders AS SELECT * FROM read_json('{folder}/in/{FILE}', columns={columns}) "  # noqa: S608 - our own names
                f"QUALIFY row_number() OVER ({KEPT}) = 1"
            )
            [(found,)] = connection.execute("SELECT count(*) FROM orders").fetchall()
        path.unlink()
        if found != keys:
            raise SystemExit(f"{found} rows of {keys} keys")

    return once


@contextmanager
def newest_by_spark(folder: str) -> Iterator[Ready]:
    """Read the file with its schema, keep the newest row of each key, and write Parquet, as Spark's users would."""
    session = users_session("peer")
    reader = session.read.schema("id long, name string, state string, cents long, n long")
    target = Path(folder) / "spark-out"

    def once() -> None:
        shutil.rmtree(target, ignore_errors=True)
        reader.json(f"{folder}/in/{FILE}").createOrReplaceTempView("lines")
        newest = f"SELECT *, row_number() OVER ({KEPT}) AS place FROM lines"  # noqa: S608
        kept = f"SELECT id, name, state, cents, n FROM ({newest}) WHERE place = 1"  # noqa: S608
        session.sql(kept).write.parquet(str(target))

    try:
        yield Ready(f"Spark {session.version}, local[*], {SETTINGS}, warm", {"run": once})
    finally:
        session.stop()
