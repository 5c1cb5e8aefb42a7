"""Reading whatever it is: snapshots as of a time, changes between two, and listening to what happens after one.

A kind of reader says which times are complete and waits for them, and what it reads then. What callers pass, and the
errors for what cannot be read, are the same for all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from persist_lib.arguments import not_pickled, parse_seconds
from persist_lib.config import Config
from persist_lib.errors import InvalidUsage, NotComplete, TimedOut
from persist_lib.frontier import Antichain
from persist_lib.location.api import Consensus
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.changes import Changes, UpdatesPart
from persist_lib.relation.held import Named
from persist_lib.relation.reader_lease import K
from persist_lib.relation.row_selection import Asked
from persist_lib.runtime.ambient import Deadline, Runtime
from persist_lib.schema.schema import Schema
from persist_lib.shard.leases import Leased
from persist_lib.times import TimeLike, Times

if TYPE_CHECKING:
    import pyarrow.compute as pc

S = TypeVar("S")


class Around(Protocol):
    """What a reader uses of its client or shard."""

    @property
    def config(self) -> Config: ...
    @property
    def runtime(self) -> Runtime: ...
    @property
    def consensus(self) -> Consensus: ...


class Reader(Leased, Generic[S, K]):
    """Reads one shard or collection; `S` is what its snapshots are. Safe to use from several threads."""

    named: Named
    """What is read, in messages."""
    schema: Schema
    """The columns that it reads."""
    around: Around
    """The clock and the settings that it uses."""
    read_only: bool
    """Whether it holds no history."""

    _kept: K
    """The history that it keeps."""

    @property
    def since(self) -> Antichain:
        """The earliest frontier at which this handle can read. Snapshots before it raise SinceViolation."""
        return self._kept.since

    @abstractmethod
    def fetch_upper(self) -> Antichain:
        """Read from the location up to where it is complete."""

    @abstractmethod
    def _contents(self, as_of: int | None, asked: Asked, deadline: Deadline) -> S:
        """The contents as of a time, once it is complete; None: the newest complete time."""

    @abstractmethod
    def _reach(self, time: int | None, least: int, deadline: Deadline) -> int:
        """Wait until a time is complete, and return it. None: the newest one, and `least` or later."""

    @abstractmethod
    def _parts(self, from_: int | None, to: int, deadline: Deadline) -> Sequence[UpdatesPart]:
        """What the updates in `(from_, to]`, which are complete, are read from."""

    @abstractmethod
    def _reach_upper(self, target: Antichain, deadline: Deadline) -> Antichain:
        """Wait until upper is there, and return it. Raises TimedOut."""

    def snapshot(
        self, as_of: TimeLike | None = None, *, columns: Sequence[str] | None = None,
        key: Sequence[object] | None = None, key_from: Sequence[object] | None = None,
        key_to: Sequence[object] | None = None, keys: object = None, filter: pc.Expression | None = None,
        diff: bool = False, timeout: float | None = None,
    ) -> S:  # fmt: skip
        """Return the contents as of a time (default: the newest complete time). Waits until upper has passed that time.

        Where no time is complete yet, the newest contents are empty, and the snapshot's `as_of` is -1. Where times are
        a clock, and the library has chosen them all (`append_now`, `upsert`, `delete`, `restore`), a client that may
        write completes a time that the store's clock has passed, by an append of nothing; never in mode `append`.

        `as_of` is an integer. Where times are a clock, it may also be a datetime, a pandas or numpy timestamp, or a
        text like "2026-11-22T12:00Z" or "1 hour ago"; the contents include updates at that very time.

        Each row is there as often as it was added. With `diff` each distinct row is there once, with a column `_diff`,
        its multiplicity. Rows cannot be read where a multiplicity is negative: InvalidUsage names one. A shard's rows
        come in the order of keys, a collection's shard by shard.

        `columns` are the columns to read (default: all). With `diff`, rows that are equal in them are one row, with the
        sum of their multiplicities, and none where that is 0. `filter` is a pyarrow expression on any columns of the
        data, such as `pyarrow.compute.field("cents") > 100`: only rows for which it is true count. `key` reads one key,
        or all keys that start with these values of the leading key columns; `key_from` and `key_to` read the keys in
        `[from, to)`. `keys` reads many keys: a table or frame of the key columns, or a list of dicts, of values (of a
        key of one column) or of tuples. A key that is given twice is read once, and what is read of keys is held in
        memory. Only parts and row groups that can hold such keys and rows are fetched.

        Raises SinceViolation for a time before since, NotComplete when upper has not passed the time after `timeout`
        seconds, LeaseExpired when this handle was retired, and SchemaChanged for a time at which a collection's rows
        cannot be given in the columns that this reader was opened with. A reader that was opened without a schema gives
        those of earlier times in the columns that they had then.
        """
        asked = Asked(columns, key, key_from, key_to, keys, filter, diff)
        time = None if as_of is None else self._times().as_of(as_of)
        return self._contents(time, asked, self._deadline(timeout))

    def changes(self, from_: TimeLike | None, to: TimeLike | None = None, *, timeout: float | None = None) -> Changes:
        """Return all changes after the time `from_`, up to and with the time `to`: the updates in `(from_, to]`.

        `to` is by default the newest complete time. Waits until upper has passed `to`. None for `from_` means from the
        beginning on. The contents as of `from_` and the changes add up to the contents as of `to`; there are none where
        both are one time. Where a collection was handed over in between, the difference is among them, at its time.
        Raises InvalidUsage when `to` is before `from_`, SinceViolation when `from_` is before since (None: when any
        history was given up), as exact times before it are gone, and NotComplete when upper has not passed the time
        after `timeout` seconds. Times are given as in `snapshot`.
        """
        times, show = self._times(), self.schema.show
        first = None if (start := times.start(from_, "from_")) < 0 else start
        last = None if to is None else times.as_of(to, "to")
        deadline = self._deadline(timeout)
        if first is not None and last is not None and last < first:
            raise InvalidUsage(
                f"changes go forward: to must be {show(first)} or later, got {show(last)}", from_=from_, to=to
            )
        self._kept.check_since(first or 0)
        with Spending() as spent:
            end = self._reach(last, -1 if first is None else first, deadline)
        return Changes(self.named, self.schema, first, end, self._parts(first, end, deadline), spent)

    def wait_for_upper(self, frontier: object, timeout: float | None = None) -> Antichain:
        """Wait until upper is at or beyond `frontier`, and return upper. Raises TimedOut after `timeout` seconds."""
        return self._reach_upper(self._times().frontier(frontier, "frontier"), self._deadline(timeout))

    def downgrade_since(self, since: object) -> None:
        """Give up history before `since`. Reads of this handle that are under way can still be finished.

        Never moves back: a `since` before the handle's own changes nothing. Raises InvalidUsage for a read-only handle,
        and LeaseExpired when this handle was retired.
        """
        given = self._times().frontier(since, "since")
        if self.read_only:
            raise InvalidUsage("a read-only handle holds no history, so there is nothing to give up")
        self._kept.downgrade(given)

    __reduce__ = not_pickled("A reader", "Open one in the other process, or pass the splits of a snapshot")

    def _times(self) -> Times:
        return Times(self.schema.times, self.around.consensus.now)

    def _deadline(self, timeout: float | None) -> Deadline:
        return self.around.runtime.deadline(self.around.config.timeout_s if timeout is None else parse_seconds(timeout))

    def _not_there(self, upper: Antichain, target: int | Antichain | None, deadline: Deadline) -> TimedOut:
        is_clock = self.schema.times is not None
        hint = (
            '. If that time has passed and nothing came since then, write.advance_upper("now") says so'
            if is_clock
            else ""
        )
        waited = f"waited {deadline.timeout_s:g} s for upper to pass" if deadline.timeout_s else "upper has to pass"
        message = (
            f"{self.named}: {waited} {self._times().show(target)}, and upper is {self.schema.show(upper)}. "
            f"Nothing is lost; wait longer, or ask for an earlier time{hint}"
        )
        fields = {"timeout_s": deadline.timeout_s, "upper": upper, **self.named.fields}
        return NotComplete(message, as_of=target, **fields) if isinstance(target, int) else TimedOut(message, **fields)
