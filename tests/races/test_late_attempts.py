"""Whatever was in doubt is applied once, at whichever step of its repetition the first attempt comes through.

Every verb that takes a token, times every carrier, times every step of the second attempt: there the first one arrives,
or arrives and is read by another thread of the second process, or another process repeats it to its end, or the lease
under which the second one writes is retired, before the first one arrives or after it. And a copy of the first one
arrives after all of it.

A stream takes no tokens: its runtime repeats its commit by itself; or the program starts again, which takes the stream
over, looks what is there, and does what is missing.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import pytest

import persist_lib as persist
from persist_lib import streams
from persist_lib.core import commands as c
from persist_lib.errors import Fenced, Indeterminate, LeaseExpired, PersistError, TimedOut
from persist_lib.frontier import at
from persist_lib.ids import WriterId
from persist_lib.shard.admin import retire_writers
from persist_lib.shard.commit import Machine
from persist_lib.streams.committer import Committer
from persist_lib.testing import contents_of
from persist_lib.timeline import Tables
from persist_lib.timeline.wal_timeline import WalLine
from tests.late import AtStep, Line, Lost, Served, fetch
from tests.streaming import SCHEMA, all_of, update
from tests.worlds import World

CONFIG = persist.Config(timeout_s=1)
STEPS = 60
Ids = list[tuple[Machine, WriterId | None]]


class Verb(NamedTuple):
    """A call with a row, and how it is repeated after an Indeterminate. Times are those from upper on."""

    first: Callable[[Any, int, int], object]
    again: Callable[[Any, int, int, Any], object]


def _rows(id_: int, time: int | None = None) -> list[dict[str, Any]]:
    return [{"id": id_, "word": "ours"} | ({} if time is None else {"_time": time, "_diff": 1})]


def _at_next_time(name: str) -> Verb:
    return Verb(
        lambda write, id_, _: getattr(write, name)(_rows(id_)),
        lambda write, id_, _, error: getattr(write, name)(_rows(id_), token=error.token),
    )


def _at(name: str, finish: Callable[[Any], object] = bool) -> Verb:
    return Verb(
        lambda write, id_, t: finish(getattr(write, name)(_rows(id_, t), t, t + 1)),
        lambda write, id_, t, error: finish(getattr(write, name)(_rows(id_, t), t, t + 1, token=error.token)),
    )


def _repeat_statement(tables: Any, id_: int, error: Indeterminate) -> None:
    """A statement takes no token: what became of it is asked, which decides it."""
    if tables.outcome(error.token, timeline="t", table="c") is None:
        tables.insert("c", _rows(id_))


def _of_a_stream(*, writes: bool = False, seals: bool = False) -> Verb:
    def again(line: Line, id_: int, _time: int, _error: object) -> None:
        line.open()
        if not line.is_done(id_, writes=writes):
            line.call(id_, writes=writes, seals=seals)

    return Verb(lambda line, id_, _: line.call(id_, writes=writes, seals=seals), again)


VERBS = {
    "insert": Verb(
        lambda tables, id_, _: tables.insert("c", _rows(id_)),
        lambda tables, id_, _, error: _repeat_statement(tables, id_, error),
    ),
    "append_now": _at_next_time("append_now"),
    "upsert": _at_next_time("upsert"),
    "delete": Verb(
        lambda write, id_, _: write.delete([-id_]), lambda write, id_, _, error: write.delete([-id_], token=error.token)
    ),
    "compare_and_append": _at("compare_and_append"),
    "append_async": _at("append_async", lambda future: future.result()),
    "append": _at("append"),
}
OF_STREAMS = {
    "write": _of_a_stream(writes=True),
    "seal": _of_a_stream(seals=True),
    "write and seal": _of_a_stream(writes=True, seals=True),
}
AT_NEXT_TIME = {"insert", "append_now", "upsert", "delete"}
LATE = [
    "it arrives",
    "another thread reads it",
    "another repeats it",
    "the lease is retired",
    "it arrives, and the lease is retired",
]
SHARDS = [verb for verb in VERBS if verb != "insert"]
CASES = [
    *itertools.product(SHARDS, ["shard"], LATE),
    # A definite append to a collection has no token: it may be repeated as it is.
    *itertools.product([verb for verb in SHARDS if verb != "append"], ["collection of 3"], LATE),
    *itertools.product(["append_now"], ["collection of 1"], LATE),
    *itertools.product(["insert"], ["yolo table", "wal table"], [late for late in LATE if "repeats" not in late]),
    *itertools.product(OF_STREAMS, ["stream", "stream, taken over"], LATE),
    *itertools.product(["append_now", "compare_and_append"], ["served shard"], LATE),
]


@pytest.fixture
def world(carrier: str) -> Iterator[World]:
    made = Served() if carrier.startswith("served") else World()
    yield made
    made.close()


def opened(client: persist.Client, carrier: str) -> Any:
    if carrier.endswith("shard"):
        return client.open_writer("c", SCHEMA)
    if carrier.startswith("stream"):
        return Line(client)
    if carrier.endswith("table"):
        tables = client.controller().tables()
        tables.insert("c", _rows(0))  # so that it has its ids
        return tables
    return client.controller().open_writer("c")


def handles(write: Any) -> list[persist.WriteHandle]:
    """What a writer writes its shards with."""
    if isinstance(write, persist.WriteHandle):
        return [write]
    if isinstance(write, Line):
        return write.handles()
    if isinstance(write, Tables):
        line = write._timelines.line("t")
        if isinstance(line, WalLine):
            return [line.writer()]
        return [handle for _, writer in line._writers.values() for handle in handles(writer)]  # type: ignore[attr-defined]
    names = (*write._timeline().last.rendition.names, write.collection.shard)
    return [write._place(name) for name in names]


def ready(write: Any) -> Ids:
    """See to it that a writer has its ids, and knows the newest versions."""
    ids: Ids = [(handle.machine, handle.id) for handle in handles(write)]
    for machine, _ in ids:
        machine.fetch()
    return ids


def read_by_another_thread(late: Callable[[], object], ids: Ids) -> None:
    late()
    for machine, _ in ids:
        fetch(machine)


def retire(world: World, ids: Ids, before: Callable[[], object] = int) -> None:
    """Retire those of these ids that are live; for None all that the shard has by then."""
    before()
    for machine, id_ in ids:
        other = world.clients[0].machine(machine.shard)
        if id_ is None:
            retire_writers(other)
        else:
            other.try_commit(lambda _state, _now, id_=id_: c.Retire(id_))  # type: ignore[misc]


def made(world: World, carrier: str) -> None:
    """With as many rows of negative ids as there are steps, for those who delete or seal."""
    client = world.client()
    if carrier.startswith("stream"):
        line = Line(client)
        line.open()
        line.write.seal(Line.STARTS).result()
        line.write.write([update(-id_, Line.STARTS + id_ - 1, "theirs") for id_ in range(1, STEPS)]).result()
        return
    if carrier.endswith("table"):
        tables = client.controller().tables()
        tables.create("c", SCHEMA, mode=carrier.removesuffix(" table"), timeline="t", shards=2)  # type: ignore[arg-type]
        tables.insert("c", [{"id": -id_, "word": "theirs"} for id_ in range(1, STEPS)])
        return
    if not carrier.endswith("shard"):
        client.controller().create("c", SCHEMA, shards=int(carrier[-1]), mode="compare_and_append")
    with opened(client, carrier) as write:
        theirs = [{"id": -id_, "word": "theirs", "_time": 2, "_diff": 1} for id_ in range(1, STEPS)]
        write.compare_and_append(theirs, 0, 3)


def contents(world: World, carrier: str) -> dict[Any, int]:
    client = world.client()
    if carrier.endswith("table"):
        rows = contents_of(client.controller().tables().read("c").to_arrow())
        return {row: count for row, count in rows.items() if row[0]}
    if carrier.startswith("stream"):
        rows = all_of(streams.open(client, mode="read").load("c"))
        return Counter((id_, word) for id_, word, _ in rows.elements())
    with client.open_reader("c") if carrier.endswith("shard") else client.controller().open_reader("c") as read:
        return contents_of(read.snapshot(diff=True).to_arrow())


@pytest.mark.parametrize(("verb", "carrier", "late"), CASES)
def test_what_was_in_doubt_is_applied_once(
    world: World, monkeypatch: pytest.MonkeyPatch, verb: str, carrier: str, late: str
) -> None:
    made(world, carrier)
    first, again = (OF_STREAMS if carrier.startswith("stream") else VERBS)[verb]
    lost, at_step = Lost(world), AtStep(world)
    monkeypatch.setattr(Machine, "fetch", lambda machine: at_step.fetched(machine))  # noqa: PLW0108 - it has to bind
    ours = opened(world.client(CONFIG, rival=lost), carrier)
    third = opened(world.client(CONFIG), carrier)
    goes_on = carrier == "stream"  # by itself: its first and its second attempt are of one call
    if goes_on:
        second, at_step.inner, lost.inner = ours, lost.inner, at_step
    else:
        second = opened(world.client(CONFIG, rival=at_step), carrier)

    def begin_again(error: Indeterminate | None = None) -> bool:
        """What was in doubt is to be repeated. Whether by another call."""
        lost.armed = False
        acts: dict[str, Callable[[], object]] = {
            "it arrives": lost.kept[0],
            "another thread reads it": partial(read_by_another_thread, lost.kept[0], ids),
            "another repeats it": partial(again, third, id_, time, error),
            "the lease is retired": partial(retire, world, ids),
            "it arrives, and the lease is retired": partial(retire, world, ids, lost.kept[0]),
        }
        at_step.machines = [machine for machine, _ in ids]
        at_step.after_fetches, at_step.act, at_step.step = late == "another thread reads it", acts[late], id_ - 1
        return not goes_on

    monkeypatch.setattr(Committer, "_goes_on", lambda _self, _doubt: not begin_again())
    for id_ in range(1, STEPS):
        ids: Ids = []
        if isinstance(second, Line):
            ours.open()
            ids += [(machine, None) for machine in second.machines]
        else:
            ids += ready(second)
        time = ready(ours)[0][0].state.upper.time or 0
        lost.armed, lost.kept = True, []
        repeat: Callable[[], object] = partial(again, second, id_, time, None)
        try:
            if goes_on:
                first(ours, id_, time)
            else:
                with pytest.raises(Indeterminate) as told:
                    first(ours, id_, time)
                begin_again(told.value)
                repeat = partial(again, second, id_, time, told.value)
                repeat()
        except (LeaseExpired, TimedOut, Fenced):  # nothing was written by this call; who made it looks, and decides
            assert late.endswith("the lease is retired") or (late == "another repeats it" and verb in OF_STREAMS)
            assert verb not in AT_NEXT_TIME
            repeat()
        with suppress(PersistError):
            lost.kept[0]()
        if at_step.step >= 0:
            break
    else:
        raise AssertionError(f"{verb} makes more than {STEPS} requests")
    at_step.step = -1
    theirs = {(-n, "theirs"): 1 for n in range(1, STEPS)}
    expected = {(n, "ours"): 1 for n in range(1, id_ + 1)}
    if verb == "delete":
        expected, theirs = {}, {(n, word): 1 for (n, word) in theirs if n < -id_}
    if carrier.startswith("stream"):
        expected = expected if "write" in verb else {}
        assert world.client().inspect("c").state.upper == at(Line.STARTS + (id_ if "seal" in verb else 0))
    assert contents(world, carrier) == {**theirs, **expected}
