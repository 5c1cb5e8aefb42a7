"""The survey: what is due on all shards, at the cost of those that have changed, whatever becomes of its memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.core.duties import DUTIES, NAMES
from persist_lib.errors import Determinate
from persist_lib.format.survey_cache import PREFIX, decode_memory
from persist_lib.ids import SeqNo
from persist_lib.location import open_location
from persist_lib.location.api import Blob
from persist_lib.location.wrap.around import AroundBlob, Operation
from persist_lib.maintain.duties import carry_out
from persist_lib.maintain.survey import CHUNK, OUTAGE
from persist_lib.testing import Fate, Outcome
from tests.shards import TINY, filled
from tests.unit.maintain.surveys import Meanwhile, append, asked, make, move, stored
from tests.worlds import SCHEMA, Storm, World

DAY_S = 86_400
EAGER = TINY.model_copy(update={"compaction_weight": 1e9, "compaction_advance": 0.01})
FREQUENT = persist.Config(rollup_every=20)


def test_a_location_without_shards_has_nothing_to_do_and_remembers_nothing(world: World) -> None:
    found = world.client().survey()
    assert (found.heads, found.looks, found.unread, found.waiting) == ({}, {}, {}, 0)
    assert [found.due(duty) for duty in NAMES] == [[]] * len(NAMES)
    assert stored(world) == []


def test_idle_shards_cost_one_request_for_all_of_them(world: World) -> None:
    client = world.client()
    make(client, *(f"s{n}" for n in range(30)))
    first = client.survey()
    assert first.cost.queries >= 30
    assert {name: look.seqno for name, look in first.looks.items()} == first.heads == client.consensus.heads()
    assert asked(world, client.survey) == {"list": 2, "heads": 1}
    fresh = world.client()
    assert asked(world, fresh.survey) == {"list": 2, "get": 1, "heads": 1}
    cost = fresh.survey().cost
    assert (cost.queries, cost.lists, cost.requests) == (1, 2, 3), "and that is what it says"
    assert fresh.survey().looks == first.looks


def test_only_shards_that_have_changed_are_read(world: World) -> None:
    client, other = world.client(), world.client()
    make(other, *(f"s{n}" for n in range(30)))
    before = client.survey()
    move(other, "s7", "s9")
    world.requests.clear()
    after = client.survey()
    assert {request.key for request in world.requests if request.kind in ("head", "scan")} == {"s7", "s9"}
    changed = {name for name in after.heads if after.looks[name] != before.looks[name]}
    assert changed == {"s7", "s9"}
    assert after.looks["s7"].mark != before.looks["s7"].mark


def test_a_client_that_knows_a_shard_reads_only_what_is_new(world: World) -> None:
    client = world.client()
    make(client, "s", appends=5)
    client.survey()
    move(client, "s")
    assert asked(world, client.survey) == {"list": 2, "heads": 1, "scan": 1}


def test_the_oldest_looks_come_first_and_the_others_wait(world: World) -> None:
    client = world.client()
    names = [f"s{n}" for n in range(10)]
    make(client, *names)
    found = client.survey(most=4)
    assert (sorted(found.looks), found.waiting) == (names[:4], 6)
    assert found.due("census") == names[:4], "what waits is not known to have work"
    world.clock.advance(1)
    move(client, *names)
    found = client.survey(most=6)
    assert (sorted(found.looks), found.waiting) == (names, 4)
    assert sorted(found.due("census")) == names[4:], "of the others the look is an old one"
    world.clock.advance(1)
    assert client.survey(most=0).waiting == 4
    assert sorted(client.survey(most=4).due("census")) == names


def test_no_shard_waits_for_ever_while_others_keep_moving(world: World) -> None:
    client = world.client()
    names = [f"s{n}" for n in range(9)]
    make(client, *names)
    for _ in range(3):
        world.clock.advance(1)
        move(client, *names[:6])
        found = client.survey(most=3)
    assert sorted(found.looks) == names


def test_it_ends_when_its_seconds_are_over(world: World) -> None:
    client = world.client()
    make(client, *(f"s{n}" for n in range(40)))
    slow = world.client(plan=_Slow(0.5))
    found = slow.survey(seconds=3.0)
    assert 0 < len(found.looks) < 10
    assert found.waiting == 40 - len(found.looks)
    assert found.unread == {}, "for want of time, not because they could not be read"
    assert slow.survey().waiting == 0


class _Slow:
    """Every read of a shard takes some seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def decide(self, operation: Operation) -> Fate:
        return Fate(delay_s=self.seconds if operation.kind == "scan" else 0.0)


def test_progress_says_how_many_are_looked_at(world: World) -> None:
    client = world.client()
    make(client, *(f"s{n:02d}" for n in range(40)))
    told: list[tuple[int, int]] = []
    client.survey(progress=lambda done, all_: told.append((done, all_)))
    assert told == [(CHUNK, 40), (2 * CHUNK, 40), (40, 40)]
    told.clear()
    client.survey(progress=lambda done, all_: told.append((done, all_)))
    assert told == []


@pytest.mark.parametrize("config", [persist.Config(), TINY, EAGER, FREQUENT])
def test_what_is_due_is_what_the_duties_do_and_every_shard_comes_to_rest(world: World, config: persist.Config) -> None:
    client = world.client(config)
    for number in range(4):
        filled(client, 8 * (number + 1), shard=f"s{number}")
    client.set_retention("s1", 3)
    make(client, "finished", appends=3)
    with client.open_writer("finished", SCHEMA) as write:
        write.finish()
    client.finish("finished")
    client.survey()
    for _ in range(20):
        found = client.survey()
        work = {duty.name: found.due(duty.name) for duty in DUTIES}
        if not any(work.values()):
            break
        for duty, names in work.items():
            for name in names:
                carry_out(duty, client.machine(name), client.leases, policy=client.policy())
        client.survey(done=work)
    else:
        pytest.fail(f"there is still work: {work}")
    for name in found.heads:
        seqno = client.inspect(name).seqno
        client.maintain(name)
        assert client.inspect(name).seqno == seqno, f"nothing was due on {name}, and something was done"


def test_each_duty_is_due_exactly_when_it_finds_work(world: World) -> None:
    client = world.client(TINY)
    filled(client, 20)
    client.set_retention("s", 5)
    for duty in ("retention", "compaction", "rollups", "garbage"):
        found = client.survey()
        assert found.due(duty) == ["s"], duty
        carry_out(duty, client.machine("s"), client.leases, policy=client.policy())
        assert client.survey().due(duty) == [], duty


def test_compaction_begins_with_the_most_debt(world: World) -> None:
    client = world.client(TINY)
    for name, times in (("little", 4), ("most", 40), ("much", 20)):
        make(client, name, appends=times)
    assert client.survey().due("compaction") == ["most", "much", "little"]


def test_leases_are_due_once_one_has_ended(world: World) -> None:
    client, other = world.client(), world.client()
    make(other, "still")
    append(other.open_writer("s", SCHEMA))
    reader = other.open_reader("s")
    reader.snapshot()
    world.clock.advance(1)
    late = other.open_writer("late", SCHEMA)
    append(late)
    found = client.survey()
    assert found.due("leases") == []
    assert found.looks["still"].leases_until == 0
    until = min(writer.lease_until for writer in client.inspect("s").state.writers.values())
    world.clock.advance((until - found.now) / 1000)
    assert client.survey().due("leases") == [], "it ends after that ms"
    assert asked(world, client.survey) == {"list": 2, "heads": 1}, "time passing is no reason to read a shard"
    world.clock.advance(2)
    assert client.survey().due("leases") == ["s", "late"]
    for name in ("s", "late"):
        assert client.expire(name).overdue
    assert client.survey().due("leases") == []


def test_a_lease_by_a_wrong_clock_is_due_at_once(world: World) -> None:
    client = world.client()
    world.clock.advance(500 * DAY_S)
    append(world.client().open_writer("s", SCHEMA))
    world.clock.advance(-500 * DAY_S)
    assert client.survey().due("leases") == ["s"]
    assert client.expire("s").overdue


@pytest.mark.parametrize("duty", ["orphans", "scrub", "census"])
def test_what_no_state_tells_is_due_until_it_was_done_and_again_after_a_change(world: World, duty: str) -> None:
    client = world.client()
    make(client, "a", "b", "c")
    assert client.survey().due(duty) == ["a", "b", "c"]
    assert asked(world, lambda: client.survey(done={duty: ["a", "c", "gone"]})).keys() <= {
        "list",
        "heads",
        "set",
        "delete_many",
    }
    assert client.survey().due(duty) == ["b"]
    assert world.client().survey().due(duty) == ["b"], "any process knows"
    move(client, "c")
    assert client.survey().due(duty) == ["b", "c"], "the one that was never done comes first"
    others = {other for other in ("orphans", "scrub", "census") if other != duty}
    assert all(client.survey().due(other) == ["a", "b", "c"] for other in others)


def test_orphans_are_looked_for_each_week_on_shards_that_rest(world: World) -> None:
    client = world.client()
    make(client, "s")
    client.survey(done={duty: ["s"] for duty in ("orphans", "scrub", "census")})
    world.clock.advance(7 * DAY_S)
    assert client.survey().due("orphans") == []
    world.clock.advance(1)
    assert client.survey().due("orphans") == ["s"]
    assert client.survey().due("scrub") == client.survey().due("census") == []


def test_the_mark_of_a_duty_is_at_the_seqno_that_the_shard_has_then(world: World) -> None:
    client = world.client()
    make(client, "s")
    client.survey()
    move(client, "s")
    found = client.survey(done={"scrub": ["s"]}, most=0)
    assert found.looks["s"].done["scrub"] == (found.heads["s"], found.now)
    assert (found.waiting, found.due("scrub")) == (0, [])


def test_rows_that_were_truncated_are_not_due_again(world: World) -> None:
    client = world.client()
    make(client, "s", appends=5)
    client.roll_up("s", force=True)
    found = client.survey()
    assert (found.due("garbage"), found.looks["s"].log_begins) == (["s"], 1)
    assert client.collect("s").rows
    assert client.survey().heads == found.heads, "a truncation is no transition"
    assert client.survey().due("garbage") == ["s"], "so the head does not tell"
    told = client.survey(done={"garbage": ["s"]})
    assert (told.due("garbage"), told.looks["s"].log_begins) == ([], client.inspect("s").state.newest_rollup)
    assert asked(world, lambda: client.survey(done={"garbage": ["s"]})) == {"list": 2, "heads": 1}
    for key in stored(world):
        world.inner.blob.delete(key)
    assert world.client().survey().due("garbage") == [], "the oldest row says so to one that was not told"
    client.survey()
    append(client.open_writer("s", SCHEMA))
    assert asked(world, client.survey) == {"list": 2, "heads": 1, "scan": 1}, "it is not asked for again"


def test_a_restored_older_copy_is_looked_at_again(world: World) -> None:
    client = world.client()
    make(client, "s", appends=6)
    before = client.survey()
    rows = client.consensus.scan("s", SeqNo(0), 100)
    world.inner.consensus.rewind("s", SeqNo(5), rows[-1].newest)
    found = world.client().survey()
    assert found.looks["s"].seqno == found.heads["s"] == 5
    assert found.looks["s"].mark != before.looks["s"].mark
    own = client.survey()
    assert list(own.unread) == ["s"]
    assert own.unread["s"].startswith("HistoryRegressed: "), "this client has seen more, and says so"


def test_a_shard_that_is_gone_is_forgotten(world: World) -> None:
    client = world.client()
    make(client, "s", "t")
    client.survey(done={"scrub": ["s", "t"]})
    (newest,) = client.consensus.scan("s", SeqNo(client.survey().heads["s"]), 1)
    assert world.inner.consensus.rewind("s", SeqNo(0), newest.newest)
    found = client.survey(done={"scrub": ["t"]})
    assert (list(found.heads), list(found.looks)) == (["t"], ["t"])
    fresh = world.client()
    make(fresh, "s")
    assert fresh.survey().due("scrub") == ["s"], "another one of that name"


def damage(world: World, name: str) -> Callable[[], None]:
    """Damage the newest row of a shard in memory. Returns what mends it."""
    rows = world.inner.consensus._logs[name]  # type: ignore[attr-defined]
    sound = rows[-1]
    rows[-1] = sound._replace(data=sound.data[:-1] + bytes((sound.data[-1] ^ 1,)))

    def mend() -> None:
        rows[-1] = sound

    return mend


def test_damage_in_one_shard_does_not_stop_the_others(world: World) -> None:
    make(world.client(), *"abcd")
    mend = damage(world, "b")
    client = world.client()
    found = client.survey()
    assert list(found.unread) == ["b"]
    assert found.unread["b"].startswith("Corrupt: ")
    assert (sorted(found.looks), found.waiting) == (["a", "c", "d"], 0)
    assert found.due("census") == ["a", "c", "d", "b"]
    assert found.due("compaction") == ["b"], "the duty itself reports the error"
    assert world.client().survey(most=0).unread == found.unread, "it is remembered as well"
    mend()
    found = client.survey()
    assert (found.unread, found.due("compaction")) == ({}, []), "no seqno moved, and yet it was looked at again"


def test_many_damaged_shards_do_not_keep_the_others_waiting(world: World) -> None:
    client = world.client()
    names = [f"s{n}" for n in range(6)]
    make(client, *names)
    for name in names[:4]:
        damage(world, name)
    fresh = world.client()
    for _ in range(3):
        world.clock.advance(1)
        move(client, *names[4:])
        found = fresh.survey(most=4)
    assert sorted(found.unread) == names[:4]
    assert (sorted(found.looks), found.waiting) == (names[4:], 0)


def test_a_shard_that_moves_during_the_survey_is_as_new_as_its_look(world: World) -> None:
    client = world.client()
    make(client, "s")
    seqno = client.inspect("s").seqno
    consensus = Meanwhile(world.inner.consensus, lambda: move(client, "s"), after=True)
    other = persist.open(replace(world.inner, consensus=consensus), runtime=world.clock.runtime(5))
    world.clients.append(other)
    found = other.survey(done={"scrub": ["s"]})
    assert found.heads["s"] == found.looks["s"].seqno > seqno
    assert (found.waiting, found.due("scrub"), found.due("census")) == (0, [], ["s"])


def test_a_store_that_fails_until_the_time_is_over_makes_shards_wait(world: World) -> None:
    make(world.client(), "a", "b", "c")
    storm = Storm(Outcome.REFUSED, "scan")
    client = world.client(persist.Config(timeout_s=100.0), plan=storm)
    storm.blows = True
    found = client.survey(seconds=3.0)
    assert (found.unread, found.waiting) == ({}, 3)
    short = world.client(persist.Config(timeout_s=1.0), plan=storm).survey()
    assert (sorted(short.unread), short.waiting) == (["a", "b", "c"], 0)


def test_a_store_that_is_down_is_an_error_and_not_damage_in_every_shard(world: World) -> None:
    make(world.client(), *(f"s{n:02d}" for n in range(30)))
    storm = Storm(Outcome.REFUSED, "scan", "head")
    client = world.client(persist.Config(timeout_s=1.0), plan=storm)
    storm.blows = True
    world.requests.clear()
    with pytest.raises(Determinate, match="planned failure"):
        client.survey()
    assert len({request.key for request in world.requests if request.kind == "head"}) == OUTAGE
    storm.blows = False
    assert client.survey().unread == {}


def test_what_was_looked_at_before_an_interrupt_is_known(world: World) -> None:
    client = world.client()
    make(client, *(f"s{n:02d}" for n in range(40)))

    def interrupt(done: int, _all: int) -> None:
        if done == 2 * CHUNK:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.survey(progress=interrupt)
    assert len(client.survey(most=0).looks) >= 2 * CHUNK


@pytest.mark.parametrize("done", [
    {"scrubbing": ["s"]}, {"scrub": "s"}, {"scrub": b"s"}, {"scrub": {"s": 1}}, {"scrub": 5}, {"scrub": [5]},
    {"scrub": ["no/shard"]}, {5: ["s"]}, {("scrub",): ["s"]}, [("scrub", ["s"])],
])  # fmt: skip
def test_a_mistake_in_what_was_done_is_refused_before_anything_is_asked(world: World, done: Any) -> None:
    client = world.client()
    make(client, "s")
    world.requests.clear()
    with pytest.raises(persist.InvalidUsage):
        client.survey(done=done)
    assert world.requests == []


def test_a_duty_that_there_is_not_is_refused(world: World) -> None:
    found = world.client().survey()
    with pytest.raises(persist.InvalidUsage, match="no duty 'scrubbing'; there are leases, retention, "):
        found.due("scrubbing")


MINUTE_S = 60


def test_no_shard_can_be_called_like_its_memory() -> None:
    with persist.open("memory:") as client:
        for name in ("-survey", PREFIX, PREFIX.rstrip("/")):
            with pytest.raises(persist.InvalidName):
                client.machine(name)


def test_it_is_one_object_which_a_newer_one_replaces(world: World) -> None:
    client = world.client()
    make(client, *(f"s{n}" for n in range(5)))
    client.survey()
    (first,) = stored(world)
    client.survey(done={"scrub": ["s1"]})
    (second,) = stored(world)
    assert second > first
    assert decode_memory(world.inner.blob.get(second) or b"").looks == client.survey().looks  # type: ignore[union-attr]


def test_it_is_written_when_that_is_worth_it(world: World) -> None:
    client = world.client()
    make(client, *(f"s{n}" for n in range(40)))
    client.survey()
    before = stored(world)
    world.clock.advance(MINUTE_S)
    for n in range(19):
        move(client, f"s{n}")
        assert "set" not in asked(world, client.survey), "one look in a fresh process costs less than a PUT"
    assert stored(world) == before
    move(client, "s19")
    assert asked(world, client.survey)["set"] == 1, "twenty do not"
    move(client, "s0")
    assert "set" not in asked(world, client.survey)
    world.clock.advance(11 * MINUTE_S)
    assert asked(world, client.survey)["set"] == 1, "nor does one, once the memory is old"
    world.clock.advance(60 * MINUTE_S)
    assert "set" not in asked(world, client.survey), "nothing has changed"


def test_it_is_written_again_if_it_is_deleted(world: World) -> None:
    client = world.client()
    make(client, "s")
    client.survey()
    for key in stored(world):
        world.inner.blob.delete(key)
    assert asked(world, client.survey)["set"] == 1
    assert "head" not in asked(world, world.client().survey)


def test_a_clock_that_was_set_back_does_not_hide_it(world: World) -> None:
    client = world.client()
    make(client, "s")
    world.clock.advance(100 * DAY_S)
    client.survey()
    (first,) = stored(world)
    world.clock.advance(-100 * DAY_S)
    client.survey(done={"scrub": ["s"]})
    (second,) = stored(world)
    assert second > first
    assert world.client().survey().due("scrub") == []


@pytest.mark.parametrize("spoil", [
    lambda data: data[:-1] + bytes((data[-1] ^ 1,)),
    lambda data: data[:4] + bytes((data[4] + 1,)) + data[5:],
    lambda data: b"",
    lambda data: b"something else",
])  # fmt: skip
def test_damaged_or_of_another_release_it_costs_one_look(world: World, spoil: Callable[[bytes], bytes]) -> None:
    client = world.client()
    make(client, *(f"s{n}" for n in range(25)))
    found = client.survey()
    (key,) = stored(world)
    data = world.inner.blob.get(key) or b""
    world.inner.blob.delete(key)
    world.inner.blob.set(key, spoil(data))
    fresh = world.client()
    assert asked(world, fresh.survey)["head"] == 25
    assert fresh.survey().looks.keys() == found.looks.keys()
    assert len(stored(world)) == 1
    assert "head" not in asked(world, world.client().survey), "it is mended"


def test_by_other_settings_it_costs_one_look_and_what_was_done_stays_done(world: World) -> None:
    client = world.client()
    make(client, *(f"s{n}" for n in range(25)))
    client.survey(done={"scrub": [f"s{n}" for n in range(25)]})
    for config in (
        persist.Config(compaction_weight=0.9), persist.Config(compaction_advance=0.9), persist.Config(rollup_every=7)
    ):  # fmt: skip
        other = world.client(config)
        assert other.survey(most=0).waiting == 25
        assert asked(world, other.survey)["head"] == 25
        assert other.survey().due("scrub") == []
    assert sorted(other.survey().due("census")) == sorted(f"s{n}" for n in range(25))
    assert "head" not in asked(world, world.client(persist.Config(rollup_every=7, read_threads=2)).survey)


def test_two_processes_do_not_forget_what_the_other_one_did(world: World) -> None:
    one, two = world.client(), world.client()
    make(world.client(), "a", "b", "c")
    for client in (one, two):
        client.survey()
    one.survey(done={"scrub": ["a"]})
    assert two.survey().due("scrub") == ["b", "c"], "a client that has looks of its own learns it as well"
    two.survey(done={"scrub": ["b"], "orphans": ["a"]})
    assert one.survey().due("scrub") == ["c"]
    assert one.survey().due("orphans") == ["b", "c"]


def test_what_another_process_wrote_in_the_meantime_is_kept(world: World) -> None:
    make(world.client(), "a", "b", "c")
    two = world.client()
    two.survey()
    one = persist.open(
        replace(world.inner, consensus=Meanwhile(world.inner.consensus, lambda: two.survey(done={"scrub": ["a"]}))),
        runtime=world.clock.runtime(5),
    )
    world.clients.append(one)
    one.survey(done={"scrub": ["b"]})
    assert world.client().survey().due("scrub") == ["c"]


class _Gone(AroundBlob):
    """An object is gone when it is got: each time, or once."""

    def __init__(self, inner: Blob, times: int) -> None:
        super().__init__(inner)
        self.times = times

    def around(self, operation: Operation, call: Callable[[], Any]) -> Any:
        if operation.kind == "get" and operation.key.startswith(PREFIX) and self.times:
            self.times -= 1
            return None
        return call()


@pytest.mark.parametrize("times", [1, 99])
def test_an_object_that_is_gone_before_it_is_read_was_replaced(world: World, times: int) -> None:
    client = world.client()
    make(client, *(f"s{n}" for n in range(25)))
    client.survey()
    location = replace(world.inner, blob=_Gone(world.inner.blob, times))
    fresh = persist.open(location, runtime=world.clock.runtime(5))
    world.clients.append(fresh)
    assert fresh.survey(most=0).waiting == (0 if times == 1 else 25)
    assert fresh.survey().waiting == 0


def test_a_read_only_client_surveys_and_writes_nothing(world: World) -> None:
    writer = world.client()
    make(writer, *(f"s{n}" for n in range(30)))
    reader = world.client(read_only=True)
    kinds = asked(world, lambda: reader.survey(done={"scrub": ["s1"]}))
    assert not {"set", "delete_many"} & kinds.keys()
    assert "s1" not in reader.survey().due("scrub"), "it knows by itself"
    assert stored(world) == []
    writer.survey(done={"scrub": ["s2"]})
    assert len(world.client(read_only=True).survey().due("scrub")) == 29


@pytest.mark.parametrize("kinds", [("set",), ("list",), ("get",), ("delete_many",), ("set", "list", "get")])
@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.LOST_UNKNOWN])
def test_without_its_memory_the_survey_works_and_says_so_once(
    world: World, caplog: pytest.LogCaptureFixture, kinds: tuple[str, ...], outcome: Outcome
) -> None:
    make(world.client(), *(f"s{n}" for n in range(30)))
    world.client().survey()
    storm = Storm(outcome, *kinds, but="-pause/")
    client = world.client(plan=storm)
    storm.blows = True
    with caplog.at_level(logging.INFO, "persist.survey"):
        for _ in range(3):
            found = client.survey(done={"scrub": ["s1"]})
            assert (len(found.looks), found.waiting, found.unread) == (30, 0, {})
            assert "s1" not in found.due("scrub")
    assert len([record for record in caplog.records if record.name == "persist.survey"]) == 1
    assert caplog.records[-1].levelname == "INFO"


def test_a_full_disk_is_no_failure_of_the_survey(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Full(AroundBlob):
        def around(self, operation: Operation, call: Callable[[], Any]) -> Any:
            if operation.kind == "set" and operation.key.startswith(PREFIX):
                raise persist.DiskFull("no room", path=str(tmp_path), free=0)
            return call()

    location = open_location(f"file:{tmp_path}/x", create=True)
    with persist.open(replace(location, blob=Full(location.blob))) as client, caplog.at_level(logging.INFO):
        make(client, "s")
        assert list(client.survey().looks) == ["s"]
        assert [record.levelname for record in caplog.records if record.name == "persist.survey"] == ["INFO"]


def test_a_forked_child_surveys_as_well(tmp_path: Path) -> None:
    with persist.open(f"file:{tmp_path}/x") as client:
        make(client, *(f"s{n}" for n in range(20)))
        client.survey()
        if (child := os.fork()) == 0:
            try:
                make(client, "t")
                found = client.survey(done={"scrub": ["s1"]})
                os._exit(0 if len(found.looks) == 21 and "s1" not in found.due("scrub") else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        found = client.survey()
        assert (len(found.looks), "s1" in found.due("scrub")) == (21, False)
