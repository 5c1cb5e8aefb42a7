"""An outcome stays decidable: what became of an append is told rightly, or not at all, whenever and whoever asks.

What happened to the request (it came through, it was lost, it arrives late) times what happened since, times who asks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.core.state import OUTCOMES_KEPT
from persist_lib.errors import Indeterminate, LeaseExpired, UpperMismatch
from persist_lib.ids import SeqNo
from persist_lib.location.api import Newest
from persist_lib.location.wrap.around import Operation
from persist_lib.testing import Outcome, Rival, check_world, contents_of
from tests.conformance.stores import CONSENSUSES
from tests.worlds import SCHEMA, Storm, World, row

SHARD = "orders"
LEASE_MS = 60_000
APPENDED_AT = 4
"""The version that the append makes if it comes through."""


@pytest.fixture
def memory() -> Iterator[World]:
    made = World()
    yield made
    made.close()


class InDoubt:
    """An append of `[1, 2)` whose outcome its writer could not find out. `deliver` is a copy that was under way."""

    def __init__(self, world: World, outcome: str, format_: int) -> None:
        self.world, self.outcome = world, outcome
        self.config = persist.Config(lease_ms=LEASE_MS, timeout_s=1, format=format_)
        storm = Storm(Outcome.LOST_UNKNOWN, "compare_and_set", "scan")
        self.late: list[Callable[[], object]] = []
        late, inner = self.late, world.inner.consensus

        class Keeping(Rival):
            def compare_and_set(self, key: str, expected: Newest | None, data: bytes) -> bool:
                if storm.blows and not late:
                    late.append(lambda: inner.compare_and_set(key, expected, data))
                    if outcome == "applied":
                        late[0]()
                return super().compare_and_set(key, expected, data)

            def around(self, operation: Operation, call: Callable[[], Any]) -> Any:
                if storm.blows:
                    raise Indeterminate("no answer")
                return call()

        self.client = world.client(self.config, rival=Keeping(inner))
        self.write = self.client.open_writer(SHARD, SCHEMA)
        self.write.compare_and_append([row(0)], 0, 1)
        storm.blows = True
        with pytest.raises(Indeterminate) as told:
            self.write.compare_and_append([row(1, "ours", 1)], 1, 2)
        storm.blows = False
        assert isinstance(told.value.token, bytes)
        self.token = told.value.token

    def deliver(self) -> None:
        if self.outcome.startswith("late"):
            self.late[0]()

    def ask(self, write: persist.WriteHandle) -> persist.Appended:
        return write.compare_and_append([row(1, "ours", 1)], 1, 2, token=self.token)

    def other(self) -> persist.Client:
        return self.world.client(self.config)

    def count(self) -> int:
        """How often it is in the shard."""
        client = self.world.client(read_only=True)
        upper = client.inspect(SHARD).state.upper.time
        assert upper
        with client.open_reader(SHARD, SCHEMA) as read:
            contents = contents_of(read.snapshot(upper - 1, diff=True).to_arrow())
        return sum(count for (_, word), count in contents.items() if word == "ours")


def others_append(doubt: InDoubt, times: int) -> None:
    """By another writer, from wherever upper is."""
    write = doubt.other().open_writer(SHARD, SCHEMA)
    for _ in range(times):
        at = write.fetch_upper().time or 0
        write.compare_and_append([row(7, "theirs", at)], at, at + 1)
    write.close()


def truncate(doubt: InDoubt) -> None:
    client = doubt.other()
    for distance in (3, 4):
        client.set_retention(SHARD, distance)
        client.roll_up(SHARD, force=True)
    client.collect(SHARD)
    assert doubt.world.inner.consensus.scan(SHARD, SeqNo(0), 1)[0].seqno > APPENDED_AT, "its row is gone"


def leases_end(doubt: InDoubt) -> None:
    doubt.world.clock.advance(3 * LEASE_MS / 1000)
    doubt.other().expire(SHARD)


def compact(doubt: InDoubt) -> None:
    others_append(doubt, 3)
    doubt.other().maintain(SHARD)


def restart(doubt: InDoubt) -> None:
    doubt.client.close()


def after_truncation(doubt: InDoubt) -> None:
    others_append(doubt, 5)
    truncate(doubt)


def after_all(doubt: InDoubt) -> None:
    others_append(doubt, 5)
    leases_end(doubt)
    compact(doubt)
    truncate(doubt)
    others_append(doubt, 1)


SINCE: dict[str, Callable[[InDoubt], None]] = {
    "nothing": lambda _: None,
    "the lease ended": leases_end,
    "the handle was closed": lambda doubt: doubt.write.close(),
    "the client was closed": restart,
    "one more append": lambda doubt: others_append(doubt, 1),
    "five more appends": lambda doubt: others_append(doubt, 5),
    "five more appends, and truncation": after_truncation,
    "compaction": compact,
    "all of it": after_all,
}


def asked(doubt: InDoubt, who: str, since: str) -> Callable[[], persist.Appended]:
    """Repeats the append, by the same handle, another one of its client, or another process."""
    if who == "another process" or since == "the client was closed":
        write = doubt.other().open_writer(SHARD, SCHEMA)
    else:
        write = doubt.write if who == "the same handle" else doubt.client.open_writer(SHARD, SCHEMA)
    return lambda: doubt.ask(write)


OUTCOMES = ["applied", "lost", "late", "late, after it was repeated"]
WHO = ["the same handle", "another handle", "another process"]
FEW = ["nothing", "the lease ended", "all of it"]
CASES = [
    *itertools.product(["memory"], OUTCOMES, SINCE, WHO, [1, 2]),
    *itertools.product(["sqlite"], OUTCOMES, SINCE, WHO[2:], [1, 2]),
]
ON_SERVERS = itertools.product(["postgresql", "s3"], OUTCOMES, FEW, WHO[2:], [2])


@pytest.mark.parametrize(
    ("store", "outcome", "since", "who", "format_"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in ON_SERVERS)],
)
def test_who_repeats_an_append_is_told_what_is_so(
    tmp_path: Path, store: str, outcome: str, since: str, who: str, format_: int
) -> None:
    url = CONSENSUSES[store].prepare(tmp_path)
    is_server = store in {"postgresql", "s3"}
    world = World(f"file:{tmp_path}/blobs", consensus=url) if is_server else World(url)
    try:
        is_told_what_is_so(world, outcome, since, who, format_)
    finally:
        world.close()


def is_told_what_is_so(world: World, outcome: str, since: str, who: str, format_: int) -> None:
    doubt = InDoubt(world, outcome, format_)
    if outcome == "late":
        doubt.deliver()
    SINCE[since](doubt)
    before = doubt.count()
    judged = doubt.other().judge_append(SHARD, doubt.token, 1, 2)
    repeat = asked(doubt, who, since)
    try:
        answer: object = repeat()
    except (UpperMismatch, LeaseExpired, Indeterminate) as error:
        answer = error
    doubt.deliver()  # a copy that was under way all the time
    if isinstance(answer, LeaseExpired) and not before:
        answer = repeat() if since == "the lease ended" else answer  # it registers again by itself
    match answer:
        case persist.Appended(seqno, _, count):
            assert doubt.count() == 1
            assert count == 1
            row_token = [r for r in world.inner.consensus.scan(SHARD, seqno, 1) if r.seqno == seqno]
            assert not row_token or doubt.token in row_token[0].data
        case UpperMismatch() | LeaseExpired():
            assert doubt.count() == before == 0, "denied, and it is there"
        case _:
            assert isinstance(answer, Indeterminate)
            assert (format_, since) in {(1, "all of it"), (1, "five more appends, and truncation")}, "it can be known"
    expected = {"committed": 1, "never": 0, "open": before, "unknown": before}
    assert before == expected[judged.answer]
    assert judged.answer != "unknown" or format_ == 1
    assert doubt.count() <= 1
    again = doubt.other().judge_append(SHARD, doubt.token, 1, 2)
    assert judged.answer in {"open", "unknown", again.answer}, "what was certain stays so"
    check_world(doubt.other(), SHARD)


@pytest.mark.parametrize("outcome", ["applied", "lost"])
@pytest.mark.parametrize("appends", [1000, OUTCOMES_KEPT + 5])
def test_a_thousand_appends_later_it_is_still_known(memory: World, outcome: str, appends: int) -> None:
    doubt = InDoubt(memory, outcome, 2)
    others_append(doubt, appends)
    leases_end(doubt)
    truncate(doubt)
    verdict = doubt.other().judge_append(SHARD, doubt.token, 1, 2)
    if appends > OUTCOMES_KEPT:
        assert verdict.answer == "unknown"
        with pytest.raises(Indeterminate, match="not known any more"):
            doubt.ask(doubt.other().open_writer(SHARD, SCHEMA))
    elif outcome == "applied":
        assert (verdict.answer, verdict.seqno) == ("committed", 4)
        assert doubt.ask(doubt.other().open_writer(SHARD, SCHEMA)).seqno == 4
    else:
        assert verdict.answer == "never"
        with pytest.raises(UpperMismatch):
            doubt.ask(doubt.other().open_writer(SHARD, SCHEMA))
    assert len(doubt.other().inspect(SHARD).state.outcomes) <= OUTCOMES_KEPT
    assert doubt.count() == (outcome == "applied")


def test_beyond_what_the_state_remembers_the_log_still_tells(memory: World) -> None:
    for outcome, known in (("applied", "committed"), ("lost", "never")):
        world = World()
        doubt = InDoubt(world, outcome, 1)
        others_append(doubt, 30)
        leases_end(doubt)
        assert doubt.other().judge_append(SHARD, doubt.token, 1, 2).answer == known
        world.close()


def test_a_copy_of_the_state_below_the_log_tells_of_what_came_after_it(memory: World) -> None:
    """The log was truncated, but not as far as to this append."""
    config = persist.Config(format=1)
    client = memory.client(config)
    write = client.open_writer(SHARD, SCHEMA)
    for time in range(6):
        write.compare_and_append([row(time, time=time)], time, time + 1)
    for distance in (3, 4):
        client.set_retention(SHARD, distance)
        client.roll_up(SHARD, force=True)
    assert client.collect(SHARD).rows
    for time in range(6, 12):
        write.compare_and_append([row(time, time=time)], time, time + 1)
    write.close()
    client.maintain(SHARD)
    assert client.judge_append(SHARD, b"x", 7, 8).answer == "never"
    assert client.judge_append(SHARD, b"x", 2, 3).answer == "unknown"
    assert client.judge_append(SHARD, b"x", 11, 13).answer == "never"
    assert client.judge_append(SHARD, b"x", 12, 13).answer == "open"


def test_the_same_token_for_other_times_is_another_append(memory: World) -> None:
    """Whoever gives each append the same token loses nothing by it."""
    for format_ in (1, 2):
        client = memory.client(persist.Config(format=format_))
        write = client.open_writer(f"same-{format_}", SCHEMA)
        for time in range(3):
            write.compare_and_append([row(time, time=time)], time, time + 1, token=b"always")
        for time in range(3):
            again = write.compare_and_append([row(time, time=time)], time, time + 1, token=b"always")
            assert (again.attempts, again.count, again.upper) == (0, 1, persist.at(time + 1))
        assert client.inspect(write.shard).state.count == 3
        with pytest.raises(UpperMismatch):
            write.compare_and_append([row(0)], 0, 3, token=b"always")


def test_appends_that_went_together_are_known_one_by_one_in_another_process(memory: World) -> None:
    for outcome in (Outcome.HAPPENED_UNKNOWN, Outcome.LOST_UNKNOWN):
        world = World()
        storm = Storm(Outcome.LOST_UNKNOWN, "compare_and_set", "scan", first=outcome)
        client = world.client(persist.Config(timeout_s=1), plan=storm)
        write = client.open_writer(SHARD, SCHEMA, batching=persist.Batching(bytes=1 << 20, age_s=10))
        assert write.id
        storm.blows = True
        futures = [write.append_async([row(n, "ours", n)], n, n + 1) for n in range(3)]
        with pytest.raises(Indeterminate):
            write.flush()
        storm.blows = False
        tokens = set()
        for future in futures:
            with pytest.raises(Indeterminate) as told:
                future.result()
            tokens.add(told.value.token)
        assert len(tokens) == 1
        other = world.client().open_writer(SHARD, SCHEMA)
        for n in range(3):
            done = other.compare_and_append([row(n, "ours", n)], n, n + 1, token=told.value.token)
            assert (done.attempts == 0) is (outcome is Outcome.HAPPENED_UNKNOWN)
        again = write.compare_and_append([row(1, "ours", 1)], 1, 2, token=told.value.token)
        assert (again.attempts, again.count) == (0, 1)
        assert world.client().inspect(SHARD).state.count == 3
        world.close()


def test_an_append_to_many_that_is_repeated_late_is_known_by_whichever_shard_knows(memory: World) -> None:
    client = memory.client(persist.Config(format=1))
    a, b = (client.open_writer(shard, SCHEMA) for shard in "ab")
    appends = [persist.Append(a, [row(1)], 0, 1), persist.Append(b, [row(1)], 0, 1)]
    done = client.compare_and_append_many(appends, token=b"t")
    for time in range(1, 8):
        client.compare_and_append_many(
            [persist.Append(a, [row(1, time=time)], time, time + 1), persist.Append(b, [], time, time + 1)]
        )
    a.close()
    b.close()
    for distance in (3, 4):
        client.set_retention("a", distance)
        client.roll_up("a", force=True)
    assert client.collect("a").rows
    assert client.judge_append("a", b"t", 0, 1).answer == "unknown"
    again = client.compare_and_append_many(appends, token=b"t")
    assert [one.token for one in again] == [one.token for one in done]
    assert again[1].seqno == done[1].seqno
    with pytest.raises(LeaseExpired):
        client.compare_and_append_many(appends, token=b"another")
    with pytest.raises(LeaseExpired):
        client.compare_and_append_many(appends)
