"""A location of every kind of layer, made by the library as it was on 2026-11-24, is read, continued and maintained.

`tests/golden/location_2026_11_24.tar.xz` has the location, what was read from it then, and the program that made it
(`make.py`). It was left in the middle: compaction is due, a copy of a rendition is behind, a WAL is not applied, a
stream has unsealed updates, a batch is not absorbed, a line is not read.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from persist_lib import events, pending_area, streams
from persist_lib.core.formats import NEWEST
from persist_lib.testing import check_location, check_world

ARCHIVE = Path(__file__).parents[1] / "golden" / "location_2026_11_24.tar.xz"
URL = "file:./lake"


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The location in the current folder; what was read when it was made."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return json.loads(Path("expected.json").read_text())


@pytest.fixture
def client(told: Any) -> Iterator[persist.Client]:
    with persist.open(URL) as opened:
        yield opened


def rows(snapshot: Any) -> list[list[Any]]:
    return sorted(([*row.values()] for row in snapshot.to_arrow().to_pylist()), key=repr)


def read(client: persist.Client, told: Any) -> dict[str, list[list[Any]]]:
    """What each layer that is read by snapshots has, under the names that `make.py` gave it."""
    controller, tables = client.controller(), client.controller().tables()
    time, _ = told["tables"]["accounts before"]
    with client.open_reader("shard") as shard, controller.open_reader("orders") as orders:
        found = {f"shard {at}": rows(shard.snapshot(int(at))) for at in told["shard"]}
        found |= {f"orders {at}": rows(orders.snapshot(int(at))) for at in told["collection"]}
    found |= {name: rows(tables.read(name)) for name in ("accounts", "entries", "plain")}
    found["accounts before"] = rows(tables.read("accounts", time))
    with controller.open_reader("orders-in") as source:
        found["orders-in"] = rows(source.snapshot())
    found["readings"] = sorted([*row] for row in contents(client, 9))
    return found


def contents(client: persist.Client, time: int) -> list[tuple[int, float]]:
    with pending_area.acquire_read_handle(client, "readings") as area:
        return [(row["sensor"], row["celsius"]) for row in area.contents(time).to_pylist()]


def as_told(told: Any) -> dict[str, list[list[Any]]]:
    found = {f"shard {at}": seen for at, seen in told["shard"].items()}
    found |= {f"orders {at}": seen for at, seen in told["collection"].items()}
    found |= {name: told["tables"][name] for name in ("accounts", "entries", "plain")}
    found["accounts before"] = told["tables"]["accounts before"][1]
    return found | {"orders-in": told["source"]["read"], "readings": told["pending"]["contents at 9"]}


def upkeep(client: persist.Client) -> None:
    """All duties of all shards and layers, twice: what one run makes due is done by the next."""
    for _ in range(2):
        client.controller().tend()
        for name in client.shards():
            client.maintain(name)


def test_what_was_read_is_read_and_still_after_upkeep_and_in_the_newest_format(
    client: persist.Client, told: Any
) -> None:
    assert read(client, told) == as_told(told)
    upkeep(client)
    assert read(client, told) == as_told(told)
    assert {client.upgrade(name).after for name in client.shards()} == {NEWEST}
    assert read(client, told) == as_told(told)
    for name in client.shards():
        check_world(client, name)
    check_location(client)


def continue_shard(client: persist.Client) -> None:
    with client.open_reader("shard") as read, client.open_writer("shard", read.schema) as write:
        write.upsert([{"id": 1, "name": "now", "cents": 1}])
        assert read.snapshot(key=[1]).to_pylist() == [{"id": 1, "name": "now", "cents": 1}]


def continue_collection(client: persist.Client) -> None:
    controller = client.controller()
    behind = controller.describe("orders").renditions[-1].number
    controller.copy_rendition("orders", behind)
    controller.hand_over("orders", behind, advance=True)
    with controller.open_writer("orders") as write, controller.open_reader("orders") as read:
        before = rows(read.snapshot())
        write.delete([8])
        assert [row for row in before if row[0] != 8] == rows(read.snapshot())
        assert [8, "not copied", 2] in before


def continue_tables(client: persist.Client) -> None:
    tables = client.controller().tables()
    with tables.transaction("bank") as change:
        change.update("accounts", {"cents": 0}, keys=[1])
        change.insert("entries", [{"entry": "e2", "cents": 90}])
    controller = client.controller()
    new = controller.make_rendition("accounts", shards=2, copy=True).number
    controller.copy_rendition("accounts", new)
    at = controller.hand_over("accounts", new)
    assert at > (change.time or 0), "beyond all that was committed, as the WAL says"
    tables.apply("bank")
    controller.copy_rendition("accounts", new, to_end=True)
    tables.update("accounts", {"cents": 1}, keys=[3])
    tables.apply("bank")
    tables.tidy("bank")
    assert tables.read("accounts", keys=[3]).to_pylist() == [{"id": 3, "cents": 1}]
    assert [row["cents"] for row in tables.read("accounts", keys=[1, 2]).to_pylist()] == [0, 110]
    assert rows(tables.read("entries")) == [["e1", 10], ["e2", 90]]
    tables.delete("plain", [1])
    assert rows(tables.read("plain")) == []


def continue_source(client: persist.Client) -> None:
    client.controller().sources().run("orders-in", until_idle=True)
    with client.controller().open_reader("orders-in") as read:
        assert rows(read.snapshot()) == [[1, "placed", 999], [2, "paid", 100]]


def continue_pending(client: persist.Client) -> None:
    schema = persist.Schema(key={"sensor": "int64 not null"}, value={"celsius": "float64"})
    with pending_area.Writer(URL, "readings", "edge-7", schema) as write:
        write.put([{"sensor": 4, "celsius": 1.0, "_time": 11}], 10, 12)
    pending_area.absorb(client, "readings")
    assert sorted(contents(client, 11)) == [(1, 20.5), (2, 18.0), (3, 7.0), (4, 1.0)]


@pytest.mark.parametrize(
    "continue_", [continue_shard, continue_collection, continue_tables, continue_source, continue_pending]
)
def test_it_is_continued(client: persist.Client, told: Any, continue_: Callable[[persist.Client], None]) -> None:
    continue_(client)
    upkeep(client)
    for name in client.shards():
        check_world(client, name)
    check_location(client)


def test_a_stream_is_continued(told: Any) -> None:
    runtime = streams.open(URL, reentrance_id="gateway-1")
    schema = persist.Schema(key={"sensor": "string not null"}, value={"celsius": "float64"})
    write, read = runtime.create_or_load("house", schema)
    assert rows(read.snapshot()) == told["stream"]["sealed"]
    with read.contents() as now:
        assert now.to_arrow().to_pylist() == told["stream"]["contents"]
    write.seal(20).result()
    assert rows(read.snapshot()) == [["attic", 21.5], ["attic", 23.0], ["cellar", 9.0]]
    runtime.stop()


def test_event_logs_are_continued(told: Any) -> None:
    def step(balance: int, event: Any) -> tuple[int, list[object]]:
        return balance + int(json.loads(bytes(event.payload))["cents"]), []

    program = events.Program(step, initial=int, release=lambda _: None, encode=lambda n: str(n).encode(), decode=int)
    for store, balance in told["events"].items():
        with events.open_store(store) as opened:
            assert list(events.replay(opened, program)) == balance
        with events.Loop(store, program) as loop:
            assert loop.submit(b'{"cents": 1}').result().event_id == 4
