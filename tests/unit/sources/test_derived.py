"""Sources over collections: the same rows at the same times, through updates, losses, handovers and drops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import persist_lib as persist
from persist_lib.errors import Gone, InvalidUsage, NotFound
from persist_lib.sources import Collection, Decoding, Files, Mark, Meaning, collection, running
from persist_lib.sources.collection import hold_name
from persist_lib.sources.conformance import check_reader
from tests.sourced import Sourced

INPUT = persist.Schema(key={"id": "int64 not null"}, value={"word": "string", "cents": "int64"})
OUTPUT = persist.Schema(key={"id": "int64 not null"}, value={"cents": "int64"})
LESS = Decoding(decoder="rows", extra="ignore")


class Place(Sourced):
    """A collection that is written, and sources over it."""

    name = "out"

    def __init__(self, times: Any = None) -> None:
        super().__init__()
        schema = persist.Schema(key=INPUT.key, value=INPUT.value, times=times)
        self.controller.create("in", schema, shards=2, mode="compare_and_append")
        self.write = self.controller.open_writer("in")

    def create(self, schema: persist.Schema = OUTPUT, **options: Any) -> Any:
        return self.sources.create("out", Collection("in"), schema, **({"decoding": LESS} | options))

    def rows(self, name: str = "out", as_of: int | None = None) -> dict[int, Any]:
        found = self.contents(name, as_of)
        assert all(row["_diff"] == 1 for row in found)
        return {row["id"]: row["cents"] for row in found}

    def history(self, name: str = "out") -> Counter[Any]:
        with self.controller.open_reader(name) as reader:
            found = reader.changes(reader.since.time).to_pylist()
        return Counter({(row["id"], row["cents"], row["_time"]): row["_diff"] for row in found})

    def check_same(self) -> None:
        """What both say at every time is the same."""
        for as_of in range(self.since("out"), self.controller.describe("out").upper.time or 0):
            if as_of >= self.since("in"):
                assert self.rows(as_of=as_of) == self.rows("in", as_of), as_of

    def since(self, name: str) -> int:
        return self.controller.describe(name).since.time or 0


def row(id_: int, cents: int | None, word: str = "w") -> dict[str, object]:
    return {"id": id_, "word": word, "cents": cents}


@pytest.fixture
def place() -> Iterator[Place]:
    found = Place()
    yield found
    found.world.close()


def test_a_derived_collection_says_the_same_at_every_time(place: Place) -> None:
    place.write.upsert([row(1, 10), row(2, 20)])
    found = place.create()
    assert found.schema.times is None
    place.catch_up()
    place.write.upsert([row(1, 11)])
    place.write.delete([2])
    place.write.upsert([row(3, 30)])
    done = place.catch_up()
    assert (done.time, done.behind_ms) == (4, 0)
    assert place.rows() == {1: 11, 3: 30}
    place.check_same()
    assert place.history()[2, 20, 2] == -1, "what goes from the one goes from the other, at its time"


def test_times_of_a_clock_are_those_of_the_input(place: Place) -> None:
    place.world.close()
    place = Place("us")
    place.write.upsert([row(1, 10)])
    assert place.create().schema.times == "us"
    place.catch_up()
    place.write.upsert([row(1, 11)])
    place.catch_up()
    assert place.history() == Counter(
        {key: diff for key, diff in place.history("in").items() if key[2] >= min(k[2] for k in place.history())}
    )
    (one,) = place.sources.show("out").instances[:1]
    assert one["state"] == "stopped"
    place.world.close()


def test_it_begins_where_the_input_can_be_read_and_holds_what_it_needs(place: Place) -> None:
    for cents in range(5):
        place.write.upsert([row(1, cents), row(cents + 10, cents)])
    place.controller.alter("in", retention=1)
    place.controller.tend()
    begins = place.since("in")
    assert begins > 0
    place.create()
    for cents in range(5, 8):
        place.write.upsert([row(1, cents)])
    place.controller.tend()
    assert place.since("in") == begins, "the source's hold keeps it"
    expected = [place.rows("in", as_of) for as_of in range(begins, 8)]
    place.catch_up()
    with pytest.raises(persist.SinceViolation):
        place.rows(as_of=begins - 2)
    assert [place.rows(as_of=as_of) for as_of in range(begins, 8)] == expected
    place.controller.tend()
    assert place.since("in") == 6, "what is durable here is not held there"


def test_several_sources_hold_one_collection_and_a_drop_lets_go(place: Place) -> None:
    place.create()
    place.sources.create("other", Collection("in"), OUTPUT, decoding=LESS)
    holds = {one.id for one in place.controller.capabilities("in") if one.kind == "hold"}
    assert len(holds) == 3
    place.sources.drop("out")
    place.sources.drop("other")
    assert {one.id for one in place.controller.capabilities("in") if one.kind == "hold"} == {"collection"}
    assert place.controller.list() == ["in"]


def test_a_handover_of_the_input_is_followed(place: Place) -> None:
    place.create()
    place.write.upsert([row(n, n) for n in range(8)])
    place.catch_up()
    place.controller.make_rendition("in", shards=5, copy=True)

    def corrected(rows: pa.Table) -> pa.Table:
        index = rows.schema.get_field_index("cents")
        return rows.set_column(index, "cents", pc.add(rows["cents"], 100))

    place.controller.copy_rendition("in", 2, transform=corrected)
    place.controller.hand_over("in", 2, advance=True, transform=corrected)
    place.write.upsert([row(1, 5)])
    place.catch_up()
    assert place.rows() == {n: 5 if n == 1 else n + 100 for n in range(8)}
    place.check_same()


def doubled(rows: pa.Table) -> pa.Table:
    """The cents doubled, of those that have any."""
    rows = rows.filter(pc.is_valid(rows["cents"]))
    names = ["id", "cents", "_time", "_diff"]
    return rows.set_column(rows.schema.get_field_index("cents"), "cents", pc.multiply(rows["cents"], 2)).select(names)


def forgetful(rows: pa.Table) -> pa.Table:
    return rows.select(["id", "cents", "_time"])


def test_a_transform_is_given_what_comes_and_what_goes(place: Place) -> None:
    place.create(meaning=Meaning(transform=f"{__name__}:doubled"), decoding=None)
    place.write.upsert([row(1, 10), row(2, None)])
    place.write.upsert([row(1, 11), row(2, 7)])
    place.write.delete([1])
    place.catch_up()
    assert [place.rows(as_of=n) for n in range(3)] == [{1: 20}, {1: 22, 2: 14}, {2: 14}]
    place.sources.drop("out")
    place.create(meaning=Meaning(transform=f"{__name__}:forgetful"), decoding=None)
    with pytest.raises(InvalidUsage, match="must pass on _diff"):
        place.catch_up()


def test_bad_rows_are_errors_once_and_take_nothing_away_when_they_go(place: Place) -> None:
    small = persist.Schema(key={"id": "int64 not null"}, value={"cents": "int8"})
    place.create(small)
    place.write.upsert([row(1, 10), row(2, 1000)])
    place.write.upsert([row(2, 20)])
    place.write.delete([2])
    place.catch_up()
    assert [place.rows(as_of=n) for n in range(3)] == [{1: 10}, {1: 10, 2: 20}, {1: 10}]
    with place.controller.open_reader("out/errors") as reader:
        (bad,) = reader.snapshot(diff=True).to_pylist()
    assert (bad["partition"], bad["address"], bad["_diff"]) == ("in", 0, 1)
    assert b"1000" in bad["raw"]


def test_upsert_over_what_is_only_added_takes_the_last_and_anything_else_is_refused(place: Place) -> None:
    place.controller.create("log", persist.Schema(key={"n": "int64 not null"}, value={"id": "int64 not null"}))
    with place.controller.open_writer("log") as write:
        write.append([{"n": n, "id": n % 3, "_time": n // 4} for n in range(8)], 0, 2)
        last = persist.Schema(key={"id": "int64 not null"}, value={"n": "int64 not null"})
        place.sources.create("last", Collection("log"), last, meaning=Meaning(envelope="upsert"))
        place.sources.run("last", until_idle=True)
        with place.controller.open_reader("last") as reader:
            found = [{one["id"]: one["n"] for one in reader.snapshot(t, diff=True).to_pylist()} for t in range(2)]
        assert found == [{0: 3, 1: 1, 2: 2}, {0: 6, 1: 7, 2: 5}]
        write.append([{"n": 0, "id": 0, "_time": 2, "_diff": -1}], 2, 3)
        with pytest.raises(InvalidUsage, match=r"taken away.*envelope 'none'"):
            place.sources.run("last", until_idle=True)
    assert place.controller.describe("last").upper == persist.at(2)


def test_windows_are_cut_and_change_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "STEP_BYTES", 3000)
    monkeypatch.setattr(running.Ingestion, "window_bytes", 3000)
    place.create()
    for n in range(20):
        place.write.upsert([row(id_, n * 100 + id_) for id_ in range(n % 5, 20)])
    parts = running.Ingestion._parts
    counts: list[int] = []

    def counted(self: Any, window: Any) -> Any:
        for part, some in parts(self, window):
            counts.append(some.num_rows)
            yield part, some

    monkeypatch.setattr(running.Ingestion, "_parts", counted)
    place.catch_up()
    assert len(counts) > 5
    assert max(counts) < sum(counts) / 3
    place.check_same()


def test_a_dropped_input_is_read_to_its_end_and_then_gone(place: Place) -> None:
    place.create()
    place.write.upsert([row(1, 10)])
    place.write.upsert([row(1, 11)])
    place.controller.drop("in")
    with pytest.raises(Gone, match="was dropped") as raised:
        place.catch_up()
    assert raised.value.partition == "in"
    assert place.rows() == {1: 11}
    assert place.sources.show("out").time == 2
    with pytest.raises(NotFound):
        place.sources.reset("out")
    assert place.sources.show("out").state == "running"
    place.sources.drop("out")
    assert place.controller.tend().waiting == ()
    assert place.controller.list() == place.sources.list() == []


def test_a_reset_reads_the_collection_that_has_the_name_now(place: Place) -> None:
    place.create()
    place.write.upsert([row(1, 10)])
    place.catch_up()
    place.write.close()
    place.controller.drop("in")
    place.controller.create("in", INPUT, mode="compare_and_append")
    with place.controller.open_writer("in") as write:
        write.upsert([row(7, 70)])
        place.sources.reset("out")
        place.catch_up()
        assert place.rows() == {7: 70}


def test_history_that_went_although_it_is_needed_is_gone(place: Place) -> None:
    place.create()
    place.write.upsert([row(1, 10)])
    place.catch_up()
    record = place.sources.find("out")
    shard = place.controller.catalog.fetch().find("in").shard
    place.sources.client.release_hold(shard, hold_name(record))
    for cents in range(5):
        place.write.upsert([row(1, cents)])
    place.controller.alter("in", retention=0)
    place.controller.tend()
    place.sources.resume("out")
    with pytest.raises(Gone, match="history of collection 'in'"):
        place.catch_up()


def test_a_source_over_a_sources_collection(place: Place, tmp_path: Any) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": 1, "cents": 5}\n{"id": 2, "cents": 6}\n')
    files = Files(place=str(tmp_path), format="jsonl")
    place.sources.create("first", files, OUTPUT, meaning=Meaning(envelope="upsert"))
    place.sources.create("second", Collection("first"), OUTPUT)
    for _ in range(2):
        place.world.clock.advance(6)
        first = place.sources.run("first", until_idle=True)
        second = place.sources.run("second", until_idle=True)
        assert first is not None
        assert second is not None
        assert (second.time, second.behind_ms) == (first.time, 0)
    assert place.rows("second") == place.rows("first") == {1: 5, 2: 6}
    place.controller.alter("first", retention=0)
    place.controller.tend()
    place.sources.drop("second")
    place.sources.drop("first")


def test_the_reader_keeps_its_promises(place: Place) -> None:
    for n in range(12):
        place.write.upsert([row(1, n), row(n, n)])
    place.controller.alter("in", retention=6)
    place.controller.tend()
    place.create()
    record = place.sources.find("out")
    values = []
    opened = record.reader.clock(place.controller, record, "")
    for table in opened.read("in", Mark(0), Mark(12)):  # type: ignore[attr-defined]
        values += table.column("value").to_pylist()
    assert len(values) > 12
    opened.close()
    check_reader(lambda: record.reader.clock(place.controller, record, ""), {"in": values})  # type: ignore[arg-type, return-value]


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("leave out the decoder", {"decoding": Decoding(decoder="json")}),
    ("keep_raw", {"meaning": Meaning(keep_raw=True)}),
    ("are not in milliseconds", {"meaning": Meaning(include={"cents": "time"})}),
    ("has its times", {"schema": persist.Schema(key=OUTPUT.key, value=OUTPUT.value, times="ms")}),
    ("Debezium", {"meaning": Meaning(envelope="debezium"), "decoding": None}),
]


@pytest.mark.parametrize(("match", "options"), WRONG)
def test_what_is_declared_wrong_makes_nothing(place: Place, match: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidUsage, match=match):
        place.create(**options)
    assert place.controller.list() == ["in"]


def test_there_must_be_such_a_collection(place: Place) -> None:
    with pytest.raises(NotFound, match="no collection 'inn'"):
        place.sources.create("out", Collection("inn"), OUTPUT)
    for name in ("", None, "a//b"):
        with pytest.raises((InvalidUsage, persist.PersistError)):
            Collection(name)  # type: ignore[arg-type]
