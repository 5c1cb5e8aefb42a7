"""A schema registry is reclocked like the messages: what it said first holds, for every process and for ever."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.errors import Determinate, Diverged, InvalidUsage, PersistError
from persist_lib.sources import Decoding, Meaning, Registry, Sources
from tests.registry import Registered, RegistryServer
from tests.unit.sources.test_avro import ROW, datum

SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"})
OTHER = {**ROW, "fields": [ROW["fields"][0], {"name": "word", "type": "string"}]}
KEY = "long"


def wire(id_: int, row: Any, schema: Any = ROW) -> bytes:
    return b"\0" + id_.to_bytes(4) + datum(row, schema)


class Place(Registered):
    """A topic of Avro, a registry, and a source of them."""

    def __init__(self, **registry: Any) -> None:
        super().__init__()
        self.server.add(1, ROW)
        self.server.add(9, json.dumps(KEY))
        self.registry = Registry(**{"place": self.server.url, **registry})
        self.sources.create(
            "s", self.topic.declared(), SCHEMA, meaning=Meaning(envelope="upsert"),
            decoding=Decoding(decoder="avro", key="avro", registry=self.registry),
        )  # fmt: skip

    def put(self, id_: int, word: str | None, schema: int = 1, as_: Any = ROW) -> None:
        value = None if word is None else wire(schema, {"id": id_, "word": word}, as_)
        self.topic.write([value], keys=[wire(9, id_, KEY)])


@pytest.fixture
def place() -> Iterator[Place]:
    found = Place()
    yield found
    found.close()


def test_messages_and_keys_are_read_by_the_registrys_schemas(place: Place) -> None:
    place.put(1, "a")
    place.put(2, "b")
    place.server.add(2, OTHER)
    place.put(3, "c", 2, OTHER)
    place.put(1, None)
    assert place.step().errors == 0
    assert place.words() == {2: "b", 3: "c"}
    assert sorted(place.server.asked) == ["/schemas/ids/1", "/schemas/ids/2", "/schemas/ids/9"]


def test_a_registry_that_does_not_answer_stalls_what_needs_it_and_nothing_else(place: Place) -> None:
    place.put(1, "a")
    place.step()
    place.server.fails = True
    place.put(2, "b")
    assert place.step().messages == 1, "what is committed is known without it"
    place.put(3, "c", 2)
    for _ in range(2):
        with pytest.raises(Determinate, match="500"):
            place.step()
    assert place.words() == {1: "a", 2: "b"}
    place.server.fails = False
    with pytest.raises(Determinate, match="no such schema"):
        place.step()
    place.server.add(2, ROW)
    heard: list[PersistError | Any] = []
    place.world.clock.advance(1)
    place.sources.run("s", until_idle=True, told=heard.append)
    assert place.words() == {1: "a", 2: "b", 3: "c"}


def test_what_was_said_first_holds_for_every_instance(place: Place) -> None:
    """Two instances whose registry says something else to each of them: the second one uses what the first one got."""
    other = Sources(place.world.client().controller())
    place.server.add(2, ROW)
    place.put(1, "a", 2)
    first, second = place.sources.open("s"), other.open("s")
    place.world.clock.advance(1)
    first._mint(place.world.client().runtime.deadline(5))
    asked = second._schemas._registry.fetch  # type: ignore[union-attr]
    assert second._schemas is not None
    second._schemas._fetch()
    # While the second one asks, the first one commits what it got; and the second one gets another answer.
    answers = []

    def late(id_: int) -> Any:
        answers.append(asked(id_))
        place.server.fails = True
        if id_ == 2:
            place.server.fails = False
            first.step(mints=False)
            return answers[-1]._replace(text=json.dumps(OTHER))
        place.server.fails = False
        return answers[-1]

    object.__setattr__(second._schemas, "_registry", Told(late, place.registry))
    second.step(mints=False)
    assert answers
    assert place.words() == {1: "a"}


class Told:
    """A registry that says what a test wants."""

    def __init__(self, fetch: Any, registry: Registry) -> None:
        self.fetch, self.place = fetch, registry.place


def test_a_registry_that_says_something_else_later_has_diverged(place: Place) -> None:
    place.put(1, "a")
    place.step()
    place.server.add(1, json.dumps(ROW, indent=3))  # the same
    place.put(1, "b")
    place.step()
    place.server.add(1, OTHER)
    place.put(1, "c")
    with pytest.raises(Diverged, match="another schema for the id 1"):
        place.step()
    assert place.words() == {1: "b"}
    place.server.add(1, ROW)
    place.step()
    assert place.words() == {1: "c"}


def test_schemas_may_refer_to_others(place: Place) -> None:
    part = {"type": "enum", "name": "Word", "symbols": ["A", "B"]}
    whole = {**ROW, "fields": [{"name": "id", "type": "long"}, {"name": "word", "type": "Word"}]}
    references = [{"name": "Word", "subject": "words/of", "version": 3}]
    place.server.subjects["words%2Fof", 3] = {"schema": json.dumps(part), "id": 70}
    place.server.add(5, whole, references=references)
    value = b"\0" + (5).to_bytes(4) + b"\x02\x02"
    place.topic.write([value], keys=[wire(9, 1, KEY)])
    assert place.step().errors == 0
    assert place.words() == {1: "B"}


def test_messages_of_unknown_schemas_are_bad_where_that_is_declared() -> None:
    place = Place(unknown="error")
    try:
        place.put(1, "a", 77)
        place.put(2, "b")
        assert place.step().errors == 1
        place.server.add(77, ROW)
        place.put(3, "c", 77)
        assert place.step().errors == 1, "as it was said first"
        assert place.words() == {2: "b"}
    finally:
        place.close()


def test_a_folder_is_a_registry_too(tmp_path: Path) -> None:
    (tmp_path / "1.avsc").write_text(json.dumps(ROW))
    registry = Registry(place=str(tmp_path))
    assert json.loads(registry.fetch(1).text) == ROW
    with pytest.raises(Determinate, match="no such schema"):
        registry.fetch(2)
    with pytest.raises(Determinate, match="no such folder"):
        Registry(place=str(tmp_path / "nope")).fetch(1)


def test_a_password_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with RegistryServer(login="me:hunter2") as server:
        server.add(1, ROW)
        with pytest.raises(Determinate, match="401"):
            Registry(place=server.url).fetch(1)
        registry = Registry(place=server.url, user="me", password="env:SOME_PASSWORD")
        with pytest.raises(InvalidUsage, match="SOME_PASSWORD"):
            registry.fetch(1)
        monkeypatch.setenv("SOME_PASSWORD", "hunter2")
        assert registry.fetch(1).kind == "AVRO"
        assert "hunter2" not in repr(registry)
    with pytest.raises(Determinate, match="does not answer"):
        registry.fetch(1)


def test_a_source_that_is_dropped_leaves_no_schemas(place: Place) -> None:
    place.put(1, "a")
    place.step()
    shard = place.sources.find("s").schemas
    place.sources.drop("s")
    state = place.world.client().machine(shard).fetch().state
    assert state.upper.time is None
    assert state.since.time is None
