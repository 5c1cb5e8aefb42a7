"""Collections with a pending area: making, reading, absorbing and deleting them, by a client.

A collection is a shard. Whatever reads shards reads what was absorbed; a reader of the pending area reads beyond that.
"""

from __future__ import annotations

from contextlib import suppress

from persist_lib.arguments import check_type, parse_flag
from persist_lib.client import Client
from persist_lib.core import refusals as r
from persist_lib.core.formats import PENDING_AREA
from persist_lib.core.leases import needed_by
from persist_lib.errors import InvalidUsage, ShardFinished, StillRead
from persist_lib.format.paths import pending_prefix
from persist_lib.frontier import MAX_TIME
from persist_lib.location.wrap.around import listed
from persist_lib.pending_area.absorbing import LAYER, Choice, absorb_shard, own
from persist_lib.pending_area.late import PAGE, discard_keys, known_of
from persist_lib.pending_area.listing import read_listing
from persist_lib.pending_area.outcome import Absorbed
from persist_lib.pending_area.reader import PendingReader
from persist_lib.pending_area.writer import check_no_constraints, parse_writer
from persist_lib.schema.schema import Schema, check_schema

CLIENT = 'persist.open("file:./data")'


def create(client: Client, name: str, schema: Schema) -> PendingReader:
    """Make a collection with a pending area, unless it exists, and return a reader of it.

    From then on anybody may put batches there, and nothing else appends to its shard (OfLayer). Nothing else has to be
    done for a writer. Raises SchemaMismatch when
    there is a shard of that name with another schema, and InvalidUsage for a schema with constraints and for a shard
    of a format before 3.
    """
    check_no_constraints(check_schema(schema))
    client = check_type(client, Client, "client", CLIENT)
    client.open_writer(name, schema).close()
    own(client.machine(name))
    return acquire_read_handle(client, name)


def acquire_read_handle(client: Client, name: str) -> PendingReader:
    """Return a reader of a collection: at its current since, of the newest version of what was absorbed.

    Raises NotFound when there is no such shard.
    """
    client = check_type(client, Client, "client", CLIENT)
    return PendingReader(client.open_reader(name, purpose="pending area"))


def absorb(client: Client, name: str, *, dry_run: bool = False) -> Absorbed:
    """Absorb what was put into a collection's pending area, and make garbage of what nobody needs.

    Any number of processes may do this at once, and each may die anywhere; doing it again goes on. Where writers
    disagree about a time, nothing from then on is absorbed: the answer says so, and `choose` goes on. With `dry_run`
    nothing is changed, and the answer says what would be done. Garbage is deleted by `client.maintain`.

    Raises NotFound when there is no such shard, and Indeterminate when it is not known whether the last piece was
    absorbed: repeat the call.
    """
    return _absorb(client, name, None, dry_run=parse_flag(dry_run, "dry_run"))


def choose(client: Client, name: str, writer: str, through: object = None, *, dry_run: bool = False) -> Absorbed:
    """Absorb what `writer` says where writers disagree, and what all agree on elsewhere.

    This is for an operator who knows which writer is right. The choice is for batches that begin before the time
    `through`; by default for those around the first time in dispute. What others say about these times becomes
    garbage. What is in the shard already is not changed. Raises InvalidUsage when nothing is in dispute.
    """
    dry_run, writer = parse_flag(dry_run, "dry_run"), parse_writer(writer)
    client, end = check_type(client, Client, "client", CLIENT), None
    if through is not None:
        found = client.machine(name).times().frontier(through, "through")
        end = MAX_TIME if found.time is None else found.time
    looked = _absorb(client, name, None, dry_run=True)
    disputed = [one for one in looked.disagreements if not one.is_late]
    if not disputed:
        raise InvalidUsage(f"collection {name}: no writers disagree about a time that is to be absorbed", shard=name)
    if all(writer not in names for names in disputed[0].writers):
        sides = " or ".join(", ".join(names) for names in disputed[0].writers)
        raise InvalidUsage(f"collection {name}: {writer} says nothing about it; choose one of {sides}", writer=writer)
    return _absorb(client, name, Choice(writer, disputed[0].time + 1 if end is None else end), dry_run=dry_run)


def delete(client: Client, name: str) -> None:
    """Delete a collection: close its shard for good, and delete everything that is pending. Idempotent.

    Raises StillRead while a reader or a hold needs it. Batches that are put later are deleted by `absorb`, which
    `persist pending absorb` and the asset in Dagster do from time to time.
    """
    client = check_type(client, Client, "client", CLIENT)
    state = client.machine(name).fetch().state
    if not state.is_finished():
        if by := needed_by(state):
            raise StillRead(
                f"collection {name} is still read by {', '.join(by)}; close the readers and release the holds first. "
                "Nothing was deleted",
                shard=name, by=by,
            )  # fmt: skip
        with client.open_writer(name, state.schemas[-1], layer=LAYER) as write:
            write.finish()
        with suppress(ShardFinished):
            client.finish(name)
    absorb_shard(client.machine(name), client.leases)


def _absorb(client: Client, name: str, choice: Choice | None, *, dry_run: bool) -> Absorbed:
    client = check_type(client, Client, "client", CLIENT)
    machine = client.machine(name)
    if client.read_only and not dry_run:
        raise InvalidUsage("absorb needs a client that may write; this one was opened with read_only=True")
    state = machine.fetch().state
    check_no_constraints(state.schemas[-1])
    if state.format < PENDING_AREA and not dry_run:
        raise machine.refused(r.NeedsFormat("a pending area", PENDING_AREA, state.format))
    return absorb_shard(machine, client.leases, choice=choice, dry_run=dry_run)


def discard(client: Client, name: str, writer: str, *, dry_run: bool = False) -> int:
    """Make garbage of the late batches of one writer, and return of how many.

    This is for late batches that say something else than the shard, once they were looked at: `absorb` leaves them
    where they are. Batches whose times the shard does not have yet are never touched. Raises NotFound.
    """
    dry_run, writer = parse_flag(dry_run, "dry_run"), parse_writer(writer)
    machine = check_type(client, Client, "client", CLIENT).machine(name)
    state = machine.fetch().state
    prefix = f"{pending_prefix(machine.shard)}{writer}/"
    listing = read_listing(machine.shard, listed(machine.blob, prefix), known_of(state))
    keyed = listing.keyed(listing.late(state.upper))
    if dry_run:
        return len(keyed)
    return sum(discard_keys(machine, keyed[start : start + PAGE]) for start in range(0, len(keyed), PAGE))
