"""The terms of a shard: how long its history is kept and for which holds, what its columns are, and its end."""

from __future__ import annotations

import datetime as dt
from abc import ABC, abstractmethod
from typing import Literal

from persist_lib.arguments import parse_bytes, parse_integer
from persist_lib.core import commands as c
from persist_lib.core.state import Produced, State
from persist_lib.frontier import MAX_TIME
from persist_lib.ids import MOST_SEQUENCE, parse_hold_name, parse_producer_name
from persist_lib.schema.schema import Schema, check_schema
from persist_lib.shard.commit import Machine
from persist_lib.times import Times, is_duration, is_moment

OPAQUE_BYTES = 4096
"""The longest fencing value of a hold. It is limited, as each copy of the state carries it."""


class Terms(ABC):
    """The calls of a client that change the terms of a shard. Each is one transition; none reads or writes data."""

    @abstractmethod
    def machine(self, name: str) -> Machine:
        """The machine of the shard with this name."""

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

        History before all holds and readers is given up: the first hold of a shard without readers also ends it there.

        `opaque` (at most 4096 bytes) is the hold's fencing value from now on. `expected` is the fencing value that it
        must have now (None: the hold must not exist yet); "any" does not check. Raises HoldConflict when it has another
        value, and SinceViolation when `since` is before the hold's own, or is history that is given up already.
        """
        self._writable("set_hold")
        hold = parse_hold_name(hold)
        frontier = self._times(name, since).frontier(since, "since")
        opaque = parse_bytes(opaque, "opaque", 0, OPAQUE_BYTES)
        expected = None if expected is None else _parse_expected(expected)

        def build(state: State, _now: int) -> c.SetHold:
            current = state.holds.get(hold)
            fence = (current.opaque if current else None) if expected == "any" else expected
            return c.SetHold(hold, frontier, fence, opaque)

        self.machine(name).commit(build)

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

        SUBTLE: all of its numbers are new again then. One that is repeated after this is committed a second time.
        Raises InvalidUsage when there is no such producer, or when it has gone on since.
        """
        self._writable("forget_producer")
        producer = parse_producer_name(producer)
        sequence = parse_integer(expected, "expected", 0, MOST_SEQUENCE)
        self.machine(name).commit(lambda _state, _now: c.ForgetProducer(producer, sequence))

    def set_retention(self, name: str, distance: int | str | dt.timedelta | None) -> None:
        """Set the retention policy: keep `distance` times of history behind upper. None: no policy.

        Where times are a clock, `distance` may be a duration: a timedelta, or a text like "7 days". Without a policy,
        the shard keeps the history that readers and holds keep.
        """
        self._writable("set_retention")
        what, times = "the retention distance (times behind upper, or None)", None
        if is_duration(distance):
            times = self.machine(name).times().distance(distance, what)
        elif distance is not None:
            times = parse_integer(distance, what, 0, MAX_TIME)
        self.machine(name).commit(lambda _state, _now: c.SetRetention(times))

    def _times(self, name: str, *values: object) -> Times:
        """How a call reads times of the shard. The location is asked only if it depends on the shard's schema.

        SUBTLE: for integers it does not, but for the end of its clock; so a wrong value is refused before any request.
        """
        machine = self.machine(name)
        if machine.known is None and not any(map(is_moment, values)):
            return Times(None, machine.consensus.now)
        return machine.times()

    def evolve_schema(self, name: str, schema: Schema) -> None:
        """Add value columns at the end, all nullable. Older updates have null in them.

        Raises SchemaMismatch when `schema` is anything else than the newest schema with such columns added.
        """
        self._writable("evolve_schema")
        check_schema(schema)
        self.machine(name).commit(lambda state, _now: c.EvolveSchema(len(state.schemas) - 1, schema))

    def finish(self, name: str) -> None:
        """Make the shard a tombstone: it can never be read or written again, and its data is collected.

        Raises StillRead while a live reader or a hold needs it.
        """
        self._writable("finish")
        self.machine(name).commit(lambda _state, _now: c.Finish())


def _parse_expected(expected: object) -> bytes | Literal["any"]:
    if isinstance(expected, str) and expected == "any":
        return "any"
    return parse_bytes(expected, "the expected fencing value (or 'any')")
