"""Ingesting files: CSV and JSON lines into a shard, beside pyarrow's readers with one append, and beside Spark's own
reader and writer.

What an ingest does more than its peers: it looks for lines that are bad, cuts and numbers them, keeps a journal, and
commits group by group, so that it can be killed at any point.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json

import persist_lib as persist
from bench.figures import Figure, beside, in_turn, timed
from bench.peer import Peer, Ready
from bench.spark_peer import SETTINGS, users_session
from jobs.engine import SparkEngine
from jobs.ingesting.engines import Engine, Local, OnSpark
from jobs.ingesting.running import Ingest
from jobs.ingesting.running import ingest as run
from jobs.ingesting.settings import Format, Settings
from jobs.session import SparkSettings, build_session
from jobs.stop import Stop

FULL, QUICK = 1_000_000, 100_000
FILES = 4
ROUNDS = 3
SCHEMA = persist.Schema(
    key={"id": "int64 not null"},
    value={"name": "string", "state": "string", "price": "float64", "at": "timestamp[us, UTC]"},
)
COLUMNS = {field.name: field.type for field in SCHEMA.data}


def write_files(folder: Path, lines: int) -> None:
    """Files of both formats with the same rows."""
    rng = np.random.default_rng(1)
    for number in range(FILES):
        count = lines // FILES
        ids = rng.permutation(count) + number * count
        table = pa.table(
            {
                "id": ids, "name": [f"customer {n % 9973}" for n in ids],
                "state": [("open", "paid", "sent")[n % 3] for n in ids],
                "price": (ids % 10_000) / 100, "at": [f"2026-01-{n % 28 + 1:02}T{n % 24:02}:00:00Z" for n in ids],
            }
        )  # fmt: skip
        pyarrow.csv.write_csv(table, folder / f"{number}.csv", pyarrow.csv.WriteOptions(quoting_style="none"))
        with (folder / f"{number}.jsonl").open("w") as file:
            for batch in table.to_batches(max_chunksize=65536):
                file.write("".join(json.dumps(row) + "\n" for row in batch.to_pylist()))


def ingest(quick: bool) -> list[Figure]:
    """Lines per second in this process, with a thread a core."""
    lines = QUICK if quick else FULL
    with TemporaryDirectory(prefix="persist-ingest-") as folder, persist.open(f"file:{folder}/data") as client:
        write_files(Path(folder), lines)
        figures = []
        for form in ("csv", "jsonl"):
            ours, theirs = in_turn(
                _ingesting(client, folder, form, lambda: Local(Stop())),
                _reading_and_appending(client, Path(folder), form),
                1 if quick else ROUNDS,
            )
            note = f"{lines:,} lines in {FILES} files; the peer holds each file in memory"
            figures.append(
                Figure(
                    f"ingest-{form}", lines / ours / 1e6, lines / theirs / 1e6, "M/s", "pyarrow and append", note=note
                )
            )
        return figures


_turns = iter(range(1_000_000))


def _ingesting(client: persist.Client, folder: str, form: Format, engine: Callable[[], Engine]) -> Callable[[], None]:
    def once() -> None:
        job = Ingest(f"s{next(_turns)}", [f"{folder}/*.{form}"], Settings(form), SCHEMA)
        outcome = run(client, job, engine())
        if outcome.tally.bad or not outcome.tally.written:
            raise SystemExit(f"{outcome}")

    return once


def _reading_and_appending(client: persist.Client, folder: Path, form: Format) -> Callable[[], None]:
    def once() -> None:
        with client.open_writer(f"s{next(_turns)}", SCHEMA) as write:
            for path in sorted(folder.glob(f"*.{form}")):
                write.append_now(_read(path, form).select(SCHEMA.names))

    return once


def _read(path: Path, form: Format) -> pa.Table:
    if form == "csv":
        return pyarrow.csv.read_csv(path, convert_options=pyarrow.csv.ConvertOptions(column_types=COLUMNS))
    schema = pa.schema(list(COLUMNS.items()))
    return pyarrow.json.read_json(path, parse_options=pyarrow.json.ParseOptions(explicit_schema=schema))


def ingest_spark(quick: bool) -> list[Figure]:
    """Lines per second on Spark, beside Spark's own `read.csv` and `write.parquet`."""
    lines = QUICK if quick else FULL
    with TemporaryDirectory(prefix="persist-ingest-") as folder, persist.open(f"file:{folder}/data") as client:
        write_files(Path(folder), lines)
        session = build_session(SparkSettings(driver_memory="1g"))
        figures = []
        try:
            for form in ("csv", "jsonl"):
                engine = OnSpark(SparkEngine(client, lambda: session))
                once = _ingesting(client, folder, form, lambda engine=engine: engine)  # type: ignore[misc]
                with Peer("bench.ingest:reader_and_writer", folder, form) as peer:

                    def theirs(peer: Peer = peer) -> float:
                        return peer.run()[0]

                    ours, plain = beside(lambda once=once: timed(once), theirs, 1 if quick else ROUNDS)  # type: ignore[misc]
                    name = f"read.{'json' if form == 'jsonl' else form}, write.parquet"
                    note = f"{lines:,} lines in {FILES} files"
                    figures.append(
                        Figure(
                            f"ingest-{form}-spark",
                            lines / ours / 1e6,
                            lines / plain / 1e6,
                            "M/s",
                            name,
                            note=note,
                            settings=peer.settings,
                        )
                    )
        finally:
            session.stop()
        return figures


@contextmanager
def reader_and_writer(folder: str, form: str) -> Iterator[Ready]:
    """Read the files with their schema, and write Parquet, as Spark's users would."""
    session = users_session("peer")
    reader = session.read.schema("id long, name string, state string, price double, at timestamp")
    target = Path(folder) / "spark-out"

    def once() -> None:
        shutil.rmtree(target, ignore_errors=True)
        path = f"{folder}/*.{form}"
        frame = reader.option("header", "true").csv(path) if form == "csv" else reader.json(path)
        frame.write.parquet(str(target))

    try:
        yield Ready(f"Spark {session.version}, local[*], {SETTINGS}, warm", {"run": once})
    finally:
        session.stop()
