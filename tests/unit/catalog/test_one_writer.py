"""What only a shard's writer did, before one class wrote shards and collections: held on a collection of three."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.catalog import CollectionWriter
from persist_lib.relation.registration import Registration
from tests.renditions import create
from tests.worlds import World

ROW = {"id": 1, "word": "a"}


@pytest.fixture
def writer() -> Iterator[CollectionWriter]:
    world = World()
    controller = create(world.client(), shards=3)
    with controller.open_writer("c") as writer:
        yield writer
    world.close()


def test_a_call_waits_for_its_turn_until_its_deadline_and_no_longer(writer: CollectionWriter) -> None:
    calls = (
        lambda: writer.append_now([ROW], timeout=0.05),
        lambda: writer.upsert([ROW], timeout=0.05),
        lambda: writer.compare_and_append([], 0, 1, timeout=0.05),
        lambda: writer.advance_upper(1, timeout=0.05),
    )
    with ThreadPoolExecutor(1) as pool, writer._lock:
        for call in calls:
            with pytest.raises(persist.TimedOut, match="other appends of this handle took that long"):
                pool.submit(call).result(20)
    assert writer.fetch_upper() == persist.at(0)


def test_nothing_is_appended_after_a_registration_that_is_in_doubt(
    writer: CollectionWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any) -> None:
        raise persist.Indeterminate("the answer was lost")

    with monkeypatch.context() as patch:
        patch.setattr(Registration, "_commit", lost)
        with pytest.raises(persist.Determinate, match=r"appended nothing.*the answer was lost"):
            writer.upsert([ROW])
    assert writer.upsert([ROW]).inserted == 1


def test_a_failure_of_closing_does_not_hide_the_error_of_the_block(
    writer: CollectionWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise persist.TimedOut("the store is away")

    monkeypatch.setattr(writer, "_retire", fails)
    with pytest.raises(ZeroDivisionError), writer:
        raise ZeroDivisionError
    monkeypatch.undo()
