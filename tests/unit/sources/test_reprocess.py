"""A wrong decoder is mended from the messages that were kept, while instances run and processes die."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib.errors import Determinate, HandoverRefused, InvalidUsage, NotFound
from persist_lib.sources import Collection, Decoding, Meaning, Sources, reprocess, running
from persist_lib.sources.protocol import HOLD
from tests.faults.test_collection_commands import Died, Dying
from tests.unit.sources.test_running import Place, row
from tests.worlds import World

ALL = os.environ.get("PERSIST_FAULTS") == "all"
WRONG = Decoding(decoder="json", columns={"word": "wrd"}, extra="ignore")
RIGHT = Decoding(decoder="json")
KEPT = Meaning(envelope="upsert", keep_raw=True)
WIDER: dict[str, Any] = {
    "schema": persist.Schema(key={"id": "int64 not null"}, value={"word": "string", "where": "string"}),
    "meaning": Meaning(envelope="upsert", keep_raw=True, include={"where": "partition"}),
}


def begin(place: Place, **options: Any) -> list[int]:
    """A source with a wrong decoder, and two times at which it was ingested."""
    place.create(**({"decoding": WRONG, "meaning": KEPT} | options))
    times: list[int] = []
    for word in ("a", "b"):
        place.write("a.jsonl", row(1, word), row(2 + len(times), word), b"garbage")
        times.append(place.catch_up().time)
    return times


def test_what_was_decoded_wrongly_is_decoded_anew_compared_and_handed_over(place: Place) -> None:
    times = begin(place)
    assert place.words() == {1: None, 2: None, 3: None}
    found = place.sources.mend("s", decoding=RIGHT)
    assert found.output is not None
    assert found.errors is not None
    assert (found.output.changed, found.output.equal_keys, found.output.columns) == (3, 0, {"word": 3})
    assert found.errors.is_equal
    assert place.words() == {1: None, 2: None, 3: None}, "no reader sees it yet"
    place.write("a.jsonl", row(1, "c"))
    place.catch_up()
    at = place.sources.hand_over("s")
    assert at > times[-1]
    assert place.words() == {1: "c", 2: "a", 3: "b"}
    assert place.words(times[0] - 1) == {1: None, 2: None}, "what was read of earlier times stays"
    for name in ("s", "s/errors"):
        assert [one.start for one in place.controller.describe(name).renditions] == [0, at], "both at once"
    place.write("a.jsonl", row(2, "d"), b"bad")
    place.catch_up()
    assert place.words() == {1: "c", 2: "d", 3: "b"}
    assert len(place.contents("s/errors")) == 3
    record = place.sources.find("s")
    assert (record.decoding, record.mending, record.mended) == (RIGHT, None, 1)


def test_errors_that_were_none_are_none_afterwards(place: Place) -> None:
    begin(place, decoding=Decoding(decoder="json", columns={"word": "wrd"}))
    assert (len(place.contents()), len(place.contents("s/errors"))) == (0, 6)
    found = place.sources.mend("s", decoding=RIGHT)
    assert found.output is not None
    assert found.errors is not None
    assert (found.output.appeared, found.errors.vanished, found.errors.equal_keys) == (3, 4, 2)
    place.sources.hand_over("s")
    assert (len(place.contents()), len(place.contents("s/errors"))) == (3, 2)


def test_instances_that_run_go_on_with_the_new_decoding(place: Place) -> None:
    """One finds out by itself, and one that was opened before writes nothing until it does."""
    begin(place)
    late = Sources(place.world.client().controller()).open("s")
    late.step()
    seen: list[Any] = []
    handed = []

    def told(what: Any) -> None:
        seen.append(what)
        if len(seen) == 2:
            place.sources.mend("s", decoding=RIGHT)
            place.write("a.jsonl", row(1, "during"))
        if len(seen) == 3:
            handed.append(place.sources.hand_over("s"))
            place.write("a.jsonl", row(2, "after"))
        place.world.clock.advance(1)

    others = Sources(place.world.client().controller())
    others.run("s", told=told, stop=lambda: len(seen) > 6)
    assert handed
    assert place.words() == {1: "during", 2: "after", 3: "b"}
    place.write("a.jsonl", row(3, "late"))
    place.world.clock.advance(10)
    with pytest.raises(Determinate, match="was mended while it ran"):
        late.step()
    late.adopt(place.sources.find("s"))
    late.step()
    late.close()
    assert place.words() == {1: "during", 2: "after", 3: "late"}


def test_an_instance_that_decoded_before_the_handover_writes_nothing_of_it_after(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handover comes between the decoding and the append. What was promised before keeps it beyond these times."""
    begin(place)
    place.sources.mend("s", decoding=RIGHT)
    instance = Sources(place.world.client().controller()).open("s")
    write = running.Ingestion._write
    at = []

    def handed_over_before(self: Any, *args: Any) -> None:
        monkeypatch.setattr(running.Ingestion, "_write", write)
        with suppress(persist.PersistError):  # it waits for what was promised to be written
            place.sources.hand_over("s", timeout=0.2)
        write(self, *args)
        at.append(args[1].end)

    monkeypatch.setattr(running.Ingestion, "_write", handed_over_before)
    place.write("a.jsonl", row(1, "between"))
    place.world.clock.advance(1)
    instance.step()
    instance.close()
    assert place.sources.hand_over("s") >= at[0] if place.sources.find("s").mending else True
    place.world.clock.advance(6)
    place.catch_up()
    assert place.words() == {1: "between", 2: "a", 3: "b"}
    assert [one.start >= at[0] for one in place.controller.describe("s").renditions if one.start] == [True]


@pytest.mark.parametrize("happens", [True, False])
@pytest.mark.parametrize("what", ["mend", "hand_over", "give_up"])
def test_what_a_mender_left_the_next_one_finishes(tmp_path: Path, what: str, happens: bool) -> None:
    total = story(tmp_path / "whole", Dying(None, happens=True), what)
    assert total > 5
    for k in range(1 + happens, total + 1, 1 if ALL else 9):
        story(tmp_path / f"{k}", Dying(k, happens=happens), what)


def story(folder: Path, dying: Dying, what: str) -> int:
    world = World()
    try:
        place = Place(world, folder)
        begin(place)
        if what != "mend":
            place.sources.mend("s", decoding=RIGHT)
        theirs = Sources(world.client(plan=dying).controller())
        calls = {"mend": lambda it: it.mend("s", decoding=RIGHT), "hand_over": lambda it: it.hand_over("s"),
                 "give_up": lambda it: it.give_up("s")}  # fmt: skip
        with suppress(Died):
            calls[what](theirs)
        world.clock.advance(30)
        for _ in range(2):
            with suppress(NotFound):  # there is nothing left of it
                calls[what](place.sources)
        place.write("a.jsonl", row(1, "end"))
        place.catch_up()
        if what == "hand_over":
            assert place.words() == {1: "end", 2: "a", 3: "b"}
            assert place.sources.find("s").mended == 1
        else:
            assert place.words() == {1: None, 2: None, 3: None}
        if what == "give_up":
            assert [one.number for one in place.controller.describe("s").renditions] == [1]
            found = place.sources.mend("s", decoding=RIGHT)
            assert found.renditions == {"output": 3, "errors": 3}
        place.sources.drop("s")
        assert place.controller.list() == []
        return dying.seen
    finally:
        dying.k = None
        world.close()


@pytest.mark.parametrize("happens", [True, False])
@pytest.mark.parametrize("recipe", ["decoding", "columns"])
def test_what_an_instance_left_is_decoded_as_before(tmp_path: Path, recipe: str, happens: bool) -> None:
    """It died at any of its requests, and the handover comes before another one has done what it left."""
    total = left_behind(tmp_path / "whole", Dying(None, happens=True), recipe)
    assert total > 15
    for k in range(1 + happens, total + 1, 1 if ALL else 5):
        left_behind(tmp_path / f"{k}", Dying(k, happens=happens), recipe)


def left_behind(folder: Path, dying: Dying, recipe: str) -> int:
    world = World()
    try:
        place = Place(world, folder)
        begin(place)
        place.write("a.jsonl", row(1, "between"), b"bad")
        place.sources.mend("s", decoding=RIGHT, **(WIDER if recipe == "columns" else {}))
        world.clock.advance(1)
        with suppress(Died):
            Sources(world.client(plan=dying).controller()).open("s").step()
        world.clock.advance(30)
        at = place.sources.hand_over("s")
        place.write("a.jsonl", row(2, "after"), b"bad")
        place.catch_up()
        assert place.words() == {1: "between", 2: "after", 3: "b"}
        assert set(place.words(at - 1).values()) == {None}
        assert len(place.contents("s/errors")) == 4
        return dying.seen
    finally:
        dying.k = None
        world.close()


def test_it_is_mended_again_and_resharded_and_all_is_still_right(place: Place) -> None:
    begin(place)
    place.sources.mend("s", decoding=RIGHT)
    place.sources.hand_over("s")
    new = place.controller.make_rendition("s", shards=3, copy=True)
    place.controller.copy_rendition("s", new.number)
    place.controller.hand_over("s", new.number)
    place.controller.copy_rendition("s", new.number, to_end=True)
    place.write("a.jsonl", row(4, "more"))
    place.catch_up()
    place.sources.mend("s", decoding=WRONG)
    place.sources.hand_over("s")
    place.world.clock.advance(6)
    place.write("a.jsonl", row(5, "again"))
    place.catch_up()
    assert place.words() == dict.fromkeys(range(1, 6))
    place.controller.tend()
    assert place.sources.find("s").mended == 2


def capitals(rows: pa.Table) -> pa.Table:
    return rows.set_column(rows.schema.get_field_index("word"), "word", pa.compute.utf8_upper(rows["word"]))


def test_other_columns_and_a_transform(place: Place) -> None:
    begin(place)
    place.sources.mend("s", decoding=RIGHT, **WIDER)
    place.sources.hand_over("s")
    place.world.clock.advance(6)
    place.write("a.jsonl", row(1, "c"))
    place.catch_up()
    assert {one["where"] for one in place.contents()} == {"a.jsonl"}
    capital = Meaning(
        envelope="upsert", keep_raw=True, transform=f"{__name__}:capitals", include={"where": "partition"}
    )
    place.sources.mend("s", meaning=capital)
    place.sources.hand_over("s")
    assert place.words() == {1: "C", 2: "A", 3: "B"}


def test_what_cannot_be_mended_is_refused_and_changes_nothing(place: Place) -> None:
    begin(place)
    with pytest.raises(NotFound, match="not being mended"):
        place.sources.mend("s")
    with pytest.raises(NotFound, match="not being mended"):
        place.sources.hand_over("s")
    with pytest.raises(InvalidUsage, match="decoded so already"):
        place.sources.mend("s", decoding=WRONG)
    with pytest.raises(InvalidUsage, match="keep_raw=True"):
        place.sources.mend("s", meaning=Meaning(envelope="upsert"))
    with pytest.raises(InvalidUsage, match="decoding must be"):
        place.sources.mend("s", decoding="json")  # type: ignore[arg-type]
    assert place.sources.find("s").mending is None
    place.sources.mend("s", decoding=RIGHT)
    with pytest.raises(InvalidUsage, match="mended in another way"):
        place.sources.mend("s", decoding=Decoding(decoder="json", extra="ignore"))
    place.sources.mend("s", decoding=RIGHT)
    place.sources.give_up("s")
    place.sources.create("bare", Collection("s"), persist.Schema(key={"id": "int64 not null"}),
                         decoding=Decoding(decoder="rows", extra="ignore"))  # fmt: skip
    with pytest.raises(InvalidUsage, match="did not keep its messages"):
        place.sources.mend("bare", decoding=RIGHT)
    place.sources.client.release_hold(place.controller.catalog.fetch().find("s/raw").shard, HOLD)
    place.controller.alter("s/raw", retention=0)
    place.controller.tend()
    with pytest.raises(InvalidUsage, match="given up its history"):
        place.sources.mend("s", decoding=RIGHT)


def test_a_handover_that_was_decided_is_not_given_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(place)
    place.sources.mend("s", decoding=RIGHT)
    monkeypatch.setattr(reprocess, "finish", lambda *_: (_ for _ in ()).throw(HandoverRefused("not now")))
    with pytest.raises(HandoverRefused):
        place.sources.hand_over("s")
    with pytest.raises(HandoverRefused, match="decided"):
        place.sources.give_up("s")
    monkeypatch.undo()
    place.world.clock.advance(6)
    place.catch_up()
    assert place.sources.find("s").mended == 1, "the next process finishes it"
    assert place.words() == {1: "b", 2: "a", 3: "b"}


def test_a_caller_that_knows_the_source_from_before_a_reset_changes_nothing_of_its_second_recipe(place: Place) -> None:
    begin(place)
    place.sources.mend("s", decoding=RIGHT)
    old = place.sources.find("s")
    place.sources.reset("s")
    place.world.clock.advance(6)
    place.catch_up()
    place.sources.mend("s", decoding=RIGHT)
    now = place.sources.find("s")
    assert (now.mending.number, old.mending.number) == (1, 1)  # type: ignore[union-attr]
    deadline = place.sources.client.runtime.deadline(10)
    with pytest.raises(NotFound, match="in between"):
        reprocess.decide(place.sources, old, deadline)
    assert place.sources.find("s") == now
