"""One append is one token: each attempt of it, each repetition by its caller, and what it answers bear the same.

A token forgotten on the way is data doubled: the log would know the first attempt under a name that nobody asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest

import persist_lib as persist
from persist_lib.errors import Indeterminate, TimedOut
from persist_lib.format.log import LogRow, decode_row
from persist_lib.ids import SeqNo
from persist_lib.location import open_location
from persist_lib.location.api import Consensus, Newest
from persist_lib.location.wrap.around import AroundConsensus, Operation
from persist_lib.testing import Outcome, check_world, contents_of
from tests.worlds import SCHEMA, World, row

TOKEN = b"a token of 16 b."
CONFIG = persist.Config(timeout_s=3)
WITHIN = persist.Config(timeout_s=0.5)


class Sent(AroundConsensus):
    """A Consensus that notes each row sent to it, and whose compare-and-sets meet the fates given, in order."""

    def __init__(self, inner: Consensus) -> None:
        super().__init__(inner)
        self.rows: list[LogRow] = []
        self.fates: list[Outcome | Callable[[], object]] = []

    def around(self, operation: Operation, call: Callable[[], object]) -> object:  # type: ignore[override]
        return call()

    def compare_and_set(self, key: str, expected: Newest | None, data: bytes) -> bool:
        self.rows.append(decode_row(data, key))
        fate = self.fates.pop(0) if self.fates else Outcome.DONE
        if callable(fate):
            fate()
        if fate is Outcome.LOST_UNKNOWN:
            raise Indeterminate("planned: no answer")
        won = self.inner.compare_and_set(key, expected, data)
        if fate is Outcome.HAPPENED_UNKNOWN:
            raise Indeterminate("planned: the answer was lost")
        return won

    def appends(self) -> list[LogRow]:
        return [row for row in self.rows if row.command in {"CompareAndAppend", "Append"}]


def sending(world: World, config: persist.Config = CONFIG) -> tuple[persist.WriteHandle, Sent]:
    """A handle that is registered, and what its client sends from now on."""
    location = open_location(world.inner.url, clock=world.clock)
    sent = Sent(location.consensus)
    client = persist.open(replace(location, consensus=sent), config=config, runtime=world.clock.runtime(1))
    world.clients.append(client)
    write = client.open_writer("s", SCHEMA)
    write.compare_and_append([], 0, 1)
    sent.rows.clear()
    return write, sent


def check_once(world: World, write: persist.WriteHandle, token: bytes) -> None:
    """The append is in the shard and in the log once, under this token."""
    looking = world.client()
    with looking.open_reader("s") as read:
        assert contents_of(read.snapshot(1, diff=True).to_arrow()) == {(1, "w"): 1}
    rows = [decode_row(found.data, "row") for found in world.inner.consensus.scan("s", SeqNo(1), 1000)]
    assert [found.token for found in rows if found.command in {"CompareAndAppend", "Append"}][1:] == [token]
    check_world(looking, "s")


LOST, HAPPENED = Outcome.LOST_UNKNOWN, Outcome.HAPPENED_UNKNOWN


@pytest.mark.parametrize("fates", [[LOST], [LOST, LOST], [HAPPENED], [LOST, HAPPENED], [HAPPENED, LOST, LOST]])
@pytest.mark.parametrize("given", [None, TOKEN])
def test_an_attempt_with_an_unknown_outcome_is_sent_again_as_it_was(world, fates, given):
    write, sent = sending(world)
    sent.fates = list(fates)
    done = write.compare_and_append([row(1, time=1)], 1, 2, token=given)
    assert len(sent.appends()) == len(fates) + 1
    assert {attempt.token for attempt in sent.appends()} == {done.token}
    assert given in {None, done.token}
    check_once(world, write, done.token)


@pytest.mark.parametrize("fates", [[LOST], [HAPPENED], []])
@pytest.mark.parametrize("kind", ["compare_and_append", "append", "append_async"])
def test_attempts_after_lost_races_bear_the_token_of_the_first(world, kind, fates):
    """Others move the shard just before it is sent, twice; then its outcome is unknown as well."""
    write, sent = sending(world)
    other = world.client()

    def overtake() -> None:
        other.set_retention("s", 10 + len(sent.rows))

    sent.fates = [overtake, overtake, *fates]
    call = getattr(write, kind)
    done = call([row(1, time=1)], 1, 2, token=TOKEN)
    done = done.result(3) if kind == "append_async" else done
    assert len(sent.appends()) == 3 + len(fates)
    assert len({attempt.seqno for attempt in sent.appends()}) == 3
    assert {attempt.token for attempt in sent.appends()} == {done.token} == {TOKEN}
    check_once(world, write, TOKEN)


@pytest.mark.parametrize("first", [LOST, HAPPENED])
@pytest.mark.parametrize("given", [None, TOKEN])
def test_a_caller_who_repeats_an_append_in_doubt_is_told_the_token_of_its_attempts(world, first, given):
    write, sent = sending(world, WITHIN)
    sent.fates = [first, *[LOST] * 10_000]
    with pytest.raises(Indeterminate) as caught:
        write.compare_and_append([row(1, time=1)], 1, 2, token=given)
    token = cast("bytes", caught.value.fields["token"])
    assert {attempt.token for attempt in sent.appends()} == {token}
    assert given in {None, token}
    sent.fates = [LOST]
    done = write.compare_and_append([row(1, time=1)], 1, 2, token=token)
    assert {attempt.token for attempt in sent.appends()} == {done.token} == {token}
    check_once(world, write, token)


def test_an_append_that_makes_room_first_keeps_its_token(world):
    """A full state refuses it; it merges what is inline, and tries again."""
    write, sent = sending(world, persist.Config(timeout_s=20))
    time = 2
    write.compare_and_append([row(1, time=1)], 1, time)
    while not any(attempt.command == "ApplyCompaction" for attempt in sent.rows):
        before = len(sent.appends())
        token = time.to_bytes(16, "big")
        done = write.compare_and_append([row(time, "x" * 12_000, time)], time, time + 1, token=token)
        assert {attempt.token for attempt in sent.appends()[before:]} == {done.token} == {token}
        time += 1
        assert time < 300, "it is never full"
    made_room = [attempt.command for attempt in sent.rows].index("ApplyCompaction")
    assert sent.rows[made_room + 1].token == done.token
    check_world(world.client(), "s")


def test_two_appends_never_share_a_token(world):
    write, sent = sending(world)
    for time in range(1, 20):
        write.compare_and_append([row(time, time=time)], time, time + 1)
    assert len({attempt.token for attempt in sent.appends()}) == 19


def test_a_race_lost_until_the_time_is_up_was_tried_with_one_token(world):
    write, sent = sending(world, WITHIN)
    other, times = world.client(), iter(range(100, 10_000))
    sent.fates = [lambda: (world.clock.advance(0.01), other.set_retention("s", next(times)))] * 5000
    with pytest.raises(TimedOut, match="this call changed nothing"):
        write.compare_and_append([row(1, time=1)], 1, 2, token=TOKEN)
    assert {attempt.token for attempt in sent.appends()} == {TOKEN}
    assert len(sent.appends()) > 1
    sent.fates = []
    write.compare_and_append([row(1, time=1)], 1, 2, token=TOKEN)
    check_once(world, write, TOKEN)
