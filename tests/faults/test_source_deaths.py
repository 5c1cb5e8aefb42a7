"""An instance of a source that dies before any one of its requests, or after: another continues, and all is right."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from persist_lib.sources import Files, Ingestion, Meaning, Sources, Transactions
from tests.faults.test_collection_commands import Died, Dying
from tests.ingests import ALONE, CONFIG, SCHEMA, Lines, Topics, Transfers, Watched, step_on, topics_of_files
from tests.worlds import World

ALL = os.environ.get("PERSIST_FAULTS") == "all"
STORIES: dict[str, tuple[type[Lines], Meaning]] = {
    "upsert": (Lines, Meaning(envelope="upsert", keep_raw=True)),
    "none": (Lines, Meaning()),
    "outputs": (Topics, Meaning(envelope="upsert", keep_raw=True)),
    "transactions": (Transfers, Meaning(envelope="debezium", transactions=Transactions(topic="marks"))),
}


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("happens", [True, False])
@pytest.mark.parametrize("kind", STORIES)
def test_another_instance_goes_on_where_one_died(
    place: Callable[[str], tuple[str, str | None]], tmp_path: Path, kind: str, happens: bool, part: int
) -> None:
    total = story(place("whole"), tmp_path / "whole-in", Dying(None, happens=True), *STORIES[kind])
    assert total > 10
    first, step = (1 + part, 2) if ALL else (1 + happens + 2 * part, 4)
    for k in range(first, total + 1, step):
        story(place(f"{k}"), tmp_path / f"{k}-in", Dying(k, happens=happens), *STORIES[kind])


def story(place: tuple[str, str | None], folder: Path, dying: Dying, kind: type[Lines], meaning: Meaning) -> int:
    """Two instances; the second one dies so in the midst of a step, and the first continues. Returns its requests."""
    world = World(place[0], 0, place[1])
    try:
        lines = kind(folder)
        with topics_of_files(), (watched := Watched(world, lines, meaning)).watching():
            lines.add("a", 1, "one")
            lines.append("a", b"bad\n")
            first = watched.open(watched.client)
            step(watched, first)
            lines.add("a", 1, "two")
            lines.add("b", 2, "three")
            torn = lines.line(ALONE, "torn")
            lines.append("b", b"worse\n" + torn[:1])
            client = world.client(CONFIG, plan=dying)
            world.clock.advance(2)
            with suppress(Died):
                other = watched.open(client)
                other.step()
                world.clock.advance(2)
                other.step()
            watched.learn()
            durable = watched.durable()
            watched.asked.clear()
            lines.append("b", torn[1:])
            lines.add("a", 2, "four")
            lines.finish()
            for _ in range(2):
                step(watched, first)
            assert all(start >= durable.get(partition, 0) for partition, start in watched.asked)
            assert all(address <= watched.durable()[partition] for partition, address in watched.told.items())
            watched.check_end()
        return dying.seen
    finally:
        dying.k = None
        world.close()


def step(watched: Watched, instance: Ingestion) -> None:
    step_on(watched.world, instance)
    watched.learn()


@pytest.mark.parametrize("happens", [True, False])
@pytest.mark.parametrize("what", ["create", "drop", "reset"])
def test_what_a_command_left_the_next_one_finishes(tmp_path: Path, what: str, happens: bool) -> None:
    total = command(tmp_path / "whole", Dying(None, happens=True), what)
    for k in range(1, total + 1) if ALL else range(1 + happens, total + 1, 2 if what == "create" else 7):
        command(tmp_path / f"{k}", Dying(k, happens=happens), what)


def command(folder: Path, dying: Dying, what: str) -> int:
    world = World()
    try:
        lines = Lines(folder)
        lines.add("a", 1, "one")
        files = Files(place=str(folder), format="jsonl")
        sources = Sources(world.client(CONFIG).controller())
        theirs = Sources(world.client(CONFIG, plan=dying).controller())
        if what == "create":
            with suppress(Died):
                theirs.create("s", files, SCHEMA, command="one")
            sources.create("s", files, SCHEMA, command="one")
        else:
            sources.create("s", files, SCHEMA, command="one")
            sources.run("s", until_idle=True)
            with suppress(Died):
                (theirs.drop if what == "drop" else theirs.reset)("s")
            if what == "reset":
                sources.reset("s")
            elif "s" in sources.declared.fetch():
                sources.drop("s")
                assert sources.list() == sources.controller.list() == []
            if what == "drop":
                sources.create("s", files, SCHEMA, command="two")
        world.clock.advance(1)
        sources.run("s", until_idle=True)
        with sources.controller.open_reader("s") as reader:
            assert [(row["id"], row["word"]) for row in reader.snapshot().to_pylist()] == [(1, "one")]
        assert sources.controller.list() == ["s", "s/errors", "s/health"]
        return dying.seen
    finally:
        dying.k = None
        world.close()
