"""The front door: tables that remember, each with the same verbs, answers and errors whatever carries it.

    db = persist.open("file:./data")
    orders = db.table("orders", persist.Schema({"id": "int64 not null"}, {"state": "string"}))
    orders.upsert([{"id": 1, "state": "placed"}])
    orders.read().to_pylist()

A table is carried by one shard, by a collection of shards, or by a timeline, whose tables change in transactions.
`Rows` is what a carrier has to do for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from persist_lib.arguments import not_pickled, parse_flag
from persist_lib.catalog.catalog import Catalog, has_shard
from persist_lib.catalog.names import parse_collection_name
from persist_lib.catalog.parallel import at_once
from persist_lib.core.cost import Cost
from persist_lib.core.holds import layer_of
from persist_lib.core.refusals import OfLayer
from persist_lib.errors import LeaseExpired, NotComplete, NotFound, SchemaMismatch, ShardFinished
from persist_lib.frontier import TOP
from persist_lib.ids import KEPT, check_not_kept, parse_shard_id
from persist_lib.relation.statements import Apply, Change, Done
from persist_lib.runtime.resource import Resource
from persist_lib.schema.schema import Schema, check_schema

if TYPE_CHECKING:
    import pyarrow.compute as pc

    from persist_lib.client import Client
    from persist_lib.relation.changes import Changes
    from persist_lib.relation.listen import Listener
    from persist_lib.relation.snapshot import SnapshotOf
    from persist_lib.timeline.tables import Tables
    from persist_lib.times import TimeLike

T = TypeVar("T")


class Rows(Protocol):
    """What carries the rows of a table."""

    carrier: str
    """`shard`, `collection`, or `timeline NAME`."""
    schema: Schema

    def append(self, rows: object, *, token: bytes | None, **options: Any) -> Any: ...
    def upsert(self, rows: object, *, token: bytes | None, **options: Any) -> Any: ...
    def delete(self, keys: object, *, token: bytes | None, **options: Any) -> Any: ...
    def update(self, change: Change, keys: object, *, token: bytes | None, **options: Any) -> Any: ...
    def apply(
        self, *parts: object, only_if: Any, order_by: Any, token: bytes | None, timeout: float | None, dry_run: bool
    ) -> Any: ...
    def read(self, as_of: TimeLike | None, *, newest: bool, timeout: float | None, **wanted: Any) -> Any: ...
    def changes(self, from_: TimeLike | None, to: TimeLike | None, *, timeout: float | None) -> Changes: ...
    def listen(self, as_of: TimeLike, *, until: object, timeout: float | None) -> Listener: ...
    def close(self) -> None: ...


class Table(Resource):
    """One table. Safe to use from several threads; in a forked or another process, open it there.

    It needs not be closed: what it has open ends with its client.
    """

    def __init__(self, name: str, rows: Rows, url: str) -> None:
        self.name, self.carrier, self.schema = name, rows.carrier, rows.schema
        self._rows, self._url = rows, url

    def __repr__(self) -> str:
        return f"Table({self.name!r}, {len(self.schema.names)} columns, on a {self.carrier} of {self._url})"

    def append(self, rows: object, *, token: bytes | None = None, timeout: float | None = None) -> Done:
        """Add rows: Arrow tables, frames, dicts, or instances of the schema's models. One commit, all or nothing.

        Raises ConstraintViolated where the schema has a constraint that would not hold, and TimedOut after `timeout`
        seconds; then nothing was written. After Indeterminate, call again with the `token` that the error carries, and
        the same rows: they are added once. SUBTLE: without it they may be added twice.
        """
        return _done(self._rows.append(rows, token=token, timeout=timeout), by_key=False)

    def upsert(
        self, rows: object, *, token: bytes | None = None, dry_run: bool = False, timeout: float | None = None
    ) -> Done:
        """Make each of `rows` the one row of its key, in one commit. Rows of other keys stay as they are.

        Rows that are there already are not written again. Two different rows for one key are refused with InvalidUsage.
        With `dry_run` nothing is written: the counts say what would be done now. Raises as `append` does.
        """
        return _done(self._rows.upsert(rows, token=token, dry_run=dry_run, timeout=timeout))

    def delete(
        self,
        keys: object = None,
        *,
        filter: pc.Expression | None = None,  # noqa: A002 - what every reader of Arrow calls it
        token: bytes | None = None,
        dry_run: bool = False,
        timeout: float | None = None,
    ) -> Done:
        """Take away all rows of these keys, or all that a filter keeps, in one commit.

        `keys` are a table or frame of the key columns, or a list of dicts, of values (of a key of one column) or of
        tuples; keys that have no rows are left alone. With `dry_run` nothing is written. Raises as `append` does.
        """
        return _done(self._rows.delete(keys, filter=filter, token=token, dry_run=dry_run, timeout=timeout))

    def update(
        self,
        change: Change,
        keys: object = None,
        *,
        filter: pc.Expression | None = None,  # noqa: A002 - what every reader of Arrow calls it
        token: bytes | None = None,
        dry_run: bool = False,
        timeout: float | None = None,
    ) -> Done:
        """Change value columns of the rows of these keys, of those that a filter keeps, or of all, in one commit.

            orders.update({"cents": pc.field("cents") * 2}, filter=pc.field("cents") < 10)

        `change` is a mapping of columns to values, expressions or functions of an Arrow table; or one such function,
        which returns a table of as many rows, in their order, with the same keys. It is computed from the rows just
        before the commit: if another process changes them first, again, so that it may be called several times. With
        `dry_run` nothing is written. Raises as `append` does.
        """
        return _done(self._rows.update(change, keys, filter=filter, token=token, dry_run=dry_run, timeout=timeout))

    def apply(
        self,
        upserts: object = None,
        deletes: object = None,
        *,
        only_if: pc.Expression | None = None,
        order_by: str | None = None,
        token: bytes | None = None,
        dry_run: bool = False,
        timeout: float | None = None,
    ) -> Done:
        """Upsert rows and delete keys in one commit, as changes come from elsewhere.

            orders.apply(rows, only_if=pc.field("seq") > persist.old("seq"), order_by="seq")

        `upserts` are what `upsert` takes, `deletes` what `delete` does; a key that is in both is refused with
        InvalidUsage. `order_by` is a value column: of several rows of a key in this call the one with the greatest
        value counts (null is the least), and where several have it, that is refused. `only_if` is an expression of the
        new row (`pc.field`) and of the one that is there (`persist.old`): where it is false or null, the old row stays,
        and its key counts as unchanged. So late changes do not overwrite newer ones. A key without a row is inserted
        without asking: a late upsert after a delete brings the row back. Keys of several rows are refused with it, and
        deletes beside it. With `dry_run` nothing is written. Raises as `append` does.
        """
        done = self._rows.apply(
            upserts, deletes, only_if=only_if, order_by=order_by, token=token, dry_run=dry_run, timeout=timeout
        )
        return _done(done)

    def read(
        self,
        as_of: TimeLike | None = None,
        *,
        columns: Sequence[str] | None = None,
        key: Sequence[object] | None = None,
        key_from: Sequence[object] | None = None,
        key_to: Sequence[object] | None = None,
        keys: object = None,
        filter: pc.Expression | None = None,  # noqa: A002 - what every reader of Arrow calls it
        diff: bool = False,
        newest: bool = False,
        timeout: float | None = None,
    ) -> SnapshotOf[Any]:
        """The rows as of a time, each as often as it is there: by default, all that was acknowledged before this call.

            orders.read(as_of="1 hour ago", columns=["id"], filter=pc.field("cents") > 100).to_polars()

        The answer turns into Arrow, pandas, polars, DuckDB, dicts and models, and its `as_of` says of which time it is;
        -1: nothing was written yet. The other arguments are those of `ReadHandle.snapshot`. A time that the store's
        clock has passed is completed by an empty commit, where this client may write. Another time that may still
        change raises NotComplete: at once, or after `timeout` seconds if that is given; with `newest` the newest
        complete contents are read then. Raises SinceViolation for a time before which history was given up.
        """
        return self._rows.read(
            as_of, newest=parse_flag(newest, "newest"), timeout=timeout, columns=columns, key=key, key_from=key_from,
            key_to=key_to, keys=keys, filter=filter, diff=diff,
        )  # fmt: skip

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
        return self._rows.changes(from_, to, timeout=timeout)

    def listen(self, as_of: TimeLike, *, until: object = TOP, timeout: float | None = None) -> Listener:
        """An iterator of what happens after `as_of`: `Updates` at their exact times, then the `Progress` over them.

        It ends at the frontier `until`, and raises TimedOut when nothing comes for `timeout` seconds (None: it waits
        for ever). Close it, or use it in a `with` block: until then it keeps history from where it is.
        """
        return self._rows.listen(as_of, until=until, timeout=timeout)

    def close(self) -> None:
        """Close what it has open. Idempotent; a later call opens it again, unless the client was closed."""
        self._rows.close()

    __reduce__ = not_pickled("A table", "Open it in the other process: persist.open(client.url).table(name)")


def _done(answer: Any, *, by_key: bool = True) -> Done:
    """The answer of any carrier's verb. An append does not look at keys, so it counts none."""
    time = getattr(answer, "time", None)
    if not by_key and answer.token and time is None:
        time = answer.upper.time - 1
    counts = {field: getattr(answer, field, 0) for field in ("inserted", "updated", "unchanged", "deleted") if by_key}
    return Done(time, answer.count, answer.token, answer.cost, **counts)


class HandleRows:
    """The rows of a shard or of a collection, through a writer and a reader that are opened when first needed."""

    def __init__(
        self, carrier: str, open_reader: Callable[[], Any], open_writer: Callable[[], Any], schema: Schema | None = None
    ) -> None:
        self.carrier, self._open = carrier, {"read": open_reader, "write": open_writer}
        self._handles: dict[str, Any] = {}
        self.schema = self._handle("read").schema if schema is None else schema

    def append(self, rows: object, **options: Any) -> Any:
        return self._handle("write").append_now(rows, **options)

    def upsert(self, rows: object, **options: Any) -> Any:
        return self._handle("write").upsert(rows, **options)

    def delete(self, keys: object, **options: Any) -> Any:
        return self._handle("write").delete(keys, **options)

    def update(self, change: Change, keys: object, **options: Any) -> Any:
        return self._handle("write").update(change, keys, **options)

    def apply(self, *parts: object, **options: Any) -> Any:
        return self._handle("write").apply(*parts, **options)

    def read(self, as_of: TimeLike | None, *, newest: bool, timeout: float | None, **wanted: Any) -> Any:
        longest = 0.0 if as_of is not None and timeout is None else timeout
        try:
            return self._reading(lambda reader: reader.snapshot(as_of, timeout=longest, **wanted))
        except NotComplete:
            if not newest:
                raise
        return self._reading(lambda reader: reader.snapshot(timeout=timeout, **wanted))

    def changes(self, from_: TimeLike | None, to: TimeLike | None, *, timeout: float | None) -> Changes:
        return self._reading(lambda reader: reader.changes(from_, to, timeout=timeout))

    def listen(self, as_of: TimeLike, *, until: object, timeout: float | None) -> Listener:
        return self._reading(lambda reader: reader.listen(as_of, until=until, timeout=timeout))

    def close(self) -> None:
        while self._handles:
            with suppress(KeyError):  # another thread was first
                self._handles.popitem()[1].close()

    def _handle(self, purpose: str) -> Any:
        if (handle := self._handles.get(purpose)) is None:
            # SUBTLE: this takes no lock, as a fork could happen while another thread holds it. Of two that open one at
            # once, both get the first one.
            opened = self._open[purpose]()
            handle = self._handles.setdefault(purpose, opened)
            if handle is not opened:
                opened.close()
        return handle

    def _reading(self, call: Callable[[Any], T]) -> T:
        """Do something with the reader; once more with a new one if its lease has ended."""
        reader = self._handle("read")
        try:
            return call(reader)
        except LeaseExpired:
            if self._handles.get("read") is reader:
                self._handles.pop("read", None)
            reader.close()
            return call(self._handle("read"))


class TimelineRows:
    """The rows of a table of a timeline."""

    def __init__(self, tables: Tables, name: str) -> None:
        self._tables, self._name = tables, name
        self._timeline = tables.timeline_of(name)[0]
        self.carrier, self.schema = f"timeline {self._timeline!r}", tables.controller.describe(name).schema
        self.read, self.changes = partial(tables.read, name), partial(tables.changes, name)
        self.listen = partial(tables.listen, name)

    def close(self) -> None:
        """Nothing: what is open is the client's, for all of its tables."""

    def append(self, rows: object, *, token: bytes | None, **options: Any) -> Any:
        return self._once(token, lambda: self._tables.insert(self._name, rows, **options))

    def upsert(self, rows: object, *, token: bytes | None, **options: Any) -> Any:
        return self._once(token, lambda: self._tables.upsert(self._name, rows, **options))

    def delete(self, keys: object, *, token: bytes | None, **options: Any) -> Any:
        return self._once(token, lambda: self._tables.delete(self._name, keys, **options))

    def update(self, change: Change, keys: object, *, token: bytes | None, **options: Any) -> Any:
        return self._once(token, lambda: self._tables.update(self._name, change, keys, **options))

    def apply(
        self, *parts: Any, only_if: Any, order_by: Any, token: bytes | None, timeout: float | None, dry_run: bool
    ) -> Any:
        def make(schema: Schema) -> Apply:
            upserts, deletes = parts
            return Apply(self._name, schema, upserts, deletes, only_if, order_by)

        return self._once(token, lambda: self._tables.execute(self._name, make, timeout, dry_run=dry_run))

    def _once(self, token: bytes | None, call: Callable[[], Any]) -> Any:
        """Do something, unless it was done by the call of which this is the token."""
        if token is not None:
            time = self._tables.outcome(token, timeline=self._timeline, table=self._name)
            if time is not None:
                return Done(time, 0, token, Cost())
        return call()


def open_table(client: Client, name: str, schema: Schema | None, tables: Callable[[], Tables]) -> Table:
    """Open the table of this name, whatever carries it; make it on a shard if it is not there and `schema` is given.

    `tables` gives the client's own tables of timelines.
    """
    parse_collection_name(name)
    wanted = () if schema is None else (check_schema(schema), _clocked(schema))
    if has_shard(client, name):
        return Table(name, _of_shard(client, name, wanted), client.url)
    controller = client.controller()
    found = controller.catalog.fetch().named(name)
    if found is None:
        if not wanted:
            raise NotFound(
                f"there is no table {name!r} in {client.url}: tables() lists them. Give a schema to make it", table=name
            )
        client.open_writer(name, wanted[-1]).close()
        if client.inspect(name).state.is_finished():
            raise ShardFinished(
                f"there was a shard {name!r} in {client.url}, which is finished for good, and its name cannot be used "
                "for another table. Nothing was done; choose another name",
                shard=name,
            )
        return Table(name, _of_shard(client, name, wanted), client.url)
    if found.kind == "table":
        rows: Rows = TimelineRows(tables(), name)
    else:
        rows = HandleRows("collection", partial(controller.open_reader, name), partial(controller.open_writer, name))
    if wanted and rows.schema not in wanted:
        rows.close()
        raise _mismatch(name, wanted[0], rows.schema)
    return Table(name, rows, client.url)


def _of_shard(client: Client, name: str, wanted: Sequence[Schema]) -> Rows:
    """The rows of a shard, in one of the schemas that are wanted, by default in its newest one."""
    check_not_kept(parse_shard_id(name), "")
    machine = client.machine(name)
    state = machine.fetch().state
    if layer := layer_of(state):
        raise machine.refused(OfLayer(layer))
    schemas = state.schemas
    schema = next((each for each in wanted or schemas[-1:] if each in schemas), None)
    if schema is None:
        raise _mismatch(name, wanted[0], schemas[-1])
    return HandleRows(
        "shard", partial(client.open_reader, name, schema), partial(client.open_writer, name, schema), schema
    )


def _mismatch(name: str, wanted: Schema, actual: Schema) -> SchemaMismatch:
    return SchemaMismatch(
        f"table {name!r} has the schema {actual}, and not {wanted}. Nothing was changed. Open it without a schema, or "
        "give the new one another name",
        table=name, expected=wanted, actual=actual,
    )  # fmt: skip


def _clocked(schema: Schema) -> Schema:
    """The schema with times that are a clock, as those of a table are that does not bring its own."""
    if schema.times is not None:
        return schema
    clocked = msgspec.structs.replace(schema, times="ms")
    clocked.__dict__["models"] = schema.models
    return clocked


def tables_in(client: Client) -> list[str]:
    """The names of all tables of a location, sorted. Costs a list, and a read of each shard not known yet."""
    names = [name for name in client.shards() if not KEPT.fullmatch(name)]
    states = at_once(client.runtime, lambda name: client.machine(name).fetch().state, names)
    lone = {n for n, state in zip(names, states, strict=True) if not state.is_finished() and not layer_of(state)}
    catalog = Catalog(client)
    try:
        found = {record.name for record in catalog.fetch().collections.values() if record.state == "live"}
    finally:
        catalog.close()
    return sorted(lone | found)
