"""What a process keeps of a WAL is bounded; what it does not keep it reads, and sees the same."""

from __future__ import annotations

from typing import Any

import pyarrow.compute as pc
import pytest

import persist_lib as persist
from persist_lib.timeline import Tables, wal_apply, wal_cache
from persist_lib.timeline.wal_timeline import WalLine
from tests.unit.timeline.banks import UNIQUE, read, rows

WORDS = persist.Schema({"id": "int64 not null"}, {"word": "string"}, unique=True)
BYTES = 100_000


@pytest.fixture(params=["some", "none"])
def bound(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The most that is kept."""
    found = BYTES if request.param == "some" else 0
    monkeypatch.setattr(wal_cache, "MOST_BYTES", found)
    return found


def line_of(tables: Tables) -> WalLine:
    line = tables._timelines.line("default")
    assert isinstance(line, WalLine)
    return line


def filled(client: persist.Client) -> Tables:
    """A table with 60 commits of 5 kB that nobody applied, and two others with one row each."""
    tables = client.controller().tables()
    for name in ("words", "a", "b"):
        tables.create(name, WORDS if name == "words" else UNIQUE, mode="wal")
    for name in ("a", "b"):
        tables.insert(name, rows((1, 1)))
    for number in range(60):
        tables.upsert("words", [{"id": number % 50, "word": f"{number}" * 2500}])
    return tables


EXPECTED = {n: f"{n + 50 if n < 10 else n}" * 2500 for n in range(50)}


def words(tables: Tables, **options: Any) -> dict[int, str]:
    return {row["id"]: row["word"] for row in tables.read("words", **options).to_pylist()}


def test_no_more_than_the_bound_is_kept_and_every_read_is_right(client: persist.Client, bound: int) -> None:
    tables = filled(client)
    other = client.controller().tables()
    for reader in (tables, other):
        assert words(reader) == EXPECTED
        assert words(reader, keys=[3, 30]) == {3: EXPECTED[3], 30: EXPECTED[30]}
        assert words(reader, filter=pc.field("id") < 2) == {0: EXPECTED[0], 1: EXPECTED[1]}
        assert read(reader, "a") == {1: 1}
        line = line_of(reader)
        assert 0 <= line.tail.size <= bound
        assert line.tail.start > 0
        assert line.tail.size == sum(e.size for t in line.tail.tables() for e in line.tail.of(t, 0, 1 << 62))


def test_a_conflict_with_what_is_not_kept_is_found(client: persist.Client, bound: int) -> None:
    tables = filled(client)
    first, second = tables.transaction(), tables.transaction()
    first.upsert("a", rows((1, 2)))
    second.upsert("b", rows((1, 2)))
    other = client.controller().tables()
    other.upsert("a", rows((1, 3)))
    for number in range(60):
        other.upsert("words", [{"id": number, "word": "x" * 5000}])
    tables.read_time()
    assert line_of(tables).tail.start > first.as_of
    with pytest.raises(persist.WriteConflict, match="another transaction has changed"):
        first.commit()
    second.commit()
    assert (read(other, "a"), read(other, "b")) == ({1: 3}, {1: 2})


def test_listeners_get_each_update_once(client: persist.Client, bound: int) -> None:
    tables = filled(client)
    with tables.listen("words", 0) as listener:
        events = listener.poll()
        found = [row for event in events if isinstance(event, persist.Updates) for row in event.table.to_pylist()]
        assert len(found) == 70
        assert {row["id"]: row["word"] for row in found if row["_diff"] > 0 and row["id"] > 9} == {
            n: word for n, word in EXPECTED.items() if n > 9
        }
        tables.upsert("words", [{"id": 0, "word": "new"}])
        (updates, _) = listener.poll()
        assert isinstance(updates, persist.Updates)
        assert [row["_diff"] for row in updates.table.to_pylist()] in ([1, -1], [-1, 1])


def test_appliers_take_some_megabytes_at_a_time_and_never_a_part_of_a_transaction(
    client: persist.Client, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wal_apply, "ROUND_BYTES", 20_000)
    tables = filled(client)
    with tables.transaction() as t:
        t.upsert("words", [{"id": n, "word": "y" * 5000} for n in range(50)])
    found = tables.apply()
    assert (found.tables, found.updates) == (("a", "b", "words"), 1 + 1 + 70 + 100)
    assert tables.lag().tables == ()
    table = tables.controller.catalog.fetch().find("words").id
    end = tables.read_time() + 1
    given = list(wal_apply.rounds(line_of(tables).entries(table, 0, end - 1), WORDS, end))
    assert len(given) > 5
    uppers = [upper for _, upper in given]
    assert (sorted(set(uppers)), uppers[-1]) == (uppers, end)
    for (part, upper), lower in zip(given, [0, *uppers], strict=False):
        times = part["_time"].to_pylist()
        assert lower <= min(times) <= max(times) < upper
    assert t.time is not None
    assert [part["_time"].to_pylist().count(t.time) for part, _ in given[:-1]] == [0] * (len(given) - 1)
    with tables.controller.open_reader("words") as reader:
        assert {row["word"] for row in reader.snapshot(diff=True).to_pylist()} == {"y" * 5000}
    assert words(tables) == dict.fromkeys(range(50), "y" * 5000)


def test_what_is_applied_is_let_go_also_of_tables_that_nobody_here_opened(client: persist.Client) -> None:
    filled(client)
    tables = client.controller().tables()
    assert read(tables, "a") == {1: 1}
    line = line_of(tables)
    assert line.tail.size > 60 * 5000, "all of it"
    client.controller().tend()
    assert read(tables, "a") == {1: 1}
    assert (line.tail.size, line.tail.tables()) == (0, [])
    assert words(tables) == EXPECTED


def test_an_interrupted_load_is_done_again_once(client: persist.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = filled(client)
    other = client.controller().tables()
    assert read(other, "a") == {1: 1}
    tables.upsert("a", rows((1, 2), (2, 2)))
    add = wal_cache.Tail.add

    def interrupted(self: wal_cache.Tail, entries: list[wal_cache.Entry]) -> None:
        add(self, entries)
        raise KeyboardInterrupt

    monkeypatch.setattr(wal_cache.Tail, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        other.read("a")
    monkeypatch.setattr(wal_cache.Tail, "add", add)
    assert read(other, "a") == {1: 2, 2: 2}
    assert words(other) == EXPECTED
