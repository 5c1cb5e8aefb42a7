"""Staged writes: leases, rivals between staging and commit, unknown outcomes, and what callers get wrong."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib.relation.stage import Lease, Ticket
from persist_lib.testing import Outcome, Rival
from tests.worlds import SCHEMA, SMALL, WIDER, Storm, World, row

UNIQUE = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"}, unique=True)
CLOCK = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"}, times="ms")


def one(id_: int, word: str | None = "w", diff: int = 1) -> dict[str, Any]:
    return {"id": id_, "word": word, "_diff": diff}


def many(start: int, rows: int = 3000) -> pa.Table:
    return pa.table({"id": np.arange(start, start + rows), "word": [f"word {i:04}" for i in range(rows)]})


def contents(client: persist.Client, shard: str = "s") -> list[tuple[Any, ...]]:
    with client.open_reader(shard) as read:
        found = read.snapshot(diff=True).to_arrow().to_pylist()
    return sorted((row["id"], row["word"], row["_diff"]) for row in found)


def test_the_time_is_that_of_the_commit_whatever_was_appended_since_staging(world: World) -> None:
    rival = Rival(world.inner.consensus)
    client, other = world.client(SMALL, rival=rival), world.client()
    write, theirs = client.open_writer("s", SCHEMA), other.open_writer("s", SCHEMA)

    def act(time: int) -> None:
        theirs.compare_and_append([row(-time, time=time)], theirs.upper, time + 1)

    with write.stage() as stage:
        staged = stage.write(many(0))
        theirs.compare_and_append([row(-1, time=6)], 0, 7)
        for time in (9, 12):
            rival.before_next(partial(act, time))
        answer = write.append_staged([staged])
    assert rival.waiting == 0
    assert (answer.upper, answer.count, answer.attempts) == (persist.at(14), 3000, 3)
    with client.open_reader("s") as read:
        assert read.snapshot(12, diff=True).to_arrow().num_rows == 3
        assert read.snapshot(13, diff=True).to_arrow().num_rows == 3003
    client.compact("s")
    client.scrub("s")
    assert len(contents(client)) == 3003


def test_a_time_can_be_chosen_and_a_clock_chooses_now(world: World) -> None:
    client = world.client()
    write = client.open_writer("s", SCHEMA)
    with write.stage() as stage:
        assert write.append_staged([stage.write([one(1)])], at=40).upper == persist.at(41)
        with pytest.raises(persist.UpperMismatch, match=r"upper is \[41\]"):
            write.append_staged([stage.write([one(1)])], at=40)
    clocked = client.open_writer("c", CLOCK)
    with clocked.stage() as stage:
        answer = clocked.append_staged([stage.write([one(1)])])
    assert answer.upper == persist.at(client.runtime.clock_ms() + 1)


def test_what_was_staged_is_garbage_only_once_its_stage_is_closed(world: World) -> None:
    client = world.client(SMALL)
    write = client.open_writer("s", SCHEMA)
    stage = write.stage()
    lost, kept = stage.write(many(0)), stage.write(many(5000))
    inline = world.client().open_writer("s", SCHEMA).resume_stage(ticket_of(client, stage)).write([one(1)])
    assert [part.key for part in inline.parts] == [""]
    assert client.audit_orphans("s").orphans == ()
    write.append_staged([kept])
    stage.close()
    stage.close()
    audited = client.audit_orphans("s")
    assert (len(audited.orphans), audited.size) == (len(lost.parts), lost.size)
    assert len(contents(client)) == 3000
    for again in (lost, inline):
        with pytest.raises(persist.LeaseExpired, match="stage"):
            write.append_staged([again])
    with pytest.raises(persist.LeaseExpired, match="stage"):
        write.resume_stage(ticket_of(client, stage)).write(many(0))


def ticket_of(client: persist.Client, stage: Any) -> Ticket:
    return Ticket(
        "memory:", "memory:", client.machine("s").shard, SCHEMA, 0, stage.id, 1000, None, persist.Config(inline_bytes=0)
    )


def test_a_lease_that_ended_loses_the_stage_and_writes_nothing(world: World) -> None:
    client = world.client(SMALL)
    write = client.open_writer("s", SCHEMA)
    stage = write.stage(lease_s=60)
    staged = stage.write(many(0))
    world.clock.sleep(61)
    client.expire("s")
    before = world.bytes("s")
    for call in (write.append_staged, write.upsert_staged, write.overwrite_staged):
        with pytest.raises(persist.LeaseExpired, match="lease of the stage"):
            call([staged])
    assert client.machine("s").fetch().state.upper == persist.at(0)
    with pytest.raises(persist.LeaseExpired, match="Nothing was appended"):
        stage.write(many(0))
    assert [row_ for row_ in before if row_ not in world.bytes("s")] == []


def test_a_task_that_writes_extends_the_lease_when_less_than_half_is_left(world: World) -> None:
    client = world.client(SMALL)
    write = client.open_writer("s", SCHEMA)
    stage = write.stage(lease_s=60)

    def slow() -> Iterator[pa.Table]:
        for number in range(6):
            world.clock.sleep(25)
            yield many(number * 10_000, 8000)

    requests = world.count("compare_and_set")
    staged = stage.write(slow())
    client.expire("s")
    assert write.append_staged([staged]).count == 48_000
    assert world.count("compare_and_set") - requests <= 6 + 2


@pytest.mark.parametrize("outcome", [Outcome.HAPPENED_UNKNOWN, Outcome.LOST_UNKNOWN])
def test_an_unknown_outcome_is_decided_by_the_producer(world: World, outcome: Outcome) -> None:
    storm = Storm(outcome)
    client, sane = world.client(SMALL.model_copy(update={"timeout_s": 1.0}), plan=storm), world.client(SMALL)
    write, again = client.open_writer("s", SCHEMA), sane.open_writer("s", SCHEMA)
    stage = write.stage()
    staged = stage.write(many(0))
    storm.blows = True
    with pytest.raises((persist.Indeterminate, persist.Determinate)):
        write.append_staged([staged], producer=("q", 7))
    storm.blows = False
    if sane.machine("s").fetch().state.producers:
        assert outcome is Outcome.HAPPENED_UNKNOWN
        with pytest.raises(persist.AlreadyProduced):
            again.append_staged([staged], producer=("q", 7))
    else:
        again.append_staged([staged], producer=("q", 7))
    assert len(contents(sane)) == 3000
    assert sane.machine("s").fetch().state.upper == persist.at(1)
    for call in (again.append_staged, again.upsert_staged, again.overwrite_staged):
        with pytest.raises(persist.AlreadyProduced):
            call([again.resume_stage(ticket_of(sane, stage)).write([one(1)])], producer=("q", 6))


@pytest.mark.parametrize("when", ["before the call", "before its commit", "never"])
def test_an_overwrite_of_contents_up_to_an_upper_loses_no_other_write(world: World, when: str) -> None:
    rival = Rival(world.inner.consensus)
    client, other = world.client(SMALL, rival=rival), world.client()
    write, theirs = client.open_writer("s", SCHEMA), other.open_writer("s", SCHEMA)
    write.compare_and_append([row(1, time=0)], 0, 1)
    append = partial(theirs.compare_and_append, [row(7, time=1)], 1, 2)
    with write.stage() as stage:
        staged = stage.write([one(2)])
        if when == "before the call":
            append()
        elif when == "before its commit":
            rival.before_next(append)
        if when == "never":
            assert write.overwrite_staged([staged], upper=1).upper == persist.at(2)
            assert write.overwrite_staged([staged], upper=1).count == 0, "a call that is repeated says the same"
        else:
            with pytest.raises(persist.UpperMismatch):
                write.overwrite_staged([staged], upper=1)
    assert rival.waiting == 0
    assert [id_ for id_, _, _ in contents(client)] == ([2] if when == "never" else [1, 7])


def test_an_overwrite_with_nothing_empties_the_shard_and_of_the_same_writes_nothing(world: World) -> None:
    client = world.client(SMALL)
    write = client.open_writer("s", SCHEMA)
    with write.stage() as stage:
        write.append_staged([stage.write(many(0))])
        seqno = client.machine("s").fetch().seqno
        assert write.overwrite_staged([stage.write(many(0))]).count == 0
        assert client.machine("s").fetch().seqno == seqno
    assert write.overwrite_staged([]).count == 3000
    assert contents(client) == []
    assert write.overwrite_staged([]).count == 0


def test_constraints_are_checked_at_the_upper_of_the_commit(world: World) -> None:
    rival = Rival(world.inner.consensus)
    client, other = world.client(rival=rival), world.client()
    write, theirs = client.open_writer("s", UNIQUE), other.open_writer("s", UNIQUE)
    with write.stage() as stage:
        staged = stage.write([one(1), one(2)])
        rival.before_next(lambda: theirs.append_now([one(2, "theirs")]))
        with pytest.raises(persist.ConstraintViolated, match="unique") as caught:
            write.append_staged([staged])
        assert caught.value.time == 1
        assert contents(client) == [(2, "theirs", 1)]
        with pytest.raises(persist.ConstraintViolated, match="unique"):
            write.overwrite_staged([stage.write([one(1), one(1)])])
        write.append_staged([stage.write([one(2, "theirs", -1), one(2, "mine")])])
    assert contents(client) == [(2, "mine", 1)]
    with write.stage(lower=9, new_upper=12) as stage, pytest.raises(persist.UpperMismatch):
        write.append_staged([stage.write([row(5, time=9)])])
    with write.stage(lower=write.fetch_upper(), new_upper=12) as stage:
        early, late = write.fetch_upper().time or 0, 11
        with pytest.raises(persist.ConstraintViolated) as caught:
            write.append_staged([stage.write([row(5, time=late), row(5, "again", time=early)])])
        assert caught.value.time == late
        write.append_staged([stage.write([row(5, time=early), row(5, time=late, diff=-1)])])
    assert contents(client) == [(2, "mine", 1)]


def test_a_full_state_gets_room(world: World) -> None:
    client = world.client()
    write = client.open_writer("s", SCHEMA)
    with write.stage() as stage:
        for number in range(120):
            write.append_staged([stage.write(many(number * 1000, 400)), stage.write([one(-number)])])
    assert len(contents(client)) == 120 * 401
    client.scrub("s")


def test_an_older_schema_can_append_and_a_newer_one_makes_an_upsert_open_anew(world: World) -> None:
    client = world.client()
    write = client.open_writer("s", SCHEMA)
    with write.stage() as stage:
        staged = stage.write([one(1)])
        client.evolve_schema("s", WIDER)
        write.append_staged([staged])
        with pytest.raises(persist.SchemaMismatch, match="newest"):
            write.upsert_staged([stage.write([one(1)])])
        wide = client.open_writer("s", WIDER)
        assert wide.upsert_staged([stage.write([one(2)])]).inserted == 1
    assert contents(client) == [(1, "w", 1), (2, "w", 1)]


def test_a_ticket_is_of_one_shard_and_not_of_one_in_memory(world: World) -> None:
    client = world.client()
    write = client.open_writer("s", SCHEMA)
    other = client.open_writer("o", SCHEMA)
    with write.stage() as stage:
        staged = stage.write([one(1)])
        before = world.bytes("s")
        with pytest.raises(persist.InvalidUsage, match="memory"):
            _ = stage.ticket
        with pytest.raises(persist.InvalidUsage, match="same shard"):
            other.resume_stage(ticket_of(client, stage))
        assert world.bytes("s") == before
        assert write.append_staged([staged]).count == 1


def test_a_task_that_writes_for_long_extends_the_lease_as_soon_as_half_of_it_is_left(world: World) -> None:
    """And looks no more often than it has to: one call of many uploads looks again when half is left, and not at the
    end of the lease.
    """
    write = world.client().open_writer("s", SCHEMA)
    stage = write.stage(lease_s=60)
    lease = Lease(write.machine, stage.id, 60_000)

    def left_s() -> float:
        machine = write.machine
        return (machine.fetch().state.writers[stage.id].lease_until - machine.consensus.now()) / 1000

    assert lease() == stage.id
    requests = world.count()
    world.clock.advance(29)
    assert lease() == stage.id
    assert world.count() == requests, "there is time"
    for _ in range(4):
        world.clock.advance(2)
        assert lease() == stage.id
        assert left_s() > 30, "extended when less than half was left"
        world.clock.advance(29)
        assert lease() == stage.id


def test_a_staged_append_in_the_older_columns_is_checked_in_these(world: World) -> None:
    """Rows of the same keys may have something in columns that came since: an append retracts none of them."""
    older = persist.Schema({"id": "int64 not null"}, {"word": "string"}, unique=True)
    newer = persist.Schema(older.key, {"word": "string", "more": "int64"}, unique=True)
    client = world.client()
    write = client.open_writer("s", older)
    client.evolve_schema("s", newer)
    client.open_writer("s", newer).append_now([{"id": 2, "word": "a", "more": 5}])
    with write.stage() as stage, pytest.raises(persist.ConstraintViolated, match="each key"):
        write.append_staged([stage.write([{"id": 2, "word": "b"}])])
    with write.stage() as stage:
        assert write.append_staged([stage.write([{"id": 3, "word": "b"}])]).count == 1
    assert client.table("s").read().to_pylist() == [
        {"id": 2, "word": "a", "more": 5}, {"id": 3, "word": "b", "more": None},
    ]  # fmt: skip
