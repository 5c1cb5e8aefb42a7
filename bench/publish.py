"""What a publication writes, beside deltalake's merge; and TPC-H's queries over it, beside plain Parquet.

The tables are TPC-H's by arithmetic (`bench.tpch`). Bytes are exact, and the same in every run. Queries run by turns in
one process of DuckDB, over the published Iceberg tables and over Parquet files that pyarrow wrote of the same rows in
the same order; their answers are compared with those over the shards, as Arrow.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import duckdb
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import persist_lib as persist
from bench import tpch
from bench.figures import Figure
from bench.peer import Peer
from bench.published_peers import QUERIES, as_text, installed

SEGMENTS = ("AUTOMOBILE", "BUILDING", "FURNITURE", "HOUSEHOLD", "MACHINERY")
CUSTOMER = persist.Schema({"c_custkey": "int64 not null"}, {"c_mktsegment": "string not null"}, unique=True)
SHARE = 500
"""One row of so many is changed: 0.2 %."""
PIECE = 250_000
MIB = 1 << 20


def publish(quick: bool) -> list[Figure]:
    """Bytes by kind of change, then the queries."""
    scale, rounds = (0.02, 1) if quick else (1.0, 5)
    with TemporaryDirectory(prefix="persist-bench-") as folder, persist.open(f"file:{folder}/data") as client:
        orders = np.arange(round(tpch.ORDERS_AT_1 * scale))
        _write(client, "customer", CUSTOMER, [_customers(max(1_000, len(orders) // 10))])
        _write(client, "orders", _unique(tpch.ORDERS), map(tpch.orders, _pieces(orders)))
        _write(client, "lineitem", _unique(tpch.LINEITEM), map(tpch.lineitems, _pieces(orders)))
        found = _bytes(client, Path(folder))
        return found + _queries(client, ["customer", "orders", "lineitem"], Path(folder), rounds)


def _bytes(client: persist.Client, folder: Path) -> list[Figure]:
    """What a publication of lineitems writes after changes of a kind, beside what a merge writes in Delta."""
    table = client.table("lineitem", _unique(tpch.LINEITEM))
    rows = table.read().to_arrow()
    whole = client.publish("lineitem", "iceberg").size
    peer = _Delta(rows, str(folder / "delta"))
    found = [
        Figure(
            "unchanged", _publish(client, table, None), whole, "B", "the table", at_most=0.001, note="metadata alone"
        )
    ]
    each = rows.num_rows // SHARE
    kinds = {
        "0.2 % together": np.arange(rows.num_rows // 2, rows.num_rows // 2 + each),
        "0.2 % spread": np.arange(each) * SHARE,
    }
    _publish(client, table, _changed(rows, kinds["0.2 % spread"], 7))  # contents are written once, whole
    for turn, (name, places) in enumerate(kinds.items()):
        changed = _changed(rows, places, turn)
        ours, theirs = _publish(client, table, changed), peer.merge(changed)
        found.append(Figure(name, ours / MIB, theirs / MIB, "MiB", "deltalake", settings=peer.settings))
    return found


def _publish(client: persist.Client, table: Any, changed: pa.Table | None) -> int:
    if changed is None:
        with client.open_writer("lineitem", client.inspect("lineitem").state.schemas[-1]) as write:
            now = write.upper.time or 0
            write.compare_and_append([], now, now + 1)
    else:
        table.upsert(changed)
    done = client.publish("lineitem", "iceberg")
    return int(done.rewritten + done.copied + done.metadata)


class _Delta:
    """The same rows in Delta, of the newest release, by its defaults."""

    def __init__(self, rows: pa.Table, place: str) -> None:
        import deltalake  # noqa: PLC0415 - of an extra

        deltalake.write_deltalake(place, rows)
        self._table = deltalake.DeltaTable(place)
        self.settings = f"deltalake {deltalake.__version__}, its defaults; merge, update and insert"

    def merge(self, changed: pa.Table) -> int:
        """The bytes of the files that a merge writes."""
        before = {one["path"] for one in self._files()}
        on = " and ".join(f"t.{name} = s.{name}" for name in tpch.LINEITEM.key_names)
        merge = self._table.merge(changed, on, source_alias="s", target_alias="t")
        merge.when_matched_update_all().when_not_matched_insert_all().execute()
        return sum(one["size_bytes"] for one in self._files() if one["path"] not in before)

    def _files(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = pa.table(self._table.get_add_actions(flatten=True)).to_pylist()
        return found


def _queries(client: persist.Client, names: list[str], folder: Path, rounds: int) -> list[Figure]:
    """Seconds of each query over Iceberg and over Parquet. Raises where an answer is not that over the shard."""
    if not installed():
        raise SystemExit("DuckDB's extensions are not installed, and cannot be: the queries were not run")
    places: dict[str, dict[str, str]] = {"iceberg": {}, "plain": {}}
    own = duckdb.connect()
    for name in names:
        rows = client.table(name).read().to_arrow()
        own.register(name, rows)
        pq.write_table(rows, file := folder / f"{name}.parquet", compression="zstd")
        places["plain"][name] = f"read_parquet('{file}')"
        places["iceberg"][name] = f"iceberg_scan('{client.publish(name, 'iceberg').place}')"
    expected = {query: as_text(own.execute(sql).fetchall()) for query, sql in QUERIES.items()}
    with Peer("bench.published_peers:duckdb", json.dumps(places)) as peer:
        found = []
        for query in QUERIES:
            seconds: dict[str, list[float]] = {of: [] for of in places}
            for _ in range(rounds + 1):  # the first one warms up
                for of in places:
                    seconds[of] += peer.run(call=f"{of} {query}")
                    if peer.answer != expected[query]:
                        raise SystemExit(
                            f"{query} over {of} answers {peer.answer}, and over the shard {expected[query]}"
                        )
            ours, plain = (statistics.median(seconds[of][1:]) * 1000 for of in places)
            found.append(
                Figure(f"TPC-H {query}", ours, plain, "ms", "plain Parquet", at_most=1.1, settings=peer.settings,
                       note="equal to the shard's answer")
            )  # fmt: skip
    return found


def _write(client: persist.Client, name: str, schema: persist.Schema, pieces: Iterable[pa.Table]) -> None:
    table = client.table(name, schema)
    for piece in pieces:
        table.append(piece)


def _pieces(numbers: Any) -> list[Any]:
    return [numbers[start : start + PIECE] for start in range(0, len(numbers), PIECE)]


def _customers(count: int) -> pa.Table:
    keys = np.arange(1, count + 1)
    return pa.table({"c_custkey": keys, "c_mktsegment": pa.array(SEGMENTS).take(pa.array(keys % len(SEGMENTS)))})


def _changed(rows: pa.Table, places: Any, turn: int) -> pa.Table:
    """These rows with another comment."""
    taken = rows.take(pa.array(places))
    comments = pc.binary_join_element_wise(taken["l_comment"], pa.scalar(f"turn {turn}"), " ")
    return taken.set_column(taken.column_names.index("l_comment"), taken.schema.field("l_comment"), comments)


def _unique(schema: persist.Schema) -> persist.Schema:
    return msgspec.structs.replace(schema, unique=True)
