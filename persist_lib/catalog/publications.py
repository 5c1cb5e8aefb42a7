"""Publications of collections: one table for other engines, of the objects of all shards of a rendition.

Each shard of the rendition that is published has a pin of it, and so have those of earlier renditions, until no
snapshot names their objects any more. The table's folder is the collection's; where a shard that was published was
promoted, it stays that of the shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from persist_lib.catalog.catalog import Contents
from persist_lib.catalog.describe import Do, Step
from persist_lib.catalog.metadata_shard import at_once
from persist_lib.catalog.reader import RenditionReader
from persist_lib.catalog.records import CollectionRecord, RenditionRecord
from persist_lib.catalog.renditions import Timeline, upper_of
from persist_lib.client import Client
from persist_lib.core.pins import folders_of, format_of
from persist_lib.errors import SinceViolation, StillRead
from persist_lib.frontier import at
from persist_lib.location.wrap.spending import charged
from persist_lib.maintain.publish import steps
from persist_lib.maintain.publish.shards import Shards, terms_of
from persist_lib.shard.commit import Machine

if TYPE_CHECKING:
    from persist_lib.catalog.controller import Controller
    from persist_lib.times import TimeLike


@charged
def publish(
    controller: Controller, name: str, format_: steps.Format, at_: TimeLike | None, *, keep: int | None,
    follows: bool | None, dry_run: bool,
) -> steps.Published:  # fmt: skip
    """Publish a collection as of a time; None: the newest that is complete. Raises as `Table.publish`."""
    contents, collection = controller._find(name)
    unit, client = contents.renditions_of(collection.id)[0].columns.times, controller.client
    # It holds what is published, so that no shard gives up the time; but a dry run changes nothing.
    with RenditionReader(client, collection, unit, None, "publication", is_leased=not dry_run) as reader:
        newest = reader.newest()
        time = newest if at_ is None else reader._times().as_of(at_, "at")
        if not (0 <= time <= newest and reader.since <= at(time)):
            show = reader.schema.show
            raise SinceViolation(
                f"{collection.kind} {name!r} cannot be published as of {show(time)}: it can be read from "
                f"{show(reader.since)} on, up to {show(newest)}. Nothing was published",
                as_of=at(time), since=reader.since, collection=name,
            )  # fmt: skip
        span = reader.timeline().at(time) if dry_run else reader.known(time, reader._deadline(None))
        shards = shards_of(client, contents, collection, span.rendition, format_)
        with shards.workers(client.leases) as workers:
            return steps.publish(shards, workers, format_, time, keep=keep, follows=follows, dry_run=dry_run)


def withdraw(controller: Controller, name: str, format_: steps.Format, *, dry_run: bool) -> steps.Withdrawn:
    """Take a publication of a collection back. Raises NotFound."""
    contents, collection = controller._find(name)
    newest = contents.renditions_of(collection.id)[-1]
    return steps.withdraw(shards_of(controller.client, contents, collection, newest, format_), format_, dry_run=dry_run)


def shards_of(
    client: Client, contents: Contents, collection: CollectionRecord, rendition: RenditionRecord, format_: str
) -> Shards:
    """The shards of a publication of a collection: those of a rendition have the rows."""
    machines = _machines(client, contents, collection)
    folder = collection.id
    for machine in machines:
        pin = next((name for name in sorted(machine.state.pins) if format_of(name) == format_), "")
        folder = folders_of(machine.state, machine.shard).get(pin, folder)
    now = tuple(one for one in machines if one.shard in rendition.names)
    return Shards(collection.name, folder, now, tuple(one for one in machines if one not in now))


def _machines(client: Client, contents: Contents, collection: CollectionRecord) -> list[Machine]:
    """Those of all shards that have rows of a collection, oldest first, with their newest states."""
    made = (one for one in contents.renditions_of(collection.id) if one.state != "making")
    machines = [client.machine(name) for record in made for name in record.names]
    there = at_once(client.runtime, lambda machine: machine.try_fetch() is not None, machines)
    return [machine for machine, is_there in zip(machines, there, strict=True) if is_there]


def check_unpublished(client: Client, contents: Contents, collection: CollectionRecord) -> None:
    """Raise StillRead where a publication names objects of a collection."""
    found = ((machine.shard, pin) for machine in _machines(client, contents, collection) for pin in machine.state.pins)
    if by := sorted({f"pin {pin}": shard for shard, pin in found}.items()):
        formats = sorted({format_of(pin.removeprefix("pin ")) for pin, _ in by})
        raise StillRead(
            f"{collection.name!r} is published as {' and '.join(formats)}, so nothing was dropped. Withdraw that "
            f"first: `persist maintain {collection.name} --withdraw {formats[0]}`, or Table.withdraw",
            shard=by[0][1], by=tuple(pin for pin, _ in by),
        )  # fmt: skip


def publication_steps(
    client: Client, contents: Contents, collection: CollectionRecord, timeline: Timeline,
    renditions: Sequence[RenditionRecord],
) -> Iterator[tuple[Step, Do]]:  # fmt: skip
    """What is published again, as it follows the collection, and how. The states of its shards were just read."""
    names = [name for record in renditions for name in record.names]
    if not any(one.follows for name in names if (v := client.machine(name).known) for one in v.state.pins.values()):
        return
    upper = timeline.upper.meet(upper_of(client, timeline))
    newest = (upper.time or 0) - 1
    for format_ in steps.FORMATS if newest >= timeline.since and not upper.is_top() else ():
        rendition = timeline.at(newest).rendition
        shards = shards_of(client, contents, collection, rendition, format_)
        pins = shards.pins(format_)
        as_of = max((-1 if pin.as_of is None else pin.as_of for pin in pins), default=newest)
        if as_of < newest and terms_of(pins, None, None).follows:
            subject = f"{format_} as of {timeline.last.rendition.columns.show(newest)}"
            yield (
                Step(collection.name, "publish", subject, "other engines read it, and it follows the collection"),
                partial(_again, client, collection, shards, format_, newest),
            )


def _again(client: Client, collection: CollectionRecord, shards: Shards, format_: steps.Format, as_of: int) -> None:
    machine = shards.machines[0]
    for name in (collection.name, *(one.shard for one in shards.machines)):
        machine.may_begin(name, "publication")
    with shards.workers(client.leases) as workers:
        steps.publish(shards, workers, format_, as_of)
