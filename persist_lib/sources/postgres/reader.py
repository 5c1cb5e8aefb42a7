"""Reads tables of PostgreSQL as a source of one partition: a first snapshot, then each transaction at its commit.

An address is a place in the server's log. The snapshot is at one address, just before the place from which the log goes
on. A mark is a place up to which the log was decoded. All before it was flushed by the server, so it stays through any
crash.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from itertools import chain
from typing import Any, NamedTuple

import psycopg
import pyarrow as pa

from persist_lib.config import MIB
from persist_lib.errors import Determinate, Diverged, Gone, ShardFinished
from persist_lib.sources.agreed_value import Choices
from persist_lib.sources.growth import Growth
from persist_lib.sources.postgres import server, snapshot
from persist_lib.sources.postgres.columns import changed
from persist_lib.sources.postgres.kind import Postgres
from persist_lib.sources.postgres.log_messages import Logged, Transaction
from persist_lib.sources.postgres.server import Table, asking, lsn_text, parse_lsn, slot_of
from persist_lib.sources.postgres.stream import TABLE_BYTES, Stream, Wire, messages_of
from persist_lib.sources.protocol import MOST_ADDRESS, START, Mark, Patience
from persist_lib.sources.records import Known

IDLE_BYTES = 16 * MIB
"""How far the log moves without changes of the tables before that is bound: so much is held back for nothing."""
WAIT_S = 0.1
FEW_WAITS, MOST_WAITS = 40, 400
"""How often it waits for a server that sends nothing of its log: of what may be bound, and of what is bound.

Every second time it asks the server how far it is, which answers at once, also while it decodes.
"""
_LOOK = """
SELECT pg_current_wal_flush_lsn()::text, s.restart_lsn::text, s.confirmed_flush_lsn::text, s.wal_status,
       ARRAY(SELECT to_regclass(name)::oid::bigint FROM unnest(%s::text[]) WITH ORDINALITY AS t(name, n) ORDER BY n)
FROM (SELECT) one LEFT JOIN pg_replication_slots s ON s.slot_name = %s
"""


class Look(NamedTuple):
    """How far the server's log is flushed, and where the slot is: from `kept` on the log is held back for it."""

    flushed: int
    kept: int
    confirmed: int


class TableReader:
    """A source reader of one table, or of several, which are one partition: the server has one log of them.

    `known` is what was noted of them when the source was made; nothing of a source of an earlier release. `joins` are
    the tables that were added since, with the choice of each one's first snapshot. That is a partition of its own, with
    one mark: the place of the snapshot, from which on the log has the table's changes for the source.
    """

    def __init__(
        self, declared: Postgres, id_: str, choices: Choices, known: Mapping[str, Known] | None = None,
        *, adds: bool = False, joins: Mapping[str, Choices] | None = None,
    ) -> None:  # fmt: skip
        self._declared, self._id, self._choices, self._known, self._adds = declared, id_, choices, known or {}, adds
        self._partition, self._joins = declared.partition, joins or {}
        self._joined: dict[str, int] = {}
        self._connection: psycopg.Connection[Any] | None = None
        self._stream: Stream | None = None
        self._tables: Mapping[str, Table] = {}
        self._checks: dict[str, str] = {}
        self._base = 0
        self._held: deque[Transaction] = deque()
        self._look: Look | None = None
        self._forgotten: set[str] = set()

    def high_watermarks(self, bound: Mapping[str, Mark], most_bytes: int) -> Mapping[str, Mark]:
        """Up to the end of the last transaction that is there; without one only if the log has gone on by a lot.

        Before anything is bound it makes the first snapshot, which takes as long as the table is large. Raises Gone if
        the slot was lost, and Diverged if this is another server.
        """
        self.learn(bound)
        before = bound.get(self._partition, START)
        look = self._looked(before)
        if before.address == 0:
            self._check_unchanged(before)
            chosen = self._chosen(self._partition)
            self._check_unchanged(before)
            return {self._partition: Mark(chosen.beginning.lsn, chosen.beginning.check)}
        self._check_mark(self._partition, before)
        self._check_unchanged(before)
        until, is_exact = look.flushed, False
        if table := next((one for one in self._joins if one not in self._joined), None):
            chosen = self._chosen(table, before.address)
            if chosen.beginning.lsn == before.address:
                return {table: Mark(chosen.beginning.lsn, chosen.beginning.check)}
            is_exact = chosen.beginning.lsn <= until
            until = min(until, chosen.beginning.lsn)
        return self._ahead(before.address, until, most_bytes, is_exact=is_exact)

    def _ahead(self, at: int, until: int, most_bytes: int, *, is_exact: bool) -> Mapping[str, Mark]:
        """How far the log can be bound: not beyond `until`, and if it `is_exact` just to there, step by step."""
        self._receive(at, until, most_bytes)
        size, end = 0, 0
        for one in self._held:
            # More may have come by now. Only up to `until` is it known what was published.
            if one.end > until or (end and size + one.size > most_bytes):
                break
            size, end = size + one.size, one.end
        if not end:
            reached = min(until, self._opened(at).reached)
            end = reached if reached >= at + IDLE_BYTES or (is_exact and reached == until) else at
        return {self._partition: Mark(end, self._check_of(self._partition))} if end > at else {}

    def learn(self, bound: Mapping[str, Mark]) -> None:
        """Take note of where tables have joined: they are bound there. Raises Determinate for one that is not known.

        SUBTLE: the log is received again from there on. As long as it sends one log the server remembers what it found
        published when a transaction wrote to the table; one that began before the table was may end after that.
        """
        for table in {*bound} - {self._partition, *self._joins}:
            raise self._unknown(table)
        for table in self._joins:
            if table in bound and table not in self._joined:
                self._joined[table] = bound[table].address
                self._stop()

    def read(self, partition: str, start: Mark, end: Mark) -> Iterator[pa.Table]:
        if start.address >= end.address:
            return
        if partition in self._joins:
            yield from self._joining(partition, end)
            return
        if partition != self._partition:
            raise self._unknown(partition)
        look, at = self._looked(start), start.address
        if not start.check:  # no mark that was answered: it may be before the snapshot
            chosen = self._find(start, partition)
            if chosen is not None and at < chosen.beginning.lsn:
                if end.address < chosen.beginning.lsn:
                    return
                yield from snapshot.copied_messages(chosen, self._declared.names)
                at = chosen.beginning.lsn
        for mark in (start, end):
            self._check_mark(partition, mark)
        self._check_unchanged(start)
        if look.flushed < end.address:
            raise self._older(end)
        for place in sorted({place for place in self._joined.values() if at < place < end.address}):
            yield from self._changes(at, place)
            self._stop()
            at = place
        yield from self._changes(at, end.address)

    def _unknown(self, table: str) -> Determinate:
        return Determinate(
            f"the table {table} was added to the source: it is taken as soon as the source is looked at again",
            partition=table,
        )  # fmt: skip

    def _joining(self, table: str, mark: Mark) -> Iterator[pa.Table]:
        """The first snapshot of a table that was added: the one that is bound."""
        self._looked(mark)
        self._check_mark(table, mark)
        chosen = self._find(START, table)
        if chosen is None or chosen.beginning.lsn != mark.address:
            raise self._diverged(mark, f"the first snapshot of {table} is another one than is bound")
        yield from snapshot.copied_messages(chosen, [table])

    def _changes(self, at: int, end: int) -> Iterator[pa.Table]:
        patience = Patience(MOST_WAITS)
        while at < end:
            stream = self._opened(at)
            is_over = False
            if not (self._held and self._held[0].end >= end) and stream.reached < end:
                is_over = patience.is_over(has_come=self._fetch(stream, asks=patience.quiet % 2 == 1))
            some: list[Transaction] = []
            while self._held and self._held[0].address < end:
                some.append(self._held.popleft())
            at = self._base = end if self._held or stream.reached >= end else stream.reached
            yield from messages_of([self._of_joined(one) for one in some])
            if is_over:
                raise Determinate(
                    f"{server.described(self._declared)} has not sent its log up to {lsn_text(end)}, which was bound. "
                    "It is asked again",
                    partition=self._partition, address=end,
                )  # fmt: skip

    def _of_joined(self, one: Transaction) -> Transaction:
        """A transaction without changes of tables that had not joined by then: what these did is in a snapshot."""
        late = {table for table in self._joins if self._joined.get(table, MOST_ADDRESS) > one.address}
        return one._replace(changes=[change for change in one.changes if change.table not in late]) if late else one

    def estimate(self, partition: str, start: int, end: int) -> int:
        del partition
        if self._held and self._base <= start and end <= self._held[-1].end:
            return sum(one.size for one in self._held if start <= one.address < end)
        return end - start

    def lag(self, marks: Mapping[str, Mark]) -> Mapping[str, int]:
        if self._look is None or self._stream is None:
            return {}
        at = marks.get(self._partition, START).address
        ahead = self._look.flushed - at
        is_news = self._stream.reached < self._look.flushed or any(one.address >= at for one in self._held)
        return {self._partition: ahead} if ahead > 0 and is_news else {}

    def held_back(self) -> tuple[int, str]:
        """How many bytes of the server's log the slot holds back; and if these are too many, that this is so."""
        if self._look is None:
            return 0, ""
        kept = max(0, self._look.flushed - self._look.kept)
        if kept <= self._declared.most_retained:
            return kept, ""
        return kept, (
            f"the slot {slot_of(self._id)} holds back {kept / MIB:,.0f} MiB of the server's log: end transactions that "
            "are open for long, let instances catch up, or drop the source"
        )

    def tell(self, marks: Mapping[str, Mark]) -> None:
        mark = marks.get(self._partition, START)
        if mark.address == 0:
            return
        self._check_mark(self._partition, mark)
        with asking(self._declared, "move the replication slot"):
            row = self._connected().execute(
                "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s", [slot_of(self._id)]
            ).fetchone()  # fmt: skip
            if row is not None and parse_lsn(row[0]) < mark.address:
                # Another instance may move or copy it just now; or it is lost, which the next look tells.
                with suppress(psycopg.errors.ObjectInUse, psycopg.errors.ObjectNotInPrerequisiteState):
                    self._connected().execute(
                        "SELECT pg_replication_slot_advance(%s, %s::pg_lsn)",
                        [slot_of(self._id), lsn_text(mark.address)],
                    )
        for partition in {*marks} - self._forgotten:
            self._choices_of(partition).forget()
            self._forgotten.add(partition)

    def growth(self) -> Growth | None:
        """What a table has that is not known yet, where the source takes that."""
        if not self._adds or not self._known:
            return None
        if not self._tables:
            self._looked(START)
        with asking(self._declared, "look at the tables' columns"):
            return server.fetch_growth(self._connected(), self._oids(), self._known)

    def close(self) -> None:
        self._stop()
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _stop(self) -> None:
        """Receive no more of the log; what is asked for next is received again."""
        if self._stream is not None:
            self._stream.close()
        self._stream = None
        self._held.clear()

    def _connected(self) -> psycopg.Connection[Any]:
        if self._connection is None:
            self._connection = server.connect(self._declared)
        return self._connection

    def _looked(self, mark: Mark) -> Look:
        """Look at the server. Raises Gone if the slot or a table is not there any more."""
        names = self._declared.names
        with asking(self._declared, "look at the replication slot"):
            connection = self._connected()
            row = connection.execute(_LOOK, [list(names), slot_of(self._id)]).fetchone()
            assert row is not None  # noqa: S101 - an outer join of one row
            flushed, kept, confirmed, status, oids = row
            if confirmed is None or status == "lost":
                what = "is not there" if confirmed is None else "was given up by the server"
                raise self._gone(
                    mark, f"the replication slot {slot_of(self._id)} {what}, and the log from {lsn_text(mark.address)} "
                    "on is still needed (look at max_slot_wal_keep_size and most_retained)",
                )  # fmt: skip
            if None in oids:
                raise self._gone(mark, f"the table {names[oids.index(None)]} was dropped or renamed")
            if oids != [*self._oids().values()]:
                is_known = [name for name in names if mark.address > 0 and name not in self._joins]
                self._tables = server.find_tables(connection, self._declared, is_known=[*is_known, *self._joined])
                self._checks.clear()
        self._look = Look(parse_lsn(flushed), parse_lsn(kept), parse_lsn(confirmed))
        if self._look.flushed < mark.address:
            raise self._older(mark)
        return self._look

    def _check_unchanged(self, mark: Mark) -> None:
        """Raise Gone if something may have been left out of the log up to the last look, and SchemaChanged."""
        publication, oids = server.publication_of(self._declared, self._id), self._oids()
        with asking(self._declared, "look at the publication"):
            noted = server.fetch_noted(self._connected(), publication, [*oids.values()])
        for table, oid in oids.items():
            known, now = self._known.get(table), noted.get(oid)
            if now is None or not now.published or (known is not None and now.published != known.published):
                raise self._gone(
                    mark, f"the publication {publication} was changed since the source was made, or the table {table} "
                    "was taken out of it, if only for a while: what was done to rows in that time may be missing in "
                    "the server's log for ever",
                )  # fmt: skip
            if known is None:
                continue
            where = f"{table} at {lsn_text(mark.address)}"
            if not (now.is_keyed or known.keyless or known.by_index):
                raise changed(where, "it has no primary key any more")
            for name, number in known.columns.items():
                if name in now.columns and now.columns[name] != number:
                    raise changed(where, f"its column {name!r} is another one than before, under that name")

    def _oids(self) -> dict[str, int]:
        """The ids of the tables, by how they are declared; none before the first look."""
        return {name: table.oid for name, table in self._tables.items()}

    def _older(self, mark: Mark) -> Diverged:
        return self._diverged(mark, "its log ends before that: this is an older copy of the server")

    def _tables_of(self, partition: str) -> dict[str, Table]:
        """The tables that the marks of a partition are about: one that was added, or those of the beginning."""
        if partition in self._joins:
            return {partition: self._tables[partition]}
        return {name: table for name, table in self._tables.items() if name not in self._joins}

    def _choices_of(self, partition: str) -> Choices:
        return self._joins.get(partition, self._choices)

    def _check_of(self, partition: str) -> str:
        if partition not in self._checks:
            with closing(Wire(self._declared)) as wire:
                self._checks[partition] = snapshot.check_of(wire, self._tables_of(partition))
        return self._checks[partition]

    def _check_mark(self, partition: str, mark: Mark) -> None:
        check = self._check_of(partition)
        if mark.check and mark.check != check:
            names = ("another server", "the server after a failover or a restore")
            tables = (f"another table of this name: {name}" for name in self._tables_of(partition))
            pairs = zip(mark.check.split(), check.split(), chain(names, tables), strict=False)
            what = next((name for was, now, name in pairs if was != now), "something else")
            raise self._diverged(mark, f"this is {what}")

    def _find(self, mark: Mark, partition: str) -> snapshot.Snapshot | None:
        try:
            return snapshot.find(self._choices_of(partition))
        except ShardFinished:
            if mark.address == 0:
                raise Determinate(f"the snapshot of {partition} was used up by others. Start again") from None
            return None

    def _chosen(self, partition: str, at: int = 0) -> snapshot.Snapshot:
        """The snapshot that all agree on; made if it is not there yet, of no earlier place than `at`.

        A table that joins at an earlier place than the log is bound to would lack what came between. That such
        a snapshot is never used is certain: it is bound only where the log is bound up to just there.
        """
        chosen = self._find(START, partition)
        if chosen is None or chosen.beginning.lsn < at:
            number = 0 if chosen is None else chosen.number + 1
            copied = snapshot.copied(self._declared, self._id, self._tables_of(partition))
            self._choices_of(partition).commit(copied, number)
            chosen = self._find(START, partition)
        if chosen is None or chosen.beginning.lsn < at:
            raise Determinate(f"the snapshot of {partition} was not committed. Look again")
        return chosen

    def _opened(self, at: int) -> Stream:
        """The stream, with all transactions from `at` on, of which some may be held already."""
        if self._stream is None or at < self._base:
            self._stop()
            self._stream = Stream(self._declared, self._id, self._logged(), at)
        while self._held and self._held[0].address < at:
            self._held.popleft()
        self._base = at
        return self._stream

    def _logged(self) -> dict[int, Logged]:
        found = {}
        for name, oid in self._oids().items():
            known = self._known.get(name)
            found[oid] = Logged(name, {}) if known is None else Logged(name, known.columns, known.by_index)
        return found

    def _receive(self, at: int, until: int, most_bytes: int) -> None:
        """Receive what the server has flushed, or as much as `most_bytes`. Raises Determinate if nothing comes of it.

        So a server that is too busy to send is not taken for one that has nothing new.
        """
        patience = Patience(FEW_WAITS)
        while True:
            stream = self._opened(at)
            if stream.reached >= until or sum(one.size for one in self._held) >= most_bytes:
                return
            if not patience.is_over(has_come=self._fetch(stream, most_bytes, asks=patience.quiet % 2 == 1)):
                continue
            if self._held:
                return
            raise Determinate(
                f"{server.described(self._declared)} has its log up to {lsn_text(until)}, and has sent nothing from "
                f"{lsn_text(stream.reached)} on for {FEW_WAITS * WAIT_S:g} s. It is asked again"
            )

    def _fetch(self, stream: Stream, most_bytes: int = TABLE_BYTES, *, asks: bool) -> bool:
        """Hold what comes. Answers whether the stream has gone on."""
        before, size = stream.reached, 0
        try:
            for one in stream.receive(WAIT_S, asks=asks):
                if one.address >= self._base:
                    self._held.append(one)
                size += one.size
                if size >= most_bytes:
                    break
        except BaseException:
            self.close()
            raise
        return stream.reached > before

    def _gone(self, mark: Mark, what: str) -> Gone:
        return Gone(
            f"{server.described(self._declared)}: {what}. Nothing of it was written. What was ingested stays "
            "readable. Begin again by `persist source reset`; or, to keep the history, declare a second source under "
            "another name",
            partition=self._partition, address=mark.address,
        )  # fmt: skip

    def _diverged(self, mark: Mark, what: str) -> Diverged:
        return Diverged(
            f"{server.described(self._declared)}: {what}, not what was read up to {lsn_text(mark.address)}. Nothing of "
            "it was written. Let the url lead to the former one; if that is lost, begin by `persist source reset`",
            partition=self._partition, address=mark.address,
        )  # fmt: skip
