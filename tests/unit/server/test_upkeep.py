"""Which client a server tells to roll up or flush, and appends that wait meanwhile for room in the state."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.state import Batch, Part
from persist_lib.frontier import MINIMUM, at
from persist_lib.ids import PartKey, SeqNo
from persist_lib.location.commands import FLUSH, ROLL_UP
from persist_lib.shard.client_duties import FLUSH_S, LOOK_S, PATIENCE, ROOM_S
from persist_lib.shard.group_commit import Funnel
from persist_lib.shard.requests import Request
from tests.unit.server.serving import LEASE_MS, W1, W2, Served, answer, append, error

SINCE = SeqNo(3)
SIZE = 200
PARTS = 10
"""How many appends fill a state."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("core.transitions", "core.plan.compaction", "core.validate"):
        monkeypatch.setattr(f"persist_lib.{name}.INLINE_TOTAL_BYTES", PARTS * SIZE)


@pytest.fixture
def waking(served: Served) -> list[float]:
    """After how many seconds the shard asked for a turn. With it, appends wait for room."""
    asked: list[float] = []
    served.funnel = Funnel(served.funnel.machine, wake=asked.append)
    return asked


def part() -> Part:
    return Part(PartKey(""), SIZE, 1, bytes(16), b"\x01", b"\x01", 0, 0, 0, inline=bytes(SIZE))


def put(served: Served, token: bytes, known: int = SINCE, seconds: float = 60.0) -> Request:
    batch = Batch(0, 1, MINIMUM, at(1), MINIMUM, 1, 1, 1, (part(),), (0,))
    command = c.AppendNow(W1, token, batch, LEASE_MS, SINCE)
    return served.put(command, token, client=token.hex(), known=SeqNo(known), seconds=seconds)


def appended(served: Served, count: int, known: int = SINCE) -> list[tuple[str, ...]]:
    """What those were told who made so many appends, each in a row of its own."""
    told = []
    for number in range(count):
        made = put(served, f"{served.funnel.machine.ground().seqno}-{number}".encode(), known)
        served.funnel.turn()
        told.append(answer(made).due)
    return told


def flush(served: Served) -> c.ApplyCompaction:
    """All that is inline, as an object."""
    trace = [batch for batch in served.funnel.machine.fetch().state.trace if batch.parts]
    first, last = trace[0].lower.time or 0, (trace[-1].upper.time or 0) - 1
    parts = tuple(
        replace(one, inline=None, key=PartKey(f"{W2}/p{number}"), at=None, time_lower=first, time_upper=last)
        for number, one in enumerate(one for batch in trace for one in batch.parts)
    )
    count = len(parts)
    output = Batch(0, 1, at(first), at(last + 1), at(first), count, count, count, parts, (0,))
    return c.ApplyCompaction(W2, tuple(one.id for one in trace), output)


# *The one who knows most does it*, and so reads least; the others read nothing.


def test_of_a_row_the_client_that_knows_the_newest_version_is_told(served: Served) -> None:
    appended(served, 4)
    made = [put(served, bytes([number]), known) for number, known in enumerate((3, 7, 5))]
    served.funnel.turn()
    assert [answer(one).due for one in made] == [(), (FLUSH,), ()]
    assert [bool(one.answer.result(0).rows) for one in made] == [False, True, False]


def test_where_the_first_append_of_a_row_has_a_time_of_its_own_its_client_rolls_up_unasked(served: Served) -> None:
    every = served.until_a_rollup_is_due()
    first, second = served.put(append(0, 5, W2), b"a", client="a"), put(served, b"b")
    served.funnel.turn()
    assert answer(first).seqno == answer(second).seqno == every
    assert answer(second).due == ()


def test_upkeep_waits_a_few_rows_for_the_client_that_did_it_last(served: Served) -> None:
    served.until_a_rollup_is_due()
    assert appended(served, 1) == [(ROLL_UP,)]
    assert appended(served, 3) == 3 * [()]
    told = appended(served, 1 + PATIENCE)
    assert told == PATIENCE * [()] + [(FLUSH,)], "to somebody, as the one that did it last did not come"
    served.direct_commit(flush(served))
    last = served.funnel.machine.fetch().seqno
    assert appended(served, 4, known=last) == 4 * [()]
    assert appended(served, 1, known=last) == [(FLUSH,)], "at once, to the one that did"


def test_nobody_else_is_told_to_flush_while_one_is_at_it(served: Served) -> None:
    assert appended(served, 5) == 4 * [()] + [(FLUSH,)]
    assert appended(served, 1, known=8) == [()]
    served.world.clock.advance(FLUSH_S)
    assert appended(served, 1, known=9) == [(FLUSH,)], "it seems to be gone"
    served.direct_commit(flush(served))
    assert appended(served, 5, known=10) == 4 * [()] + [(FLUSH,)], "there is less room again"


# *Appends wait for room*: refused, hundreds of clients would upload a kilobyte each.


def test_appends_wait_for_room_and_are_committed_when_it_is_there(served: Served, waking: list[float]) -> None:
    appended(served, PARTS)
    made = [put(served, bytes([number])) for number in range(4)]
    served.funnel.turn()
    assert not any(one.answer.done() for one in made)
    assert not served.funnel.is_idle
    assert waking == [LOOK_S], "one look for all of them"
    served.put(flush(served), b"flush")
    served.funnel.turn()
    assert len(served.funnel.queue) == 4, "so that there is another turn"
    served.funnel.turn()
    assert [answer(one).outcome.upper for one in made] == [at(PARTS + number + 1) for number in range(4)]
    assert served.funnel.is_idle


def test_room_made_in_the_same_row_counts(served: Served, waking: list[float]) -> None:
    appended(served, PARTS)
    made = put(served, b"a")
    served.put(flush(served), b"flush")
    served.funnel.turn()
    assert not made.answer.done()
    served.funnel.turn()
    assert answer(made).is_committed


def test_where_nobody_makes_room_it_is_refused_after_a_while(served: Served, waking: list[float]) -> None:
    appended(served, PARTS)
    made, hasty = put(served, b"a"), put(served, b"b", seconds=ROOM_S / 2)
    served.funnel.turn()
    served.world.clock.advance(ROOM_S / 4)
    served.funnel.turn()
    assert isinstance(answer(hasty).refusal, r.InlineFull), "it has time for the other way"
    assert not made.answer.done()
    served.world.clock.advance(ROOM_S)
    served.funnel.turn()
    assert isinstance(answer(made).refusal, r.InlineFull)
    assert served.funnel.is_idle


def test_one_of_those_that_are_refused_is_told_to_make_room(served: Served, waking: list[float]) -> None:
    appended(served, PARTS)
    served.world.clock.advance(FLUSH_S)
    made = [put(served, bytes([number])) for number in range(3)]
    served.funnel.turn()
    assert (answer(made[0]).refusal, answer(made[0]).due) == (r.InlineFull(PARTS * SIZE), (FLUSH,))
    assert not made[1].answer.done()


def test_those_that_wait_are_answered_at_the_end_and_let_go_when_their_client_is_gone(
    served: Served, waking: list[float]
) -> None:
    appended(served, PARTS)
    made, gone = put(served, b"a"), put(served, b"b")
    served.funnel.turn()
    gone.is_dropped = True
    served.funnel.turn()
    assert "the client was gone" in error(gone).message
    served.funnel.give_up()
    served.funnel.turn()
    assert "stopping" in error(made).message


def test_without_a_way_to_wake_up_none_waits(served: Served) -> None:
    appended(served, PARTS)
    made = [put(served, bytes([number])) for number in range(3)]
    served.funnel.turn()
    assert {type(answer(one).refusal) for one in made} == {r.InlineFull}
