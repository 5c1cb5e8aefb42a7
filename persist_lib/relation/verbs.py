"""Statements (upsert, update and delete) and appends at the next time, over however many places hold the rows.

Each call finds the upper and what it has to know of the contents there, and appends at that upper by one commit. If
another writer was first, nothing was written, and the call reads what is new and tries again. So each call is against
the contents just before it. What a caller read before the call is not looked at: an upsert of such a value plus one
goes over another writer's. A `compare_and_append` at the upper that was read, and a transaction of tables, do not.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.arguments import parse_flag
from persist_lib.convert.by_key import without_times
from persist_lib.core.state import Version
from persist_lib.errors import LeaseExpired, PersistError
from persist_lib.frontier import Antichain
from persist_lib.ids import SeqNo, parse_token
from persist_lib.kernel.consolidate import consolidate
from persist_lib.kernel.keyset import Counts, Keys
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.key_lookup import Looking
from persist_lib.relation.ordered_writer import Brought, Done, OrderedWriter
from persist_lib.relation.registration import Named, check_produced, next_time, since_of
from persist_lib.relation.row_selection import RowSelection
from persist_lib.relation.statements import Apply, Delete, Statement, Update, Upsert
from persist_lib.relation.statements import Change as New
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import Schema
from persist_lib.shard.commit import Machine
from persist_lib.shard.outcomes import Verdict, forgotten

Counted = TypeVar("Counted")
"""What a change by key answers: what an append does, and what became of the keys."""
Basis = TypeVar("Basis")
"""What else a turn rests on: of a collection, which rendition it is, and where another one follows."""


NOTHING = Counts()
UNKNOWN = SeqNo(0)


class Turn(NamedTuple, Generic[Basis]):
    """What a change is computed from: the upper, and the places that hold the rows, each as of a version.

    `shares` cuts rows (or keys) into those of each place.
    """

    lower: Antichain
    places: Sequence[tuple[Machine, Version]]
    shares: Callable[[pa.Table], Sequence[pa.Table]]
    basis: Basis


class Changes(NamedTuple):
    """Updates without times to append at `lower`, and what they amount to by key."""

    lower: Antichain
    table: pa.Table
    counts: Counts = Counts()


Finding = Callable[[Turn[Any], Deadline], Changes]
"""Makes the changes of a turn."""


class Change(NamedTuple):
    """A call at the next time: what it appends, whether constraints were checked already, and for which producer."""

    find: Finding
    spent: Spending
    is_checked: bool = True
    producer: tuple[str, int] | None = None


class Verbs(OrderedWriter[Brought, Done], Generic[Brought, Basis, Done, Counted]):
    """The calls that find out by themselves at which time to write, and what to retract."""

    def append_now(
        self,
        updates: object,
        *,
        timeout: float | None = None,
        token: bytes | None = None,
        producer: tuple[str, int] | None = None,
    ) -> Done:
        """Append updates at the next time: upper; where times are a clock, now if that is later.

        `updates` is what `compare_and_append` takes, without `_time`; all of it is held in memory. The time is
        `answer.upper.time - 1`. No updates are no append: nothing is written, and upper stays. `timeout`, `token` and
        errors are those of `upsert`. Unlike an upsert, this call does the same again when it is repeated
        without the token of its Indeterminate. With a `producer`, a name and a sequence number, it does not: it raises
        AlreadyProduced, as `compare_and_append` says.
        """
        self._check_verb("append_now")
        since, producer = None if token is None else since_of(parse_token(token)), self._parse_producer(producer)
        known = Named.of(token) if since is None else None
        empty = empty_table(self.schema.contents)
        given = without_times(self.schema, updates, whole=False, filling=self._filling())
        table = pa.concat_tables([empty, *(table.select(empty.schema.names) for table in given)])

        def append(deadline: Deadline) -> Done:
            if token is None and producer is not None:
                check_produced(self._producing(), producer)
            if since is not None or (token is None and self._is_placed()):
                return self._append_placed(table, deadline, token, since, producer)
            return self._append_next(table, known, producer, deadline)

        return self._in_turn(timeout, append)

    def _append_next(
        self, table: pa.Table, known: Named | None, producer: tuple[str, int] | None, deadline: Deadline
    ) -> Done:  # fmt: skip
        with Spending() as spent:
            change = Change(lambda turn, _: Changes(turn.lower, table), spent, False, producer)
            return self._plain(self._at_next_time(change, known, deadline))

    def upsert(
        self, rows: object, *, timeout: float | None = None, token: bytes | None = None, dry_run: bool = False
    ) -> Counted:
        """Make each of `rows` the one row of its key, at the next time. Rows of other keys stay as they are.

        `rows` is what `append_now` takes, without `_time` and `_diff`; all of it is held in memory. What is there for
        these keys is looked up, in the row groups that can hold them, and retracted in the same append. Value columns
        that a row lacks keep what the row of its key has, and are null in a new key (SchemaMismatch, if they take no
        null; InvalidUsage, if the key has several rows). Rows that are there already are not written again. Of several
        writers that upsert one key, the last one's row stays: a row that was made of one read before may go over
        another writer's. Two different rows for one key are refused: InvalidUsage names the keys. Raises SchemaMismatch
        where rows of these keys have something in columns that were added since the writer was opened, as it cannot say
        what to retract.

        `timeout` is in seconds, for everything. Raises TimedOut when other writers were first all that time, and
        UpperMismatch when it is closed for writing; then nothing was written. After Indeterminate, call again
        with the `token` that the error carries, and the same rows: if the first call was committed, that one answers.
        With `dry_run` nothing is written: the counts say what would be done now.
        """
        return self._execute(
            "upsert",
            partial(Upsert, self._name(), rows=rows, filling=self._filling(is_dry=parse_flag(dry_run, "dry_run"))),
            timeout,
            token,
            dry_run=dry_run,
        )

    def delete(
        self,
        keys: object = None,
        *,
        filter: pc.Expression | None = None,
        timeout: float | None = None,
        token: bytes | None = None,
        dry_run: bool = False,
    ) -> Counted:
        """Retract all rows of these keys, or all that a filter keeps, at the next time. Other rows stay as they are.

        `keys` is what `read.snapshot(keys=...)` takes; keys that have no rows are left alone. What a filter keeps is
        held in memory. `timeout`, `token`, `dry_run` and errors are those of `upsert`.
        """
        made = partial(Delete, self._name(), keys=keys, filter=filter)
        return self._execute("delete", made, timeout, token, dry_run=dry_run)

    def update(
        self,
        change: New,
        keys: object = None,
        *,
        filter: pc.Expression | None = None,
        timeout: float | None = None,
        token: bytes | None = None,
        dry_run: bool = False,
    ) -> Counted:
        """Change value columns of the rows of these keys, of those that a filter keeps, or of all, at the next time.

            write.update({"cents": pc.field("cents") * 2}, filter=pc.field("cents") < 0)

        `change` is a mapping of columns to values, expressions or functions of an Arrow table; or one such function,
        which returns a table of as many rows, in their order, with the same keys. If another writer is first, it is
        computed again from what is there then, so that it may be called several times. The rows are held in memory.
        `timeout`, `token`, `dry_run` and errors are those of `upsert`.
        """
        made = partial(Update, self._name(), change=change, keys=keys, filter=filter)
        return self._execute("update", made, timeout, token, dry_run=dry_run)

    def apply(
        self,
        upserts: object = None,
        deletes: object = None,
        *,
        appends: object = None,
        only_if: pc.Expression | None = None,
        order_by: str | None = None,
        timeout: float | None = None,
        token: bytes | None = None,
        dry_run: bool = False,
    ) -> Counted:
        """Upsert rows, delete keys and add rows in one append, at the next time.

            write.apply(rows, only_if=pc.field("seq") > persist.old("seq"), order_by="seq")

        `upserts` and `appends` are what `upsert` takes, `deletes` what `delete` does; a key that is in two of them is
        refused with InvalidUsage. `order_by` is a value column: of several rows of a key in this call the one with the
        greatest value counts (null is the least), and where several have it, that is refused. `only_if` is an
        expression of the new row (`pc.field`) and of the one that is there (`persist.old`): where it is false or null,
        the old row stays, and its key counts as unchanged. A key without a row is inserted without asking. It is
        evaluated against the rows just before the append, again after each lost race, with what a new row lacks taken
        from the old one. Keys of several rows are refused with it, and deletes beside it. `timeout`, `token`, `dry_run`
        and errors are those of `upsert`.
        """
        made = partial(
            Apply, self._name(), upserts=upserts, deletes=deletes, appends=appends,
            filling=self._filling(is_dry=parse_flag(dry_run, "dry_run")), only_if=only_if, order_by=order_by,
        )  # fmt: skip
        return self._execute("apply", made, timeout, token, dry_run=dry_run)

    def _execute(
        self, verb: str, make: Callable[[Schema], Statement], timeout: float | None, token: bytes | None, *,
        dry_run: bool,
    ) -> Counted:  # fmt: skip
        self._check_verb(verb)
        is_dry, known = parse_flag(dry_run, "dry_run"), Named.of(token)
        find = _Executed(make(self.schema), self._told())

        def change(deadline: Deadline) -> Counted:
            with Spending() as spent:
                return self._at_next_time(Change(find, spent), known, deadline, is_dry=is_dry)

        return self._in_turn(timeout, change)

    def _at_next_time(self, call: Change, known: Named | None, deadline: Deadline, *, is_dry: bool = False) -> Counted:
        """Append what the newest contents ask for, at the next time; again if another writer was first.

        `known` is the append of an earlier call: its outcome answers, and it is sent again while it can be committed.
        SUBTLE: the first attempt of a repeated call may come through at any moment, also between two steps of the
        repetition. So a token that is found open is sent only at an upper that is still its lower. Where upper has
        moved since, it is judged again, and not replaced by a fresh one.
        Where no other process writes, the first attempt reads nothing: it loses its race if what this process knows is
        not the newest. Errors, and that there is nothing to change, are of the newest contents alone.
        """
        # Constraints are checked where it is appended, and what breaks one must be in the newest contents.
        may_guess = known is None and not is_dry and (call.is_checked or not self.schema.constraints)
        races, likely = 0, self._likely_turn() if may_guess else None
        while True:
            if known is not None:
                verdict = self._certain(known, deadline)
                if verdict.seqno is not None:
                    return self._answer(known.upper, 0, known.token, call.spent, known.time, seqno=verdict.seqno)
                known = known if verdict.answer == "open" else None
            turn, is_likely, likely = likely or self._before(partial(self._next_turn, deadline)), bool(likely), None
            if turn.lower.is_top():
                raise self._gap(turn.lower, turn.lower)
            if (changes := self._found(call, turn, deadline, is_likely=is_likely)) is None:
                continue
            if known is not None and self._has_moved(known, changes.lower):
                continue
            named = known or (self._fresh(changes.lower) if changes.table.num_rows else None)
            if named is None or is_dry or not changes.table.num_rows:
                count, seqno = changes.table.num_rows, turn.places[0][1].seqno
                return self._answer(changes.lower, count, b"", call.spent, None, changes.counts, seqno)
            try:
                if (answer := self._try_turn(call, turn, changes, named, deadline)) is not None:
                    return answer
            except LeaseExpired:
                if self._is_closed():
                    raise
            races += 1
            if deadline.has_passed():
                raise self._outrun(deadline, races)

    def _found(self, call: Change, turn: Turn[Basis], deadline: Deadline, *, is_likely: bool) -> Changes | None:
        """The changes of a call at a turn. None where it is a likely one, and the newest contents have to tell."""
        try:
            changes = self._before(partial(call.find, turn, deadline))
        except Exception:
            if is_likely:
                return None
            raise
        return None if is_likely and not changes.table.num_rows else changes

    def _certain(self, known: Named, deadline: Deadline) -> Verdict:
        verdict = self._judge(known, deadline)
        if verdict.answer == "unknown":
            raise forgotten(self._what, known.token, verdict)
        return verdict

    def _has_moved(self, known: Named, upper: Antichain) -> bool:
        """Whether upper has passed the lower of an append since it was found open."""
        if upper < known.lower:  # its token is of another place, or this one was put back to an earlier state
            raise self._gap(known.lower, upper)
        return upper != known.lower

    def _fresh(self, lower: Antichain) -> Named:
        """A name of its own, at the next time. Raises InvalidUsage where times end."""
        return Named.fresh(self._runtime, lower, next_time(self.schema, self._what, lower, self._runtime, self._now))

    @abstractmethod
    def _answer(
        self, upper: Antichain, count: int, token: bytes, spent: Spending, time: int | None = None,
        counts: Counts = NOTHING, seqno: SeqNo = UNKNOWN, attempts: int = 0,
    ) -> Counted:  # fmt: skip
        """What a call answers. `seqno` and `attempts` are those of the one shard that is written."""

    @abstractmethod
    def _plain(self, answer: Counted) -> Done:
        """An answer without counts by key."""

    def _is_placed(self) -> bool:
        """Whether a server puts appends where upper is when their turn comes, so that no race is lost."""
        return False

    def _name(self) -> str:
        return next(iter(self._told()[1].values()))

    @abstractmethod
    def _append_placed(
        self, table: pa.Table, deadline: Deadline, token: bytes | None, since: SeqNo | None,
        producer: tuple[str, int] | None,
    ) -> Done:  # fmt: skip
        """Append wherever upper is then. A call with the token of an earlier one appends only if that did not."""

    @abstractmethod
    def _judge(self, known: Named, deadline: Deadline) -> Verdict:
        """What became of the append of an earlier call. Reads the location."""

    @abstractmethod
    def _likely_turn(self) -> Turn[Basis] | None:
        """Where an append can be made, if no other process has written; None where one may have. Reads nothing."""

    @abstractmethod
    def _next_turn(self, deadline: Deadline) -> Turn[Basis]:
        """Where an append can be made now. Reads the location, and writes nothing."""

    @abstractmethod
    def _try_turn(
        self, call: Change, turn: Turn[Basis], changes: Changes, named: Named, deadline: Deadline
    ) -> Counted | None:
        """Append the changes, if upper is still where they were found; None if another writer was first."""

    @abstractmethod
    def _is_closed(self) -> bool:
        """Whether the writer was closed. Until then one whose lease ended is registered again."""

    @abstractmethod
    def _gap(self, lower: Antichain, upper: Antichain) -> PersistError:
        """The error where an append begins at `lower`, and upper is another one."""

    @abstractmethod
    def _outrun(self, deadline: Deadline, races: int) -> PersistError:
        """The error where other writers were first until the deadline."""


def execute(
    write: Verbs[Any, Any, Any, Counted], make: Callable[[Schema], Statement], *, timeout: float | None = None,
    token: bytes | None = None, dry_run: bool = False,
) -> Counted:  # fmt: skip
    """Carry out the statement that `make` makes for a writer's schema, at the next time. Raises as `upsert` does."""
    return write._execute("statements", make, timeout, token, dry_run=dry_run)


class _Executed:
    """The changes that a statement asks for, of what the places of a turn hold."""

    def __init__(self, statement: Statement, told: tuple[str, dict[str, str]]) -> None:
        self._statement, self._schema, self._told = statement, statement.schema, told
        self._looking: dict[str, Looking] = {}

    def __call__(self, turn: Turn[Any], deadline: Deadline) -> Changes:
        schema, keyed = self._schema, self._statement.keyed
        wanted = self._statement.wanted or RowSelection(schema)
        found, uppers = [empty_table(schema.contents)], set()
        shares = [None] * len(turn.places) if keyed is None else turn.shares(keyed)
        for (machine, version), share in zip(turn.places, shares, strict=True):
            keys = wanted.keys if share is None or len(turn.places) == 1 else Keys.of(schema, share)
            looking = self._looking.setdefault(machine.shard, Looking(machine, schema, keys, wanted.where))
            version, rows = looking.contents(version, deadline)  # noqa: PLW2901 - a newer one, where objects are gone
            uppers.add(version.state.upper)
            found.append(self._statement.in_its_columns(rows, looking.schema, self._told[0], **self._told[1]))
        old = found[1] if len(found) == 2 else consolidate(schema, pa.concat_tables(found))
        changes, counts = self._statement.changes(old)
        # An append at an upper that not all looks were at would be of older contents; this one loses its race.
        return Changes(max(uppers) if len(uppers) == 1 else turn.lower, changes, counts)
