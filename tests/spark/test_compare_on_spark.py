"""Renditions compared on Spark by the program: what the library finds, also after a kill, and kept for listeners."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import persist_lib as persist
from jobs.compare import compare, main
from jobs.engine import SparkEngine
from persist_lib.catalog import answers

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]
SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"name": "string", "cents": "int64"})
ROWS = 100_000


def corrected(table: pa.Table) -> pa.Table:
    """Other cents in some rows, and some rows less."""
    ids = table.column("id")
    more = pc.add(table.column("cents"), pc.cast(pc.equal(pc.bit_wise_and(ids, 1023), 0), pa.int64()))
    found = table.set_column(table.schema.get_field_index("cents"), "cents", more)
    return found.filter(pc.not_equal(pc.bit_wise_and(ids, 4095), 1))


def made(client: persist.Client) -> int:
    with client.controller() as controller:
        controller.create("orders", SCHEMA, shards=3, mode="compare_and_append")
        ids = np.arange(ROWS)
        with controller.open_writer("orders") as write:
            write.append_now(pa.table({"id": ids, "name": [f"n{i % 7}" * 9 for i in range(ROWS)], "cents": ids}))
        new = controller.make_rendition("orders", shards=2, copy=True).number
        controller.copy_rendition("orders", new, transform=corrected)
        return new


def test_on_spark_it_is_what_the_library_finds_and_is_kept(
    spark: object, client: persist.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = made(client)
    with client.controller() as controller, controller.open_reader("orders") as reader:
        whole = controller.compare("orders", new)
        engine = SparkEngine(client, lambda: spark)  # type: ignore[arg-type,return-value]
        monkeypatch.setattr("jobs.works.TASK_BYTES", 100_000)
        told: list[float] = []
        found = compare(
            controller, "orders", new, keep=True, engine=engine, tells=lambda _says, _done, of: told.append(of)
        )
        assert found == whole
        assert max(told) > 2, "several tasks"
        assert (found.vanished, found.changed) == ((ROWS + 4095) // 4096, (ROWS + 1023) // 1024)
        with reader.listen(0) as heard:
            controller.hand_over("orders", new, at=1)
            controller.copy_rendition("orders", new, transform=corrected, to_end=True)
            with controller.open_writer("orders") as write:
                write.upsert([{"id": 5, "name": "five", "cents": 5}])
            monkeypatch.setattr(answers, "difference", None)  # so that nothing can be merged
            tables = [event.table for event in heard.poll() if isinstance(event, persist.Updates)]
        before, after = (reader.snapshot(time, diff=True).to_arrow().drop_columns(["_diff"]) for time in (0, 1))
        rows = {tuple(row.values()): 1 for row in before.to_pylist()}
        for table in tables:
            for row in table.to_pylist():
                *data, _, diff = row.values()
                rows[tuple(data)] = rows.get(tuple(data), 0) + diff
        assert {data for data, diff in rows.items() if diff} == {tuple(row.values()) for row in after.to_pylist()}
        assert set(rows.values()) <= {0, 1}
        assert sum(table.num_rows for table in tables) == 2 * whole.changed + whole.vanished + 2


@pytest.mark.parametrize(
    ("arguments", "says", "status"),
    [
        (["--collection", "order", "--rendition", "2"], "NotFound", 1),
        (["--collection", "", "--rendition", "2"], "InvalidName", 2),
        (["--collection", "orders", "--rendition", "9"], "has no rendition 9", 1),
        (["--collection", "orders", "--rendition", "2", "--as-of", "soon"], "InvalidUsage", 2),
        (["--collection", "orders", "--rendition", "0"], "rendition", 2),
    ],
)
def test_what_is_asked_wrongly_is_said(
    client: persist.Client, folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str,
    status: int,
) -> None:  # fmt: skip
    with client.controller() as controller:
        controller.create("orders", SCHEMA)
        controller.make_rendition("orders")
    assert main(["--location", f"file:{folder}", *arguments]) == status
    assert says in capsys.readouterr().err
