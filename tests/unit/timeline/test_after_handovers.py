"""A table right after a handover: complete at the handover's time, and not kept as of the time before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.timeline import direct_timeline, view, wal_apply, wal_timeline
from tests.unit.timeline.banks import UNIQUE, read, rows


@pytest.fixture
def client() -> Iterator[persist.Client]:
    with persist.open("memory:") as client:
        yield client


def handed_over(client: persist.Client, mode: Any) -> int:
    """A table whose new rendition is complete up to the handover, and keeps nothing of before. Answers its time."""
    controller = client.controller()
    tables = controller.tables()
    tables.create("t", UNIQUE, mode=mode)
    tables.insert("t", rows((1, 1), (2, 2)))
    if mode == "wal":
        tables.apply()
    controller.make_rendition("t", shards=2, copy=True)
    controller.copy_rendition("t", 2)
    time = controller.hand_over("t", 2)
    tables.close()
    controller.copy_rendition("t", 2, to_end=True)
    for shard in controller.describe("t").active.shards:
        client.release_hold(shard, "collection")  # as `tend` did before holds ended at the newest time
        with client.open_reader(shard) as reader:
            reader.downgrade_since(time)
        client.set_hold(shard, "collection", time)
        assert client.inspect(shard).state.since.time == time == client.inspect(shard).state.upper.time
    return time


@pytest.mark.parametrize("mode", ["wal", "yolo"])
def test_what_is_not_kept_as_of_the_time_before_is_advanced_before_it_is_read(
    client: persist.Client, mode: Any
) -> None:
    handed_over(client, mode)
    assert read(client.controller().tables(), "t") == {1: 1, 2: 2}
    tables = client.controller().tables()
    tables.upsert("t", rows((2, 3), (4, 4)))
    assert read(tables, "t") == {1: 1, 2: 3, 4: 4}


@pytest.mark.parametrize("mode", ["wal", "yolo"])
def test_the_first_statement_after_a_handover_looks_its_keys_up_in_the_new_rendition(
    client: persist.Client, mode: Any
) -> None:
    handed_over(client, mode)
    tables = client.controller().tables()
    tables.upsert("t", rows((2, 3)))
    tables.delete("t", keys=[1])
    assert read(tables, "t") == {2: 3}


MUTANTS = {
    "never": lambda span, upper: False,
    "not at its time": lambda span, upper: span.start > 0 and upper < span.start,
}


@pytest.mark.parametrize("mode", ["wal", "yolo"])
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_table_that_is_read_too_early_is_noticed(
    client: persist.Client, mode: Any, mutant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed_over(client, mode)
    for module in (view, wal_apply, wal_timeline, direct_timeline):
        monkeypatch.setattr(module, "needs_settling", mutant)
    with persist.open(client.location, config=persist.Config(timeout_s=5)) as impatient:
        tables = impatient.controller().tables()
        try:
            tables.upsert("t", rows((2, 3)))
            found = read(tables, "t")
        except persist.PersistError:
            return
    assert found != {1: 1, 2: 3}


def test_a_handover_that_advances_applies_what_the_wal_has(client: persist.Client) -> None:
    controller = client.controller()
    tables = controller.tables()
    tables.create("t", UNIQUE, mode="wal", timeline="bank")
    tables.insert("t", rows((1, 1)))
    controller.make_rendition("t", shards=2, copy=True)
    controller.hand_over("t", 2, force=True, advance=True, timeout=60)
    assert read(tables, "t") == {1: 1}
    assert controller.describe("t").active.number == 2
