"""Reading streams: unsealed and sealed updates at one moment, listeners, sources, and runtimes that only read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import persist_lib as persist
from persist_lib import streams
from persist_lib.ids import SeqNo
from persist_lib.location import open_location
from persist_lib.streams import stream_reader as readers
from tests.gated import LONG_S
from tests.streaming import SCHEMA, start, update
from tests.unit.streams.test_calls import Place
from tests.worlds import World


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place()
    yield place
    place.close()


def ids(found: streams.Contents) -> Counter[int]:
    bag: Counter[int] = Counter()
    for row in found.to_arrow().to_pylist():
        bag[row["id"]] += row["_diff"]
    return bag


Change = Callable[[streams.StreamWriter], object]


def seal(write: streams.StreamWriter) -> None:
    write.seal(10).result()


def write_and_seal(write: streams.StreamWriter) -> None:
    """A write that stays unsealed, then one that is sealed: who has the second without the first has no moment."""
    write.write([update(2, 50)]).result()
    write.write([update(3, 7)]).result()
    write.seal(10).result()


def seal_and_compact(write: streams.StreamWriter) -> None:
    seal(write)
    write.allow_compaction(9).result()


MOMENTS: list[dict[int, int]] = [{1: 1, 9: 1}, {1: 1, 9: 1, 2: 1}, {1: 1, 9: 1, 2: 1, 3: 1}]


def read_while(world: World, change: Change, monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """What a reader finds that reads the sealed part after `change` was made, and the unsealed part before it."""
    runtime = start(world)
    write, read = runtime.create_or_load("s", SCHEMA)
    write.write([update(1, 5), update(9, 20)]).result()
    write.seal(3).result()
    rows = readers.StreamReader._rows
    done: list[bool] = []

    def then(self: Any, state: Any) -> Any:
        found = rows(self, state)
        if not done:
            done.append(True)
            change(write)
        return found

    monkeypatch.setattr(readers.StreamReader, "_rows", then)
    with read.contents() as found:
        return ids(found)


@pytest.mark.parametrize("change", [seal, write_and_seal, seal_and_compact])
def test_what_is_sealed_between_two_reads_is_neither_lost_nor_there_twice(
    world: World, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_while(world, change, monkeypatch) in MOMENTS


def test_a_reader_that_reads_the_newest_sealed_contents_is_found_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def newest(self: Any, _upper: Any) -> Any:
        return self.sealed.snapshot(self.sealed.fetch_upper().time - 1, diff=True)

    monkeypatch.setattr(readers.StreamReader, "_as_of", newest)
    assert read_while(world, write_and_seal, monkeypatch) not in MOMENTS


def test_sealed_first_is_found_out(world: World) -> None:
    write, read = start(world).create_or_load("s", SCHEMA)
    write.write([update(1, 5), update(9, 20)]).result()
    write.seal(3).result()
    sealed = [row["id"] for row in read.snapshot(diff=True).to_pylist()]
    seal(write)
    with read.contents() as found:
        unsealed = [row["id"] for row in found.unsealed.to_pylist()]
    assert Counter(sealed + unsealed) not in MOMENTS


def test_how_far_a_read_looks_is_its_own_choice(place: Place) -> None:
    assert place.read.sealed.id  # their leases come first, as commits have to wait then
    assert place.read.unsealed.id
    first = place.outstanding()
    place.write.write([update(2, 1002)])

    def found(ahead: Any) -> tuple[Counter[int], Counter[int], Counter[int]]:
        with place.read.contents(ahead=ahead) as contents:
            rows = [contents.sealed.to_arrow() if contents.sealed else None, contents.unsealed, contents.accepted]
            return tuple(Counter(table.column("id").to_pylist()) if table else Counter() for table in rows)  # type: ignore[return-value]

    assert found("accepted") == (Counter(), Counter([0]), Counter([1, 2]))
    assert not first.done()
    place.gate.open.set()
    place.runtime.flush()
    first.result()
    assert found("accepted") == (Counter(), Counter([0, 1, 2]), Counter())
    place.write.seal(1001).result()
    assert found("accepted") == found("durable") == (Counter([0]), Counter([1, 2]), Counter())
    assert found("sealed") == (Counter([0]), Counter(), Counter())


def test_a_listener_may_look_ahead_to_what_waits_for_its_commit(place: Place) -> None:
    with place.read.listen(0, ahead="accepted", timeout=LONG_S) as events:

        def given(count: int = 1) -> list[tuple[str, list[int]]]:
            found = [next(events) for _ in range(count)]
            return [
                (type(e).__name__, e.table.column("id").to_pylist())
                for e in found
                if not isinstance(e, persist.Progress)
            ]

        assert given(2) == [("Unsealed", [0])]  # of the fixture, and its progress
        first = place.outstanding()
        second = place.write.write([update(2, 1002), update(3, 1003)])
        assert given(2) == [("Accepted", [1]), ("Accepted", [2, 3])]
        assert not first.done()
        place.gate.open.set()
        second.result()
        durable: list[int] = []
        while len(durable) < 3:  # in one commit or in two, they come again; their previews do not
            for kind, ids in given():
                assert kind == "Unsealed"
                durable += ids
        assert sorted(durable) == [1, 2, 3]
        place.write.seal(1002).result()
        place.gate.shut()
        place.write.write([update(4, 1004)])
        found: list[tuple[str, list[int]]] = []
        while not found or found[-1][0] != "Accepted":
            found += given()
        assert found == [("Unsealed", [0, 1]), ("Updates", [0, 1]), ("Accepted", [4])]
        place.gate.open.set()


def test_what_was_accepted_comes_once_as_that(place: Place) -> None:
    with place.read.listen(0, ahead="accepted", timeout=0.05) as events:
        assert [type(next(events)) for _ in range(2)] == [streams.Unsealed, persist.Progress]
        place.outstanding()
        assert isinstance(next(events), streams.Accepted)
        with pytest.raises(persist.TimedOut):
            next(events)
        place.gate.open.set()


def test_what_was_accepted_and_failed_does_not_come_again(place: Place) -> None:
    with place.read.listen(0, ahead="accepted", timeout=LONG_S) as events:
        assert [type(next(events)) for _ in range(2)] == [streams.Unsealed, persist.Progress]
        first = place.outstanding()
        assert isinstance(next(events), streams.Accepted)
        place.gate.outcome = persist.DiskFull("no")
        place.gate.open.set()
        with pytest.raises(persist.DiskFull):
            first.result()
        place.gate.outcome = None
        place.write.write([update(5, 1005)]).result()
        found = [next(events)]
        if isinstance(found[0], streams.Accepted):
            found = [next(events)]
        assert found[0].table.column("id").to_pylist() == [5]  # type: ignore[union-attr]


def test_only_the_process_that_writes_listens_to_what_waits(world: World) -> None:
    with start(world) as runtime:
        runtime.create_or_load("s", SCHEMA)
        with streams.open(world.client(), mode="read") as reading:
            read = reading.load("s")
            with pytest.raises(persist.InvalidUsage, match="only to the runtime that writes"):
                read.listen(0, ahead="accepted")


def test_a_default_snapshot_is_definite_and_sealed(place: Place) -> None:
    place.write.write([update(1, 5), update(2, 9)]).result()
    place.write.seal(6).result()
    assert [row["id"] for row in place.read.snapshot(diff=True).to_pylist()] == [1]
    with pytest.raises(persist.TimedOut):
        place.read.snapshot(8, timeout=0.05, diff=True)
    assert (
        place.client.open_reader("s").snapshot(5, diff=True).to_pylist()
        == place.read.snapshot(5, diff=True).to_pylist()
    )


@pytest.mark.parametrize("ahead", ["", None, 5, "Sealed"])
def test_a_wrong_look_ahead_is_refused(place: Place, ahead: Any) -> None:
    with pytest.raises(persist.InvalidUsage, match="ahead"):
        place.read.contents(ahead=ahead)
    with pytest.raises(persist.InvalidUsage, match="ahead"):
        place.read.listen(0, ahead=ahead)


def test_a_listener_of_sealed_updates_gets_each_once(place: Place) -> None:
    with place.read.listen(0, timeout=LONG_S) as events:
        place.write.write([update(1, 5), update(2, 9)]).result()
        place.write.seal(6).result()
        place.write.seal(10).result()
        got = [next(events) for _ in range(4)]
    times = [row["_time"] for event in got if isinstance(event, persist.Updates) for row in event.table.to_pylist()]
    assert times == [5, 9]
    assert got[-1] == persist.Progress(persist.at(10))


def test_at_each_progress_all_that_a_listener_got_is_what_the_stream_contains(world: World) -> None:
    runtime = start(world)
    write, read = runtime.create_or_load("s", SCHEMA)
    write.write([update(0, 5)]).result()
    got, expected = Counter[Any](), Counter[Any]({(0, 5): 1})
    with read.listen(0, ahead="durable", timeout=1) as events:
        for step in range(1, 15):
            for event in events:
                if isinstance(event, persist.Progress):
                    break
                for row in event.table.to_pylist():
                    got[row["id"], row["_time"]] += row["_diff"]
            assert Counter({key: count for key, count in got.items() if count}) == expected
            write.write([update(step, step + 5), update(-step, step + 20)]).result()
            expected.update({(step, step + 5): 1, (-step, step + 20): 1})
            if step % 3 == 0:
                write.seal(step + 6).result()
            if step % 4 == 0:
                write.allow_compaction(write.upper.time - 1).result()  # type: ignore[operator]


def test_a_listener_ahead_ends_where_it_was_told_and_says_when_nothing_comes(world: World) -> None:
    write, read = start(world).create_or_load("s", SCHEMA)
    with read.listen(0, ahead="durable", until=5, timeout=0.5) as events, pytest.raises(persist.TimedOut):
        next(events)
    with read.listen(0, ahead="durable", until=5, timeout=0.5) as events:
        write.write([update(1, 3), update(2, 7)]).result()
        write.seal(9).result()
        got = list(events)
    assert got[-1] == persist.Progress(persist.at(5))
    assert [row["_time"] for e in got if isinstance(e, persist.Updates) for row in e.table.to_pylist()] == [3]


def test_a_listener_ahead_can_be_polled(world: World) -> None:
    write, read = start(world).create_or_load("s", SCHEMA)
    write.write([update(1, 3), update(2, 7)]).result()
    write.seal(5).result()
    with read.listen(0, ahead="durable") as events:
        assert [type(event) for event in events.poll()] == [streams.Unsealed, persist.Updates, persist.Progress]
        assert events.poll() == []
        write.write([update(3, 8)]).result()
        assert [type(event) for event in events.poll()] == [streams.Unsealed, persist.Progress]


def test_a_source_gives_contents_then_updates_then_progress(place: Place) -> None:
    place.write.write([update(1, 5), update(1, 6), update(2, 9)]).result()
    place.write.seal(8).result()
    place.write.seal(20).result()
    bag, frontier = Counter[Any](), persist.at(0)
    for event in streams.persisted_source(place.read, 7, until=20, timeout=LONG_S):
        if isinstance(event, persist.Progress):
            assert frontier < event.frontier
            frontier = event.frontier
        else:
            for row in event.table.to_pylist():
                assert frontier.is_before(row["_time"])
                bag[row["id"], row["_time"]] += row["_diff"]
    assert (bag, frontier) == ({(1, 7): 2, (2, 9): 1}, persist.at(20))


@pytest.mark.parametrize("independent", [False, True])
def test_a_runtime_that_only_reads_changes_nothing(tmp_path: Any, independent: bool) -> None:
    url = f"file:{tmp_path}"
    with streams.open(url) as writing:
        write, _ = writing.create_or_load("s", SCHEMA)
        write.write([update(1, 5), update(2, 9)]).result()
        write.seal(6).result()
        files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and "-shm" not in path.name}
        heads = writing.client.consensus.heads()
        with streams.open(url, mode="read", independent=independent) as reading:
            read = reading.load("s")
            with read.contents() as found:
                assert ids(found) == {1: 1, 2: 1}
            with pytest.raises(persist.InvalidUsage, match="only"):
                read.contents(ahead="accepted")
            assert [one.name for one in reading.list()] == ["s"]
            for call in (
                lambda: reading.create_or_load("t", SCHEMA), lambda: reading.multi_write([]), reading.flush,
            ):  # fmt: skip
                with pytest.raises(persist.InvalidUsage, match="mode='read'"):
                    call()
            with pytest.raises(persist.NotFound, match="Did you mean s"):
                reading.load("S")
            events = streams.persisted_source(read, 5, timeout=LONG_S)
            assert [next(events), next(events)][1] == persist.Progress(persist.at(6))
            assert writing.client.consensus.heads() == heads
            assert {path: path.read_bytes() for path in files} == files
            write.seal(10).result()
            assert isinstance(next(events), persist.Updates)
            events.close()  # type: ignore[attr-defined]


def test_an_independent_reader_waits_for_no_notification(place: Place) -> None:
    with streams.open(open_location(place.url), mode="read", independent=True) as reading:
        assert not reading.client.consensus.wait("s", SeqNo(1), LONG_S)


def test_where_there_is_nothing_there_is_nothing_to_read(tmp_path: Any) -> None:
    with pytest.raises(persist.NotFound):
        streams.open(f"file:{tmp_path}/none", mode="read")
    with persist.open("memory:") as client, streams.open(client, mode="read") as reading:
        assert reading.list() == []
        with pytest.raises(persist.NotFound):
            reading.load("s")


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "x"}, {"mode": None}, {"independent": True}, {"reentrance_id": 5}, {"reentrance_id": "x" * 201},
        {"owner": b"x"}, {"wipe_older": "yes"}, {"mode": "read", "independent": "no"},
    ],
)  # fmt: skip
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(persist.InvalidUsage):
        streams.open("memory:", **options)


def test_a_client_that_only_reads_writes_no_streams(tmp_path: Any) -> None:
    persist.open(f"file:{tmp_path}").close()
    with persist.open(f"file:{tmp_path}", read_only=True) as client:
        with pytest.raises(persist.InvalidUsage, match="read_only"):
            streams.open(client)
        with streams.open(client, mode="read") as reading:
            assert reading.list() == []
