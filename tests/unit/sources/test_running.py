"""Running a source on files: what is in its collections, across restarts, instances, pauses, changes and losses."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib.catalog.records import data_shard
from persist_lib.errors import (
    Diverged,
    Gone,
    HoldConflict,
    InvalidUsage,
    NameTaken,
    NotFound,
    Refused,
    SinceViolation,
)
from persist_lib.runtime.ambient import Deadline
from persist_lib.sources import Custom, Decoding, Files, Mark, Meaning, Sources, running
from persist_lib.sources.bindings import Bindings, Bound
from persist_lib.sources.files.reader import LineFiles
from persist_lib.sources.pipeline import Pipeline, Ready
from persist_lib.sources.protocol import HOLD
from persist_lib.sources.targets import Target
from tests import servers
from tests.sourced import Sourced
from tests.worlds import World

SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"})


class Place(Sourced):
    """A world with a folder of files, and sources there."""

    def __init__(self, world: World, folder: Path) -> None:
        super().__init__(world)
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def write(self, name: str, *rows: object) -> None:
        with (self.folder / name).open("ab") as file:
            for row in rows:
                file.write((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n")

    def create(self, schema: persist.Schema = SCHEMA, **options: Any) -> None:
        self.sources.create("s", Files(place=str(self.folder), format="jsonl"), schema, **options)

    def history(self, name: str = "s") -> list[dict[str, Any]]:
        with self.controller.open_reader(name) as reader:
            first = reader.since.time or 0
            return sorted(reader.changes(first).to_pylist(), key=repr)


def row(id_: int, word: str | None = "a") -> dict[str, object]:
    return {"id": id_, "word": word}


def test_a_source_is_shown_while_its_instances_go_further(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at what is durable and that at the bindings, others move on, and history with them."""
    place.write("a.jsonl", row(1))
    place.create()
    place.catch_up()
    since, times = Bindings.since, list[int]()

    def moved(bindings: Bindings, time: int) -> Bound:
        times.append(time)
        if len(times) == 1:
            with monkeypatch.context() as as_it_is:
                as_it_is.setattr(Bindings, "since", since)
                place.world.clock.advance(1)
                place.write("a.jsonl", row(2))
                place.catch_up()
            raise SinceViolation("history moved", as_of=time, since=time + 1)
        return since(bindings, time)

    monkeypatch.setattr(Bindings, "since", moved)
    found = place.sources.show("s")
    assert found.time == times[-1] > times[0]
    monkeypatch.setattr(Bindings, "since", lambda *_: (_ for _ in ()).throw(SinceViolation("gone", as_of=0, since=1)))
    with pytest.raises(SinceViolation, match="gone"):
        place.sources.show("s")


def test_files_become_a_collection_that_can_be_read_as_of_any_time(place: Place) -> None:
    place.write("a.jsonl", row(1, "a"), row(2, "b"))
    place.create(meaning=Meaning(envelope="upsert"))
    first = place.catch_up()
    place.write("a.jsonl", row(1, "c"))
    place.write("b.jsonl", row(3, "d"))
    second = place.catch_up()
    assert place.words() == {1: "c", 2: "b", 3: "d"}
    assert place.words(first.time - 1) == {1: "a", 2: "b"}
    assert second.time > first.time
    found = place.sources.show("s")
    assert found.state == "running"
    assert found.time == second.time
    assert found.durable == found.bound
    assert {p: m.address for p, m in found.bound.items()} == {
        "a.jsonl": (place.folder / "a.jsonl").stat().st_size, "b.jsonl": (place.folder / "b.jsonl").stat().st_size,
    }  # fmt: skip


def test_no_bad_line_is_lost(place: Place) -> None:
    lines: list[object] = [row(n, f"w{n}") for n in range(200)]
    for n in range(0, 200, 50):
        lines[n] = b"garbage %d" % n
    place.write("a.jsonl", *lines)
    place.create()
    place.catch_up()
    errors = place.contents("s/errors")
    assert [error["raw"] for error in sorted(errors, key=lambda e: e["address"])] == [
        b"garbage %d" % n for n in range(0, 200, 50)
    ]
    assert all(error["partition"] == "a.jsonl" and error["reason"] for error in errors)
    assert len(place.words()) == 196


def test_an_idle_source_goes_on_in_time(place: Place) -> None:
    place.create()
    first = place.catch_up()
    place.world.clock.advance(60)
    second = place.catch_up()
    assert second.time >= first.time + 60_000
    place.world.clock.advance(1)
    assert place.catch_up().time == second.time, "no more often than TICK_MS"
    assert place.contents() == []


def test_keep_raw_keeps_what_came(place: Place) -> None:
    place.write("a.jsonl", row(1), b"bad", b"")
    place.create(meaning=Meaning(keep_raw=True))
    place.catch_up()
    raw = sorted(place.contents("s/raw"), key=lambda one: one["address"])
    assert [one["value"] for one in raw] == [json.dumps(row(1)).encode(), b"bad", b""]


def test_a_source_of_a_reader_of_a_user(place: Place) -> None:
    options = {"place": str(place.folder)}
    place.write("a.log", b"one", b"two")
    schema = persist.Schema(key={"at": "uint64 not null"}, value={"line": "string"})
    place.sources.create(
        "s", Custom(factory=f"{__name__}:open_logs", options=options), schema,
        decoding=Decoding(decoder="text"), meaning=Meaning(include={"at": "address"}),
    )  # fmt: skip
    place.catch_up()
    assert [one["line"] for one in place.contents()] == ["one", "two"]


def open_logs(place: str) -> object:
    return Files(place=place, format="text").open()


def test_windows_bound_memory_and_change_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running.Ingestion, "step_bytes", 200)
    monkeypatch.setattr(running.Ingestion, "window_bytes", 500)
    most = 0
    apply = Pipeline.apply

    def seen(self: Any, ready: Ready, lookup: Any) -> Any:
        nonlocal most
        most = max(most, ready.messages.num_rows)
        return apply(self, ready, lookup)

    monkeypatch.setattr(Pipeline, "apply", seen)
    for name in ("a", "b", "c"):
        place.write(f"{name}.jsonl", *(row(n % 7, f"{name}{n}") for n in range(100)))
    place.create(meaning=Meaning(envelope="upsert"))
    place.catch_up()
    assert place.words() == {n % 7: f"c{n}" for n in range(93, 100)}
    assert 1 < most < 40
    times = Counter(one["_time"] for one in place.history())
    assert len(times) > 10


def test_messages_of_several_files_come_in_the_order_of_their_times(place: Place) -> None:
    """Three times that are bound before any of them is made durable, so that they are one window."""
    place.create(meaning=Meaning(envelope="upsert"))
    instance = place.sources.open("s")
    for name, word in (("a", "first"), ("b", "second"), ("a", "third")):
        place.write(f"{name}.jsonl", row(1, word))
        place.world.clock.advance(1)
        instance._mint(place.sources.client.runtime.deadline(10))
    instance.step()
    instance.close()
    assert place.words() == {1: "third"}
    times = sorted({one["_time"] for one in place.history()})
    assert [place.words(int(time.timestamp() * 1000))[1] for time in times] == ["first", "second", "third"]


def test_a_window_that_is_long_decoded_has_its_whole_timeout_to_be_written(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else no time would be left to write it, at each attempt."""
    place.create()
    place.write("a.jsonl", row(1))
    client = place.world.client(persist.Config(timeout_s=5, lease_ms=3_600_000))
    apply, append = Pipeline.apply, Target.append
    left: list[float] = []

    def slow(self: Any, *args: Any) -> Any:
        place.world.clock.advance(60)
        return apply(self, *args)

    def noted(self: Any, updates: pa.Table, start: int, end: int, deadline: Deadline) -> None:
        left.append(deadline.remaining_s())
        append(self, updates, start, end, deadline)

    monkeypatch.setattr(Pipeline, "apply", slow)
    monkeypatch.setattr(Target, "append", noted)
    Sources(client.controller()).open("s").step()
    assert left
    assert min(left) > 4


def test_a_second_instance_that_was_late_appends_the_same_again(place: Place) -> None:
    place.write("a.jsonl", row(1, "a"), row(2, "b"), b"bad")
    place.create(meaning=Meaning(envelope="upsert", keep_raw=True))
    other = Sources(place.world.client().controller())
    late = other.open("s")
    late.step()
    place.write("a.jsonl", row(1, "c"))
    place.catch_up()
    before = place.history(), place.history("s/errors"), place.history("s/raw")
    late.step()
    late.close()
    after = place.history(), place.history("s/errors"), place.history("s/raw")
    assert after == before
    assert place.words() == {1: "c", 2: "b"}


def died_after(place: Place, role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance that appended to one collection, and not to the others."""
    append = Target.append

    def cut(self: Any, *args: Any) -> None:
        append(self, *args)
        if self.name == role:
            raise KeyboardInterrupt

    monkeypatch.setattr(Target, "append", cut)
    with pytest.raises(KeyboardInterrupt):
        place.catch_up()
    monkeypatch.setattr(Target, "append", append)


@pytest.mark.parametrize("role", ["s", "s/errors", "s/raw"])
def test_who_comes_after_one_that_died_between_two_appends_goes_on(
    place: Place, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.create(meaning=Meaning(envelope="upsert", keep_raw=True))
    place.write("a.jsonl", row(1, "a"))
    place.catch_up()
    place.write("a.jsonl", row(1, "b"), b"bad", row(2, "c"))
    died_after(place, role, monkeypatch)
    place.write("a.jsonl", row(2, "d"))
    place.catch_up()
    assert place.words() == {1: "b", 2: "d"}
    assert len(place.contents("s/errors")) == 1
    assert len(place.contents("s/raw")) == 5
    diffs = Counter((one["id"], one["word"], one["_diff"]) for one in place.history())
    assert diffs[2, "c", 1] == diffs[2, "c", -1] == 1, "the time at which one died stays a time of its own"


def test_other_rows_than_those_committed_are_diverged_and_nothing_is_written(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.create(meaning=Meaning(keep_raw=True))
    place.write("a.jsonl", row(1, "a"), row(2, "b"))
    died_after(place, "s", monkeypatch)
    uppers = {name: place.controller.describe(name).upper for name in ("s", "s/errors", "s/raw")}
    assert len(set(uppers.values())) > 1
    decode = Pipeline.apply

    def wrong(self: Any, ready: Ready, lookup: Any) -> Any:
        made = decode(self, ready, lookup)
        return made._replace(output=made.output.slice(1))

    monkeypatch.setattr(Pipeline, "apply", wrong)
    with pytest.raises(Diverged, match="collection 's'") as raised:
        place.catch_up()
    assert raised.value.collection == "s"
    assert raised.value.time > 0
    assert raised.value.rows[0]["word"] == "a"
    assert {name: place.controller.describe(name).upper for name in uppers} == uppers
    (instance,) = [one for one in place.contents("s/health") if one["state"] == "failed"]
    assert "Diverged" in instance["why"]
    monkeypatch.setattr(Pipeline, "apply", decode)
    place.catch_up()
    assert place.words() == {1: "a", 2: "b"}


def test_rows_that_differ_in_one_shard_alone_are_found_before_the_others_are_written(place: Place) -> None:
    """Another process died after the first of three shards: the collection's upper tells nothing of that."""
    place.create(shards=3)
    place.write("a.jsonl", *(row(n) for n in range(20)))
    place.world.clock.advance(1)
    instance, client = place.sources.open("s"), place.sources.client
    instance._mint(client.runtime.deadline(10))
    bound = instance._clock.newest().upper  # type: ignore[attr-defined]
    names = [data_shard(place.sources.find("s").collections["output"], 1, n) for n in range(3)]
    first = names[0]
    schema = client.inspect(first).state.schemas[-1]
    with client.open_writer(first, schema, layer="collection") as write:
        write.append([{"id": 99, "word": "alien", "_time": bound - 1}], 0, bound)
    with pytest.raises(Diverged) as raised:
        instance.step(mints=False)
    assert raised.value.shard == first
    instance.close()
    uppers = [client.inspect(name).state.upper for name in names[1:]]
    assert uppers == [persist.at(0), persist.at(0)]


def test_two_that_differ_and_append_at_once_are_found_out(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one is first between the comparison and the append."""
    place.create()
    place.write("a.jsonl", row(1, "a"))
    other = Sources(place.world.client().controller()).open("s")
    mine = place.sources.open("s")
    append, apply = Target.append, Pipeline.apply

    def wrong(self: Any, ready: Ready, lookup: Any) -> Any:
        made = apply(self, ready, lookup)
        return made._replace(output=made.output.slice(1)) if self is other._pipelines["output"] else made

    def rivalled(self: Any, *args: Any) -> None:
        monkeypatch.setattr(Target, "append", append)
        other.step(mints=False)
        other.close()
        append(self, *args)

    monkeypatch.setattr(Pipeline, "apply", wrong)
    monkeypatch.setattr(Target, "append", rivalled)
    with pytest.raises(Diverged):
        mine.step()


def test_a_file_that_goes_while_it_is_needed_is_gone_and_later_does_not_matter(place: Place) -> None:
    place.create()
    place.write("a.jsonl", row(1, "a"))
    instance = place.sources.open("s")
    instance._mint(place.sources.client.runtime.deadline(10))
    kept = (place.folder / "a.jsonl").read_bytes()
    (place.folder / "a.jsonl").unlink()
    with pytest.raises(Gone) as raised:
        place.catch_up()
    assert (raised.value.partition, raised.value.address) == ("a.jsonl", 0)
    (place.folder / "a.jsonl").write_bytes(kept)
    place.catch_up()
    (place.folder / "a.jsonl").unlink()
    place.write("b.jsonl", row(2, "b"))
    place.catch_up()
    assert place.words() == {1: "a", 2: "b"}


def test_too_many_errors_stop_it_before_they_are_written(place: Place) -> None:
    place.create(meaning=Meaning(most_errors=2))
    place.write("a.jsonl", row(1), b"bad 1", b"bad 2")
    place.catch_up()
    place.write("a.jsonl", row(2), b"bad 3")
    for _ in range(2):
        with pytest.raises(Refused, match="most_errors is 2"):
            place.catch_up()
    assert len(place.contents("s/errors")) == 2
    assert place.words() == {1: "a"}


def test_history_that_a_restart_needs_is_held_whatever_the_retention(place: Place) -> None:
    place.create(meaning=Meaning(envelope="upsert"), retention=0)
    for n in range(4):
        place.write("a.jsonl", row(1, f"w{n}"))
        time = place.catch_up().time
        place.world.clock.advance(5)
        place.controller.tend()
        found = place.controller.describe("s")
        assert found.since == persist.at(time - 1)
        shard = place.controller.catalog.fetch().named("s").shard  # type: ignore[union-attr]
        assert place.sources.client.inspect(shard).state.holds[HOLD].since == persist.at(time - 1)
    assert place.words() == {1: "w3"}


def test_the_upstream_is_told_the_bindings_since_and_never_t(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Mark]] = []
    monkeypatch.setattr(LineFiles, "tell", lambda _self, marks: told.append(dict(marks)))
    place.create()
    place.write("a.jsonl", row(1))
    size = (place.folder / "a.jsonl").stat().st_size
    place.catch_up()
    place.world.clock.advance(5)
    place.catch_up()
    assert told[-1]["a.jsonl"].address == size
    record = place.sources.declared.find("s")
    since = place.sources.client.inspect(record.bindings).state.since
    place.sources.client.set_hold(record.bindings, "another-pipeline", since)
    place.write("a.jsonl", row(2))
    for _ in range(3):
        place.world.clock.advance(5)
        place.catch_up()
    assert {marks["a.jsonl"].address for marks in told} == {size}
    place.sources.client.release_hold(record.bindings, "another-pipeline")
    place.world.clock.advance(5)
    place.catch_up()
    place.catch_up()
    assert told[-1]["a.jsonl"].address > size


def test_an_instance_of_a_dropped_source_is_fenced_off_and_its_name_is_free(place: Place) -> None:
    place.create()
    place.write("a.jsonl", row(1))
    place.catch_up()
    late = Sources(place.world.client().controller()).open("s")
    late.step()
    place.sources.drop("s")
    place.world.clock.advance(10)
    with pytest.raises((HoldConflict, NotFound, InvalidUsage)):
        late.step()
    late.close()
    assert place.sources.list() == place.controller.list() == []
    place.create(meaning=Meaning(envelope="upsert"))
    place.catch_up()
    assert place.words() == {1: "a"}


def test_a_source_that_is_reset_begins_anew_with_what_is_there(place: Place) -> None:
    place.create(meaning=Meaning(envelope="upsert"), shards=2, retention=5)
    place.write("a.jsonl", row(1), row(2))
    place.catch_up()
    late = Sources(place.world.client().controller()).open("s")
    late.step()
    (place.folder / "a.jsonl").write_bytes(b'{"id": 7, "word": "new"}\n')
    with pytest.raises(Diverged):
        place.catch_up()
    place.sources.reset("s")
    place.world.clock.advance(5)
    with pytest.raises((HoldConflict, NotFound)):
        late.step()
    late.close()
    place.catch_up()
    assert place.words() == {7: "new"}
    found = place.controller.describe("s")
    assert (len(found.active.shards), found.retention) == (2, 5)
    assert place.sources.find("s").epoch == 2


def test_an_instance_whose_hold_was_taken_away_ends_until_it_is_set_again(place: Place) -> None:
    place.create()
    place.write("a.jsonl", row(1))
    place.catch_up()
    shard = place.controller.catalog.fetch().named("s").shard  # type: ignore[union-attr]
    place.sources.client.release_hold(shard, HOLD)
    place.world.clock.advance(10)
    place.write("a.jsonl", row(2, "b"))
    with pytest.raises(HoldConflict, match="persist source pause --resume"):
        place.catch_up()
    place.sources.resume("s")
    place.catch_up()
    assert place.words() == {1: "a", 2: "b"}
    assert HOLD in place.sources.client.inspect(shard).state.holds


def test_a_paused_source_stands_still_and_says_so(place: Place) -> None:
    place.create()
    place.sources.pause("s", why="maintenance")
    place.write("a.jsonl", row(1))
    assert place.catch_up() is None
    assert place.sources.show("s").state == "paused"
    (instance,) = place.contents("s/health")
    assert (instance["state"], instance["why"]) == ("paused", "maintenance")
    place.sources.resume("s")
    place.catch_up()
    assert place.words() == {1: "a"}


def test_what_may_pass_is_waited_for_and_told(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.create()
    place.write("a.jsonl", row(1))
    step, failures = running.Ingestion.step, [persist.Determinate("the disk is away"), persist.LeaseExpired("slow")]
    monkeypatch.setattr(
        running.Ingestion, "step", lambda self: (_ for _ in ()).throw(failures.pop()) if failures else step(self)
    )
    told: list[object] = []
    place.sources.run("s", until_idle=True, told=told.append)
    assert [type(one).__name__ for one in told] == ["LeaseExpired", "Determinate", "Progress", "Progress"]


def test_a_run_stops_when_it_is_told_to(place: Place) -> None:
    place.create()
    place.write("a.jsonl", row(1))
    steps: list[object] = []
    place.sources.run("s", stop=lambda: len(steps) >= 2, told=steps.append)
    assert len(steps) == 2
    (instance,) = place.contents("s/health")
    assert instance["state"] == "stopped"


def test_a_default_that_is_given_as_another_string_is_the_same(place: Place) -> None:
    """What retracts a row is the row as it is stored: a record is not always encoded the same way again."""
    none: Any = str(b"none", "ascii")
    place.create(meaning=Meaning(envelope=none))
    place.sources.pause("s")
    place.sources.resume("s")
    place.sources.drop("s")
    assert place.sources.list() == []


@pytest.mark.parametrize("call", ["pause", "resume", "drop", "reset"])
def test_a_caller_that_knows_the_source_from_before_a_reset_changes_nothing_of_the_new_one(
    place: Place, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    place.create()
    old = place.sources.find("s")
    place.sources.reset("s")
    late = Sources(place.world.client().controller())
    monkeypatch.setattr(late, "find", lambda _name: old)
    monkeypatch.setattr(late.declared, "find", lambda _name: old)
    with pytest.raises(NotFound, match="in between"):
        getattr(late, call)("s")
    found = place.sources.find("s")
    assert (found.state, found.epoch) == ("running", 2)


def test_create_is_one_command_and_takes_no_names(place: Place) -> None:
    place.create(command="one")
    place.create(command="one")
    with pytest.raises(NameTaken):
        place.create()
    with pytest.raises(NameTaken):
        place.create(command="one", meaning=Meaning(envelope="upsert"))
    place.controller.create("t/errors", persist.Schema(key={"a": "int64"}))
    files = Files(place=str(place.folder), format="jsonl")
    with pytest.raises(NameTaken, match="t/errors"):
        place.sources.create("t", files, SCHEMA)
    assert place.sources.list() == ["s"]
    with pytest.raises(NotFound, match="no source 'x'"):
        place.sources.show("x")


WRONG: list[tuple[str, Callable[[Place], object]]] = [
    ("times", lambda p: p.create(persist.Schema(key={"a": "int64"}, times="us"))),
    ("reader", lambda p: p.sources.create("s", "./in", SCHEMA)),  # type: ignore[arg-type]
    ("no such folder", lambda p: p.sources.create("s", Files(place="/nope", format="csv"), SCHEMA)),
    ("name", lambda p: p.sources.create("", Files(place=str(p.folder), format="csv"), SCHEMA)),
]


@pytest.mark.parametrize(("match", "call"), WRONG)
def test_what_is_declared_wrong_makes_nothing(place: Place, match: str, call: Callable[[Place], object]) -> None:
    with pytest.raises(persist.PersistError, match=match):
        call(place)
    assert place.sources.list() == place.controller.list() == []


def test_a_sources_collection_is_resharded_while_it_is_ingested(place: Place) -> None:
    place.create(meaning=Meaning(envelope="upsert"))
    other = Sources(place.world.client().controller()).open("s")
    expected: dict[int, str] = {}

    def more(n: int) -> int:
        for id_ in range(n, n + 4):
            place.write("a.jsonl", row(id_ % 6, f"w{n}"))
            expected[id_ % 6] = f"w{n}"
        time: int = place.catch_up().time
        assert place.words() == expected
        return time

    more(0)
    other.step()
    new = place.controller.make_rendition("s", shards=3, copy=True)
    place.controller.copy_rendition("s", new.number)
    before = more(3), dict(expected)
    place.controller.hand_over("s", new.number)
    place.controller.copy_rendition("s", new.number, to_end=True)
    for n in range(4):
        more(n)
        other.step()
    other.close()
    assert place.controller.describe("s").active.number == 2
    assert place.words(before[0] - 1) == before[1]


@pytest.mark.slow
def test_a_source_on_s3_alone_where_there_are_no_transactions(tmp_path: Path) -> None:
    servers.use_test_credentials()
    server, name = servers.s3_server(), f"t{os.urandom(8).hex()}"
    world = World(server.location(name), 0, server.location(name, "s3+cas"))
    try:
        place = Place(world, tmp_path / "in")
        place.create(meaning=Meaning(envelope="upsert", keep_raw=True), shards=2)
        other = Sources(world.client().controller()).open("s")
        for n in range(2):
            place.write("a.jsonl", *(row(id_, f"w{n}") for id_ in range(5)), b"bad")
            place.catch_up()
            other.step()
        other.close()
        assert place.words() == dict.fromkeys(range(5), "w1")
        assert len(place.contents("s/errors")) == 2
        place.sources.drop("s")
        assert place.controller.list() == []
    finally:
        world.close()


def test_a_window_that_is_larger_than_was_estimated_is_read_in_parts(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running.Ingestion, "window_bytes", 4_000)
    monkeypatch.setattr(running.Ingestion, "step_bytes", 1_500)
    monkeypatch.setattr(LineFiles, "estimate", lambda *_: 0)
    place.create(meaning=Meaning(envelope="upsert"))
    ahead = place.sources.open("s")
    for n in range(12):
        place.write("a.jsonl", *(row(n, f"{n}-{m}" + "x" * 40) for m in range(20)))
        place.world.clock.advance(0.01)
        ahead._mint(place.world.client().runtime.deadline(5))
    sizes: list[int] = []
    apply = Pipeline.apply

    def noted(pipeline: Pipeline, ready: Ready, lookup: Any) -> Any:
        sizes.append(ready.messages.nbytes)
        return apply(pipeline, ready, lookup)

    monkeypatch.setattr(Pipeline, "apply", noted)
    assert place.sources.open("s").step(mints=False).messages == 240
    assert len(sizes) > 2
    assert max(sizes) < 12_000
    assert len(place.words()) == 12
