"""Columns that count up: each number is given once, whatever is repeated, lost, raced for or killed."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest

import persist_lib as persist
from persist_lib.cli.history import changes
from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.deciding import is_out_for_ever
from persist_lib.core.diff import StateDiff, apply_diff
from persist_lib.core.identities import END
from persist_lib.core.state import State
from persist_lib.core.transitions import change
from persist_lib.core.validate import check_state
from persist_lib.errors import InvalidUsage, PersistError, SchemaMismatch
from persist_lib.format.log import decode_row
from persist_lib.ids import SeqNo
from persist_lib.location.wrap.around import Operation
from persist_lib.testing import Fate, Outcome, check_world
from tests.worlds import World

NOTES = persist.Schema(key={"id": "int64 not null identity"}, value={"text": "string"}, times="ms")


def ids(table: persist.Table) -> list[int]:
    return sorted(row["id"] for row in table.read().to_pylist())


def test_rows_are_numbered_from_1_on_by_each_verb(world: World) -> None:
    client = world.client()
    table = client.table("notes", NOTES)
    assert str(NOTES.key[0]) == "id: int64 not null default identity()"
    assert persist.Schema({"id": "int64 not null default identity()"}, NOTES.value, times="ms") == NOTES
    table.append([{"text": "a"}, {"text": "b"}])
    table.upsert([{"text": "c"}, {"id": 2, "text": "B"}])
    client.open_writer("notes", NOTES).append_now([{"text": "d"}])
    rows = {row["id"]: row["text"] for row in table.read().to_pylist()}
    assert rows[1] == "a"
    assert rows[2] == "B"
    assert sorted(rows) == [1, 2, *sorted({*rows} - {1, 2})]
    assert len(rows) == 4
    with pytest.raises(InvalidUsage, match="taken away"):
        table.append([{"text": "a", "_diff": -1}])
    assert client.inspect("notes").state.format == 12
    check_world(client, "notes")
    client.maintain("notes")
    again = world.client().table("notes", NOTES)
    again.append([{"text": "e"}])
    assert len(set(ids(again))) == 5, "what a rollup says counts on"


def test_numbers_rise_within_a_writer_and_are_taken_ahead_but_for_the_first(world: World) -> None:
    client = world.client()
    table = client.table("notes", NOTES)
    for text in range(40):
        table.append([{"text": str(text)}])
    rows = sorted((row["id"], int(row["text"])) for row in table.read().to_pylist())
    assert [text for _, text in rows] == list(range(40))
    before = 1 + 1 + 2 + 4 + 8 + 16 + 32
    assert client.inspect("notes").state.identities == {"id": before}
    rows_of_log = client.machine("notes").consensus.scan("notes", SeqNo(1), 200)
    assert sum(decode_row(row.data, "row").command == "Reserve" for row in rows_of_log) == 6
    other = world.client().table("notes", NOTES)
    other.append([{"text": "40"}] * 2)
    assert [row for row in ids(other) if row >= before] == [before, before + 1]


def test_a_repeated_call_keeps_the_numbers_of_the_first(world: World) -> None:
    table = world.client().table("notes", NOTES)
    done = table.append([{"text": "a"}])
    assert table.append([{"text": "a"}], token=done.token).time == done.time
    assert ids(table) == [1]
    table.append([{"text": "b"}])
    assert len(set(ids(table))) == 2


def test_a_dry_run_takes_no_number(world: World) -> None:
    client = world.client()
    table = client.table("notes", NOTES)
    seqno = client.inspect("notes").seqno
    assert table.upsert([{"text": "a"}], dry_run=True).inserted == 1
    table.append([{"text": "a"}], dry_run=True)
    assert client.inspect("notes").seqno == seqno
    assert client.inspect("notes").state.identities == {}


class Losing:
    """Every second commit is lost: by turns on its way there, and with its answer."""

    def __init__(self) -> None:
        self._count = 0

    def decide(self, operation: Operation) -> Fate:
        if not operation.kind.startswith("compare_and_set"):
            return Fate()
        self._count += 1
        return Fate([Outcome.DONE, Outcome.HAPPENED_UNKNOWN, Outcome.DONE, Outcome.LOST_UNKNOWN][self._count % 4])


def test_a_lost_answer_leaves_a_gap_and_no_number_twice(world: World) -> None:
    world.client().table("notes", NOTES)
    table = world.client(plan=Losing()).table("notes", NOTES)
    for text in range(12):
        table.append([{"text": str(text)}] * 2)
    found = ids(world.client().table("notes", NOTES))
    assert len(found) == len(set(found)) == 24


def test_many_writers_never_get_the_same_number(world: World) -> None:
    world.client().table("notes", NOTES)
    failed: list[PersistError] = []

    def run(number: int) -> None:
        try:
            table = world.client().table("notes", NOTES)
            for _ in range(5):
                table.append([{"text": str(number)}] * 3)
        except PersistError as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    found = ids(world.client().table("notes", NOTES))
    assert len(found) == len(set(found)) == 120


def test_an_interrupt_leaves_a_gap(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    client = world.client()
    table = client.table("notes", NOTES)
    machine = client.machine("notes")
    commit = machine.try_commit

    def interrupted(*arguments: Any) -> Any:
        commit(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(machine, "try_commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        table.append([{"text": "a"}])
    monkeypatch.undo()
    table.append([{"text": "b"}])
    assert ids(table) == [2]


def test_a_fork_takes_numbers_of_its_own(world: World) -> None:
    client = world.client()
    table = client.table("notes", NOTES)
    for _ in range(3):
        table.append([{"text": "a"}])
    numbers = client.machine("notes").numbers
    column = NOTES.key[0]
    assert numbers.take(column, 1) == 4
    numbers.after_fork_in_child()
    assert numbers.take(column, 1) == 8, "5 to 7 are the parent's"


def test_the_end_of_int64_is_refused_and_no_number_is_below_it(world: World) -> None:
    client = world.client()
    table = client.table("notes", NOTES)
    machine = client.machine("notes")
    machine.try_commit(lambda _state, _now: c.Reserve("id", 1, END - 3))
    table.append([{"text": "a"}, {"text": "b"}])
    assert ids(table) == [2**63 - 2, 2**63 - 1]
    with pytest.raises(InvalidUsage, match="has 0 numbers left, and 1 are needed"):
        table.append([{"text": "c"}])
    assert table.upsert([{"id": 7, "text": "given"}]).inserted == 1


def test_a_column_that_is_added_counts_for_new_rows(world: World) -> None:
    client = world.client()
    table = client.table("t", persist.Schema({"id": "string"}, {"text": "string"}, times="ms"))
    table.append([{"id": "a", "text": "a"}])
    now = table.describe().schema
    with pytest.raises((InvalidUsage, SchemaMismatch)):
        table.evolve(now.add({"n": "int64 not null identity"}))
    table.evolve(now.add({"n": "int64 not null identity"}, {"n": 0}).add({"m": "int64 identity"}))
    table = world.client().table("t")
    table.append([{"id": "b", "text": "b"}])
    table.evolve(table.describe().schema.rename({"n": "number"}))
    table = world.client().table("t")
    table.upsert([{"id": "b", "text": "B"}, {"id": "c", "text": "c"}])
    rows = {row["id"]: (row["number"], row["m"]) for row in table.read().to_pylist()}
    assert rows["a"] == (0, None)
    assert rows["b"] == (1, 1), "an upsert keeps what is there"
    assert rows["c"][0] > 1, "a renamed column counts on"
    assert set(client.inspect("t").state.identities) == {"n", "m"}


def test_what_cannot_count_refuses(world: World) -> None:
    client = world.client()
    with pytest.raises(InvalidUsage, match="for int64"):
        persist.Schema({"id": "string default identity()"})
    with pytest.raises(InvalidUsage, match="only a table of one shard"):
        client.controller().create("c", NOTES, shards=1, mode="append")
    with pytest.raises(InvalidUsage, match="only a table of one shard"):
        client.controller().tables().create("d", NOTES)
    client.table("notes", NOTES).append([{"text": "a"}])
    with pytest.raises(InvalidUsage, match="only a table of one shard"):
        client.controller().promote("notes")
    assert ids(client.table("notes")) == [1]


# --- the state machine ------------------------------------------------------------------------------------------------


def counted() -> State:
    made = change(State(), SeqNo(1), c.Create(NOTES, 12))
    assert isinstance(made, StateDiff)
    return apply_diff(State(), made)


def test_a_range_begins_at_the_next_number_and_nowhere_else() -> None:
    state = counted()
    first = change(state, SeqNo(2), c.Reserve("id", 1, 5))
    assert first == StateDiff(identities=(("id", None, 6),))
    state = apply_diff(state, first)
    for wrong in (1, 5, 7):
        assert change(state, SeqNo(3), c.Reserve("id", wrong, 1)) == r.Overtaken(SeqNo(wrong), SeqNo(6))
    assert is_out_for_ever(state, c.Reserve("id", 1, 5)), "repeated, it takes nothing"
    assert not is_out_for_ever(state, c.Reserve("id", 6, 5))
    second = change(state, SeqNo(3), c.Reserve("id", 6, END - 6))
    assert second == StateDiff(identities=(("id", 6, END),))
    check_state(apply_diff(state, second), SeqNo(3))


@pytest.mark.parametrize(
    ("column", "count"), [("text", 1), ("nope", 1), ("id", 0), ("id", -1), ("id", END), ("id", True)]
)
def test_no_such_range_is_taken(column: str, count: int) -> None:
    answer = change(counted(), SeqNo(2), c.Reserve(column, 1, count))
    assert isinstance(answer, r.Unknown if column != "id" else r.InvalidBounds)


@pytest.mark.parametrize("numbers", [{"id": 1}, {"id": END + 1}, {"text": 5}, {"id": True}])
def test_a_state_with_other_numbers_is_damaged(numbers: dict[str, int]) -> None:
    with pytest.raises(PersistError, match="next number"):
        check_state(msgspec.structs.replace(counted(), identities=numbers), SeqNo(1))


def test_such_a_schema_needs_the_format() -> None:
    assert isinstance(change(State(), SeqNo(1), c.Create(NOTES, 11)), r.Malformed)
    assert isinstance(change(State(), SeqNo(1), c.Create(NOTES, 12)), StateDiff)


def test_a_shard_that_counts_stays_one_by_itself() -> None:
    answer = change(counted(), SeqNo(2), c.Adopt("c00000000000000ab/1", SeqNo(2)))
    assert isinstance(answer, r.InvalidBounds)
    assert "count up" in answer.reason


def test_the_history_says_which_numbers_were_taken(world: World) -> None:
    client = world.client()
    client.table("notes", NOTES).append([{"text": "a"}] * 3)
    rows = [decode_row(row.data, "row") for row in client.machine("notes").consensus.scan("notes", SeqNo(1), 9)]
    (row,) = [row for row in rows if row.command == "Reserve"]
    assert "numbers of column id from 1 up to 3" in list(changes(row.diff))
