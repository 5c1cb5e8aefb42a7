"""What a server tells of a row that it committed. It sends a client what that client needs, and no more.

A row holds the commands of many clients. If each of them got all of it, a server would send as many rows as there are
commands in it. So a client whose append was put at the next time gets only where that was.
"""

from __future__ import annotations

from collections.abc import Sequence

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.diff import StateDiff
from persist_lib.core.groups import Answer
from persist_lib.core.plan.compaction import is_filling
from persist_lib.core.state import State, Version
from persist_lib.ids import SeqNo
from persist_lib.location.api import Row
from persist_lib.location.commands import Answered
from persist_lib.maintain.rollups import is_duty
from persist_lib.server.requests import APPENDS, Request
from persist_lib.shard.answers import Committed

FOLLOWED_BYTES = 2048
"""The most bytes of rows that go along with an answer that does not need them. A lone client then still follows."""


def committed(request: Request, diff: StateDiff, version: Version, rows: tuple[Row, ...], *, is_due: bool) -> Answered:
    """The answer to a request that a row committed, which led to `version`; `rows` are those since its client's."""
    if not isinstance(request.command, c.AppendNow) or diff.outcomes is None:
        return Answered(version.seqno, is_committed=True, rows=rows)
    told = rows if is_due or sum([len(row.data) for row in rows]) <= FOLLOWED_BYTES else ()
    return Answered(version.seqno, is_committed=True, rows=told, outcome=diff.outcomes.added[-1], is_due=is_due)


def refused(request: Request, refusal: r.Refusal, seqno: SeqNo, rows: tuple[Row, ...]) -> Answered:
    """The answer to a request that the version `seqno` refuses."""
    return Answered(seqno, refusal, rows=() if isinstance(request.command, c.AppendNow) else rows)


def due(lot: Sequence[Request], answers: Sequence[Answer], before: State | None, after: Version, every: int) -> int:
    """The place of the request whose client has to roll up or flush, as its append is a row's first; -1 for none."""
    if before is None:
        return -1
    is_filled = is_filling(before, after.state, after.seqno)
    if not (is_filled or is_duty(Committed(after.seqno, b"", before, after.state, 1), every)):
        return -1
    found = (
        place
        for place, (request, answer) in enumerate(zip(lot, answers, strict=False))
        if isinstance(answer, StateDiff) and isinstance(request.command, APPENDS)
    )
    return next(found, -1)
