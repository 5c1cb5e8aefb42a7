"""Producers: who numbers its appends, so that none is committed twice, however late it is repeated.

A producer is a name (a streaming query, an ingestion run) and needs no lease and no token: the shard remembers its last
sequence number in the same transition that appends. It commits only higher ones.
"""

from __future__ import annotations

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.diff import StateDiff
from persist_lib.core.formats import PRODUCERS
from persist_lib.core.state import PRODUCERS_MOST, Produced, State
from persist_lib.ids import MOST_SEQUENCE, SeqNo, is_producer_name


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


def forget(state: State, name: str, expected: int) -> StateDiff | r.Refusal:
    """What forgetting a producer changes."""
    last = state.producers.get(name)
    if last is None or last.sequence != expected:
        return r.WrongSequence(name, expected, None if last is None else last.sequence)
    return StateDiff(producers=((name, last, None),))
