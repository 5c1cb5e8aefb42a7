"""What became of rows whose sending had no certain answer: found out from the logs, never guessed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from persist_lib.errors import Determinate, Indeterminate, InvalidUsage, PersistError
from persist_lib.format.log import LogRow
from persist_lib.ids import ShardId
from persist_lib.runtime.ambient import Deadline
from persist_lib.shard.refusals import named

DOUBT_PAUSE_S = 0.01


class Sent(Protocol):
    """A row that one shard's log was asked to append."""

    @property
    def shard(self) -> ShardId:
        """The shard's name."""

    @property
    def row(self) -> LogRow:
        """The row."""

    def is_in_log(self) -> bool | None:
        """Whether the row is there; False when another is, for ever; None when there is no row in its place."""

    def is_remembered(self) -> bool | None:
        """Whether it was committed, as far as the newest state remembers its last appends; None when it does not."""


def until_decided(send: Callable[[], bool], sent: Sequence[Sent], deadline: Deadline) -> bool:
    """Whether the rows that `send` appends together, by one compare-and-set, are in their logs now.

    Resolves what is indeterminate, or raises Indeterminate. SUBTLE: after an indeterminate answer the rows may still
    arrive later, so that "not there" decides nothing. The same bytes are sent again until some row is there: ours, or
    another's, which keeps ours out for ever.
    """
    doubt: PersistError | None = None
    while True:
        try:
            won = send()
            if won or doubt is None:
                return won
            is_done = _is_done(sent)
        except Indeterminate as error:
            doubt = doubt or error
        except Determinate:
            if doubt is None:
                raise
        except InvalidUsage as error:  # say, a password that was changed meanwhile: no further attempt helps
            if doubt is None:
                raise
            raise _in_doubt(sent, error) from error
        else:
            if is_done is None:
                raise _in_doubt(sent, doubt) from doubt
            return is_done
        if deadline.has_passed():
            raise _in_doubt(sent, doubt) from doubt
        deadline.pause(DOUBT_PAUSE_S)


def _is_done(sent: Sequence[Sent]) -> bool | None:
    """What became of rows that were sent with an unknown outcome, and refused when sent again; None: nothing tells.

    SUBTLE: refused means that in at least one shard our place is taken. Where it is not, nothing is decided. Where it
    is taken by our row, all of ours are there, as they came together; where by another's, ours can never come to that
    place, and so to none, however late a copy of the request arrives. Which shard it is does not matter, nor that they
    are looked at one after the other: what is in a place stays there. Only truncation can hide it; then the state's
    memory of its last appends tells.
    """
    for one in sent:
        if (is_ours := one.is_in_log()) is not None:
            return is_ours
    for one in sent:
        if (is_ours := one.is_remembered()) is not None:
            return is_ours
    return None


def _in_doubt(sent: Sequence[Sent], cause: PersistError) -> Indeterminate:
    row = sent[0].row
    appended = row.diff.trace.added[-1] if row.diff.trace and row.command == "CompareAndAppend" else None
    what = f"append of [{appended.lower}, {appended.upper})" if appended else f"change ({row.command})"
    return Indeterminate(
        f"{named([one.shard for one in sent])}: it is not known whether the {what} with token {row.token.hex()} was "
        f"committed ({cause}). "
        "Repeat the call with the same token and it answers what happened; delete nothing that it refers to",
        shard=sent[0].shard, token=row.token,
    )  # fmt: skip
