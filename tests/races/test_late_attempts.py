"""Whatever was in doubt is applied once, at whichever step of its repetition the first attempt comes through.

Every verb that takes a token, times every carrier, times every step of the second attempt: there the first one arrives,
or arrives and is read by another thread of the second process, or another process repeats it to its end, or the lease
under which the second one writes is retired.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest

import persist_lib as persist
from persist_lib.core import commands as c
from persist_lib.errors import Indeterminate, LeaseExpired
from persist_lib.ids import WriterId
from persist_lib.shard.commit import Machine
from persist_lib.storage.tables import Tables
from persist_lib.storage.tables.wal_line import WalLine
from persist_lib.testing import contents_of
from tests.late import AtStep, Lost, fetch
from tests.worlds import World

SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"})
CONFIG = persist.Config(timeout_s=1)
STEPS = 60


class Verb(NamedTuple):
    """A call with a row, and how it is repeated after an Indeterminate. Times are those from upper on."""

    first: Callable[[Any, int, int], object]
    again: Callable[[Any, int, int, Indeterminate], object]


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
AT_NEXT_TIME = {"insert", "append_now", "upsert", "delete"}
LATE = ["it arrives", "another thread reads it", "another repeats it", "the lease is retired"]
SHARDS = [verb for verb in VERBS if verb != "insert"]
CASES = [
    *itertools.product(SHARDS, ["shard"], LATE),
    # A definite append to a collection has no token: it may be repeated as it is.
    *itertools.product([verb for verb in SHARDS if verb != "append"], ["collection of 3"], LATE),
    *itertools.product(["append_now"], ["collection of 1"], LATE),
    *itertools.product(["insert"], ["yolo table", "wal table"], [late for late in LATE if "repeats" not in late]),
]


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def opened(client: persist.Client, carrier: str) -> Any:
    if carrier == "shard":
        return client.open_writer("c", SCHEMA)
    if carrier.endswith("table"):
        tables = client.controller().tables()
        tables.insert("c", _rows(0))  # so that it has its ids
        return tables
    return client.controller().open_writer("c")


def handles(write: Any) -> list[persist.WriteHandle]:
    """What a writer writes its shards with."""
    if isinstance(write, persist.WriteHandle):
        return [write]
    if isinstance(write, Tables):
        line = write._timelines.line("t")
        if isinstance(line, WalLine):
            return [line.writer()]
        return [handle for _, writer in line._writers.values() for handle in handles(writer)]  # type: ignore[attr-defined]
    names = (*write._timeline().last.rendition.names, write.collection.shard)
    return [write.shard(name) for name in names]


def ready(write: Any) -> list[tuple[Machine, WriterId]]:
    """See to it that a writer has its ids, and knows the newest versions."""
    ids = [(handle.machine, handle.id) for handle in handles(write)]
    for machine, _ in ids:
        machine.fetch()
    return ids


def again_by(again: Callable[..., object], id_: int, time: int, error: Indeterminate, write: Any) -> object:
    return again(write, id_, time, error)


def read_by_another_thread(write: Any, late: Callable[[], object]) -> None:
    late()
    for handle in handles(write):
        fetch(handle.machine)


def retire(world: World, ids: list[tuple[Machine, WriterId]]) -> None:
    other = world.clients[0]
    for machine, id_ in ids:
        other.machine(machine.shard).commit(lambda _state, _now, id_=id_: c.Retire(id_))  # type: ignore[misc]


def made(world: World, carrier: str) -> None:
    """With as many rows of negative ids as there are steps, for those who delete."""
    client = world.client()
    if carrier.endswith("table"):
        tables = client.controller().tables()
        tables.create("c", SCHEMA, mode=carrier.removesuffix(" table"), timeline="t", shards=2)  # type: ignore[arg-type]
        tables.insert("c", [{"id": -id_, "word": "theirs"} for id_ in range(1, STEPS)])
        return
    if carrier != "shard":
        client.controller().create("c", SCHEMA, shards=int(carrier[-1]), mode="compare_and_append")
    with opened(client, carrier) as write:
        theirs = [{"id": -id_, "word": "theirs", "_time": 2, "_diff": 1} for id_ in range(1, STEPS)]
        write.compare_and_append(theirs, 0, 3)


def contents(world: World, carrier: str) -> dict[Any, int]:
    client = world.client()
    if carrier.endswith("table"):
        rows = contents_of(client.controller().tables().read("c").to_arrow())
        return {row: count for row, count in rows.items() if row[0]}
    with client.open_reader("c") if carrier == "shard" else client.controller().open_reader("c") as read:
        return contents_of(read.snapshot().to_arrow())


@pytest.mark.parametrize(("verb", "carrier", "late"), CASES)
def test_what_was_in_doubt_is_applied_once(
    world: World, monkeypatch: pytest.MonkeyPatch, verb: str, carrier: str, late: str
) -> None:
    made(world, carrier)
    first, again = VERBS[verb]
    lost, at_step = Lost(world), AtStep(world)
    monkeypatch.setattr(Machine, "fetch", lambda machine: at_step.fetched(machine))  # noqa: PLW0108 - it has to bind
    ours = opened(world.client(CONFIG, rival=lost), carrier)
    second, third = (opened(world.client(CONFIG, rival=rival), carrier) for rival in (at_step, None))
    for id_ in range(1, STEPS):
        ids, time = ready(second), ready(ours)[0][0].state.upper.time or 0
        lost.armed, lost.kept = True, []
        with pytest.raises(Indeterminate) as told:
            first(ours, id_, time)
        lost.armed = False
        repeat = partial(again_by, again, id_, time, told.value)
        acts: dict[str, Callable[[], object]] = {
            "it arrives": lost.kept[0],
            "another thread reads it": partial(read_by_another_thread, second, lost.kept[0]),
            "another repeats it": partial(repeat, third),
            "the lease is retired": partial(retire, world, ids),
        }
        at_step.machines = [machine for machine, _ in ids]
        at_step.after_fetches, at_step.act, at_step.step = late == "another thread reads it", acts[late], id_ - 1
        try:
            repeat(second)
        except LeaseExpired:  # nothing was written; one who says the times looks at upper, and decides
            assert (late, verb in AT_NEXT_TIME) == ("the lease is retired", False)
            repeat(second)
        if at_step.step >= 0:
            break
    else:
        raise AssertionError(f"{verb} makes more than {STEPS} requests")
    at_step.step = -1
    theirs = {(-n, "theirs"): 1 for n in range(1, STEPS)}
    expected = {(n, "ours"): 1 for n in range(1, id_ + 1)}
    if verb == "delete":
        expected, theirs = {}, {(n, word): 1 for (n, word) in theirs if n < -id_}
    assert contents(world, carrier) == {**theirs, **expected}
