"""What is done to make a source, and to take it away: steps that any process may repeat."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from persist_lib.catalog.metadata_shard import finish_shard
from persist_lib.catalog.names import OF_SOURCES
from persist_lib.errors import Determinate, HoldConflict, NotFound, ShardFinished, SinceViolation
from persist_lib.runtime.ambient import Deadline
from persist_lib.shard.admin import claim
from persist_lib.sources.bindings import SCHEMA as BINDINGS
from persist_lib.sources.health import SCHEMA as HEALTH
from persist_lib.sources.kinds import Declared
from persist_lib.sources.pipeline import ERRORS, RAW
from persist_lib.sources.protocol import HOLD
from persist_lib.sources.records import SourceRecord, changed, in_unit, minted
from persist_lib.sources.schema_registry import SCHEMA as SCHEMAS
from persist_lib.sources.transactions import WAITING

if TYPE_CHECKING:
    from persist_lib.catalog.controller import Controller


def settle(
    controller: Controller, declared: Declared, record: SourceRecord, deadline: Deadline, *, is_kept: bool = True
) -> None:
    """Create what a declared source needs, and say that it is there; without `is_kept`, only to drop it.

    What it has outside of the catalog is made only where it is kept.
    """
    if record.state != "making":
        return
    client = controller.client
    if is_kept:
        record = record.reader.hold(client, record, is_new=True)
    ids: dict[str, str] = {}
    errors = in_unit(ERRORS, record.schema.times)
    schemas = {"output": record.schema, "errors": errors, "raw": RAW, "waiting": WAITING, "health": HEALTH}
    for role, name in names_of(record).items():
        made = controller.create(
            name, schemas[role], shards=record.shards if role == "output" else 1,
            mode="compare_and_append" if role == "health" else "append",
            retention={"output": record.retention, "waiting": 0}.get(role), command=f"{record.id}.{role}",
        )  # fmt: skip
        ids[role] = made.id
    health = ids.pop("health")
    client.open_writer(record.bindings, BINDINGS, layer=OF_SOURCES).close()
    if record.decoding.registry is not None:
        client.open_writer(record.schemas, SCHEMAS, layer=OF_SOURCES).close()
        claim(client.machine(record.schemas), OF_SOURCES)
    record.reader.begin(controller, record, [name for role, name in names_of(record).items() if role != "health"])
    hold(controller, changed(record, collections=ids), is_new=True)
    table = record.reader.make(client, record, deadline) if is_kept else None

    def settled(now: SourceRecord) -> SourceRecord | None:
        if now.state != "making":
            return None
        return changed(now, state="running", collections=ids, health=health, input=record.input, table=table)

    declared.update(record, settled, deadline)


def hold(controller: Controller, record: SourceRecord, *, is_new: bool = False) -> None:
    """Set the holds of a source where there are none: as it is made, or after one was released."""
    contents, client = controller.catalog.fetch(), controller.client
    if not is_new:
        record.reader.hold(client, record, is_new=False)
    for shard in (*(contents.collections[id_].shard for id_ in record.collections.values()), record.bindings):
        with suppress(HoldConflict, SinceViolation):  # it is there
            client.set_hold(shard, HOLD, client.inspect(shard).state.since, opaque=record.fence, expected=None)


def take_away(controller: Controller, declared: Declared, record: SourceRecord, deadline: Deadline) -> list[str]:
    """Drop what a source has, and forget it; or, where it begins again, declare it again.

    Answers what could not be taken away outside, and what to do about it.
    """
    client = controller.client
    if not record.collections:  # its making was cut off
        settle(controller, declared, changed(record, state="making"), deadline, is_kept=False)
    contents = controller.catalog.fetch()
    for one in contents.collections.values():
        if not one.command.startswith(f"{record.id}."):
            continue
        with suppress(HoldConflict, ShardFinished, NotFound):
            client.release_hold(one.shard, HOLD)
        if one.state != "dropping":
            with suppress(NotFound):
                controller.drop(one.name, timeout=deadline.remaining_s() + 0.001)
    finish_shard(client, record.bindings, BINDINGS, HOLD)
    finish_shard(client, record.schemas, SCHEMAS)
    left = record.reader.remove(client, record)
    if left and record.again:
        raise Determinate(f"the source {record.name!r} cannot begin again now: {left[0]}. Or reset it again then")
    if record.again:
        id_, again = minted(client), record.reader.input(controller)
        declared.update(
            record, lambda now: changed(fresh(now), id=id_, epoch=now.epoch + 1, input=again), deadline
        )  # fmt: skip
    else:
        declared.forget(record, deadline)
    return left


def names_of(record: SourceRecord) -> dict[str, str]:
    """The collections of a source, by what they are for."""
    name = record.name
    raw = {"raw": f"{name}/raw"} if record.meaning.keep_raw else {}
    waiting = {} if record.meaning.transactions is None else {"waiting": f"{name}/waiting"}
    return {"output": name, "errors": f"{name}/errors", **raw, **waiting, "health": f"{name}/health"}


def fresh(record: SourceRecord) -> SourceRecord:
    """A record as it was when the source was declared, under no id."""
    return changed(
        record, id="", state="making", why="", epoch=1, collections={}, health="", again=False, input=None,
        mending=None, mends=0, mended=0, table=None,
    )  # fmt: skip
