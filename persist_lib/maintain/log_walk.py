"""A walk over the log of a shard: each row is decoded, linked, replayed and judged, and no damage is raised.

It holds one page of rows and one version at a time, however long the log is. Behind a row that cannot be replayed it
begins again at the next copy of the state (a rollup) that is linked to its row. Where the shard is in use, rollups may
be collected and rows truncated while it walks: what it finds then has to be looked at again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple

import msgspec

from persist_lib.core.state import Rollup, State, Version
from persist_lib.core.validate import check_references, check_state, history_problems
from persist_lib.errors import Damage, NewerFormat, PersistError
from persist_lib.format.digest import verify as verify_digests
from persist_lib.format.frame import HEADER_BYTES
from persist_lib.format.log import (
    GENESIS,
    LogRow,
    StoredState,
    decode_row,
    decode_state,
    encode_state,
    row_digest,
    row_format,
)
from persist_lib.format.paths import blob_key, key_of, parts_prefix, prefix
from persist_lib.ids import PartKey, SeqNo
from persist_lib.location.api import Row
from persist_lib.shard.commit import Machine
from persist_lib.shard.log import SCAN_ROWS, after, apply_row, row_name

Kind = Literal[
    "row", "gap", "chain", "state", "history", "rollup", "start", "log", "missing", "size", "batch", "orphan",
    "record", "stray", "promise",
]  # fmt: skip


class Finding(msgspec.Struct, frozen=True):
    """One thing that is not as it is said to be.

    `about` names it: a version as `v17`, a key in Blob, a batch, or what a record is about. `said` is what is said of
    it, empty where that goes without saying, and `found` what is there. `do` is the command that mends it or says more.
    """

    kind: Kind
    about: str
    said: str
    found: str
    do: str
    is_damage: bool = True

    @property
    def says(self) -> str:
        """All of it in one sentence, but for the command."""
        return f"{self.about}: {self.found}" + (f" (said: {self.said})" if self.said else "")


class Step(NamedTuple):
    """A row, and the versions before and after it. `before` is None where the walk begins with a copy of the state."""

    before: Version | None
    row: LogRow
    after: Version


class Walk:
    """One walk. Iterate over `steps` once; then the counts are those of the whole walk.

    `said` are the rollups that the newest state refers to, and `copies` all that Blob has, by their seqno. It begins at
    the newest copy up to `begin`, or with the oldest row.
    """

    def __init__(
        self, machine: Machine, said: Mapping[SeqNo, Rollup], copies: Mapping[SeqNo, PartKey],
        found: Callable[[Finding], object], begin: SeqNo = SeqNo(0),  # noqa: B008 - a number
    ) -> None:  # fmt: skip
        self._machine, self._said, self._found = machine, said, found
        self._copies = {**copies, **{seqno: rollup.key for seqno, rollup in said.items()}}
        self.begin = max((seqno for seqno in self._copies if seqno <= begin), default=SeqNo(0))
        self._known = begin
        self._version: Version | None = None
        self._previous: bytes | None = None
        self._judged: set[SeqNo] = set()
        self.rows = self.replayed = self.truncated = 0
        self.last: Row | None = None
        self.newer = ""
        """Why the walk ended before the end of the log: a newer release wrote the next row."""

    @property
    def rollups(self) -> int:
        """How many rollups were read and compared."""
        return len(self._judged)

    @property
    def newest(self) -> Version | None:
        """The version at the end of the log; None if the walk did not get there."""
        found = self._version
        return found if found is not None and self.last is not None and found.seqno == self.last.seqno else None

    def steps(self) -> Iterator[Step]:
        """Each version that can be replayed, oldest first. What is wrong is found on the way."""
        for stored in self._pages():
            self._place(stored)
            self.rows, self.last = self.rows + 1, stored
            try:
                step = self._judge(stored)
            except NewerFormat as error:
                self.newer, self._version = error.message, None
                return
            if step is not None:
                self.replayed += 1
                yield step
        if self.rows and not self.replayed:
            says = (
                f"it begins at v{self.last.seqno - self.rows + 1 if self.last else 0}, and no copy of a state is left"
            )
            self._tell("start", "the log", "", says)
        for seqno in self._said.keys() - self._judged if self.begin == 0 else ():
            self._load(seqno)

    def _pages(self) -> Iterator[Row]:
        at = self.begin
        while page := self._machine.consensus.scan(self._machine.shard, at, SCAN_ROWS):
            yield from page
            at = SeqNo(page[-1].seqno + 1)

    def _place(self, stored: Row) -> None:
        """Judge whether the row is the one that should come next, and begin again where it is not."""
        expected = SeqNo(self.last.seqno + 1) if self.last else self.begin or SeqNo(1)
        if self.last is None and stored.seqno == 1:
            self._version = Version(SeqNo(0), State(), GENESIS)
        if stored.seqno == expected:
            return
        self._version = self._previous = None
        oldest = self._machine.consensus.scan(self._machine.shard, SeqNo(0), 1)
        if oldest and oldest[0].seqno < stored.seqno:
            self._tell("gap", f"v{expected}", f"the rows up to v{stored.seqno}", "they are not in the log")
        else:
            self.truncated = stored.seqno - 1  # by a collection, before or in the meantime

    def _judge(self, stored: Row) -> Step | None:
        name, before = row_name(self._machine.shard, stored.seqno), self._version
        problem, row = "", None
        try:
            row = decode_row(stored.data, name)
        except NewerFormat:
            raise
        except Damage as error:
            problem = error.message
        if row is None or row.seqno != stored.seqno:
            self._tell(
                "row", f"v{stored.seqno}", "", problem or f"the row there is another version's: {row and row.seqno}"
            )
            self._version = self._previous = None
            return None
        if self._previous not in {None, row.previous}:
            said = f"it follows {row.previous.hex()}"
            there = "" if self._previous is None else self._previous.hex()
            self._tell("chain", f"v{row.seqno}", said, f"the row before it has the digest {there}")
            before = None
        self._previous = row_digest(stored.data)
        self._version = version = self._replayed(before, row, stored) if before else self._started(row, stored)
        if version is None:
            return None
        if before is not None and row.seqno in self._said:
            self._compare(version)
        return Step(before, row, version)

    def _replayed(self, before: Version, row: LogRow, stored: Row) -> Version | None:
        name = row_name(self._machine.shard, row.seqno)
        try:
            if row.previous != before.digest:
                said = f"it follows {row.previous.hex()}"
                self._tell("chain", f"v{row.seqno}", said, f"v{before.seqno} has the digest {before.digest.hex()}")
                return None
            state = apply_row(before.state, row, name)
            check_references(state, row.diffs, row.seqno)
            check_state(state, row.seqno)
        except NewerFormat:
            raise
        except PersistError as error:
            self._tell("state", f"v{row.seqno}", "", error.message)
            return None
        if row.seqno > self._known:
            done = {step.command for step in row.steps if step.diff is not None}
            for problem in history_problems(before.state, state, row.seqno, done):
                self._tell("history", f"v{row.seqno}", "", problem)
        return after(row, stored.data, state)

    def _started(self, row: LogRow, stored: Row) -> Version | None:
        """The version of this row by a copy of it, if there is one that is linked to the row."""
        if row.seqno not in self._copies or (copy := self._load(row.seqno)) is None:
            return None
        if copy.digest != row_digest(stored.data):
            said = f"it was made of a row with the digest {copy.digest.hex()}"
            self._tell("rollup", self._key(row.seqno), said, f"v{row.seqno} has {row_digest(stored.data).hex()}")
            return None
        return Version(row.seqno, copy.state, copy.digest, row.rollup, row_format(stored.data))

    def _compare(self, version: Version) -> None:
        copy = self._load(version.seqno)
        if copy is not None and canonical(copy) != canonical(version):
            self._tell(
                "rollup", self._key(version.seqno), "", f"it is not the state that the log has at v{version.seqno}"
            )

    def _load(self, seqno: SeqNo) -> Version | None:
        """The copy of the state at `seqno`; None if it is not there, or not what it should be."""
        key, said = self._key(seqno), self._said.get(seqno)
        self._judged.add(seqno)
        try:
            data = self._machine.blob.get(key)
            if data is None:
                if said is not None:
                    self._tell("rollup", key, f"{said.size:,} bytes, a copy of v{seqno}", "it is not there")
                return None
            if said is not None:
                verify_digests(key, data, said.digests)
            stored = decode_state(data, key)
            check_state(stored.state, seqno)
        except NewerFormat:
            raise
        except Damage as error:
            if said is not None:
                self._tell("rollup", key, f"a copy of v{seqno}", error.message)
            return None
        if stored.seqno != seqno:
            self._tell("rollup", key, f"a copy of v{seqno}", f"it is one of v{stored.seqno}")
            return None
        return Version(seqno, stored.state, stored.digest)

    def _key(self, seqno: SeqNo) -> str:
        return blob_key(self._machine.shard, self._copies[seqno])

    def _tell(self, kind: Kind, about: str, said: str, found: str) -> None:
        self._found(Finding(kind, about, said, found, f"persist shard repair {self._machine.shard} --dry-run"))


def canonical(version: Version) -> bytes:
    """The bytes of a copy of a version: equal for equal versions, in any process."""
    return encode_state(StoredState(version.seqno, version.digest, version.state))


def every_object(machine: Machine) -> dict[PartKey, int]:
    """The size of each object of the shard but for its pending area, whatever is known of its state."""
    listed = (entry for below in (prefix, parts_prefix) for entry in machine.blob.list(below(machine.shard)))
    return {key_of(machine.shard, entry.key): entry.size for entry in listed}


def said_by_newest_row(machine: Machine) -> dict[SeqNo, Rollup]:
    """The rollup that the newest row of the log names, where no state can be read; none if the row cannot be."""
    head = machine.consensus.head(machine.shard)
    try:
        row = None if head is None else decode_row(head.data, row_name(machine.shard, head.seqno))
    except Damage:
        return {}
    return {} if row is None or row.rollup is None else {row.rollup[0]: row.rollup[1]}


def begins_like(row: Row, digest: bytes) -> bool:
    """Whether this row of the log has this digest."""
    return len(row.data) >= HEADER_BYTES and row_digest(row.data) == digest
