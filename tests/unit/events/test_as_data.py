"""The log of a `persist` store is a collection: its events as of any event, by everything that reads shards."""

from __future__ import annotations

from pathlib import Path

import persist_lib as persist
from tests.eventlogs import store_of, write


def test_a_log_is_read_as_of_an_event_and_kept_by_the_same_upkeep(tmp_path: Path) -> None:
    store = store_of("persist", tmp_path)
    for start in range(1, 61, 3):
        write(store, [b"event %d" % id_ for id_ in range(start, start + 3)])
    with persist.open(store.specifier.options[0]) as client:
        client.maintain("events")
        with client.open_reader("events") as read:
            for as_of in (0, 1, 7, 60):
                rows = read.snapshot(as_of=as_of, columns=["id", "payload"]).to_pylist()
                found = sorted((row["id"], row["payload"]) for row in rows)
                assert found == [(id_, b"event %d" % id_) for id_ in range(1, as_of + 1)]
            relation = read.snapshot(as_of=9).to_duckdb()
            counted = relation.query("log", "SELECT count(*), max(id) FROM log")
            assert counted is not None
            assert counted.fetchall() == [(9, 9)]
    write(store, [b"event 61"])
    with store.reader() as reader:
        assert [event.id for event in reader.replay()] == [*range(1, 62)]
