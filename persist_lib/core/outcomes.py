"""What a state knows of an append by its token and its times: that it was committed, that it never will be, or neither.

Token, lower and upper together name an append, so several appends may have the same token. An append that was sent
together with others under one token was committed if an outcome with that token covers its times.

A batch that is to be at the next time is put at upper, wherever that is. So no frontier ever passes it, and it could be
put there twice. Its token keeps that off: the command says by `since` from which version on the appends that the state
remembers have to be searched. A state that does not remember all of them refuses.

A producer is a name (a streaming query, an ingestion run) that numbers its appends, and needs no lease and no token:
the shard remembers its last sequence number in the same transition that appends. It commits only higher ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

import msgspec

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.diff import OutcomesEdit, StateDiff
from persist_lib.core.formats import PRODUCERS, REMEMBERS_OUTCOMES
from persist_lib.core.state import OUTCOMES_KEPT, PRODUCERS_MOST, Batch, Outcome, Produced, State
from persist_lib.frontier import MAX_TIME, Antichain, at
from persist_lib.ids import MOST_SEQUENCE, SeqNo, WriterId, is_producer_name
from persist_lib.times import END_S, PER_SECOND, Unit


def find_outcome(state: State, token: bytes, lower: Antichain, upper: Antichain) -> Outcome | None:
    """The outcome of the append of `[lower, upper)` with this token, if the state remembers it."""
    index = _place(state, upper)
    if 0 < index < len(state.outcomes):
        begins, outcome = state.outcomes[index - 1].upper, state.outcomes[index]
        return outcome if outcome.token == token and begins <= lower else None
    # It is not known where these appends began; but if a batch begins in between, they did not cover these times.
    known = (*state.outcomes[:1], *(outcome for writer in state.writers.values() for outcome in writer.outcomes))
    found = (outcome for outcome in known if (outcome.token, outcome.upper) == (token, upper))
    return None if _is_cut(state, lower, upper) else next(found, None)


def outcome_since(state: State, token: bytes, since: int) -> Outcome | None:
    """The outcome of an append with this token that was committed after the version `since`, if it is remembered."""
    for outcome in reversed(state.outcomes):
        if outcome.seqno <= since:
            return None
        if outcome.token == token:
            return outcome
    return None


def staged_before(state: State, staged: Iterable[tuple[WriterId, bytes]]) -> list[Outcome]:
    """The outcomes of those answers of tasks that were appended, as far as their stages are open."""
    if not (asked := set(staged)):
        return []
    stages = {id_: state.writers[id_].staged for id_, _ in asked if id_ in state.writers}
    return [outcome for id_, known in stages.items() for outcome in known if (id_, outcome.token) in asked]


def is_excluded(state: State, lower: Antichain, upper: Antichain) -> bool:
    """Whether an append of `[lower, upper)` that `find_outcome` does not know was not committed, and never will be.

    It can only be committed when the shard's upper is its lower, and then leaves an upper at or beyond its own. So it
    is excluded when the shard's upper has been between both, when a batch begins between both, and when the append that
    reached its upper is remembered and is another one.
    """
    if state.upper < upper:
        return lower < state.upper
    index = _place(state, upper)
    if index > 0:
        return True
    if state.outcomes and state.outcomes[0].upper == upper and state.outcomes[0].token:
        return True  # it is not known where the first outcome starts, so it only tells of the times before its end
    return _is_cut(state, lower, upper)


def remember(state: State, outcome: Outcome) -> OutcomesEdit | None:
    """The edit by which the state remembers one more outcome, and forgets the oldest; None if its format cannot."""
    if state.format < REMEMBERS_OUTCOMES:
        return None
    return OutcomesEdit(max(0, len(state.outcomes) + 1 - OUTCOMES_KEPT), (outcome,))


def _is_cut(state: State, lower: Antichain, upper: Antichain) -> bool:
    """Whether a batch begins between both. Then these times were not committed together."""
    place = bisect_left(state.trace, upper, key=lambda batch: batch.upper)
    return place < len(state.trace) and lower < state.trace[place].lower


def _place(state: State, upper: Antichain) -> int:
    """The index of the first outcome that reached `upper`."""
    return bisect_left(state.outcomes, upper, key=lambda outcome: outcome.upper)


def time_after(upper: Antichain, unit: Unit | None, now: int) -> int | None:
    """The time at which a batch is put that is to be at the next one: of a clock now, but never before upper.

    `now` is ms. Without a clock it is upper. None where the shard is closed for writing, and at the end of all times.
    """
    least = upper.time
    if least is None:
        return None
    if unit is None:
        return least if least < MAX_TIME else None
    found = max(least, now * PER_SECOND[unit] // 1_000)
    return found if found < END_S * PER_SECOND[unit] else None


def counted_at(batch: Batch, lower: Antichain, time: int) -> Batch:
    """The same updates, all at one time, in a batch from `lower` on. All of its parts must be of one time."""
    parts = tuple(
        [part if part.time_lower == part.time_upper == time else part.counted_at(time) for part in batch.parts]
    )
    return msgspec.structs.replace(batch, lower=lower, upper=at(time + 1), parts=parts)


def remembers_since(state: State, since: int) -> bool:
    """Whether the state remembers all appends that were committed after the version `since`."""
    return state.format >= REMEMBERS_OUTCOMES and bool(state.outcomes) and state.outcomes[0].seqno <= since


def not_new(state: State, seqno: SeqNo, command: c.AppendNow) -> r.Refusal | None:
    """Why an append at the next time is refused before anything else is looked at; None if it was not committed yet."""
    if command.since >= seqno:
        return r.InvalidBounds(f"it is said to be made from v{command.since}, which is not before v{seqno}")
    if (outcome := outcome_since(state, command.token, command.since)) is not None:
        return r.AlreadyDone(outcome)
    if state.format < REMEMBERS_OUTCOMES:
        return r.NeedsFormat("an append at the next time", REMEMBERS_OUTCOMES, state.format)
    return None if remembers_since(state, command.since) else r.Forgotten(command.since, state.outcomes[0].seqno)


def placed(state: State, command: c.AppendNow) -> c.CompareAndAppend | r.Refusal:
    """The append that it comes to in this state."""
    batch, upper = command.batch, state.upper
    if upper.is_top():
        return r.WrongUpper(upper, upper)
    if (time := time_after(upper, state.times, command.now)) is None:
        return r.InvalidBounds(f"upper is {upper}, where times end")
    if any(part.time_lower != part.time_upper for part in batch.parts):
        return r.InvalidBounds("it is to be put at one time, and has parts of several")
    return c.CompareAndAppend(
        command.writer, command.token, counted_at(batch, upper, time), command.lease_until, command.producer,
        command.now, command.staged,
    )  # fmt: skip


def last_of(state: State, name: str, sequence: int) -> Produced | None:
    """The producer's last append, if it has this sequence number or a higher one."""
    last = state.producers.get(name)
    return last if last is not None and last.sequence >= sequence else None


def problems_of(name: object, sequence: object) -> str | None:
    """Why this is no producer that could be stored; None if it is one."""
    if not isinstance(name, str) or not is_producer_name(name):
        return f"producer {name!r:.300}"
    # True is an int, and would be read again as a bool.
    if type(sequence) is not int or not 0 <= sequence <= MOST_SEQUENCE:
        return f"sequence number {sequence!r:.100}"
    return None


def is_not_new(state: State, name: str, sequence: int) -> r.Refusal | None:
    """Why an append with this number is refused before anything else is looked at; None if it may be made."""
    if reason := problems_of(name, sequence):
        return r.Malformed(reason)
    last = last_of(state, name, sequence)
    return None if last is None else r.AlreadyProduced(name, sequence, last)


def cannot_produce(state: State, name: str) -> r.Refusal | None:
    """Why the shard cannot remember an append of this producer; None if it can."""
    if state.format < PRODUCERS:
        return r.NeedsFormat(f"the producer {name!r}", PRODUCERS, state.format)
    if name not in state.producers and len(state.producers) >= PRODUCERS_MOST:
        return r.TooManyProducers(name, PRODUCERS_MOST)
    return None


def produced(
    state: State, command: c.CompareAndAppend, producer: tuple[str, int], seqno: SeqNo
) -> tuple[str, Produced | None, Produced | None]:
    """The edit by which the state remembers this append of its producer."""
    name, sequence = producer
    return name, state.producers.get(name), Produced(sequence, seqno, command.batch.upper, command.now)


def forget_producer(state: State, name: str, expected: int) -> StateDiff | r.Refusal:
    """What forgetting a producer changes."""
    last = state.producers.get(name)
    if last is None or last.sequence != expected:
        return r.WrongSequence(name, expected, None if last is None else last.sequence)
    return StateDiff(producers=((name, last, None),))
