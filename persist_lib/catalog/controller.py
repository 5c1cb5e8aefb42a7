"""The controller: what collections there are, and what is done to them. A library, not a server.

Any process may have one, and any number may be at work at once. Each command is decided by one append to the catalog,
is the same command however often it is sent with its id, and is finished by another process if its own dies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from persist_lib.arguments import check_type, parse_flag, parse_integer, parse_seconds, parse_text
from persist_lib.catalog.catalog import Changes, Contents, has_shard, setting
from persist_lib.catalog.collection_arguments import (
    MOST_SHARDS,
    Retention,
    parse_hold,
    parse_rendition,
    parse_retention,
)
from persist_lib.catalog.collection_status import capabilities, describe
from persist_lib.catalog.deleted_keys import KeepDeletes, KeepingDeletes, keeping, parse_keeping, parse_kept
from persist_lib.catalog.describe import Capability, Description, Tended
from persist_lib.catalog.handover import Handovers
from persist_lib.catalog.maintenance import Asking, tend
from persist_lib.catalog.planned import apply, exactly_of, plan
from persist_lib.catalog.promotion import Promoting
from persist_lib.catalog.publications import check_unpublished
from persist_lib.catalog.reader import CollectionReader, RenditionReader
from persist_lib.catalog.records import CollectionRecord, CommandRecord, Kind, Mode, minted, parse_collection_name
from persist_lib.catalog.wal import has_wal
from persist_lib.catalog.writer import CollectionWriter
from persist_lib.core.holds import is_of_layer
from persist_lib.core.plan.written import Step as PlannedStep
from persist_lib.core.state import RETENTION
from persist_lib.errors import InvalidUsage, NameTaken, StillRead
from persist_lib.relation.reader import PURPOSE_LETTERS
from persist_lib.relation.writer import Batching
from persist_lib.runtime.threads import Resource
from persist_lib.schema.evolution import fresh
from persist_lib.schema.schema import Schema, check_schema
from persist_lib.shard.admin import Downgraded
from persist_lib.times import TimeLike

if TYPE_CHECKING:
    from persist_lib.sources import Sources
    from persist_lib.timeline import Tables


COPY_S = 7 * 86_400.0
"""How long a copy may take where no timeout is given."""


class New(NamedTuple):
    """A collection to be created; with a `timeline`, which is its minted id, a table on it."""

    name: str
    schema: Schema
    shards: int
    mode: Mode
    retention: Retention
    hash_columns: Sequence[str] | None = None
    timeline: str | None = None
    keep_deletes: KeepDeletes = None


class Controller(Promoting, Handovers, KeepingDeletes, Resource):
    """Creates, changes, describes and drops the collections of a location. Safe to use from several threads.

    `catalog` names the shard that lists the collections; a location may have several catalogs, which know nothing of
    one another. Every command takes the id `command`, by which it may be repeated from anywhere: after Indeterminate,
    or after a crash. A repeated command answers what the first one did. Without one an id is minted, which the error
    carries.
    """

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
        return self._create(New(name, schema, shards, mode, retention, hash_columns), command, timeout)

    def _create(self, new: New, command: str | None, timeout: float | None) -> Description:
        name, schema, timeline = parse_collection_name(new.name), fresh(check_schema(new.schema)), new.timeline
        self._writable("create")
        rendition = parse_rendition(self.client, schema, new.shards, new.mode, new.hash_columns)
        distance = parse_retention(new.retention, schema, self.client.consensus.now)
        asked = {
            "name": name, "schema": rendition.schema, "shards": rendition.shards, "mode": new.mode,
            "hash_columns": list(rendition.hash_columns), "retention": distance,
        }  # fmt: skip
        asked |= {} if timeline is None else {"timeline": timeline}
        kept = None if new.keep_deletes is None else parse_keeping(name, schema, *parse_kept(new.keep_deletes))
        asked |= {} if kept is None else {"keep_deletes": [kept.column, kept.span_ms]}
        kind: Kind = "collection" if timeline is None else "table"

        def intent(contents: Contents, record: CommandRecord) -> tuple[Changes, CommandRecord]:
            if contents.named(name) is not None:
                raise _taken(name)
            self._check_no_shard(name)
            id_ = minted(self.client.runtime.entropy())
            collection = CollectionRecord(
                id=id_, name=name, kind=kind, retention=distance, timeline=timeline, command=record.id
            )
            first = msgspec.structs.replace(rendition, collection=id_, command=record.id)
            record = msgspec.structs.replace(record, collection=id_, pending=True)
            if kept is not None:
                collection, marks, made = keeping(self.client, collection, kept, record)
                return setting(collection, first, marks, made), record
            return setting(collection, first), record

        return self._named(name, self._command("create", None, asked, intent, command, timeout))

    def _check_no_shard(self, name: str) -> None:
        """Raise NameTaken if there is a shard of this name, as `client.open_writer` does for a collection."""
        if has_shard(self.client, name):
            raise self._is_a_shards(name)

    def _named(self, name: str, record: CommandRecord) -> Description:
        """What the collection is that was to get this name. Raises NameTaken if a shard got it at the same moment."""
        if record.refused:
            raise self._is_a_shards(name)
        return self._described(record)

    def _is_a_shards(self, name: str) -> NameTaken:
        return NameTaken(
            f"there is a shard {name!r} in {self.client.url} already. Nothing was changed; choose another name for "
            "the collection, as a name stands for one of both",
            collection=name, shard=name,
        )  # fmt: skip

    def list(self) -> list[str]:
        """The names of all collections, sorted. One that is being created is there once its command is done."""
        return self.catalog.fetch().names()

    def describe(self, name: str) -> Description:
        """What a collection is, and how far it has come. Raises NotFound."""
        contents, collection = self._find(name)
        return describe(self.client, contents, collection)

    def alter(
        self, name: str, *, retention: Retention, command: str | None = None, timeout: float | None = None
    ) -> Description:
        """Change a collection's options. It takes effect when collections are tended next. Raises NotFound."""
        self._writable("alter")
        contents, collection = self._subject(name, command)
        schema = contents.renditions_of(collection.id)[0].columns
        distance = parse_retention(retention, schema, self.client.consensus.now)

        def intent(contents: Contents, record: CommandRecord) -> tuple[Changes, CommandRecord]:
            current = contents.collections[collection.id]
            its = [current, *contents.marks_of(current)]  # so that both can be restored to as many times
            return setting(*(msgspec.structs.replace(one, retention=distance) for one in its)), record

        asked = {"name": name, "retention": distance}
        return self._described(self._command("alter", collection.id, asked, intent, command, timeout))

    def rename(self, name: str, to: str, *, command: str | None = None, timeout: float | None = None) -> Description:
        """Give a collection another name. Readers and writers that are open continue. Raises NotFound and NameTaken."""
        self._writable("rename")
        to = parse_collection_name(to)
        _, collection = self._subject(name, command)

        def intent(contents: Contents, record: CommandRecord) -> tuple[Changes, CommandRecord]:
            if contents.named(to) is not None:
                raise _taken(to)
            self._check_no_shard(to)
            current = contents.collections[collection.id]
            asked = {**record.asked, "was": current.name}
            record = msgspec.structs.replace(record, asked=asked, pending=True)
            return setting(msgspec.structs.replace(current, name=to)), record

        return self._named(
            to, self._command("rename", collection.id, {"name": name, "to": to}, intent, command, timeout)
        )

    def drop(
        self, name: str, *, dry_run: bool = False, command: str | None = None, timeout: float | None = None
    ) -> Tended:
        """Drop a collection. Its name is free at once; open readers go on until they are closed, writers are refused.

        The answer says what was done, and which readers and holds the rest waits for; `tend` does it later. With
        `dry_run` nothing is changed, and the answer says what would be. Raises NotFound, and StillRead where a hold of
        its users keeps its history, as no client could release that later.
        """
        dry_run = parse_flag(dry_run, "dry_run")
        if not dry_run:
            self._writable("drop")
        name = parse_collection_name(name)
        contents, collection = self._subject(name, None if dry_run else command, is_drop=True)
        if collection.state != "dropping":
            self._check_not_held(name, collection.shard)
            check_unpublished(self.client, contents, collection)
        if dry_run:
            return self._tended(timeout, collection.id, dry_run=True, as_if_dropped=True)

        def intent(contents: Contents, record: CommandRecord) -> tuple[Changes, CommandRecord]:
            if has_wal(collection):  # a mark in its WAL comes first: see `effects`
                return {}, msgspec.structs.replace(record, pending=True)
            current = contents.collections[collection.id]
            return setting(msgspec.structs.replace(current, state="dropping")), record

        self._command("drop", collection.id, {"name": name}, intent, command, timeout)
        return self._tended(timeout, collection.id)

    def _check_not_held(self, name: str, shard: str) -> None:
        version = self.client.machine(shard).try_fetch()
        holds = version.state.holds if version is not None else ()  # it may be half made
        if held := [hold for hold in sorted(holds) if hold != RETENTION and not is_of_layer(hold)]:
            raise StillRead(
                f"{name!r} is kept by the hold {', '.join(held)}, so nothing was dropped. Release it first: "
                f"`persist hold release {name} {held[0]}`, or Table.release_hold",
                shard=shard, by=tuple(f"hold {hold}" for hold in held),
            )  # fmt: skip

    def tend(
        self, name: str | None = None, *, dry_run: bool = False, planned: Sequence[PlannedStep] | None = None,
        timeout: float | None = None,
    ) -> Tended:  # fmt: skip
        """Look after one collection, or after all and what is left of dropped ones: the duty of this layer.

        Finishes commands that were left, promises as far as the data is there, moves the holds that keep history,
        and takes away renditions and collections that nobody can need any more. With `dry_run` it only says so. What
        is paused waits. With `planned`, so does what gives something up and is not exactly one of these steps.
        """
        dry_run = parse_flag(dry_run, "dry_run")
        exactly = None if planned is None else exactly_of(planned)
        if not dry_run:
            self._writable("tend")
        only = None if name is None else self._find(name)[1].id
        return self._tended(timeout, only, dry_run=dry_run, heeds_pauses=True, planned=exactly)

    def plan(self, name: str | None = None, *, timeout: float | None = None) -> tuple[PlannedStep, ...]:
        """Return what tending a collection, or all, would give up now, for `apply`. Changes nothing.

        That is history, renditions, and what is left of dropped collections. What gives nothing up is in no plan.
        """
        return plan(self, name, timeout)

    def apply(self, steps: Sequence[PlannedStep], *, timeout: float | None = None) -> Tended:
        """Tend all collections, and give up exactly what these steps say, or raise PlanMoved and change nothing.

        What was planned is not done a second time. A pause, or a rival amid it, leaves some of them undone: they wait,
        in the answer.
        """
        self._writable("apply")
        return apply(self, steps, timeout)

    def _tended(self, timeout: float | None, only: str | None, **simulated: Any) -> Tended:
        from persist_lib.timeline.wal_truncation import timeline_steps  # noqa: PLC0415 - tables stand on the controller

        return tend(self.catalog, self._deadline(timeout), timeline_steps, only, Asking(**simulated))

    def reshard(self, name: str, shards: int, *, timeout: float | None = None) -> int:
        """Give a collection so many shards: make a rendition, copy the rows to it, hand over. Answers its number.

        It is read and written all the time. `timeout` is in seconds; None: as long as it takes. A call that was
        cut short is repeated, and continues with the copy that it finds. Raises as the steps do.
        """
        shards = parse_integer(shards, "shards", 1, MOST_SHARDS)
        timeout = COPY_S if timeout is None else parse_seconds(timeout)
        found = self.describe(name)
        active = found.active.number
        copies = [one for one in found.renditions if (one.copies, len(one.shards)) == (active, shards)]
        new = next((one for one in copies if one.start is None and one.state == "live"), None)
        new = new or self.make_rendition(name, shards=shards, copy=True)
        self.copy_rendition(name, new.number, timeout=timeout)
        self.hand_over(name, new.number, advance=True, timeout=timeout)
        return new.number

    def set_hold(self, name: str, hold: str, since: TimeLike, *, opaque: bytes = b"") -> None:
        """Keep a collection's history from `since` on, durably, whatever its retention, until `release_hold`.

        A hold never gives history up: see `downgrade_hold`. Raises SinceViolation for history that is given up, or
        before the hold's own time, GivesUpHistory for a time beyond the newest, and NotFound.
        """
        hold = parse_hold(hold)
        _, collection = self._find(name)
        self.client.set_hold(collection.shard, hold, since, opaque=opaque)

    def downgrade_hold(self, name: str, hold: str, since: TimeLike, *, dry_run: bool = False) -> Downgraded:
        """Give up a collection's history before `since`, as far as its retention and no other hold or reader keeps it.

        As `client.downgrade_hold`; with `dry_run` nothing is changed. Renditions and their data go when it is tended.
        """
        hold = parse_hold(hold)
        _, collection = self._find(name)
        return self.client.downgrade_hold(collection.shard, hold, since, dry_run=dry_run)

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
        owner = parse_text(owner, "owner", PURPOSE_LETTERS)
        return CollectionReader(RenditionReader(self.client, collection, unit, schema, owner))

    def open_writer(
        self, name: str, schema: Schema | None = None, *, rendition: int | None = None,
        batching: Batching | None = None, owner: str = "",
    ) -> CollectionWriter:  # fmt: skip
        """Return a handle to write a collection: whichever rendition is the collection at the times that are written.

        With `rendition`, the handle writes that one, which is not the collection yet. With `batching`, appends that
        `append_async` accepts are held back as by a shard's writer. `owner` is a short text that lists of capabilities
        show. With a `schema`, one that the collection has or had before columns were added, it writes in these columns.
        Raises NotFound, and SchemaMismatch for any other schema.
        """
        self._writable("open_writer")
        if batching is not None:
            check_type(batching, Batching, "batching", "persist.Batching(bytes=8 << 20, age_s=1.0)")
        contents, collection = self._find(name)
        only = None if rendition is None else self._of(contents, collection, parse_integer(rendition, "rendition", 1))
        if collection.kind == "table" and only is None:
            raise InvalidUsage(
                f"{name!r} is a table, whose times are minted: write it with controller.tables()", collection=name
            )
        unit = contents.renditions_of(collection.id)[0].columns.times
        schema = None if schema is None else check_schema(schema)
        owner = parse_text(owner, "owner", PURPOSE_LETTERS)
        return CollectionWriter(self.client, collection, unit, only, batching, owner, schema)

    def tables(self) -> Tables:
        """The tables of this catalog: to create them, to change their rows, alone or in transactions, to read them."""
        from persist_lib.timeline import Tables  # noqa: PLC0415 - they stand on the controller

        return Tables(self)

    def _apply_wal(self, timeline: str, timeout: float) -> None:
        with self.tables() as tables:
            tables.apply(timeline, timeout=timeout)

    def sources(self) -> Sources:
        """The sources of this catalog: outside data that becomes collections."""
        from persist_lib.sources import Sources  # noqa: PLC0415 - they stand on the controller

        return Sources(self)

    def close(self) -> None:
        """Close what this controller has open; the client stays open. Idempotent."""
        self.catalog.close()


def create_table(controller: Controller, new: New, command: str | None, timeout: float | None) -> Description:
    """Create a table on its timeline."""
    return controller._create(new, command, timeout)


def _taken(name: str) -> NameTaken:
    return NameTaken(
        f"there is a collection {name!r} already. Nothing was changed; choose another name, or open it with "
        "controller.open_reader and open_writer",
        collection=name,
    )
