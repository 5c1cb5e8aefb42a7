"""What one scrub has to read, what it found so far, and what is to be remembered of it."""

from __future__ import annotations

import logging

import msgspec

from persist_lib.core.state import Batch, Version
from persist_lib.errors import PersistError
from persist_lib.format.scrub_marks import Mark, Marks, identity_of
from persist_lib.location.wrap.deadline import within
from persist_lib.maintain.marks import Remembered, remember
from persist_lib.maintain.scrubbed import BatchId, Scrubbed
from persist_lib.shard.commit import Machine

log = logging.getLogger("persist.scrub")
SAVE_S = 30.0
"""How much of a long scrub is lost when its process is killed."""
REMEMBER_S = 5.0
"""How long to try. A store that takes no writes must not hold up the scrubs of a thousand shards."""
SAVE_DAMAGE_S = 1.0
"""The same, once there is damage that nobody knows yet."""


class Findings:
    """The verdicts of one scrub, batch by batch. `to_read` are the batches that it has to read.

    `known` is what earlier scrubs remember. Batches that they found damaged are always read, and everything is read if
    some of it could not be. `is_kept` is whether anything may be remembered.
    """

    def __init__(
        self, machine: Machine, version: Version, known: Remembered, *, after: int, new_only: bool, is_kept: bool
    ) -> None:
        self._machine = machine
        self._version = version
        self._before = self._stored = known
        if known.seqno > version.seqno:
            # The memory is that of a log before a restore. Objects that this log deleted since may be missing.
            self._before = known = msgspec.structs.replace(known, sound=frozenset())
        self._why_not = "" if is_kept else "it was not asked for"
        self._saved_s = machine.runtime.monotonic()
        self._is_urgent = False
        self._batches = {identity_of(batch): batch for batch in version.state.trace if batch.count}
        wanted = [
            identity
            for identity, batch in self._batches.items()
            if identity in known.damaged
            or known.unreadable
            or (batch.born > after and not (new_only and identity in known.sound))
        ]
        self.to_read = [self._batches[identity] for identity in wanted]
        unread = self._batches.keys() - set(wanted)
        self._left, self._skipped = len(unread & known.sound), len(unread - known.sound)
        self._sound = set(known.sound & self._batches.keys())
        self._damaged = {identity: mark for identity, mark in known.damaged.items() if identity in self._batches}
        self._read: dict[bytes, str | None] = {}

    def add(self, batch: Batch, problem: str | None) -> None:
        """Note what is wrong with a batch: an empty text for nothing, None if it was replaced while it was read.

        Now and then, what was found is remembered, so that a scrub that is killed has not read for nothing.
        """
        identity = identity_of(batch)
        self._read[identity] = problem
        before = self._damaged.pop(identity, None)
        self._sound.discard(identity)
        if problem == "":
            self._sound.add(identity)
        elif problem is not None:
            since = self._machine.consensus.now() if before is None else before.since
            self._damaged[identity] = Mark(identity, batch.lo, batch.hi, problem, since)
            self._is_urgent |= before is None
        waited_s = self._machine.runtime.monotonic() - self._saved_s
        if waited_s >= (SAVE_DAMAGE_S if self._is_urgent else SAVE_S):
            self.save()

    def save(self) -> None:
        """Remember what was found so far, unless that is remembered already. `answer` tells a failure."""
        damaged = sorted(self._damaged.values(), key=lambda mark: (mark.id, mark.identity))
        marks = Marks(self._version.seqno, tuple(sorted(self._sound)), tuple(damaged))
        self._saved_s, self._is_urgent = self._machine.runtime.monotonic(), False
        if self._why_not or self._stored.is_exactly(marks):
            return
        try:
            deadline = self._machine.runtime.deadline(REMEMBER_S)
            keys = within(deadline, lambda: remember(self._machine, marks, self._stored.keys))
        except PersistError as error:
            self._why_not = error.message
            shard = self._machine.shard
            log.warning("shard %s: the scrub goes on, but what it finds cannot be remembered: %s", shard, error)
            return
        self._stored = Remembered(frozenset(marks.sound), dict(self._damaged), marks.seqno, keys)

    def answer(self) -> Scrubbed:
        """Remember all of it, and return what the scrub found."""
        self.save()
        verified = [self._batches[identity] for identity, problem in self._read.items() if problem is not None]
        marks = [self._damaged[identity] for identity, problem in self._read.items() if problem]
        before = self._before.damaged
        return Scrubbed(
            batches=len(verified),
            updates=sum(batch.count for batch in verified),
            size=sum(batch.size for batch in verified),
            damaged=tuple((mark.id, mark.says) for mark in marks),
            newest=self._version.seqno,
            left=self._left,
            skipped=self._skipped,
            known=tuple(mark.id for mark in marks if mark.identity in before),
            since=tuple(mark.since for mark in marks),
            mended=self._ids_of({identity for identity, problem in self._read.items() if problem == ""}),
            gone=self._ids_of(
                before.keys() - self._batches.keys()
                | {identity for identity, problem in self._read.items() if problem is None}
            ),
            remembered=not self._why_not,
            why_not=self._why_not,
        )

    def _ids_of(self, identities: set[bytes]) -> tuple[BatchId, ...]:
        """The ids of those that were known to be damaged."""
        return tuple(sorted(mark.id for identity, mark in self._before.damaged.items() if identity in identities))
