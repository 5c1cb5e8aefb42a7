"""A server's threads: many clients and shards at once, stopping, and shards that nobody asks for any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest

from persist_lib.config import Config
from persist_lib.core import commands as c
from persist_lib.errors import Determinate, Indeterminate, Overloaded, PersistError
from persist_lib.format.log import GROUP, LogRow, decode_row
from persist_lib.frontier import at
from persist_lib.ids import SeqNo, ShardId, format_writer_id
from persist_lib.runtime.ambient import Runtime
from persist_lib.shard import funnels
from persist_lib.shard.funnels import Funnels
from persist_lib.shard.requests import Request
from persist_lib.testing import check_world
from tests.unit.server.serving import Lost, Told, append, hold
from tests.worlds import SCHEMA, World

RUNTIME = Runtime()
CONFIG = Config(timeout_s=2)


class Place:
    """A location with shards of format 4, each with a writer, and a server with threads."""

    def __init__(self, world: World, shards: int = 1) -> None:
        self.world = world
        self.client = world.client(Config(format=4))
        self.shards = [ShardId(f"shard-{n}") for n in range(shards)]
        for shard in self.shards:
            self.commit(shard, c.Create(SCHEMA, 4))
            self.commit(shard, c.RegisterWriter(format_writer_id(1), "ingest", 2**50))
        self.consensus = Told(world.inner.consensus)
        self.server = Funnels(world.inner.blob, self.consensus, CONFIG, RUNTIME)

    def commit(self, shard: ShardId, command: c.Command) -> None:
        self.client.machine(shard).commit(lambda _state, _now: command)

    def ask(self, command: c.Command, shard: str | None = None, **given: Any) -> Request:
        shard, seconds = shard or self.shards[0], given.pop("seconds", 20.0)
        options: dict[str, Any] = {"client": "a", "known": SeqNo(0), "token": RUNTIME.token(), **given}
        request = Request(ShardId(shard), command, deadline=RUNTIME.deadline(seconds), **options)
        self.server.submit(request)
        return request

    def rows(self, shard: str | None = None) -> list[LogRow]:
        found = self.world.inner.consensus.scan(shard or self.shards[0], SeqNo(0), 10_000)
        return [decode_row(row.data, "row") for row in found]


@pytest.fixture
def place() -> Iterator[Place]:
    world = World()
    made = Place(world, 3)
    made.server.start()
    yield made
    made.server.give_up()
    made.server.close()
    world.close()


def got(request: Request) -> Any:
    return request.answer.result(20)


def test_many_clients_of_one_shard_append_each_once_and_share_rows(place: Place) -> None:
    def run(number: int) -> int:
        """Append so many times, and try again from the upper that a refusal tells."""
        lower = done = 0
        while done < 10:
            writer = format_writer_id(1)
            try:
                answered = got(
                    place.ask(append(lower, lower + 1, writer, b"%d-%d" % (number, lower)), client=str(number))
                )
            except Overloaded:  # all of them are one writer, of which not many may wait: nothing was done
                continue
            lower = lower + 1 if answered.is_committed else answered.refusal.actual.time
            done += answered.is_committed
        return done

    place.consensus.before = lambda: time.sleep(0.002)  # as long as a commit takes
    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(run, range(16))) == 160
    assert place.client.machine(place.shards[0]).fetch().state.upper == at(160)
    check_world(place.client, place.shards[0])


def test_what_is_asked_while_a_row_is_committed_becomes_the_next_row(place: Place) -> None:
    asked = threading.Event()
    place.consensus.before = asked.wait
    lots = [[place.ask(hold(f"{n}-{k}", b"x"), client=str(n)) for k in range(20)] for n in range(20)]
    asked.set()
    assert all(got(one).is_committed for lot in lots for one in lot)
    rows = place.rows()
    assert sum(len(row.steps) for row in rows) == 402
    assert len(rows) <= 2 + 3, "the first, which held up the others, and 256 at a time"
    assert {row.command for row in rows[-2:]} == {GROUP}
    check_world(place.client, place.shards[0])


def test_a_shard_whose_outcome_is_unknown_holds_up_none_of_the_others(place: Place) -> None:
    stuck, clear = place.shards[0], threading.Event()

    def fate() -> None:
        if threading.current_thread() is blocked and not clear.is_set():
            raise Lost

    blocked: Any = None

    def first() -> None:
        nonlocal blocked
        blocked, place.consensus.before = threading.current_thread(), fate
        raise Lost

    place.consensus.before = first
    doubtful = place.ask(hold("h", b"x"), stuck)
    while blocked is None:
        time.sleep(0.001)
    waiting = [place.ask(hold(str(n), b"x"), stuck) for n in range(50)]
    for _ in range(20):
        assert got(place.ask(hold(f"k{_}", b"x"), place.shards[1])).is_committed
    assert not doubtful.answer.done()
    assert not any(one.answer.done() for one in waiting)
    clear.set()
    assert got(doubtful).is_committed
    assert all(got(one).is_committed for one in waiting)


def test_two_servers_of_one_shard_only_contend(place: Place) -> None:
    other = Funnels(place.world.inner.blob, place.world.inner.consensus, CONFIG, RUNTIME)
    other.start()

    def run(number: int) -> int:
        server, done = (place.server, other)[number % 2], 0
        for step in range(20):
            request = Request(
                place.shards[0], hold(f"{number}-{step}", b"x"), RUNTIME.token(), str(number), RUNTIME.deadline(20),
                SeqNo(0),
            )  # fmt: skip
            server.submit(request)
            done += got(request).is_committed
        return done

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(run, range(8))) == 160
    other.stop()
    other.close()
    assert len(place.client.machine(place.shards[0]).fetch().state.holds) == 160
    check_world(place.client, place.shards[0])


def test_a_server_that_stops_serves_what_waits_and_takes_nothing_more(place: Place) -> None:
    place.consensus.before = lambda: time.sleep(0.01)
    waiting = [place.ask(hold(str(n), b"x"), shard) for n in range(20) for shard in place.shards]
    place.server.stop()
    late = place.ask(hold("late", b"x"))
    assert isinstance(late.answer.exception(1), Overloaded)
    assert all(got(one).is_committed for one in waiting)
    while not place.server.is_idle():
        time.sleep(0.001)


def test_a_server_that_gives_up_answers_everybody_at_once(place: Place) -> None:
    def lost() -> None:
        raise Lost

    place.consensus.before = lost
    sent = place.ask(hold("h", b"x"))
    while not place.consensus.sent:
        time.sleep(0.001)
    waiting = [place.ask(hold(str(n), b"x")) for n in range(20)]
    place.server.give_up()
    assert isinstance(sent.answer.exception(5), Indeterminate)
    wait([one.answer for one in waiting], 5)
    assert {type(one.answer.exception(0)) for one in waiting} == {Overloaded}


def test_several_shards_at_once_beside_single_ones(place: Place) -> None:
    def together(number: int) -> list[Request]:
        token = RUNTIME.token()
        command, until = hold(f"together-{number}", b"x"), RUNTIME.deadline(20)
        order = place.shards[:: 1 - 2 * (number % 2)]
        requests = [Request(shard, command, token, "a", until, SeqNo(0)) for shard in order]
        place.server.submit_together(requests)
        return requests

    with ThreadPoolExecutor(8) as pool:
        single = [place.ask(hold(f"single-{n}", b"x"), place.shards[n % 3]) for n in range(60)]
        joint = list(pool.map(together, range(40)))
        assert all(got(one).is_committed for one in single)
        assert all(got(one).is_committed for lot in joint for one in lot)
    for shard in place.shards:
        holds = place.client.machine(shard).fetch().state.holds
        assert sum(name.startswith("together") for name in holds) == 40
        check_world(place.client, shard)


def test_states_that_nobody_asks_for_are_forgotten_and_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(funnels, "SHARDS_MOST", 2)
    place = Place(World(), 6)
    for turn in range(3):
        for shard in place.shards:
            made = place.ask(hold(str(turn), b"x"), shard)
            while place.server.work():
                pass
            assert got(made).is_committed
        assert len(place.server._funnels) == 2
    assert place.consensus.asked.count("head") == 18


def test_a_bug_in_one_shard_is_told_and_the_others_are_served_on(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = place.server.funnel(place.shards[0])

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as context:
        context.setattr(broken, "look_for", fail)
        failed = [place.ask(hold(str(n), b"x")) for n in range(40)]
        assert {type(one.answer.exception(5)) for one in failed} == {Indeterminate}
    ends = time.monotonic() + 5
    while "a turn failed" not in caplog.text and time.monotonic() < ends:
        time.sleep(0.001)
    assert "a turn failed" in caplog.text
    assert got(place.ask(hold("h", b"x"))).is_committed
    assert got(place.ask(hold("h", b"x"), place.shards[1])).is_committed


def test_what_waits_longer_than_it_may_is_told_so(place: Place) -> None:
    released = threading.Event()
    place.consensus.before = released.wait
    first = place.ask(hold("h", b"x"))
    while not place.consensus.sent:
        time.sleep(0.001)
    late = place.ask(hold("k", b"x"), seconds=0.01)
    time.sleep(0.05)
    released.set()
    assert got(first).is_committed
    assert isinstance(late.answer.exception(5), Determinate)


def test_a_shard_that_is_not_there_is_created_by_one_of_those_who_ask(place: Place) -> None:
    made = [place.ask(c.Create(SCHEMA, 4), "new", client=str(n)) for n in range(10)]
    missing = place.ask(hold("h", b"x"), "nobody")
    found = [got(one) for one in made]
    assert sum(one.is_committed for one in found) == 1
    assert type(got(missing).refusal).__name__ == "Unknown"
    assert not issubclass(type(got(missing).refusal), PersistError)
    assert place.client.shards() == ["new", *place.shards]


def test_shards_that_another_commit_still_uses_stay_in_use_when_one_is_over(place: Place) -> None:
    first, second = place.shards[:2]
    place.server._in_use.update([first, second, second])
    request = Request(second, hold("h", b""), RUNTIME.token(), "a", RUNTIME.deadline(5), SeqNo(0))
    place.server._commit_together([(place.server.funnel(second), request)])
    assert place.server._in_use == {first: 1, second: 1}
    assert not place.server.is_idle()
