"""The front door: tables that remember, each with the same verbs, answers and errors whatever carries it.

    db = persist.open("file:./data")
    orders = db.table("orders", persist.Schema({"id": "int64 not null"}, {"state": "string"}))
    orders.upsert([{"id": 1, "state": "placed"}])
    orders.read().to_pylist()

A table is carried by one shard, by a collection of shards, or by a timeline, whose tables change in transactions.
`carrier.Carrier` is what one has to do for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from persist_lib.arguments import check_callable, not_pickled, parse_flag, parse_integer, parse_seconds
from persist_lib.catalog.collection_arguments import MOST_SHARDS
from persist_lib.catalog.names import parse_collection_name
from persist_lib.catalog.promotion import parse_losing, parse_timeline
from persist_lib.core.pins import MOST_KEPT
from persist_lib.errors import InvalidUsage, MemberOf
from persist_lib.frontier import MAX_TIME, TOP
from persist_lib.maintain.publish.steps import Published, Withdrawn, parse_format
from persist_lib.relation.row_selection import Asked
from persist_lib.relation.statements import Apply, Change, Delete, Done, Update, Upsert
from persist_lib.runtime.resource import Resource
from persist_lib.schema.schema import Schema, check_schema, with_times
from persist_lib.table.carrier import Carrier, Make, TableDescription
from persist_lib.table.following import Continuing, counted_by_time, kept_changes

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc

    from persist_lib.catalog.collection_arguments import Retention
    from persist_lib.catalog.deleted_keys import Span
    from persist_lib.convert.filling import Filling
    from persist_lib.maintain.duties import Maintained
    from persist_lib.maintain.worker import Progress
    from persist_lib.relation.changes import Changes
    from persist_lib.relation.listen import Listener
    from persist_lib.relation.snapshot import SnapshotOf
    from persist_lib.shard.admin import Downgraded
    from persist_lib.table.erase import Erased
    from persist_lib.times import TimeLike

T = TypeVar("T")


class Table(Resource):
    """One table. Safe to use from several threads; in a forked or another process, open it there.

    It needs not be closed: what it has open ends with its client.
    """

    def __init__(
        self, carrier: Carrier, check_open: Callable[[], None], moved: Callable[[str, Schema], Carrier]
    ) -> None:
        self._carrier, self._check_open, self._moved = carrier, check_open, moved
        self._former: list[Carrier] = []
        """What carried it before, which answers that are still being read come from."""

    @property
    def name(self) -> str:
        """Its name, which is unique in the location."""
        return self._carrier.name

    @property
    def carrier(self) -> str:
        """What carries it: `shard`, `collection`, or `timeline NAME`."""
        return self._carrier.kind

    @property
    def schema(self) -> Schema:
        """The columns in which it was opened."""
        return self._carrier.schema

    def __repr__(self) -> str:
        on = f"on a {self.carrier} of {self._carrier.client.url}"
        return f"Table({self.name!r}, {len(self.schema.names)} columns, {on})"

    def append(
        self, rows: object, *, token: bytes | None = None, dry_run: bool = False, timeout: float | None = None
    ) -> Done:
        """Add rows: Arrow tables, frames, dicts, or instances of the schema's models. One commit, all or nothing.

        Rows may lack value columns that may be null, as those of a program do that does not know a new column.

        Raises ConstraintViolated where the schema has a constraint that would not hold, and TimedOut after `timeout`
        seconds; then nothing was written. After Indeterminate, call again with the `token` that the error carries, and
        the same rows: they are added once. SUBTLE: without it they may be added twice. With `dry_run` nothing is
        written.
        """
        dry_run = parse_flag(dry_run, "dry_run")
        return self._ask(lambda on: on.append(rows, token=token, timeout=timeout, dry_run=dry_run))

    def upsert(
        self, rows: object, *, token: bytes | None = None, dry_run: bool = False, timeout: float | None = None
    ) -> Done:
        """Make each of `rows` the one row of its key, in one commit. Rows of other keys stay as they are.

        A row may lack value columns, a dict by itself, a frame or table for all of its rows: they keep what the row of
        its key has just before the commit, and are null in a new key; None is a null. Rows that are there already are
        not written again. InvalidUsage: there are two different rows for one key, or a row lacks columns and its key
        has several rows. SchemaMismatch: a row of a new key lacks a column that takes no null.
        With `dry_run` nothing is written: the counts say what would be done now. Raises as `append` does.
        """
        return self._execute(
            partial(Upsert, self.name, rows=rows, filling=self._filling(dry_run)), token, timeout, dry_run=dry_run
        )

    def delete(
        self, keys: object = None, *, filter: pc.Expression | None = None, token: bytes | None = None,
        dry_run: bool = False, timeout: float | None = None,
    ) -> Done:  # fmt: skip
        """Take away all rows of these keys, or all that a filter keeps, in one commit.

        `keys` are a table or frame of the key columns, or a list of dicts, of values (of a key of one column) or of
        tuples; keys that have no rows are left alone. With `dry_run` nothing is written. Raises as `append` does.
        """
        return self._execute(partial(Delete, self.name, keys=keys, filter=filter), token, timeout, dry_run=dry_run)

    def update(
        self, change: Change, keys: object = None, *, filter: pc.Expression | None = None, token: bytes | None = None,
        dry_run: bool = False, timeout: float | None = None,
    ) -> Done:  # fmt: skip
        """Change value columns of the rows of these keys, of those that a filter keeps, or of all, in one commit.

            orders.update({"cents": pc.field("cents") * 2}, filter=pc.field("cents") < 10)

        `change` is a mapping of columns to values, expressions or functions of an Arrow table; or one such function,
        which returns a table of as many rows, in their order, with the same keys. It is computed from the rows just
        before the commit: if another process changes them first, again, so that it may be called several times. With
        `dry_run` nothing is written. Raises as `append` does.
        """
        made = partial(Update, self.name, change=change, keys=keys, filter=filter)
        return self._execute(made, token, timeout, dry_run=dry_run)

    def apply(
        self, upserts: object = None, deletes: object = None, *, appends: object = None,
        only_if: pc.Expression | None = None, order_by: str | None = None, token: bytes | None = None,
        dry_run: bool = False, timeout: float | None = None,
    ) -> Done:  # fmt: skip
        """Upsert rows, delete keys and add rows in one commit, as changes come from elsewhere.

            orders.apply(rows, only_if=pc.field("seq") > persist.old("seq"), order_by="seq")

        `upserts` are what `upsert` takes, `deletes` what `delete` does, `appends` what `append` does; a key that is in
        two of them is refused with InvalidUsage. `order_by` is a value column: of several rows of a key in this call
        the one with the greatest value counts (null is the least), and where several have it, that is refused; so is a
        row without that column, and a last row that lacks a column which another row of its key has. `only_if` is an
        expression of the new row (`pc.field`), completed by the old one, and of the old one (`persist.old`): where it
        is false or null, the old row stays, and its key counts as unchanged. So late changes do not overwrite newer
        ones. A key without a row is inserted without asking: a late upsert after a delete brings the row back. So
        deletes beside it are refused, but where the table keeps deleted keys. Keys of several rows are refused with it.
        With `dry_run` nothing is written. Raises as `upsert` does.

        A table that keeps deleted keys (`set_keep_deletes`) orders all changes by its column: upserts and deletes are
        rows with it, `order_by` is not needed, and of a key that is in both the later one counts, where they tie the
        delete. A row takes effect if it has more than the row that is there, and than the delete that is remembered; a
        delete also if it has as much as the row. Otherwise its key counts as `late` or, with as much, as unchanged.
        Then the contents are the same in whatever order, and however often, changes come. `only_if` is asked of rows
        that are there, in addition. DeletesForgotten: a row may be older than a delete that is forgotten.
        """
        made = partial(
            Apply, self.name, upserts=upserts, deletes=deletes, appends=appends, filling=self._filling(dry_run),
            only_if=only_if, order_by=order_by,
        )  # fmt: skip
        return self._execute(made, token, timeout, dry_run=dry_run)

    def read(
        self, as_of: TimeLike | None = None, *, columns: Sequence[str] | None = None,
        key: Sequence[object] | None = None, key_from: Sequence[object] | None = None,
        key_to: Sequence[object] | None = None, keys: object = None, filter: pc.Expression | None = None,
        diff: bool = False, newest: bool = False, timeout: float | None = None,
    ) -> SnapshotOf[Any]:  # fmt: skip
        """The rows as of a time, each as often as it is there: by default, all that was acknowledged before this call.

            orders.read(as_of="1 hour ago", columns=["id"], filter=pc.field("cents") > 100).to_polars()

        The answer turns into Arrow, pandas, polars, DuckDB, dicts and models, and its `as_of` says of which time it is;
        -1: nothing was written yet. The other arguments are those of `ReadHandle.snapshot`. A time that the store's
        clock has passed is completed by an empty commit, where this client may write. Another time that may still
        change raises NotComplete: at once, or after `timeout` seconds if that is given; with `newest` the newest
        complete contents are read then. Raises SinceViolation for a time before which history was given up.
        """
        newest = parse_flag(newest, "newest")
        asked = Asked(columns, key, key_from, key_to, keys, filter, diff)
        return self._ask(lambda on: on.read(as_of, asked, newest=newest, timeout=timeout))

    def count(self, as_of: TimeLike | None = None, *, timeout: float | None = None) -> int:
        """How many rows there are as of a time; see `read`."""
        with self.read(as_of, columns=[], diff=True, timeout=timeout) as found:
            return found.count()

    def changes(self, from_: TimeLike | None, to: TimeLike | None = None, *, timeout: float | None = None) -> Changes:
        """What happened after the time `from_`, up to and with `to` (default: the newest time), as updates.

        They have the columns, `_time` and `_diff`. None for `from_` means from the beginning on. The rows as of `from_`
        and these add up to the rows as of `to`.
        Raises SinceViolation where history from then on was given up, NotComplete, and InvalidUsage where `to` is
        before `from_`.
        """
        return self._ask(lambda on: on.changes(from_, to, timeout=timeout))

    def listen(
        self, as_of: TimeLike | None, *, until: object = TOP, replace: bool = False, timeout: float | None = None
    ) -> Listener:
        """An iterator of what happens after `as_of`: `Updates` at their exact times, then the `Progress` over them.

        None and -1, which `read` answers as long as nothing was written, mean from the beginning on. In older columns,
        updates that differ in newer ones alone come one by one. It ends at the
        frontier `until`, and raises TimedOut when nothing comes for `timeout` seconds (None: it waits for ever). Close
        it, or use it in a `with` block: until then it keeps history from where it is. With `replace`, at a handover of
        a collection to columns in which older rows cannot be given, all old rows go out and all new ones come in;
        without it, that raises SchemaChanged.
        """
        replace = parse_flag(replace, "replace")

        def listen(as_of: TimeLike | None) -> Listener:
            return self._ask(lambda on: on.listen(as_of, until=until, replace=replace, timeout=timeout))

        found = listen(as_of)
        return Continuing(found, listen)

    def history(
        self, from_: TimeLike | None = None, to: TimeLike | None = None, *, limit: int | None = None,
        timeout: float | None = None,
    ) -> pa.Table:  # fmt: skip
        """When something was written, newest first: `_time`, and by how much rows were `added` and `retracted` then.

        By default of all history that is kept; of `limit`, the newest times alone. All changes in between are read:
        `from_`, a time after which it begins, makes that less. `_time` is a timestamp where times are a clock. Raises
        as `changes` does.
        """
        limit = MAX_TIME if limit is None else parse_integer(limit, "limit", 1, MAX_TIME)
        with kept_changes(self, from_, to, timeout) as changes:
            return counted_by_time(changes, limit)

    def restore(self, to: TimeLike, *, dry_run: bool = False, timeout: float | None = None) -> Done:
        """Make the contents what they were as of the time `to`, in one commit. History stays as it is.

        What others write in the meantime is taken back, too. `count` of the answer is how many distinct rows change
        their number; keys are not counted. Where nothing is to be done nothing is written, so that the call may be
        repeated. On a collection and a timeline, the rows then and now are held in memory. With `dry_run` nothing is
        written. Raises SinceViolation for a time before since, NotComplete for one that may still change, and TimedOut.
        """
        dry_run = parse_flag(dry_run, "dry_run")
        return self._ask(lambda on: on.restore(to, dry_run=dry_run, timeout=timeout))

    def describe(self) -> TableDescription:
        """What it is by now, and how far it has come: its columns, since, upper, retention and holds."""
        return self._ask(lambda on: on.describe())

    def evolve(self, schema: Schema, *, dry_run: bool = False) -> tuple[str, ...]:
        """Change the columns: add value columns at the end, and rename, widen, drop or reorder those that there are.

            orders.evolve(orders.describe().schema.rename({"state": "status"}).add({"note": "string"}))

        `schema` is what `Schema.add`, `rename`, `widen`, `drop`, `reorder` and `relax` make of the newest one, or that
        declared with more columns. Answers what changes, of a new column its name. Nothing is rewritten: rows that do
        not say a column have its default, or null, as of any time. This handle has the new columns from now on; those
        that are open elsewhere stay in theirs, in which the table can also be opened from now on, as long as these hold
        what is there. They change rows that have nothing in newer columns, and no others. Where `schema` is what the
        table has, nothing is changed; with `dry_run` neither. A call that was cut short is repeated, or finished by any
        process.

        Tables that keep deleted keys only gain columns that may be null and have no default. Older programs
        cannot use such a table any more; with a WAL, none of those that share it.

        Raises SchemaMismatch for any other schema, and InvalidUsage while a copy of the table is under way, and for a
        table with a WAL on a store without transactions.
        """
        dry_run, schema = parse_flag(dry_run, "dry_run"), with_times(check_schema(schema), self.schema.times)
        added = self._ask(lambda on: on.evolve(schema, dry_run=dry_run))
        if not dry_run:
            self._carrier.close()  # what it has open is of the older columns
            self._carrier.schema = schema
        return added

    def set_retention(self, distance: Retention, *, dry_run: bool = False) -> Downgraded:
        """Keep `distance` of history behind the newest time from now on, and give up at once what is older.

            orders.set_retention("30 days")

        `distance` is a number of times or, where times are a clock, a duration; None: no policy. What is given up can
        never be read again; `maintain` moves it on later. The answer says how since moves, and who keeps it there:
        holds and readers keep history whatever the policy. With `dry_run` nothing is changed.
        """
        dry_run = parse_flag(dry_run, "dry_run")
        return self._ask(lambda on: on.set_retention(distance, dry_run=dry_run))

    def set_keep_deletes(self, column: str | None, span: Span = None, *, dry_run: bool = False) -> None:
        """Remember deleted keys for `span` from now on, so that late changes do not bring them back; None: no more.

            orders.set_keep_deletes("seq", "7 days")
            orders.apply(changed, deletes=gone)     # both with the column seq, in any order and in any batches

        The column is a value column whose values can be compared: integers, decimals, dates, timestamps, texts. `span`
        is a duration or a number of milliseconds. From then on `apply` orders the changes of each key by the column,
        whatever order they come in: see there. A delete without a value (`delete`, or what an overwrite takes away)
        has that of its row; `upsert` and `append` ask for no order, and end what is remembered of their keys. `restore`
        restores what was remembered, too. `maintain` forgets what was kept for the span, and an `apply` of rows that
        may be older than a delete that is forgotten raises DeletesForgotten.

        Another span may be set at any time. To order by another column, end it first: all deleted keys are forgotten
        then. The table is on a timeline with a WAL; others are refused with InvalidUsage, which names the step. With
        `dry_run` nothing is changed. Programs of the release before cannot read the location's catalog from then on.
        """
        dry_run = parse_flag(dry_run, "dry_run")
        self._ask(lambda on: on.set_keep_deletes(column, span, dry_run=dry_run))

    def set_hold(self, hold: str, since: TimeLike, *, opaque: bytes = b"") -> None:
        """Keep history from `since` on, durably, whatever the retention, until `release_hold`.

        A hold never gives history up: without a retention, what is before it is kept as well. See `downgrade_hold`.
        Raises SinceViolation for history that is given up, or before the hold's own time, and GivesUpHistory for a time
        beyond the newest. `opaque` is its fencing value.
        """
        self._ask(lambda on: on.client.set_hold(*on.hold_of(hold), since, opaque=opaque))

    def downgrade_hold(self, hold: str, since: TimeLike, *, dry_run: bool = False) -> Downgraded:
        """Move a hold, or create it there, and give up the history before `since` that nothing else keeps.

        The answer says how since moves, and who keeps it there; with `dry_run` nothing is changed.
        """
        return self._ask(lambda on: on.client.downgrade_hold(*on.hold_of(hold), since, dry_run=dry_run))

    def release_hold(self, hold: str) -> None:
        """Drop a hold. Raises HoldConflict when there is none of that name."""
        self._ask(lambda on: on.client.release_hold(*on.hold_of(hold)))

    def hold_of(self, hold: str) -> tuple[str, str]:
        """The shard that keeps its history, where a hold of this name is or would be, and the checked name.

        For the calls of a client about holds, which also take fencing values.
        """
        return self._ask(lambda on: on.hold_of(hold))

    def kept_by(self) -> str:
        """The shard that keeps its history: its holds and its readers are there."""
        return self._ask(lambda on: on.kept_by())

    def promote(
        self, *, shards: int | None = None, timeline: str | None = None, make_timeline: bool = False,
        losing: Sequence[str] = (), dry_run: bool = False, timeout: float | None = None,
    ) -> TableDescription:  # fmt: skip
        """Make a table that one shard carries a collection, in place. That can have more shards, and another name.

            db.upgrade("orders")
            orders.promote()

        One transaction decides; nothing is copied, and history, holds, producers and retention stay. Tables that are
        open continue, in any process of this release; handles that were opened by the shard's name are refused with
        MemberOf, which says what to do. There is no way back. With `shards`, the rows are then copied to a rendition of
        so many shards, while they are read and written, and that is handed over to: this takes as long as it takes to
        read them and write them once. A call that was cut short is repeated; on a collection only the copy is left to
        do. With a `timeline`, which has a WAL, the table joins that instead, whether one shard or a collection carries
        it: from then on it is changed in transactions with others. One that is not there is made with `make_timeline`,
        in the change by which the table begins to join it, and is NotFound without. Through a shard server, it is
        refused where clients would lose access whose rights are by the shard's name, unless all of them are in
        `losing`. With `dry_run` nothing is changed, but what would be raised is.

        Needs format 5 of its shards (`db.upgrade`), and from then on programs of the release before cannot read the
        location's catalog. Raises InvalidUsage where it cannot be: in an older format, on a timeline, on a store
        without transactions; and NameTaken.
        """
        dry_run = parse_flag(dry_run, "dry_run")
        shards = None if shards is None else parse_integer(shards, "shards", 1, MOST_SHARDS)
        timeout = None if timeout is None else parse_seconds(timeout)
        timeline = parse_timeline(timeline, make_timeline)
        if shards is not None and timeline is not None:
            raise InvalidUsage("promote takes shards or a timeline: a table that joins one stays on its one shard")
        how = {"make_timeline": make_timeline, "losing": parse_losing(losing), "timeout": timeout}
        on = self._carrier
        promoted = self._ask(lambda on: on.promote(shards, timeline, dry_run=dry_run, **how))
        if promoted and not dry_run:
            self._continue_on(on, promoted)
            self._carrier.promote(shards, None, dry_run=False, timeout=timeout)
        return self.describe()

    def rename(self, to: str) -> None:
        """Give it another name. Handles that are open elsewhere find it by its old one no more.

        Raises NameTaken, and InvalidUsage where one shard carries it, as other programs know that by its name.
        """
        name = parse_collection_name(to)
        self._ask(lambda on: on.rename(name))

    def drop(self, *, dry_run: bool = False) -> tuple[str, ...]:
        """Drop it, with all of its history. Its name is free at once: `db.table(name, schema)` makes another table.

        On a shard this raises StillRead, and changes nothing, while readers or holds elsewhere need it. On a collection
        or timeline, open readers can continue, and the answer says for whom the rest waits; `db.maintain()` takes it
        away later. With `dry_run` nothing is changed.
        """
        dry_run = parse_flag(dry_run, "dry_run")
        for former in self._former:
            former.close()  # its own readers would be in the way
        return self._ask(lambda on: on.drop(dry_run=dry_run))

    def erase(
        self, keys: object, *, dry_run: bool = False, timeout: float | None = None, progress: Progress | None = None
    ) -> Erased:
        """Take the rows of these keys away for ever, as if they had never been written: no object has them any more.

            receipt = people.erase([{"id": 17}])
            receipt.left        # (): they are gone; else what still has them, and why

        `keys` are as in `delete`, and their rows are deleted first. The history of the whole table up to that is given
        up, whatever its retention keeps, as a time is read whole or not at all. Readers elsewhere and holds of users
        are not moved: the answer names them, and the same call continues, as it does after a crash. Then what had the
        keys is rewritten and deleted, replaced objects and the log's rows among it, and all is looked through again.
        With `dry_run` nothing is changed, and the answer says what has them. `timeout` is in seconds, for the deletion,
        and `progress` is called with how many shards are done and how many there are.

        Copies elsewhere are not looked at: caches of other programs, backups, versions that a bucket keeps, tables that
        were made of this one, and what a source reads again. Raises InvalidUsage for a table that keeps deleted keys,
        and as `delete` does.
        """
        from persist_lib.table.erase import erase_keys  # noqa: PLC0415 - few programs need it

        dry_run = parse_flag(dry_run, "dry_run")
        if progress is not None:
            check_callable(progress, "progress", "how many are done and how many there are, or None")
        for former in self._former:
            former.close()  # its own readers would be in the way
        return self._ask(lambda on: erase_keys(on, keys, dry_run=dry_run, timeout=timeout, progress=progress))

    def publish(
        self, as_: str = "iceberg", at: TimeLike | None = None, *, keep: int | None = None,
        follows: bool | None = None, dry_run: bool = False,
    ) -> Published:  # fmt: skip
        """Publish it as of a time for other engines, as an Iceberg or a Delta table over its own objects.

            orders.publish("delta", keep=3, follows=True).place

        `at` is the time (None: the newest that is complete). Nothing is copied where each object that has rows as of
        that time has each of them once; the answer says what was written, and what would be with `dry_run`. No object
        that a published snapshot names is deleted. The last `keep` snapshots stay (10, unless it was said before). With
        `follows`, each upkeep publishes again (`maintain`); None: as it was. Doing it again finds nothing to do, and
        continues after a crash. Of a collection it is one table, of all shards of the rendition that is the collection
        then; of a table on a timeline, what is in its WAL is applied first. Needs the extra `publish`, and moves the
        table's shards to format 9.

        Raises Unpublishable where the format cannot say the table; SinceViolation; Missing where another program has
        deleted published files; and Fenced where another call took over.
        """
        format_, dry_run = parse_format(as_), parse_flag(dry_run, "dry_run")
        keep = None if keep is None else parse_integer(keep, "keep", 1, MOST_KEPT)
        follows = None if follows is None else parse_flag(follows, "follows")
        return self._ask(lambda on: on.publish(format_, at, keep=keep, follows=follows, dry_run=dry_run))

    def withdraw(self, as_: str = "iceberg", *, dry_run: bool = False) -> Withdrawn:
        """Take its publication back: other engines do not find it any more, and its objects may go.

        Readers that have it open may fail. With `dry_run` nothing is changed. NotFound where it is not published.
        """
        format_, dry_run = parse_format(as_), parse_flag(dry_run, "dry_run")
        return self._ask(lambda on: on.withdraw(format_, dry_run=dry_run))

    def maintain(self, *, dry_run: bool = False) -> dict[str, Maintained]:
        """Do all upkeep of what carries it, in this process. Answers what was done, by shard.

        Doing it again finds nothing to do. Errors are those of `client.maintain`. With `dry_run` nothing is changed.
        """
        dry_run = parse_flag(dry_run, "dry_run")
        return self._ask(lambda on: on.maintain(dry_run=dry_run))

    def writer(self) -> Any:
        """A writer of its own, for appends whose times you bring: `compare_and_append`, and what goes with it.

        Raises InvalidUsage for a table of a timeline, whose times are minted.
        """
        return self._ask(lambda on: on.writer())

    def close(self) -> None:
        """Close what it has open. Idempotent; a later call opens it again, unless the client was closed."""
        for carrier in (*self._former, self._carrier):
            carrier.close()

    def _ask(self, call: Callable[[Carrier], T]) -> T:
        """What the carrier answers; if it was promoted by whomever, and so did nothing, what the one after it does."""
        self._check_open()
        on = self._carrier
        try:
            return call(on)
        except MemberOf as error:
            self._continue_on(on, str(error.fields["collection"]))
        return call(self._carrier)

    def _continue_on(self, on: Carrier, collection: str) -> None:
        """Be carried by a collection from now on, unless another call has seen to it."""
        moved = self._moved(collection, on.schema)
        if self._carrier is on:
            self._former.append(on)  # first, as answers that it gave may still be read
            self._carrier = moved

    def _filling(self, dry_run: object) -> Filling:
        return self._carrier.filling(is_dry=parse_flag(dry_run, "dry_run"))

    def _execute(self, make: Make, token: bytes | None, timeout: float | None, *, dry_run: bool) -> Done:
        return self._ask(lambda on: on.execute(make, token=token, timeout=timeout, dry_run=dry_run))

    __reduce__ = not_pickled("A table", "Open it in the other process: persist.open(client.url).table(name)")
