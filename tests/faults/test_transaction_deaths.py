"""An instance that dies at any request while transactions wait: no time ever shows half of one; the end is right."""

from __future__ import annotations

import os
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.errors import PersistError
from persist_lib.sources import Files, Meaning, Sources, Transactions
from tests.bank import MARKS, Bank, Told, by_time, sums
from tests.faults.test_collection_commands import Died, Dying
from tests.ingests import CONFIG, step_on
from tests.worlds import World

ALL = os.environ.get("PERSIST_FAULTS") == "all"
SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"cents": "int64 not null"})
STAGES = 5


@pytest.mark.parametrize("happens", [True, False])
@pytest.mark.parametrize("in_order", [True, False])
def test_another_instance_goes_on_where_one_died(tmp_path: Path, happens: bool, in_order: bool) -> None:
    total = story(tmp_path / "whole", Dying(None, happens=True), in_order=in_order)
    assert total > 20
    for k in range(1, total + 1) if ALL else range(1 + happens + 2 * in_order, total + 1, 23):
        story(tmp_path / f"{k}", Dying(k, happens=happens), in_order=in_order)


def story(folder: Path, dying: Dying, *, in_order: bool) -> int:
    """Two instances; the second one dies so. Answers its requests."""
    folder.mkdir()
    world, dice = World(), random.Random(3)
    bank = Bank(dice)
    for _ in range(8):
        bank.transfer()
    try:
        sources = Sources(world.client(CONFIG).controller())
        how = Transactions(topic=f"{MARKS}.jsonl", in_order=in_order)
        meaning = Meaning(envelope="debezium", transactions=how)
        sources.create("s", Files(place=str(folder), format="jsonl"), SCHEMA, meaning=meaning, shards=2)
        first, client = sources.open("s"), world.client(CONFIG, plan=dying)
        seen: dict[Any, dict[int, int]] = {}
        told = bank.with_repeats()
        for stage in range(STAGES):
            grow(folder, told, dice, stage)
            if 0 < stage < 4:
                world.clock.advance(2)
                with suppress(Died, PersistError):
                    Sources(client.controller()).open("s").step()
            look(sources, seen)
            if stage != 1:
                step_on(world, first)
                look(sources, seen)
        for _ in range(3):
            step_on(world, first)
        assert look(sources, seen) == bank.balances
        with sources.controller.open_reader("s/waiting") as reader:
            assert {row["what"] for row in reader.snapshot().to_pylist()} == {"done"}
        return dying.seen
    finally:
        dying.k = None
        world.close()


def grow(folder: Path, told: list[Told], dice: random.Random, stage: int) -> None:
    """More of each topic is there, of each as much as chance has it; at last all of it."""
    for topic in {one.topic for one in told}:
        lines = [one.value + b"\n" for one in told if one.topic == topic]
        path = folder / f"{topic}.jsonl"
        known = path.read_bytes().count(b"\n") if path.exists() else 0
        upto = len(lines) if stage == STAGES - 1 else dice.randrange(known, len(lines) + 1)
        with path.open("ab") as file:
            file.writelines(lines[known:upto])


def look(sources: Sources, seen: dict[Any, dict[int, int]]) -> dict[int, int]:
    """What is there at each time: whole transfers, and the same as ever before. Answers the newest."""
    with sources.controller.open_reader("s") as reader:
        if not reader.fetch_upper().time:
            return {}
        found = by_time(reader.changes(None).to_pylist())
    for time, contents in found.items():
        assert sums(contents)
        assert seen.setdefault(time, contents) == contents
    assert set(seen) == set(found)
    return found[max(found)] if found else {}
