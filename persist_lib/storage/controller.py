"""The controller: what collections there are, and what is done to them. A library, not a server.

Any process may have one, and any number may be at work at once. Each command is decided by one append to the catalog,
is the same command however often it is sent with its id, and is finished by whoever comes next if its process dies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from persist_lib.arguments import check_type, parse_flag, parse_integer, parse_seconds, parse_text, shown
from persist_lib.client import PURPOSE_LETTERS, Client
from persist_lib.errors import HandoverRefused, InvalidUsage, NameTaken, NotFound
from persist_lib.frontier import MAX_TIME, at
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import Schema, check_schema
from persist_lib.storage import judging
from persist_lib.storage.asked import (
    MOST_SHARDS,
    Retention,
    check_same,
    parse_hash_columns,
    parse_hold,
    parse_rendition,
    parse_retention,
)
from persist_lib.storage.catalog import Catalog, Changes, Contents, setting
from persist_lib.storage.comparing import Comparison, compare_renditions
from persist_lib.storage.copying import Copied, Transform, copy_step
from persist_lib.storage.describe import Capability, Description, RenditionDescription, Tended
from persist_lib.storage.describing import capabilities, describe, timeline_of
from persist_lib.storage.effects import handover_time, settle, wal_upper
from persist_lib.storage.judging import Judging
from persist_lib.storage.names import CATALOG, minted, parse_collection_name, parse_command_id
from persist_lib.storage.reader import CollectionReader
from persist_lib.storage.rebuilding import Rebuild, begin
from persist_lib.storage.records import CollectionRecord, CommandRecord, Kind, Mode, RenditionRecord, What, schema_form
from persist_lib.storage.small import out_of_time
from persist_lib.storage.tend import tend
from persist_lib.storage.timeline import Timeline
from persist_lib.storage.wal import check_handover, has_wal
from persist_lib.storage.writer import CollectionWriter
from persist_lib.times import TimeLike, Times

if TYPE_CHECKING:
    from persist_lib.storage.tables import Tables

PAUSE_S = 0.05
"""Between two looks at what there is to copy."""
Intent = Callable[[Contents, CommandRecord], tuple[Changes, CommandRecord]]


class Controller:
    """Creates, changes, describes and drops the collections of a location. Safe to use from several threads.

    `catalog` names the shard that lists the collections; a location may have several catalogs, which know nothing of
    one another. Every command takes the id `command`, by which it may be repeated from anywhere: after Indeterminate,
    or after a crash. A repeated command answers what the first one did. Without one an id is minted, which the error
    carries.
    """

    def __init__(self, client: Client, *, catalog: str = CATALOG) -> None:
        self.client = check_type(client, Client, "client", "persist.open(url)")
        self.catalog = Catalog(client, catalog)

    def create(
        self,
        name: str,
        schema: Schema,
        *,
        shards: int = 1,
        mode: Mode = "append",
        hash_columns: Sequence[str] | None = None,
        retention: Retention = None,
        command: str | None = None,
        timeout: float | None = None,
    ) -> Description:
        """Create a collection of `shards` shards. Rows go to them by a hash of `hash_columns` (default: the key).

        `mode` says how it is written. With "append", any number of writers append identical data. With
        "compare_and_append", writers exclude one another, as those of one shard do; with several shards this takes a
        store with transactions. `retention` is how much history is kept behind upper: a number of times or, where times
        are a clock, a duration such as "7 days". None keeps all of it.

        Raises NameTaken when there is a collection of that name, and InvalidUsage.
        """
        return self._create(name, schema, shards, mode, hash_columns, retention, None, command, timeout)

    def _create(
        self, name: str, schema: Schema, shards: int, mode: Mode, hash_columns: Sequence[str] | None,
        retention: Retention, timeline: str | None, command: str | None, timeout: float | None,
    ) -> Description:  # fmt: skip
        """Create a collection, or with a `timeline`, which is its minted id, a table on it."""
        name, schema = parse_collection_name(name), check_schema(schema)
        self._writable("create")
        rendition = parse_rendition(self.client, schema, shards, mode, hash_columns)
        distance = parse_retention(retention, schema, self.client.runtime.clock_ms)
        asked = {
            "name": name, "schema": rendition.schema, "shards": rendition.shards, "mode": mode,
            "hash_columns": list(rendition.hash_columns), "retention": distance,
        }  # fmt: skip
        asked |= {} if timeline is None else {"timeline": timeline}
        kind: Kind = "collection" if timeline is None else "table"

        def intent(contents: Contents, record: CommandRecord) -> tuple[Changes, CommandRecord]:
            if contents.named(name) is not None:
                raise _taken(name)
            id_ = minted(self.client.runtime.entropy())
            collection = CollectionRecord(
                id=id_, name=name, kind=kind, retention=distance, timeline=timeline, command=record.id
            )
            first = msgspec.structs.replace(rendition, collection=id_, command=record.id)
            record = msgspec.structs.replace(record, collection=id_, pending=True)
            return setting(collection, first), record

        record = self._command("create", None, asked, intent, command, timeout)
        return self._described(record)

    def list(self) -> list[str]:
        """The names of all collections, sorted. One that is being created is there once its command is done."""
        return sorted(c.name for c in self.catalog.fetch().collections.values() if c.state == "live")

    def describe(self, name: str) -> Description:
        """What a collection is, and how far it has come. Raises NotFound."""
        contents, collection = self._find(name)
        return describe(self.client, contents, collection)

    def alter(
        self,
        name: str,
        *,
        retention: Retention,
        command: str | None = None,
        timeout: float | None = None,
    ) -> Description:
        """Change a collection's options. It takes effect when collections are tended next. Raises NotFound."""
        self._writable("alter")
        contents, collection = self._subject(name, command)
        schema = contents.renditions_of(collection.id)[0].columns
        distance = parse_retention(retention, schema, self.client.runtime.clock_ms)

        def intent(contents: Contents, record: CommandRecord) -> tuple[Changes, CommandRecord]:
            altered = msgspec.structs.replace(contents.collections[collection.id], retention=distance)
            return setting(altered), record

        asked = {"name": name, "retention": distance}
        return self._described(self._command("alter", collection.id, asked, intent, command, timeout))

    def rename(self, name: str, to: str, *, command: str | None = None, timeout: float | None = None) -> Description:
        """Give a collection another name. Readers and writers that are open go on. Raises NotFound and NameTaken."""
        self._writable("rename")
        to = parse_collection_name(to)
        _, collection = self._subject(name, command)

        def intent(contents: Contents, record: CommandRecord) -> tuple[Changes, CommandRecord]:
            if contents.named(to) is not None:
                raise _taken(to)
            return setting(msgspec.structs.replace(contents.collections[collection.id], name=to)), record

        return self._described(
            self._command("rename", collection.id, {"name": name, "to": to}, intent, command, timeout)
        )

    def make_rendition(
        self,
        name: str,
        *,
        shards: int | None = None,
        schema: Schema | None = None,
        copy: bool = False,
        hash_columns: Sequence[str] | None = None,
        command: str | None = None,
        timeout: float | None = None,
    ) -> RenditionDescription:
        """Make a rendition of a collection, empty: what is not given is as in the active one. Nobody reads it yet.

        With `copy` it is to become a copy of the active rendition (see `copy_rendition`). Without, it is written
        independently, by writers that open it by its number, until it is handed over to. Raises NotFound.
        """
        self._writable("make_rendition")
        copy = parse_flag(copy, "copy")
        _, collection = self._subject(name, command)
        if schema is not None:
            schema = check_schema(schema)
        if shards is not None:
            shards = parse_integer(shards, "shards", 1, MOST_SHARDS)
        if hash_columns is not None:
            hash_columns = parse_hash_columns(hash_columns)
        asked: dict[str, Any] = {
            "name": name, "schema": None if schema is None else schema_form(schema), "shards": shards,
            "hash_columns": hash_columns, "copy": copy,
        }  # fmt: skip

        def intent(contents: Contents, record: CommandRecord) -> tuple[Changes, CommandRecord]:
            current = contents.collections[collection.id]
            active = timeline_of(self.client, current, contents.renditions_of(collection.id)[0]).last.rendition
            columns = active.columns if schema is None else schema
            if columns.times != active.columns.times:
                raise InvalidUsage(
                    f"collection {name!r} has {_unit(active.columns)}, and a rendition of it must have the same: got "
                    f"{_unit(columns)}",
                    collection=name,
                )
            hashed = active.hash_columns if hash_columns is None and columns.key == active.columns.key else hash_columns
            wanted = parse_rendition(self.client, columns, shards or active.shards, active.mode, hashed)
            made = msgspec.structs.replace(
                wanted, collection=collection.id, number=current.made + 1, command=record.id,
                copies=active.number if copy else None,
            )  # fmt: skip
            record = msgspec.structs.replace(record, asked={**record.asked, "rendition": made.number}, pending=True)
            return setting(msgspec.structs.replace(current, made=made.number), made), record

        record = self._command("make rendition", collection.id, asked, intent, command, timeout)
        return self._rendition_of(self._described(record), record.asked["rendition"])

    def copy_rendition(
        self,
        name: str,
        rendition: int,
        *,
        transform: Transform | None = None,
        to_end: bool = False,
        timeout: float | None = None,
    ) -> Copied:
        """Bring a copy up to where the rendition is that it copies; again and again, while that is written.

        `transform` makes rows in the new columns of rows in the old ones; without one they are copied as they are. It
        must be a pure function of each row, and pass on `_time` and `_diff`. With `to_end`, the call goes on until the
        copy was handed over to and has all that was before; `timeout` is in seconds.

        A copy that fell so far behind that history was given up cannot go on: SinceViolation. Make another one then.
        """
        self._writable("copy_rendition")
        to_end, deadline = parse_flag(to_end, "to_end"), self._deadline(timeout)
        if transform is not None and not callable(transform):
            raise InvalidUsage(f"transform must be a function of a pyarrow.Table: got {shown(transform)}")
        old, new, collection = self._copy_of(name, rendition)
        owner = f"copy to rendition {new.number}"
        with CollectionReader(self.client, collection, new.columns.times, None, owner) as reader:
            while True:
                copied = copy_step(reader, old, new, transform, deadline)
                if copied.is_complete or (not to_end and copied.goal <= copied.upper):
                    return copied
                if deadline.has_passed():
                    raise out_of_time(f"collection {name!r}", deadline, f"the copy is at {copied.upper}")
                if copied.goal <= copied.upper:
                    deadline.pause(PAUSE_S)

    @contextmanager
    def begin_rebuild(self, name: str, rendition: int, *, transform: str | None = None) -> Iterator[Rebuild | None]:
        """Begin or resume the first copy of a large rendition by many processes; None if it is there already.

        `jobs/rebuild.py` is the program that does so on Spark. `transform` names a function, as `module:function`.
        """
        self._writable("begin_rebuild")
        old, new, collection = self._copy_of(name, rendition)
        owner = f"copy to rendition {new.number}"
        with CollectionReader(self.client, collection, new.columns.times, None, owner) as reader:
            begun = begin(reader, old, new, transform)
            if begun is None:
                yield None
                return
            with begun:
                yield begun

    def compare(
        self,
        name: str,
        rendition: int,
        *,
        to: int | None = None,
        as_of: TimeLike | None = None,
        timeout: float | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Comparison:
        """What a rendition would change: which rows appear, vanish and change as of a time, by column, with samples.

        It is compared to the rendition `to` (default: the active one), as of `as_of` (default: the newest time that
        both have). `progress` is called with the number of rows, of both, that are compared so far. Changes nothing,
        and takes bounded memory. Raises NotFound, TimedOut, SinceViolation, and InvalidUsage where the keys have other
        columns.
        """
        deadline = self._deadline(timeout)
        contents, collection = self._find(name)
        new = self._of(contents, collection, parse_integer(rendition, "rendition", 1))
        timeline = timeline_of(self.client, collection, new)
        old = timeline.last.rendition if to is None else self._of(contents, collection, parse_integer(to, "to", 1))
        unit = new.columns.times
        with CollectionReader(self.client, collection, unit, None, f"compare rendition {new.number}") as reader:
            return compare_renditions(reader, old, new, as_of, deadline, progress)

    @contextmanager
    def begin_comparison(
        self, name: str, rendition: int, *, to: int | None = None, as_of: TimeLike | None = None, keep: bool = False,
        timeout: float | None = None,
    ) -> Iterator[Judging]:  # fmt: skip
        """Begin what `compare` does for a large collection, by many processes. `jobs/compare.py` does so on Spark.

        A rendition that was handed over to is compared at its handover. With `keep` the difference is kept for
        listeners that pass a handover, if it is exactly that one; it goes with the old rendition.
        """
        if keep := parse_flag(keep, "keep"):
            self._writable("begin_comparison with keep")
        deadline = self._deadline(timeout)
        contents, collection = self._find(name)
        new = self._of(contents, collection, parse_integer(rendition, "rendition", 1))
        timeline = timeline_of(self.client, collection, new)
        old = timeline.last.rendition if to is None else self._of(contents, collection, parse_integer(to, "to", 1))
        owner = f"compare rendition {new.number}"
        with (
            CollectionReader(self.client, collection, new.columns.times, None, owner) as reader,
            judging.begin(reader, old, new, as_of, deadline, keep=keep) as begun,
        ):
            yield begun

    def drop_rendition(
        self, name: str, rendition: int, *, command: str | None = None, timeout: float | None = None
    ) -> Tended:
        """Give up a rendition that is not the collection at any time that can still be read.

        Raises NotFound, and HandoverRefused when the rendition is needed. Its shards go when nobody reads them.
        """
        self._writable("drop_rendition")
        _, collection = self._subject(name, command)
        rendition = parse_integer(rendition, "rendition", 1)

        def intent(contents: Contents, record: CommandRecord) -> tuple[Changes, CommandRecord]:
            found = self._of(contents, collection, rendition)
            timeline = timeline_of(self.client, collection, found)
            if any(span.rendition.number == rendition for span in timeline.spans):
                raise HandoverRefused(
                    f"collection {name!r}: rendition {rendition} is the collection at times that can still be read. It "
                    "goes by itself once history before its end is given up",
                    collection=name, rendition=rendition,
                )  # fmt: skip
            return setting(msgspec.structs.replace(found, state="dropping")), record

        asked = {"name": name, "rendition": rendition}
        self._command("drop rendition", collection.id, asked, intent, command, timeout)
        return tend(self.catalog, self._deadline(timeout), only=collection.id)

    def hand_over(
        self,
        name: str,
        rendition: int,
        *,
        at: TimeLike | None = None,
        force: bool = False,
        dry_run: bool = False,
        command: str | None = None,
        timeout: float | None = None,
    ) -> int:
        """Make a rendition the collection from a time on, and return that time.

        Nothing before it changes. `at` is the time (default: the earliest possible); it must not be promised already.
        Refused are a rendition that was given up, one that is the collection already, and one whose data does not reach
        beyond the time, unless `force` is true: readers would wait for it. With `dry_run` nothing is changed, and the
        answer is the time at which it would happen now.

        Raises HandoverRefused, and NotFound.
        """
        force, dry_run = parse_flag(force, "force"), parse_flag(dry_run, "dry_run")
        if not dry_run:
            self._writable("hand_over")
        rendition = parse_integer(rendition, "rendition", 1)
        contents, collection = self._subject(name, None if dry_run else command)
        schema = contents.renditions_of(collection.id)[0].columns
        start = None if at is None else Times(schema.times, self.client.runtime.clock_ms).as_of(at, "at")

        def check(contents: Contents) -> tuple[RenditionRecord, Timeline, int]:
            check_handover(self.client, collection)
            new = self._of(contents, collection, rendition)
            timeline = timeline_of(self.client, collection, new)
            if timeline.last.rendition.number == rendition:
                raise HandoverRefused(
                    f"collection {name!r}: rendition {rendition} is the collection already, since "
                    f"{schema.show(timeline.last.start)}. Nothing was changed",
                    collection=name, rendition=rendition,
                )  # fmt: skip
            time = handover_time(timeline, start, wal_upper(self.client, collection))
            self._check_time(name, new, timeline, time)
            self._check_copy(name, new, timeline)
            if start is not None and has_wal(collection) and start != time:
                raise HandoverRefused(
                    f"table {name!r}: transactions are committed and read up to {schema.show(time)} already, so a "
                    "handover cannot be before that",
                    collection=name, at=start, earliest=time,
                )  # fmt: skip
            self._check_reach(name, new, time, force=force)
            return new, timeline, time

        if dry_run:
            return check(contents)[2]

        def intent(contents: Contents, record: CommandRecord) -> tuple[Changes, CommandRecord]:
            _, timeline, _ = check(contents)
            last = timeline.last
            asked = {**record.asked, "expects": last.command, "follows": last.rendition.number}
            return {}, msgspec.structs.replace(record, asked=asked, pending=True)

        asked = {"name": name, "rendition": rendition, "at": start}
        record = self._command("hand over", collection.id, asked, intent, command, timeout)
        if record.refused:
            raise HandoverRefused(
                f"collection {name!r}: rendition {rendition} was not handed over to: {record.refused}. Nothing was "
                "changed",
                collection=name, rendition=rendition,
            )  # fmt: skip
        return int(record.answer["at"])

    def drop(
        self, name: str, *, dry_run: bool = False, command: str | None = None, timeout: float | None = None
    ) -> Tended:
        """Drop a collection. Its name is free at once; open readers go on until they are closed, writers are refused.

        The answer says what was done, and which readers and holds the rest waits for; `tend` does it later. With
        `dry_run` nothing is changed, and the answer says what would be. Raises NotFound.
        """
        dry_run = parse_flag(dry_run, "dry_run")
        if not dry_run:
            self._writable("drop")
        name = parse_collection_name(name)
        _, collection = self._subject(name, None if dry_run else command, is_drop=True)
        if dry_run:
            return tend(self.catalog, self._deadline(timeout), only=collection.id, dry_run=True, as_if_dropped=True)

        def intent(contents: Contents, record: CommandRecord) -> tuple[Changes, CommandRecord]:
            if has_wal(collection):  # a mark in its WAL comes first: see `effects`
                return {}, msgspec.structs.replace(record, pending=True)
            current = contents.collections[collection.id]
            return setting(msgspec.structs.replace(current, state="dropping")), record

        self._command("drop", collection.id, {"name": name}, intent, command, timeout)
        return tend(self.catalog, self._deadline(timeout), only=collection.id)

    def tend(self, name: str | None = None, *, dry_run: bool = False, timeout: float | None = None) -> Tended:
        """Look after one collection, or after all and what is left of dropped ones: the duty of this layer.

        Finishes commands that were left, promises as far as the data is there, moves the holds that keep history,
        and takes away renditions and collections that nobody can need any more. With `dry_run` it only says so.
        """
        dry_run = parse_flag(dry_run, "dry_run")
        if not dry_run:
            self._writable("tend")
        only = None if name is None else self._find(name)[1].id
        return tend(self.catalog, self._deadline(timeout), only=only, dry_run=dry_run)

    def set_hold(self, name: str, hold: str, since: TimeLike, *, opaque: bytes = b"") -> None:
        """Keep a collection's history from `since` on, durably, whatever its retention, until `release_hold`.

        Raises SinceViolation for history that is given up, or before the hold's own time, and NotFound.
        """
        hold = parse_hold(hold)
        _, collection = self._find(name)
        self.client.set_hold(collection.shard, hold, since, opaque=opaque)

    def release_hold(self, name: str, hold: str) -> None:
        """Drop a hold of a collection. Raises HoldConflict when there is none of that name, and NotFound."""
        hold = parse_hold(hold)
        _, collection = self._find(name)
        self.client.release_hold(collection.shard, hold)

    def capabilities(self, name: str) -> Sequence[Capability]:
        """Who may read the collection, and from when on, and who writes it. Raises NotFound."""
        return capabilities(self.client, *self._find(name))

    def open_reader(self, name: str, schema: Schema | None = None, *, owner: str = "") -> CollectionReader:
        """Return a handle to read a collection. `owner` is a short text that lists of capabilities show.

        Raises NotFound, and SchemaMismatch when the newest rendition does not have `schema`.
        """
        contents, collection = self._find(name)
        unit = contents.renditions_of(collection.id)[0].columns.times
        schema = None if schema is None else check_schema(schema)
        return CollectionReader(self.client, collection, unit, schema, parse_text(owner, "owner", PURPOSE_LETTERS))

    def open_writer(self, name: str, *, rendition: int | None = None) -> CollectionWriter:
        """Return a handle to write a collection: whichever rendition is the collection at the times that are written.

        With `rendition`, the handle writes that one, which is not the collection yet. Raises NotFound.
        """
        self._writable("open_writer")
        contents, collection = self._find(name)
        only = None if rendition is None else self._of(contents, collection, parse_integer(rendition, "rendition", 1))
        if collection.kind == "table" and only is None:
            raise InvalidUsage(
                f"{name!r} is a table, whose times are minted: write it with controller.tables()", collection=name
            )
        schema = contents.renditions_of(collection.id)[0].columns
        return CollectionWriter(self.client, collection, schema.times, only)

    def tables(self) -> Tables:
        """The tables of this catalog: to create them, to change their rows, alone or in transactions, to read them."""
        from persist_lib.storage.tables import Tables  # noqa: PLC0415 - they stand on the controller

        return Tables(self)

    def close(self) -> None:
        """Close what this controller has open; the client stays open. Idempotent."""
        self.catalog.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _command(
        self, what: What, collection: str | None, asked: dict[str, Any], intent: Intent, command: str | None,
        timeout: float | None,
    ) -> CommandRecord:  # fmt: skip
        """Decide a command, or find it decided, and see it finished. Pending ones of the collection come first."""
        id_ = self.client.runtime.token().hex() if command is None else parse_command_id(command)
        deadline = self._deadline(timeout)

        def decide(contents: Contents) -> tuple[Changes, CommandRecord]:
            if (known := contents.commands.get(id_)) is not None:
                check_same(known, what, collection, asked)
                return {}, known
            if collection is not None:
                for before in contents.pending(collection):
                    return {}, before
                if (current := contents.collections.get(collection)) is None or current.state == "dropping":
                    raise NotFound("the collection was dropped in the meantime; nothing was changed")
            number = max((known.number for known in contents.commands.values()), default=0) + 1
            record = CommandRecord(id=id_, what=what, collection=collection or "", asked=asked, number=number)
            changes, record = intent(contents, record)
            return {**changes, **setting(record)}, record

        while True:
            record = self.catalog.change(decide, deadline)
            if record.pending:
                record = settle(self.catalog, record, deadline)
            if record.id == id_:
                return record

    def _writable(self, what: str) -> None:
        if self.client.read_only:
            raise InvalidUsage(f"{what} needs a client that may write; this one was opened with read_only=True")

    def _deadline(self, timeout: float | None) -> Deadline:
        return self.client.runtime.deadline(self.client.config.timeout_s if timeout is None else parse_seconds(timeout))

    def _copy_of(self, name: str, rendition: object) -> tuple[RenditionRecord, RenditionRecord, CollectionRecord]:
        """The rendition that is copied, and its copy."""
        contents, collection = self._find(name)
        new = self._of(contents, collection, parse_integer(rendition, "rendition", 1))
        if new.copies is None:
            raise InvalidUsage(
                f"collection {name!r}: rendition {new.number} is written independently. To copy, make a rendition with "
                "copy=True",
                collection=name, rendition=new.number,
            )  # fmt: skip
        return self._of(contents, collection, new.copies), new, collection

    def _find(self, name: str) -> tuple[Contents, CollectionRecord]:
        name = parse_collection_name(name)
        contents = self.catalog.fetch()
        collection = contents.find(name)
        if collection.state == "making":  # its process may be at it, or gone
            if not self.client.read_only:
                for command in contents.pending(collection.id):
                    settle(self.catalog, command, self._deadline(None))
            contents = self.catalog.fetch()
            collection = contents.find(name)
        if collection.state == "making":
            raise NotFound(
                f"collection {name!r} is being created. Look again; if its process has died, the next client that may "
                "write finishes it",
                collection=name,
            )
        return contents, collection

    def _subject(self, name: str, command: str | None, *, is_drop: bool = False) -> tuple[Contents, CollectionRecord]:
        """The collection that a command is about: by its name, or the same as at first for one that is repeated."""
        name = parse_collection_name(name)
        contents = self.catalog.fetch()
        known = None if command is None else contents.commands.get(parse_command_id(command))
        if known is None:
            return self._find(name)
        found = contents.collections.get(known.collection)
        if found is None and is_drop:
            found = CollectionRecord(id=known.collection, name=name, state="dropping")
        return contents, self._still(found, known)

    def _described(self, record: CommandRecord) -> Description:
        """What a collection is after a command."""
        contents = self.catalog.fetch()
        found = contents.collections.get(record.collection)
        if found is not None and found.state == "dropping":
            found = None
        return describe(self.client, contents, self._still(found, record))

    def _still(self, found: CollectionRecord | None, record: CommandRecord) -> CollectionRecord:
        if found is None:
            raise NotFound(
                f"the command {record.id!r} ({record.what}) was done, and the collection has been dropped since",
                command=record.id,
            )
        return found

    def _of(self, contents: Contents, collection: CollectionRecord, number: int) -> RenditionRecord:
        found = contents.renditions.get((collection.id, number))
        if found is not None and found.state == "making" and not self.client.read_only:
            # SUBTLE: its shards have no hold yet, without which what is written could be given up.
            for command in contents.pending(collection.id):
                settle(self.catalog, command, self._deadline(None))
        if found is None or found.state == "dropping":
            numbers = [r.number for r in contents.renditions_of(collection.id) if r.state != "dropping"]
            raise NotFound(
                f"collection {collection.name!r} has no rendition {number}: it has {numbers}",
                collection=collection.name, rendition=number,
            )  # fmt: skip
        return found

    def _rendition_of(self, description: Description, number: int) -> RenditionDescription:
        for rendition in description.renditions:
            if rendition.number == number:
                return rendition
        raise NotFound(
            f"collection {description.name!r} has no rendition {number} any more: it was made, and dropped since",
            collection=description.name, rendition=number,
        )  # fmt: skip

    def _check_time(self, name: str, new: RenditionRecord, timeline: Timeline, time: int) -> None:
        show, earliest = new.columns.show, at(handover_time(timeline, None))
        if at(time) < earliest:
            raise HandoverRefused(
                f"collection {name!r}: the time {show(time)} is promised already: readers have relied on what is the "
                f"collection then. The earliest time is {show(earliest)}. Nothing was changed",
                collection=name, at=time, earliest=earliest,
            )  # fmt: skip
        if time >= MAX_TIME:
            raise InvalidUsage(f"a handover must be before the end of all times: got {time}", at=time)

    def _check_copy(self, name: str, new: RenditionRecord, timeline: Timeline) -> None:
        if new.copies is None:
            return
        why = ""
        if new.begun:
            why = f"rendition {new.number} was the collection before, and has nothing of what was written since"
        elif new.copies != timeline.last.rendition.number:
            why = (
                f"rendition {new.number} is a copy of rendition {new.copies}, and since "
                f"{new.columns.show(timeline.last.start)} rendition {timeline.last.rendition.number} is the collection"
            )
        if why:
            raise HandoverRefused(
                f"collection {name!r}: {why}. Nothing was changed; make a new rendition with copy=True",
                collection=name, rendition=new.number,
            )  # fmt: skip

    def _check_reach(self, name: str, new: RenditionRecord, time: int, *, force: bool) -> None:
        show = new.columns.show
        states = [self.client.machine(shard).fetch().state for shard in new.names]
        since, upper = max(state.since for state in states), min(state.upper for state in states)
        if at(time) < since:
            raise HandoverRefused(
                f"collection {name!r}: rendition {new.number} can only be read from {show(since)} on, which is after "
                f"{show(time)}. Nothing was changed; hand over at {show(since)} or later",
                collection=name, at=time, since=since,
            )  # fmt: skip
        if not force and new.copies is None and not upper.has_passed(time):
            raise HandoverRefused(
                f"collection {name!r}: rendition {new.number} has data up to {show(upper)} only, so that readers would "
                f"wait for it at {show(time)}. Nothing was changed; write it further, or say force=True",
                collection=name, at=time, upper=upper,
            )  # fmt: skip


def _taken(name: str) -> NameTaken:
    return NameTaken(
        f"there is a collection {name!r} already. Nothing was changed; choose another name, or open it with "
        "controller.open_reader and open_writer",
        collection=name,
    )


def _unit(schema: Schema) -> str:
    return "plain integers as times" if schema.times is None else f"times of a clock in {schema.times}"
