"""`persist streams`: what streams there are, who writes them, and what an operator may do about it."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from persist_lib.cli.json_values import clock, jsonable
from persist_lib.cli.render import labelled, plain_table
from persist_lib.cli.session import Session
from persist_lib.cli.shared_options import DryRun, Yes
from persist_lib.core import units
from persist_lib.errors import Locked, NotFound

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.client import Client
    from persist_lib.streams import Lock, Streams

Stream = Annotated[str | None, typer.Argument(metavar="[STREAM]", help="The stream's name. Default: all.")]


def show(session: Session, name: Stream = None) -> None:
    """Show one stream: how far it is sealed, what its writer keeps of its history, and what is not sealed yet.

    Without a name: all streams of the location, their shards, how far each is sealed, and who writes them, until when
    without a renewal. The sealed shard is a shard as any other: `persist read` and all other commands take it.

    \b
    persist streams show
    persist streams show --json | jq '.streams[] | {name, upper}'
    persist streams show readings --json | jq .unsealed_updates
    """
    from persist_lib import streams

    with session.open() as client, streams.open(client, mode="read") as runtime:
        if name is None:
            _list(session, client, runtime)
            return
        read = runtime.load(name)
        sealed, unsealed = (client.inspect(shard).state for shard in (read.record.sealed, read.record.unsealed))
        with read.contents() as found:
            count = found.unsealed.num_rows
            value = {
                "stream": name, "sealed": read.record.sealed, "unsealed": read.record.unsealed,
                "upper": jsonable(found.upper), "since": jsonable(sealed.since),
                "unsealed_updates": count, "unsealed_bytes": unsealed.size,
                "writers": sorted(sealed.writers.keys() | unsealed.writers.keys()), **clock(read.schema.times),
            }  # fmt: skip
            upper = read.schema.show(found.upper)
    lines = labelled(
        ("sealed", f"{read.record.sealed}, up to {upper}"), ("since", read.schema.show(sealed.since)),
        ("unsealed", f"{units.of(count, 'update')} in {read.record.unsealed} ({units.size(unsealed.size)})"),
        ("schema", str(read.schema)),
    )  # fmt: skip
    session.answer(value, lines)


def _list(session: Session, client: Client, runtime: Streams) -> None:
    """List all streams, and their writer."""
    found = runtime.list()
    table = plain_table("stream", "sealed shard", "unsealed shard", "since", "sealed up to")
    for one in found:
        show_time = client.inspect(one.sealed).state.schemas[-1].show
        table.add_row(one.name, one.sealed, one.unsealed, show_time(one.since), show_time(one.upper))
    value: dict[str, Any] = {}
    said: list[str] = []
    with suppress(NotFound):  # no stream was ever written
        lock = _lock(client)
        value = {**jsonable(lock), "held": lock.is_held(client.consensus.now())}
        said = [_said(client, lock)]
    session.answer({"streams": jsonable(found), "lock": value or None}, table, units.of(len(found), "stream"), *said)


def unlock(
    session: Session,
    epoch: Annotated[int | None, typer.Option(metavar="N", help="Only if this is still the lock's epoch.")] = None,
    dry_run: DryRun = False,
) -> None:
    """Free the writer's lock of a runtime that is gone, so that another one can write.

    A runtime that still lives commits nothing more once another one has taken the lock; what it acknowledged stays. A
    runtime with the same reentrance id takes over without this.

    \b
    persist streams unlock --dry-run
    persist streams unlock --epoch 7
    """
    from persist_lib import streams

    with session.open(read_only=dry_run) as client:
        lock = _lock(client)
        if epoch is not None and lock.epoch != epoch:
            raise Locked(
                f"the lock of {client.url} is at epoch {lock.epoch}, not at {epoch}. It was not broken",
                epoch=lock.epoch, owner=lock.owner, lease_until=lock.lease_until,
            )  # fmt: skip
        said = _said(client, lock)
        after = lock if dry_run else streams.break_lock(client, epoch=lock.epoch)
    if not lock.instance:
        text = f"{said}; there is nothing to break"
    else:
        text = f"would break it: {said}" if dry_run else f"broken, at epoch {after.epoch} now; before: {said}"
    session.answer({"before": jsonable(lock), "after": jsonable(after), "dry_run": dry_run}, text)


def wipe(
    session: Session,
    reentrance_id: Annotated[
        str, typer.Option("--reentrance-id", metavar="ID", help="Of the runtime that writes, to end it.")
    ] = "",
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Drop all streams of the location, for development. Nothing brings them back.

    Shards that are still read, or held, are left: close the readers, release the holds, and repeat it.

    \b
    persist streams wipe --dry-run
    persist streams wipe --yes
    """
    from persist_lib import streams
    from persist_lib.streams.stream_list import Catalog

    session.confirm(session.location, "dropping all its streams", "location", yes=dry_run or yes)
    with session.open(read_only=dry_run) as client:
        if dry_run:
            lock = _lock(client)
            records = Catalog(client).fetch()
            dropped, left = tuple(sorted(record.sealed for record in records.values())), tuple[str, ...]()
            held = f" ({_said(client, lock)})" if lock.is_held(client.consensus.now()) else ""
        else:
            done = streams.wipe_all(client, reentrance_id=reentrance_id)
            dropped, left, held = done.dropped, done.left, ""
    names = ", ".join(dropped) or "no streams"
    text = f"would drop {names}{held}" if dry_run else f"dropped {names}"
    text += f"; left, as they are still read: {', '.join(left)}" if left else ""
    session.answer({"dropped": list(dropped), "left": list(left), "dry_run": dry_run}, text)


def _lock(client: Client) -> Lock:
    from persist_lib import streams

    if (lock := streams.fetch_lock(client)) is None:
        raise NotFound(f"there are no streams in {client.url}, so there is no lock of their writer", url=client.url)
    return lock


def _said(client: Client, lock: Lock) -> str:
    if not lock.instance:
        return f"epoch {lock.epoch}: the lock is free"
    who = lock.owner or lock.instance
    with_id = f" with the reentrance id {lock.reentrance!r}" if lock.reentrance else ""
    left_s = (lock.lease_until - client.consensus.now()) / 1000
    until = f"its lease ends in {left_s:.0f} s" if left_s > 0 else "its lease has ended"
    return f"epoch {lock.epoch}: {who} holds the lock{with_id}; {until}"
