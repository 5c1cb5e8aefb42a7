"""Transactions over several tables of a timeline in WAL mode, and the loop of a single statement in either mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple, Self, Unpack

import pyarrow as pa

from persist_lib.arguments import not_pickled
from persist_lib.convert.filling import Filling
from persist_lib.errors import InvalidUsage, WriteConflict
from persist_lib.kernel.keyset import Counts, Keys
from persist_lib.kernel.order import take
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.deleted_keys import kept, keyed
from persist_lib.relation.row_selection import Asked as Wanted
from persist_lib.relation.row_selection import ReadArguments, RowSelection, recast, summed
from persist_lib.relation.statements import Apply, Change, Delete, Done, Insert, Statement, Update, Upsert
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.empty import empty_table
from persist_lib.schema.evolution import named_as
from persist_lib.schema.schema import Schema
from persist_lib.timeline.timeline import Line
from persist_lib.timeline.view import TableSnapshot, View, in_memory
from persist_lib.timeline.wal_timeline import WalLine

if TYPE_CHECKING:
    import pyarrow.compute as pc

SHOWN = 3
Look = Callable[[View, RowSelection], pa.Table]
"""Reads rows of a table as of the time at which a statement looks."""


class Asked(NamedTuple):
    """What a statement asks for: changes of tables, the number of updates of its own one, and what became of keys.

    `looked` are the tables and keys that it rests on beside those that change.
    """

    changes: list[tuple[View, pa.Table]]
    updates: int
    counts: Counts
    looked: list[tuple[View, pa.Table]]


def _asked(line: Line, view: View, statement: Statement, old: pa.Table, look: Look) -> Asked:
    """What a statement makes of the rows that it looks at; of a table that keeps deleted keys, and of these."""
    if (keeping := line.keeping(view, statement.schema)) is None:
        changes, counts = statement.changes(old)
        made = [(view, recast(changes, statement.schema, view.whole))] if changes.num_rows else []
        return Asked(made, changes.num_rows, counts, [])
    rule, marks = keeping
    found = kept(statement, rule, old, lambda wanted: look(marks, wanted), line.client.consensus.now())
    both = [(one, rows) for one, rows in ((view, found.changes), (marks, found.marks)) if rows.num_rows]
    # Without the floor: where it rises, a mark of these keys went, or it says nothing about them.
    looked = [(view, found.keys), (marks, keyed(rule.marks, found.keys).slice(0, found.keys.num_rows))]
    return Asked(both, found.changes.num_rows, found.counts, looked)


def run(line: Line, view: View, statement: Statement, deadline: Deadline, *, dry_run: bool = False) -> Done:
    """Carry out one statement, again until nothing that it looks at was committed in between.

    With `dry_run`, only say what it would do to what is there now.
    """
    wanted, schema = statement.wanted, statement.schema
    old, seen, races = empty_table(schema.contents), -1, 0
    read: Schema | None = None  # the columns in which `old` was read, which may be more than the statement's
    with Spending() as spent, ExitStack() as pins:
        while True:
            with ExitStack() as newer:
                as_of = newer.enter_context(line.at_newest(view, deadline))
                view = line.current(view, schema)
                if wanted is not None:
                    mine = wanted._replace(schema=named_as(view.whole, schema))
                    more = line.changed(view, seen, as_of, mine) if read == mine.schema else None
                    if more is None:
                        old = line.contents(view, as_of, mine, deadline)
                    elif more.num_rows:
                        old = summed(mine.schema, old, more)
                    read = mine.schema
                seen = as_of
                pins.close()
                pins.push(newer.pop_all())
            had = statement.in_its_columns(old, read or schema, f"table {view.name!r}", table=view.name)

            def look(marks: View, wanted: RowSelection, as_of: int = as_of) -> pa.Table:
                return line.contents(marks, as_of, wanted, deadline)

            asked = _asked(line, view, statement, had, look)
            if dry_run or not asked.changes:
                return Done(None, asked.updates, b"", spent.cost, *asked.counts)
            done = line.try_commit(asked.changes, as_of, deadline)
            if done is not None:
                return Done(done.time, asked.updates, done.token, spent.cost, *asked.counts)
            races += 1
            if deadline.has_passed():
                raise line.out_of_time(deadline, f"others were first {races} times")


class Transaction:
    """A transaction: it reads at one time, `as_of`, and commits at a later one, all of it or nothing.

    It sees the tables as of `as_of` and what it has changed itself. `commit` refuses (WriteConflict) where another
    transaction has changed a key that this one changes since `as_of`: snapshot isolation. In a `with` block it commits
    at the end, and an error in the block ends it with nothing written. `time` is when it was committed, None before.
    """

    def __init__(self, line: WalLine, timeout_s: float, *, dry_run: bool = False) -> None:
        self._line, self._timeout_s, self._is_dry = line, timeout_s, dry_run
        self._pins = ExitStack()
        self._pending: dict[str, tuple[View, pa.Table]] = {}
        self._looked: dict[str, tuple[View, pa.Table]] = {}
        self._is_open = True
        self.time: int | None = None
        self.token = b""
        """By which `tables.outcome` tells what became of it; set before it is sent."""
        with line.lock:
            self.as_of = line.read_time(self._deadline())
            self._pins.enter_context(line.pinned(self.as_of))

    def insert(self, table: str, rows: object) -> Counts:
        """Add rows: tables, frames, dicts or models. Raises ConstraintViolated; the transaction can continue then."""
        return self._do(table, lambda schema: Insert(table, schema, rows, self._filling()))

    def upsert(self, table: str, rows: object) -> Counts:
        """Make each row the one row of its key. Value columns that it lacks keep what the row of its key has."""
        return self._do(table, lambda schema: Upsert(table, schema, rows, self._filling()))

    def delete(self, table: str, keys: object = None, *, filter: pc.Expression | None = None) -> Counts:
        """Take rows away, by their keys or by a filter."""
        return self._do(table, lambda schema: Delete(table, schema, keys, filter))

    def update(self, table: str, change: Change, keys: object = None, *, filter: pc.Expression | None = None) -> Counts:
        """Change value columns of the rows of these keys, or that a filter keeps; of all rows without either."""
        return self._do(table, lambda schema: Update(table, schema, change, keys, filter))

    def apply(
        self, table: str, upserts: object = None, deletes: object = None, *, appends: object = None,
        only_if: pc.Expression | None = None, order_by: str | None = None,
    ) -> Counts:  # fmt: skip
        """Upsert rows, delete keys and add rows at once, as `Table.apply` does; against what this transaction sees."""

        def make(schema: Schema) -> Statement:
            filling = self._filling()
            return Apply(table, schema, upserts, deletes, appends, filling=filling, only_if=only_if, order_by=order_by)

        return self._do(table, make)

    def read(self, table: str, **asked: Unpack[ReadArguments]) -> TableSnapshot:
        """The rows as of `as_of`, with what this transaction has changed. The arguments are those of a snapshot."""
        view = self._view(table)
        wanted = Wanted(**asked).of(view.schema)
        return in_memory(table, self.as_of, wanted, self._contents(view, wanted.whole()), self._line.client.runtime)

    def commit(self) -> Done:
        """Commit what was changed, by one append to the WAL. Nothing changed is nothing written.

        Raises WriteConflict (nothing was written: begin again), NotFound for a table that was dropped since,
        TimedOut, and Indeterminate with the token if it is not known whether it was committed.
        """
        self._check_open()
        deadline = self._deadline()
        changes = [pending for pending in self._pending.values() if pending[1].num_rows]
        count = sum(rows.num_rows for _, rows in changes)
        keys = self._rests_on(changes)
        views = [self._looked[id_][0] if id_ in self._looked else self._pending[id_][0] for id_ in keys]
        checked, races = self.as_of, 0
        try:
            with Spending() as spent:
                if self._is_dry or not changes:
                    return Done(None, count, b"", spent.cost)
                while True:
                    newest = self._line.upper - 1
                    self._check(views, keys, checked, newest)
                    checked = newest
                    done = self._line.try_commit(changes, newest, deadline, self._sending)
                    if done is not None:
                        self.time, self.token = done.time, done.token
                        return Done(done.time, count, done.token, spent.cost)
                    races += 1
                    if deadline.has_passed():
                        raise self._line.out_of_time(deadline, f"others committed first {races} times")
        finally:
            self._end()

    def rollback(self) -> None:
        """End it with nothing written. Idempotent; does nothing after a commit."""
        self._end()

    __reduce__ = not_pickled("A transaction", "Begin one in the other process")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None and self._is_open:
            self.commit()
        self._end()

    def _filling(self) -> Filling:
        return Filling(self._line.client.runtime)

    def _do(self, table: str, make: Callable[[Schema], Statement]) -> Counts:
        view = self._view(table)
        statement = make(view.whole)
        old = empty_table(view.whole.contents)
        if statement.wanted is not None:
            old = self._contents(view, statement.wanted)
        asked = _asked(self._line, view, statement, old, self._contents)
        for of, rows in asked.changes:
            was, before = self._pending.get(of.id, (of, rows.slice(0, 0)))
            self._pending[of.id] = of, summed(of.whole, recast(before, was.whole, of.whole), rows)
        for of, keys in asked.looked:
            known = self._looked.get(of.id, (of, keys.slice(0, 0)))[1]
            self._looked[of.id] = of, pa.concat_tables([known, keys])
        return asked.counts

    def _rests_on(self, changes: Sequence[tuple[View, pa.Table]]) -> dict[str, Keys]:
        """By table the keys that no other commit may have changed: those that change, and those that it looked at."""
        rows: dict[str, list[tuple[View, pa.Table]]] = {}
        for view, table in (*changes, *self._looked.values()):
            rows.setdefault(view.id, []).append((view, table.select(view.whole.key_names)))
        return {id_: Keys.of(its[0][0].schema, pa.concat_tables(one for _, one in its)) for id_, its in rows.items()}

    def _contents(self, view: View, wanted: RowSelection) -> pa.Table:
        rows = self._line.contents(view, self.as_of, wanted, self._deadline())
        pending = self._pending.get(view.id)
        if pending is None:
            return rows
        # Columns that came since have their default in it, as in all that this transaction sees.
        mine = recast(pending[1], pending[0].whole, wanted.schema)
        return summed(wanted.schema, rows, wanted.kept(summed(wanted.schema, mine)))

    def _view(self, table: str) -> View:
        self._check_open()
        return self._line.view(table)

    def _check(self, views: Sequence[View], keys: dict[str, Keys], from_: int, to: int) -> None:
        """Raise WriteConflict if anybody committed to a key of these changes in `(from_, to]`."""
        line = self._line
        with line.lock:
            for view in views:
                if view.id in line.gone:
                    raise line.dropped(view.name)
                if from_ < line.since or (entries := line.entries(view.id, from_, to)).has_break():
                    raise WriteConflict(
                        f"table {view.name!r} was handed over to another rendition, or keeps deleted keys or none now, "
                        "or this process was away for longer than its lease, since the transaction began. Nothing was "
                        "written; run it again",
                        table=view.name, keys=[],
                    )  # fmt: skip
                for entry in entries:
                    if found := _common(view, keys[view.id], entry.rows(view.schema, view.schema.key_names)):
                        raise WriteConflict(
                            f"table {view.name!r}: another transaction has changed keys that this one changes, and was "
                            f"first: {found}. Nothing was written; run it again, as it reads the newest rows then",
                            table=view.name, keys=found,
                        )  # fmt: skip

    def _check_open(self) -> None:
        if not self._is_open:
            raise InvalidUsage("this transaction has ended: begin another one with tables.transaction()")

    def _deadline(self) -> Deadline:
        return self._line.client.runtime.deadline(self._timeout_s)

    def _sending(self, token: bytes) -> None:
        self.token = token

    def _end(self) -> None:
        self._is_open = False
        self._pins.close()


def _common(view: View, keys: Keys, rows: pa.Table) -> list[dict[str, object]]:
    """The first few keys that are in both."""
    others = Keys.of(view.schema, rows).table
    rows = take(others, keys.find(others))
    return list(rows.slice(0, SHOWN).to_pylist())
