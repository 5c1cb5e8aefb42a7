"""Commits of several shards at once: all of the commands are committed, or none.

The turns of their shards are taken in the order of the shards' names, so that two such commits never wait for each
other. While the outcome of one is unknown, nothing else of its shards is committed or answered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TypeVar

from persist_lib.core import refusals as r
from persist_lib.core.deciding import is_out_for_ever
from persist_lib.core.diff import StateDiff
from persist_lib.core.groups import Answer
from persist_lib.core.state import State, Version
from persist_lib.errors import InvariantViolated
from persist_lib.ids import SeqNo
from persist_lib.location.commands import Answered
from persist_lib.runtime.ambient import Deadline
from persist_lib.runtime.threads import Lock, giving_back, taking
from persist_lib.shard.committer import Work, carry_out
from persist_lib.shard.dedup_index import Found
from persist_lib.shard.group_commit import Funnel
from persist_lib.shard.machine import Prepared
from persist_lib.shard.requests import Request, answering, forgotten, still_open

T = TypeVar("T")


class Share:
    """One shard's part of a commit: its funnel, its request, and what comes of it on the newest known version."""

    def __init__(self, funnel: Funnel, request: Request) -> None:
        self.funnel, self.request, self.shard = funnel, request, request.shard
        self.version = Version(SeqNo(0), State(), b"")
        self.found: Found = "not there"
        self.prepared: Prepared | None = None
        self.answer: Answer | None = None

    def look(self) -> None:
        """Look for the command in the log, up to the newest known version."""
        self.version = self.funnel.machine.ground()
        seen, self.prepared = self.funnel.seen, None
        seen.follow(self.version.seqno)
        self.found = seen.find(self.request)
        if self.found == "unknown" and not self.request.is_repeated:
            self.answer = r.Forgotten(self.request.known, seen.begins)

    def prepare(self) -> None:
        """Apply the command to that version, if it is not there."""
        if self.found == "not there":
            self.prepared, (self.answer,) = self.funnel.prepared(self.version, [self.request])

    @property
    def done_before(self) -> SeqNo | None:
        """Where an earlier call with this token was committed, if it was."""
        if isinstance(self.answer, r.AlreadyDone) and self.answer.outcome is not None:
            return self.answer.outcome.seqno
        return None if isinstance(self.found, str) else self.found


def commit_together(parts: Sequence[tuple[Funnel, Request]]) -> None:
    """Commit all requests or none, and answer each of them. At least one; each shard once; all with one token."""
    shares = [Share(*part) for part in parts]
    turns: list[Lock] = []
    give_back = giving_back(turns)
    try:
        with answering([request for _, request in parts]):
            # Turns are always taken in the order of shard names, as in `shard.commit`.
            for share in sorted(shares, key=attrgetter("shard")):
                turns += taking(share.funnel.machine.turn)
            carry_out(_Together(shares))
    finally:
        give_back()


class _Together(Work):
    """The requests of one commit of several shards."""

    def __init__(self, shares: Sequence[Share]) -> None:
        self._shares, self._first = shares, shares[0].funnel
        self._requests = [share.request for share in shares]
        self.machines = [share.funnel.machine for share in shares]

    @property
    def deadline(self) -> Deadline:
        return self._requests[0].deadline

    def is_wanted(self) -> bool:
        if is_over := any(request.is_over for request in self._requests):
            self._first.let_go(self._requests)
        else:
            for share in self._shares:
                self.ask(share.look)
        return not is_over

    def prepare(self) -> Sequence[Prepared]:
        for share in self._shares:
            share.prepare()
        prepared = [share.prepared for share in self._shares if share.prepared is not None]
        return prepared if len(prepared) == len(self._shares) else ()

    def is_answered(self, *, is_fresh: bool) -> bool:
        return _tell(self._shares, is_fresh=is_fresh)

    def send(self, prepared: Sequence[Prepared]) -> bool | None:
        return self._first.send(prepared, self._requests)

    def committed(self, prepared: Sequence[Prepared], attempts: int, took_s: float) -> None:  # noqa: ARG002
        for share, one in zip(self._shares, prepared, strict=True):
            share.funnel.know(one, 1, took_s)
            rows = share.funnel.seen.rows(share.request.known, one.row.seqno)
            share.request.settle(Answered(one.row.seqno, is_committed=True, rows=rows))

    def lost(self, prepared: Sequence[Prepared], attempts: int) -> None:
        """Continue: what waits too long is let go of."""

    def ask(self, call: Callable[[], T]) -> T:
        return self._first.ask(call)


def _tell(shares: Sequence[Share], *, is_fresh: bool) -> bool:
    """Answer all, if that is possible without a row; refusals only by versions that were read afresh."""
    if any(share.done_before is not None for share in shares):
        # The earlier call did all or nothing, so one shard that remembers it speaks for all. Another shard may
        # have forgotten it, and would refuse it now.
        for share in shares:
            share.request.settle(Answered(share.done_before or share.version.seqno, r.AlreadyDone()))
        return True
    if not is_fresh:
        return False
    # Refused for ever in one shard is refused for ever in all.
    is_certain = any(is_out_for_ever(share.version.state, share.request.command) for share in shares)
    for share in shares:
        request, answer = share.request, share.answer
        if request.is_repeated and any(one.found == "unknown" for one in shares):
            request.fail(forgotten(request))
        elif request.is_repeated and not is_certain:
            request.fail(still_open(request, answer))
        elif isinstance(answer, InvariantViolated):
            request.fail(answer)
        else:
            request.settle(Answered(share.version.seqno, None if isinstance(answer, StateDiff) else answer))
    return True
