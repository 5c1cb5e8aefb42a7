"""Declaring sources that read a collection, and what is done to make and to drop them. `following` reads it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from persist_lib.errors import HoldConflict, InvalidUsage, NotFound, SinceViolation
from persist_lib.frontier import at
from persist_lib.schema.schema import Schema
from persist_lib.storage.effects import HOLD as COLLECTION
from persist_lib.storage.names import rendition_shard
from persist_lib.storage.records import schema_form
from persist_lib.storage.sources.bindings import Bindings
from persist_lib.storage.sources.declared import Collection, Decoding, Meaning
from persist_lib.storage.sources.following import Following
from persist_lib.storage.sources.opening import open_reader
from persist_lib.storage.sources.protocol import SourceReader
from persist_lib.storage.sources.records import Followed, SourceRecord, changed

if TYPE_CHECKING:
    from persist_lib.client import Client
    from persist_lib.storage.controller import Controller

Clock = Bindings | Following


def hold_name(record: SourceRecord) -> str:
    """The hold that a source has on the collection that it reads. A collection may be read by many."""
    return f"source-{record.id}"


def clock_of(controller: Controller, record: SourceRecord, owner: str, *, is_leased: bool = True) -> Clock:
    """What says at which times a source's messages are. Without `is_leased`, for a caller that reads no messages."""
    if record.input is None:
        return Bindings(controller.client, record.bindings)
    if not isinstance(record.reader, Collection):
        raise AssertionError(f"{record.name} reads no collection")  # noqa: TRY004 - no caller's mistake
    found = Following(controller, record.name, record.input, record.reader.name, owner, is_leased=is_leased)
    found.hold = hold_name(record)
    return found


def reader_of(client: Client, record: SourceRecord, clock: Clock) -> SourceReader:
    """What reads a source's messages."""
    return clock if isinstance(clock, Following) else open_reader(client, record)


def follow(controller: Controller, name: str) -> Followed:
    """What is to be read of a collection. Raises NotFound."""
    found = controller.describe(name)
    return Followed(found.id, schema_form(found.schema))


def declared_over(
    controller: Controller, reader: Collection, schema: Schema, decoding: Decoding | None, meaning: Meaning,
    decoded: Schema | None,
) -> tuple[Followed, Schema, Decoding, Schema | None]:  # fmt: skip
    """What a source over a collection is declared as. Raises InvalidUsage for what cannot be, and NotFound."""
    followed = follow(controller, reader.name)
    columns = followed.columns
    if schema.times not in {None, columns.times}:
        unit = "plain integers" if columns.times is None else repr(columns.times)
        raise InvalidUsage(
            f"a source over a collection has its times: those of {reader.name!r} are {unit}, not {schema.times!r}"
        )
    decoding = decoding or Decoding(decoder="rows")
    if decoding.decoder != "rows":
        raise InvalidUsage(f"updates of a collection are rows: leave out the decoder {decoding.decoder!r}")
    if meaning.keep_raw:
        raise InvalidUsage(f"keep_raw keeps bytes, and these messages are rows: {reader.name!r} is what is raw")
    if "time" in meaning.include.values() and columns.times != "ms":
        raise InvalidUsage(f"include: the times of {reader.name!r} are not in milliseconds, so that no column is one")
    if meaning.transform is not None and decoded is None:
        types = {one.name: one.type + ("" if one.nullable else " not null") for one in columns.columns}
        decoded = Schema(key=types)
    return followed, in_unit(schema, columns.times), decoding, decoded


def in_unit(schema: Schema, unit: object) -> Schema:
    """The schema with other times."""
    models = schema.models
    schema = msgspec.structs.replace(schema, times=unit)
    schema.__dict__["models"] = models
    return schema


def hold_input(client: Client, record: SourceRecord, *, is_new: bool) -> SourceRecord:
    """Hold the collection that a source reads, where that is not done yet; with the time from which on it can be read.

    Only while a source is made (`is_new`) it begins there: what is read back decides. Raises NotFound if it is gone.
    """
    if record.input is None:
        return record
    shard, name = rendition_shard(record.input.id), hold_name(record)
    while True:
        state = None if client.machine(shard).try_fetch() is None else client.inspect(shard).state
        if state is None or state.is_finished() or (is_new and state.upper.is_top()):
            raise NotFound(
                f"the collection that the source {record.name!r} reads was dropped: drop the source",
                collection=record.reader.name if isinstance(record.reader, Collection) else "",
            )  # fmt: skip
        if (found := state.holds.get(name)) is not None:
            break
        with suppress(HoldConflict, SinceViolation):  # another process was first, or history was given up just now
            client.set_hold(shard, name, state.since, opaque=record.fence, expected=None)
    return changed(record, input=msgspec.structs.replace(record.input, begins=found.since.time or 0))


def begin(controller: Controller, record: SourceRecord, names: Mapping[str, str]) -> None:
    """See to it that a source's collections say nothing of times before what it reads begins.

    SUBTLE: they can be read as of the time before, where they are empty, as a reader that starts reads the state there.
    """
    if record.input is None or not (begins := record.input.begins):
        return
    for name in names.values():
        with controller.open_writer(name) as write:
            write.advance_upper(begins)
        shard = controller.catalog.fetch().find(name).shard
        with suppress(SinceViolation):
            controller.client.downgrade_hold(shard, COLLECTION, at(begins - 1))


def let_input_go(client: Client, record: SourceRecord) -> None:
    """Release the hold on the collection that a source reads."""
    if record.input is not None:
        with suppress(HoldConflict, NotFound):
            client.release_hold(rendition_shard(record.input.id), hold_name(record))
