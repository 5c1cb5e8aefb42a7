"""What a server tells of a row that it committed. It sends a client what that client needs, and no more.

A row holds the commands of many clients. If each of them got all of it, a server would send as many rows as there are
commands in it. So a client whose append was put at the next time gets only where that was.
"""

from __future__ import annotations

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.diff import StateDiff
from persist_lib.core.state import Version
from persist_lib.ids import SeqNo
from persist_lib.location.api import Row
from persist_lib.location.commands import Answered
from persist_lib.server.requests import Request


def committed(
    request: Request, diff: StateDiff, version: Version, rows: tuple[Row, ...], due: tuple[str, ...]
) -> Answered:
    """The answer to a request that a row committed, which led to `version`; `rows` are those since its client's."""
    if not isinstance(request.command, c.AppendNow) or diff.outcomes is None:
        return Answered(version.seqno, is_committed=True, rows=rows)
    return Answered(
        version.seqno, is_committed=True, rows=rows if due else (), outcome=diff.outcomes.added[-1], due=due
    )


def refused(
    request: Request, refusal: r.Refusal, seqno: SeqNo, rows: tuple[Row, ...], due: tuple[str, ...] = ()
) -> Answered:
    """The answer to a request that the version `seqno` refuses."""
    return Answered(seqno, refusal, rows=() if isinstance(request.command, c.AppendNow) else rows, due=due)
