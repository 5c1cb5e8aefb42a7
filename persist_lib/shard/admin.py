"""The terms of a shard: with which columns it is made and opened, how long its history is kept, and its end."""

from __future__ import annotations

import datetime as dt
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, TypeVar

import msgspec

from persist_lib.arguments import parse_bytes, parse_flag, parse_integer, shown
from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.formats import format_for, least_to_follow
from persist_lib.core.holds import layer_of
from persist_lib.core.leases import keepers
from persist_lib.core.plan.retention import check_own
from persist_lib.core.state import LAYERS, MARK, Produced, State, Version
from persist_lib.core.transitions import apply
from persist_lib.errors import InvalidUsage, NameTaken, NotAllowed, SchemaMismatch
from persist_lib.frontier import MAX_TIME, MINIMUM, Antichain
from persist_lib.ids import MOST_SEQUENCE, SeqNo, ShardId, parse_hold_name, parse_producer_name
from persist_lib.schema.evolution import adopted, place_of
from persist_lib.schema.schema import Schema, check_schema, with_models
from persist_lib.shard.commit import Committed, Machine
from persist_lib.shard.refusals import refused
from persist_lib.times import Times, is_duration, is_moment

OPAQUE_BYTES = 4096
"""The longest fencing value of a hold. It is limited, as each copy of the state carries it."""


T = TypeVar("T", c.SetHold, c.DowngradeHold)


class Downgraded(msgspec.Struct, frozen=True):
    """How the shard's since moved, or would, with a hold that was downgraded; and who keeps it there."""

    before: Antichain
    after: Antichain
    kept_by: tuple[str, ...]


class Terms(ABC):
    """The calls of a client that change the terms of a shard. Each is one transition; none reads or writes data."""

    machine: Callable[[str], Machine]
    """The machine of the shard with a name."""

    @abstractmethod
    def _writable(self, what: str) -> None:
        """Raise InvalidUsage if this client is read-only. `what` names the call that would change something."""

    def set_hold(
        self,
        name: str,
        hold: str,
        since: object,
        *,
        opaque: bytes = b"",
        expected: bytes | Literal["any"] | None = "any",
    ) -> None:
        """Create or move the hold with the name `hold`: it keeps history from `since` on, durably and without a lease.

        A hold never gives history up: what nothing else keeps, the hold of the retention does from then on. So without
        a policy all is kept. GivesUpHistory is raised for a time beyond the newest one that is complete. See
        `downgrade_hold`.

        `opaque` (at most 4096 bytes) is the hold's fencing value from now on. `expected` is the fencing value that it
        must have now (None: the hold must not exist yet); "any" does not check. Raises HoldConflict when it has another
        value, and SinceViolation when `since` is before the hold's own, or is history that is given up already.
        """
        self._writable("set_hold")
        opaque = parse_bytes(opaque, "opaque", 0, OPAQUE_BYTES)
        self.machine(name).commit(self._hold(name, hold, since, opaque, expected, c.SetHold))

    def downgrade_hold(
        self,
        name: str,
        hold: str,
        since: object,
        *,
        opaque: bytes | None = None,
        expected: bytes | Literal["any"] | None = "any",
        dry_run: bool = False,
    ) -> Downgraded:
        """Move a hold, or create it there, and give up the history before `since` that nothing else keeps.

        This is for the owner of a hold: what is given up can never be read again. The answer says how the shard's since
        moves, and who keeps it; with `dry_run` nothing is changed. `opaque` None keeps the fencing value as it is. The
        rest is as in `set_hold`: also here, GivesUpHistory is raised for a time beyond the newest one.
        """
        dry_run = parse_flag(dry_run, "dry_run")
        if not dry_run:
            self._writable("downgrade_hold")
        opaque = None if opaque is None else parse_bytes(opaque, "opaque", 0, OPAQUE_BYTES)
        machine, build = self.machine(name), self._hold(name, hold, since, opaque, expected, c.DowngradeHold)
        if not dry_run:
            done = machine.commit(build)
            return Downgraded(done.before.since, done.after.since, tuple(keepers(done.after)))
        version = machine.fetch()
        found = apply(version.state, SeqNo(version.seqno + 1), build(version.state, 0))
        if not isinstance(found, (State, r.AlreadyDone)):
            raise machine.refused(found)
        after = found if isinstance(found, State) else version.state
        return Downgraded(version.state.since, after.since, tuple(keepers(after)))

    def _hold(
        self, name: str, hold: str, since: object, opaque: bytes | None, expected: object, kind: type[T],
    ) -> Callable[[State, int], T]:  # fmt: skip
        """How the command about a hold is built from a state, its arguments checked."""
        hold = parse_hold_name(hold)
        frontier = self._times(name, since).frontier(since, "since")
        wanted = None if expected is None else _parse_expected(expected)

        def build(state: State, _now: int) -> T:
            current = state.holds.get(hold)
            fence = (current.opaque if current else None) if wanted == "any" else wanted
            kept = current.opaque if current is not None else b""
            return kind(hold, frontier, fence, kept if opaque is None else opaque)

        return build

    def release_hold(self, name: str, hold: str, *, expected: bytes | Literal["any"] = "any") -> None:
        """Drop the hold with the name `hold`, if its fencing value is `expected` ("any" does not check).

        The shard's since moves with the next reader or hold that moves. Raises HoldConflict when there is no such hold,
        or when it has another fencing value.
        """
        self._writable("release_hold")
        hold, expected = parse_hold_name(hold), _parse_expected(expected)

        def build(state: State, _now: int) -> c.ReleaseHold:
            current = state.holds.get(hold)
            return c.ReleaseHold(hold, (current.opaque if current else b"") if expected == "any" else expected)

        self.machine(name).commit(build)

    def producers(self, name: str) -> dict[str, Produced]:
        """The producers that the shard remembers, by name: the last `sequence` of each, and where it was committed.

        Each also has the `upper` that this append left, and when it was (`now`, ms of the store's clock).
        """
        return dict(sorted(self.machine(name).fetch().state.producers.items()))

    def forget_producer(self, name: str, producer: str, *, expected: int) -> None:
        """Forget a producer whose last sequence number is still `expected`. It must never append again.

        All of its numbers are new again then. One that is repeated after this is committed a second time.
        Raises InvalidUsage when there is no such producer, or when it has continued since.
        """
        self._writable("forget_producer")
        producer = parse_producer_name(producer)
        sequence = parse_integer(expected, "expected", 0, MOST_SEQUENCE)
        self.machine(name).commit(lambda _state, _now: c.ForgetProducer(producer, sequence))

    def set_retention(self, name: str, distance: int | str | dt.timedelta | None, *, layer: str = "") -> None:
        """Set the retention policy: keep `distance` times of history behind upper. None: no policy.

        Where times are a clock, `distance` may be a duration: a timedelta, or a text like "7 days". Without a policy,
        the shard keeps the history that readers and holds keep. The policy holds history from this call on, by a hold
        named `retention`; what is older than it goes with the next `retention` or `maintain`. `layer` is for layers
        above shards: the shard is theirs from then on.
        """
        self._writable("set_retention")
        layer = parse_layer(layer)
        what, times = "the retention distance (times behind upper, or None)", None
        check_own(distance, what)
        if is_duration(distance):
            times = self.machine(name).times().distance(distance, what)
        elif distance is not None:
            times = parse_integer(distance, what, 0, MAX_TIME)
        self.machine(name).commit(lambda _state, _now: c.SetRetention(times, layer))

    def _times(self, name: str, *values: object) -> Times:
        """How a call reads times of the shard. The location is asked only if it depends on the shard's schema.

        For integers it does not, but for the end of its clock; so a wrong value is refused before any request.
        """
        machine = self.machine(name)
        if machine.known is None and not any(map(is_moment, values)):
            return Times(None, machine.consensus.now)
        return machine.times()

    def evolve_schema(self, name: str, schema: Schema) -> None:
        """Make `schema` the newest one: what `Schema.add`, `rename`, `widen`, `drop`, `reorder` and `relax` make of it.

        Older updates have the default of an added column in it, or null. Handles that are open stay in their columns.
        Raises SchemaMismatch when `schema` is anything else than the newest schema so changed.
        """
        self._writable("evolve_schema")
        evolve_schema(self.machine(name), check_schema(schema))

    def finish(self, name: str) -> None:
        """Make the shard a tombstone: it can never be read or written again, and its data is collected.

        Raises StillRead while a live reader or a hold needs it.
        """
        self._writable("finish")
        self.machine(name).commit(lambda _state, _now: c.Finish())


def evolve_schema(machine: Machine, schema: Schema, number: int | None = None) -> None:
    """Make a schema the newest one of a shard, as the one with this number. Raises SchemaMismatch."""

    def build(state: State, _now: int) -> c.EvolveSchema:
        expected = len(state.schemas) if number is None else number
        return c.EvolveSchema(expected - 1, adopted(state.schemas[-1], schema))

    state = machine.fetch().state
    least = least_to_follow(state.schemas[-1], adopted(state.schemas[-1], schema))
    if state.format < least:  # the columns are asked for, and so is what they need
        machine.try_commit(lambda _state, _now: c.Upgrade(least))
    machine.commit(build)


def check_evolves(shard: str, version: Version, schema: Schema) -> None:
    """Raise SchemaMismatch where a shard would refuse to have this schema next. Changes nothing."""
    state, older = version.state, version.state.schemas[-1]
    newer = adopted(older, schema)
    least = least_to_follow(older, newer)
    moved = msgspec.structs.replace(state, format=max(state.format, least), member="")  # as its owner
    answer = apply(moved, SeqNo(version.seqno + 1), c.EvolveSchema(len(state.schemas) - 1, newer))
    if not isinstance(answer, (State, r.AlreadyDone)):
        raise refused(ShardId(shard), answer)


def parse_layer(layer: object) -> str:
    """Check that this is a layer above shards, or empty for none."""
    if not isinstance(layer, str) or layer not in {"", *LAYERS}:
        raise InvalidUsage(f"layer is one of {', '.join(sorted(LAYERS))}, or left out: got {shown(layer)}", layer=layer)
    return str(layer)


def claim(machine: Machine, layer: str) -> None:
    """Make a shard a layer's: from then on it lets nothing else append. One commit the first time. Raises OfLayer."""

    def build(state: State, _now: int) -> c.SetHold:
        if (found := layer_of(state)) not in {"", layer}:
            raise machine.refused(r.OfLayer(found))
        mark = state.holds.get(MARK)
        return c.SetHold(MARK, mark.since if mark else state.since, mark.opaque if mark else None, layer.encode())

    if layer_of(machine.state) != layer:
        machine.commit(build)


def retire_writers(machine: Machine, *, but: str | None = None) -> None:
    """Retire all live ids that append, but for those of one owner. Ids of maintenance stay: they change no contents."""
    writers = machine.fetch().state.writers
    for id_ in sorted(id_ for id_, one in writers.items() if one.purpose == "ingest" and one.owner != but):
        retire = c.Retire(id_)
        machine.try_commit(lambda _state, _now, retire=retire: retire)  # type: ignore[misc] # refused: it has expired


def _parse_expected(expected: object) -> bytes | Literal["any"]:
    if isinstance(expected, str) and expected == "any":
        return "any"
    return parse_bytes(expected, "the expected fencing value (or 'any')")


def create_if_missing(
    machine: Machine, schema: Schema, format_: int | None, check: Callable[[], None] | None = None
) -> None:
    """Create the shard if there is none, in this format (None: the one in which this release creates shards).

    `check` raises NameTaken if its name is something else's. It is called before the shard is made, and as long as
    nothing has written to it, as something else may be given the name at the same moment. That is there, too, then: so
    who made the shard takes it away, and others only refuse to write to it. Raises MemberOf for a shard that was
    promoted.
    """
    answer: Committed | r.Refusal | None = None
    if machine.try_fetch() is None:
        if check is not None:
            check()
        answer = machine.try_commit(lambda _state, _now: c.Create(schema, format_for(format_, schema)))
        if isinstance(answer, r.Exists):
            machine.fetch()  # another client created it at the same moment
        elif not isinstance(answer, Committed):
            raise machine.refused(answer)
    machine.check_same(machine.state)
    if check is None or machine.state.upper != MINIMUM:
        return
    try:
        check()
    except NameTaken as taken:
        machine.check_same(machine.fetch().state)  # it may be the name of what the shard was promoted to just now
        if isinstance(answer, Committed):
            _take_away(machine, taken)
        raise


def _take_away(machine: Machine, taken: NameTaken) -> None:
    """Finish a shard that this process has just made; not if a program that knows nothing of this has written to it."""

    def build(state: State, _now: int) -> c.Finish:
        if state.upper != MINIMUM:
            raise taken
        return c.Finish()

    with suppress(NotAllowed):
        machine.try_commit(build)


def known_schema(machine: Machine, schema: Schema) -> tuple[int, Schema]:
    """The number of this schema in the shard, and what the shard knows of it: the ids of its columns.

    Raises SchemaMismatch when the shard does not have it.
    """
    schemas = machine.state.schemas
    place = place_of(schema, schemas)
    if place is None:
        schemas = machine.fetch().state.schemas
        place = place_of(schema, schemas)
    if place is None:
        raise SchemaMismatch(
            f"shard {machine.shard} has the schema {schemas[-1]}, and was opened with {schema}. "
            "Open it with its own schema, or add columns with client.evolve_schema",
            shard=machine.shard, actual=schemas[-1], expected=schema,
        )  # fmt: skip
    return place, with_models(schemas[place], schema)


def schema_id(machine: Machine, schema: Schema) -> int:
    """The number that this schema has in the shard. Raises SchemaMismatch when the shard does not have it."""
    return known_schema(machine, schema)[0]
