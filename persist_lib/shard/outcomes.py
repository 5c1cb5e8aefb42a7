"""What became of an append, given its token and times. Any process can ask, at any time; only certain answers count.

The newest state remembers its last appends. An append that it does not remember may still be excluded by the times of
its appends and batches, or be found in the rows of the log that are not truncated yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from persist_lib.core.diff import TraceEdit
from persist_lib.core.outcomes import find_outcome, is_excluded, outcome_since, remembers_since
from persist_lib.core.state import Outcome, State
from persist_lib.errors import Indeterminate, LeaseExpired, PersistError, ShardFinished, UpperMismatch
from persist_lib.format.log import LogRow, decode_row
from persist_lib.frontier import Antichain
from persist_lib.ids import SeqNo
from persist_lib.shard.commit import Machine
from persist_lib.shard.log import SCAN_ROWS, fetch_rollup, row_name
from persist_lib.shard.refusals import named
from persist_lib.times import show_frontier


class Verdict(msgspec.Struct, frozen=True):
    """What is known of an append.

    `committed`: it is in the shard since the version `seqno`. `never`: it is not in the shard and never will be, even
    if a copy of it is still on its way. `open`: it is not in the shard yet, as upper has not passed its lower; it may
    still be committed if it is sent again or still on its way. `unknown`: its times are complete, and the shard no
    longer remembers which append completed them. `why` says it in a sentence.
    """

    answer: Literal["committed", "never", "open", "unknown"]
    seqno: SeqNo | None
    why: str


FIRST_ROW = SeqNo(1)
APPENDS = frozenset({"CompareAndAppend", "Append", "Absorb"})
"""The commands whose tokens are remembered."""

REFUSED = (UpperMismatch, LeaseExpired, ShardFinished)
"""The refusals that a repeated append may get although it was committed before."""


def committed_before(
    machine: Machine, token: bytes, lower: Antichain, upper: Antichain, refusal: PersistError
) -> SeqNo:
    """The seqno at which the append with this token was committed, before it was repeated and refused.

    Raises `refusal` if it never was: then nothing of it is in the shard. Raises Indeterminate if that is not known.
    """
    verdict = judge(machine, token, lower, upper)
    if verdict.seqno is not None:
        return verdict.seqno
    if verdict.answer == "unknown":
        raise forgotten(named([machine.shard]), token, verdict) from refusal
    raise refusal


def forgotten(where: str, token: bytes, verdict: Verdict) -> Indeterminate:
    """The error for an append that was repeated so late that it is not known whether it was committed before."""
    return Indeterminate(
        f"{where}: whether the append with token {token.hex()} was committed before is not known any more: "
        f"{verdict.why}. This call wrote nothing. Read the shard to see what is there",
        token=token,
    )


def judge(machine: Machine, token: bytes, lower: Antichain, upper: Antichain) -> Verdict:
    """What became of the append of `[lower, upper)` with this token. Reads the shard afresh, and changes nothing."""
    version = machine.fetch()
    if (verdict := _by_state(version.state, token, lower, upper)) is not None:
        return verdict
    if version.state.upper <= lower:
        reached, begins = (_show(version.state, one) for one in (version.state.upper, lower))
        return Verdict("open", None, f"upper is {reached}, and has not passed {begins}")
    first: LogRow | None = None
    for row in _rows(machine):
        first = first or row
        for edit in _appends(row, token):
            added = edit.added[-1]
            if not upper <= added.upper:
                continue
            # An empty batch is fused with empty ones before it, and then begins earlier than the append did.
            if upper != added.upper and edit.removed:
                return _unknown(version.state, lower, upper)
            if upper == added.upper or added.lower <= lower:
                return Verdict("committed", row.seqno, f"it was committed as v{row.seqno}")
    if first is None or first.seqno > version.seqno:
        return _unknown(version.state, lower, upper)
    if first.seqno == 1:
        return Verdict("never", None, "the log goes back to the first version, and it is not in there")
    return _before(machine, first.seqno, token, lower, upper) or _unknown(version.state, lower, upper)


def find_since(machine: Machine, token: bytes, since: SeqNo) -> Outcome | SeqNo:
    """The outcome of an append at the next time that was made from the version `since`, or a version without it.

    Reads the shard afresh, and changes nothing. Raises Indeterminate if it is not known any more.
    """
    version = machine.fetch()
    if (outcome := outcome_since(version.state, token, since)) is not None:
        return outcome
    if remembers_since(version.state, since):
        return version.seqno
    newest = since
    for row in _rows(machine, SeqNo(since + 1)):
        if row.seqno != newest + 1:
            break
        newest = row.seqno
        for step in row.steps:
            if step.token == token and step.command in APPENDS and step.diff is not None and step.diff.outcomes:
                return step.diff.outcomes.added[-1]
    if newest >= version.seqno:
        return newest
    raise Indeterminate(
        f"shard {machine.shard}: whether the append with token {token.hex()} was committed before is not known any "
        f"more: it was first sent after v{since}, the shard remembers its {len(version.state.outcomes)} newest "
        "appends, and its log is truncated. This call wrote nothing. Read the shard to see what is there",
        shard=machine.shard, token=token,
    )  # fmt: skip


def find_placed(machine: Machine, token: bytes, since: SeqNo) -> Outcome | SeqNo | None:
    """The same for an append that a server placed in a shard by its name. None: it is not there, and never will be.

    That is so once the shard is a member, which takes nothing by its name. Looked at first, so that all rows up
    to there are searched.
    """
    is_member = bool(machine.fetch().state.member)
    found = find_since(machine, token, since)
    return found if isinstance(found, Outcome) or not is_member else None


def _by_state(state: State, token: bytes, lower: Antichain, upper: Antichain) -> Verdict | None:
    if (outcome := find_outcome(state, token, lower, upper)) is not None:
        return Verdict("committed", outcome.seqno, f"it was committed as v{outcome.seqno}")
    if is_excluded(state, lower, upper):
        return Verdict("never", None, f"upper is {_show(state, state.upper)}, and other appends brought it there")
    return None


def _before(machine: Machine, first: SeqNo, token: bytes, lower: Antichain, upper: Antichain) -> Verdict | None:
    """What the rollup at `first` says of the append. From there on the log is whole, and does not have the append."""
    rollup = machine.state.rollups.get(first)
    base = None if rollup is None else fetch_rollup(machine.reads, machine.shard, (first, rollup))
    if base is None:
        return None
    if base.state.upper <= lower:
        passed = _show(base.state, lower)
        return Verdict("never", None, f"upper passed {passed} after v{first}, and it is not in the log since then")
    return _by_state(base.state, token, lower, upper)


def _unknown(state: State, lower: Antichain, upper: Antichain) -> Verdict:
    oldest = f"the {len(state.outcomes)} newest" if state.outcomes else "those of the last few of each live writer"
    return Verdict(
        "unknown", None,
        f"upper is {_show(state, state.upper)}, so all of [{_show(state, lower)}, {_show(state, upper)}) is complete, "
        f"and the shard no longer remembers by which appends: it remembers {oldest}, and its log is truncated",
    )  # fmt: skip


def _show(state: State, frontier: Antichain) -> str:
    return show_frontier(frontier, state.times)


def _appends(row: LogRow, token: bytes) -> Iterator[TraceEdit]:
    """What the appends with this token that a row holds did to the trace."""
    for step in row.steps:
        if step.token == token and step.command in APPENDS and step.diff is not None and step.diff.trace is not None:
            yield step.diff.trace


def _rows(machine: Machine, at: SeqNo = FIRST_ROW) -> Iterator[LogRow]:
    """Every row of the log that is there, from one on, oldest first."""
    while rows := machine.consensus.scan(machine.shard, at, SCAN_ROWS):
        for seqno, data in rows:
            yield decode_row(data, row_name(machine.shard, seqno))
        at = SeqNo(rows[-1].seqno + 1)
        if len(rows) < SCAN_ROWS:
            return
