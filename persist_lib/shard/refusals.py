"""The exceptions for refusals. Each message says what was asked, what the state is, and what to do.

Every refusal has its exception and its sentence. A new one does not type-check until it has both: it is a case of
`refused`, or else one of `_Rare` and a case of `_sentence`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import assert_never

from persist_lib.core import refusals as r
from persist_lib.core.state import COLLECTION
from persist_lib.errors import (
    AlreadyProduced,
    CompactionRefused,
    GivesUpHistory,
    HoldConflict,
    Indeterminate,
    InvalidUsage,
    LeaseExpired,
    MemberOf,
    NotFound,
    OfLayer,
    PersistError,
    SchemaMismatch,
    ShardFinished,
    SinceViolation,
    StillRead,
    UpperMismatch,
)
from persist_lib.frontier import Antichain
from persist_lib.ids import ShardId
from persist_lib.times import Unit, show_frontier


def named(shards: Sequence[ShardId]) -> str:
    """The name of one shard or of several in messages."""
    return f"shard {shards[0]}" if len(shards) == 1 else f"shards {', '.join(shards)}"


def refused(shard: ShardId, refusal: r.Refusal, unit: Unit | None = None, table: str = "") -> PersistError:
    """The exception for a refusal. Its message says what was asked, what the state is, and what to do.

    `unit` is the clock that the shard's times are; None: plain integers. `table` is the name of the table that a member
    is of, where it is known.
    """
    show = partial(show_frontier, unit=unit)
    match refusal:
        case r.Finished():
            return ShardFinished(f"shard {shard} is finished for good: it can neither be read nor written", shard=shard)
        case r.NotLive(ids):
            return LeaseExpired(
                f"shard {shard}: {', '.join(ids)} is not live: its lease ended without a heartbeat, or it was closed. "
                f"This change was not made. {_after_expiry(ids)}",
                shard=shard, id=ids[0] if ids else "",
            )  # fmt: skip
        case r.WrongUpper(expected, actual) if actual.is_top():
            return UpperMismatch(
                f"shard {shard}: the batch starts at {show(expected)}, but the shard is closed for writing: its upper "
                f"is {show(actual)}, for ever. This append wrote nothing. Read the shard to see whether it holds this "
                "data",
                shard=shard, expected=expected, actual=actual,
            )  # fmt: skip
        case r.WrongUpper(expected, actual):
            return UpperMismatch(
                f"shard {shard}: the batch starts at {show(expected)}, but upper is {show(actual)}: another writer was "
                f"first, or there is a gap. Nothing was written; decide from {show(actual)} on",
                shard=shard, expected=expected, actual=actual,
            )  # fmt: skip
        case r.BelowSince(asked, since):
            return SinceViolation(
                f"shard {shard}: nothing can be held at {show(asked)}. History before {show(since)} is given up, or "
                f"the hold is there already and never moves back. Hold {show(since)} or later",
                shard=shard, as_of=asked, since=since,
            )  # fmt: skip
        case r.GivesUpHistory() | r.OfLayer() | r.OfMember() | r.WrongOpaque():
            return _of_holds(shard, refusal, show, table)
        case r.NotEquivalent(reason):
            return CompactionRefused(
                f"shard {shard}: the compaction was refused, as its output is not what its inputs hold: {reason}. "
                "It was not applied. This is damage or a bug: run `persist shard scrub`",
                shard=shard, reason=reason,
            )  # fmt: skip
        case r.InputsGone(inputs):
            return CompactionRefused(
                f"shard {shard}: the batches {inputs} have been replaced since the plan was made; plan again",
                shard=shard, reason="inputs gone",
            )  # fmt: skip
        case r.WrongSchema(newest, reason):
            return SchemaMismatch(f"shard {shard}: {reason}", shard=shard, newest=newest)
        case r.Held(by):
            return StillRead(
                f"shard {shard} is still read by {', '.join(by)}; close the readers and release the holds first",
                shard=shard, by=by,
            )  # fmt: skip
        case r.Unknown(("shard",)):
            return NotFound(f"there is no shard {shard!r} in this location; create it first", shard=shard)
        case _:
            return _rarely_told(shard, refusal, show)


def _after_expiry(ids: Sequence[str]) -> str:
    """What to do. A writer registers again by itself; a reader does not, as history that it needs may be gone."""
    if any(id_.startswith("r") for id_ in ids):
        return "History that it held may be gone: open a new reader"
    return "The next call on its handle registers again by itself: look at upper, then decide"


def _of_holds(
    shard: ShardId, refusal: r.GivesUpHistory | r.OfLayer | r.OfMember | r.WrongOpaque,
    show: Callable[[Antichain], str], table: str,
) -> PersistError:  # fmt: skip
    match refusal:
        case r.GivesUpHistory(name, asked, since, newest):
            return GivesUpHistory(
                f"shard {shard}: {_given_up(name, asked, since, newest, show)}. Nothing was changed",
                shard=shard, hold=name, asked=asked, since=since, newest=newest,
            )  # fmt: skip
        case r.OfLayer(layer):
            return OfLayer(
                f"shard {shard} belongs to {_LAYERS.get(layer, layer)}, and only that appends to it: a foreign append "
                "would stop it for good. Nothing was written; write through it, or choose another shard",
                shard=shard, layer=layer,
            )  # fmt: skip
        case r.OfMember(member):
            id_ = member.partition("/")[0]
            of = f"table {table!r}" if table else f"collection with the id {id_}"
            renamed = "" if table else ", or by the name that it was given since"
            return MemberOf(
                f"shard {shard} was promoted: it is a member of the {of}, which alone reads and writes it and sets its "
                f"terms. This changed nothing; open the table with client.table({table or shard!r}){renamed}",
                shard=shard, layer=COLLECTION, collection=id_, table=table,
            )  # fmt: skip
        case r.WrongOpaque(name, expected, actual):
            return HoldConflict(
                f"shard {shard}: {_hold_conflict(name, expected, actual)}. This change was not made",
                shard=shard, name=name, expected=expected, actual=actual,
            )  # fmt: skip
        case _:
            assert_never(refusal)


_LAYERS = {
    "collection": "a collection or a table", "source": "a source", "stream": "a stream", "events": "an event log",
    "catalog": "the catalog of collections", "pending": "a pending area",
}  # fmt: skip


def _given_up(
    name: str, asked: Antichain, since: Antichain, newest: Antichain, show: Callable[[Antichain], str]
) -> str:
    """Why a hold does not move as asked."""
    if newest < asked:
        return (
            f"hold {name!r} at {show(asked)} would be beyond the newest time that is complete, {show(newest)}, so "
            f"that nothing could be read any more. Hold {show(newest)} or earlier"
        )
    return (
        f"hold {name!r} at {show(asked)} would give up history from {show(since)} on, as nothing else keeps it. A hold "
        f"keeps: set it at {show(since)}, or give that history up by `persist hold set --give-up` "
        "(client.downgrade_hold), which has a dry run, or by a retention"
    )


def _hold_conflict(name: str, expected: bytes | None, actual: bytes | None) -> str:
    """Why a hold's fencing value is not the expected one (None: no such hold)."""
    if actual is None:
        return f"there is no hold {name!r}: it was never set, or it is released already"
    if expected is None:
        return f"there is a hold {name!r} already, with the fencing value {actual!r}"
    return (
        f"hold {name!r} has the fencing value {actual!r}, not {expected!r}: "
        "another client set it, or it never had that value"
    )


_Rare = (
    r.Exists | r.Malformed | r.InvalidBounds | r.AlreadyDone | r.InlineFull | r.TooOld | r.Unknown | r.NothingDue
    | r.OlderFormat | r.NeedsFormat | r.Overtaken
)  # fmt: skip
"""Refusals that rarely reach a caller: the code that made the command deals with them, or checked for them before."""


_OfProducers = r.AlreadyProduced | r.TooManyProducers | r.WrongSequence | r.StillPending | r.Forgotten


def _rarely_told(shard: ShardId, refusal: _Rare | _OfProducers, show: Callable[[Antichain], str]) -> PersistError:
    """The exception for a refusal that is rare, or that is about producers, tokens or the pending area."""
    match refusal:
        case r.Forgotten(since, remembered):
            return Indeterminate(
                f"shard {shard}: whether this append was committed before is not known: it was first sent after "
                f"v{since}, and the shard remembers its appends after v{remembered}. This call wrote nothing. Repeat "
                "it with the same token, and the log tells, unless it is truncated",
                shard=shard, since=since, remembered=remembered,
            )  # fmt: skip
        case r.AlreadyProduced(name, sequence, last):
            return AlreadyProduced(
                f"shard {shard}: the producer {name!r} has appended number {last.sequence} already (as v{last.seqno}, "
                f"up to {show(last.upper)}), so number {sequence} was not appended again. This call wrote nothing; "
                f"continue after {last.sequence}",
                shard=shard, producer=name, sequence=sequence, last=last.sequence, seqno=last.seqno, upper=last.upper,
            )  # fmt: skip
        case r.StillPending(key, upper, actual):
            return InvalidUsage(
                f"shard {shard}: the pending batch {key} goes up to {show(upper)}, and upper is {show(actual)}: it is "
                "still needed. This change was not made; absorb it first",
                shard=shard, refusal=refusal,
            )  # fmt: skip
        case r.TooManyProducers() | r.WrongSequence():
            return InvalidUsage(f"shard {shard}: {_of_producers(refusal)}", shard=shard, refusal=refusal)
        case _:
            return InvalidUsage(f"shard {shard}: {_sentence(refusal)}", shard=shard, refusal=refusal)


def _of_producers(refusal: r.TooManyProducers | r.WrongSequence) -> str:
    match refusal:
        case r.TooManyProducers(name, most):
            return (
                f"it remembers {most} producers, as many as it may, and {name!r} is none of them. Nothing was written. "
                "Forget those that will never append again: `persist shard producers`, with --forget"
            )
        case r.WrongSequence(name, _, None):
            return f"there is no producer {name!r} to forget. This change was not made"
        case r.WrongSequence(name, expected, actual):
            return (
                f"the producer {name!r} is at {actual} by now, not at {expected}: it is at work. It was not forgotten; "
                "stop it first"
            )
        case _:
            assert_never(refusal)


def _existing(what: str) -> str:
    if what == "shard":
        return "it exists already. This change was not made; open it instead of creating it"
    if what.startswith(r.STAGED):
        return (
            f"the task's answer {what.removeprefix(r.STAGED)} was appended before, and others of this call were not. "
            "Nothing was appended; pass those that were not, by themselves"
        )
    if "/" in what:
        return (
            f"the object {what} is in the shard, or was, and is never added a second time. Nothing was appended; the "
            "answer of the task that wrote it was appended before: leave it out"
        )
    return f"{what} exists or existed once, and is never used again. This change was not made; repeat it"


def _sentence(refusal: _Rare) -> str:
    match refusal:
        case r.Exists(what):
            return _existing(what)
        case r.Malformed(reason):
            return f"{reason} could not be stored and read again. This change was not made; pass another value"
        case r.InvalidBounds(reason):
            return f"such a batch cannot be appended: {reason}. This change was not made"
        case r.AlreadyDone():
            return "it is so already, so there was nothing to change"
        case r.InlineFull(held):
            return (
                f"its state holds {held} bytes of inline batches, as many as it may. This change was not made; "
                "compact the shard, and try again"
            )
        case r.TooOld(seqno, newest):
            return f"a rollup of v{seqno} is of no use, as there is one of v{newest}; this change was not made"
        case r.Unknown(what):
            names = ", ".join(what) or "nothing"
            return f"there is no {names} to forget (any more): another client was first. This change was not made"
        case r.OlderFormat(asked, actual):
            return f"it is written in format {actual} already, and never goes back to {asked}. Nothing was changed"
        case r.NeedsFormat(what, needed, actual):
            return (
                f"it is written in format {actual}, which cannot say {what}; format {needed} can. This change was not "
                "made. Once all programs that use the shard know that format, run `persist shard upgrade`"
            )
        case r.Overtaken(expected, actual):
            return f"this was made for v{expected}, and it is at v{actual} by now. This change was not made; repeat it"
        case r.NothingDue():
            return "no lease has ended, so no reader or writer was retired"
        case _:
            assert_never(refusal)
