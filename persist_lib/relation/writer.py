"""Writing: one handle, one writer id, appends by compare-and-set.

A writer registers at its first append. Each append builds a batch, and uploads what does not fit in the state. The
batch is then its share of a commit, of this shard alone or of several. Appends that `append_async` accepts wait in an
outbox, and are written as if they were made one by one.
"""

from __future__ import annotations

import msgspec

from persist_lib.core import commands as c
from persist_lib.core.state import Batch, State
from persist_lib.errors import LeaseExpired
from persist_lib.frontier import MINIMUM, TOP, Antichain
from persist_lib.ids import WriterId, parse_token
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.appends import Appended, Batching, Changed
from persist_lib.relation.commit import Share
from persist_lib.relation.registration import parse_bounds, whole
from persist_lib.relation.staged_commit import Prepared
from persist_lib.relation.staging import Staging
from persist_lib.runtime.ambient import Deadline
from persist_lib.runtime.threads import Lock
from persist_lib.shard.batches import Built
from persist_lib.times import Times

__all__ = ["Appended", "Batching", "Changed", "WriteHandle"]


class WriteHandle(Staging):
    """Writes to one shard. Safe to use from several threads; the appends of one handle are carried out in order."""

    @property
    def shard(self) -> str:
        """The shard's name."""
        return self.machine.shard

    @property
    def upper(self) -> Antichain:
        """The newest upper of the shard that this process has seen. `fetch_upper` reads it from the location."""
        return self.machine.upper

    @property
    def id(self) -> WriterId:
        """This writer's id, which is registered on first use. Raises LeaseExpired when the handle is closed."""
        return self._registration.id

    def fetch_upper(self) -> Antichain:
        """Read the shard's current upper from the location."""
        return self.machine.fetch().state.upper

    def append(
        self,
        updates: object,
        lower: object,
        new_upper: object,
        *,
        timeout: float | None = None,
        token: bytes | None = None,
    ) -> Appended:
        """Append those updates with times in `[lower, new_upper)` that the shard does not have yet.

        Use it when several writers write identical data: the first one to commit a time wins, and the others add what
        lies beyond it. If the shard has all of it already, the call succeeds and writes nothing. `timeout` and `token`
        are as in `compare_and_append`. Raises UpperMismatch when there is a gap before `lower`. Also raises it when the
        shard is closed for writing, as it cannot be told then whether the shard holds this data; an append of no
        updates succeeds there.
        """
        times = self._times()
        low, upper = parse_bounds(lower, new_upper, times)
        token = None if token is None else parse_token(token)

        def rest(built: Built, state: State) -> Batch:
            is_overlap = low < state.upper and state.upper < upper
            return built.trimmed(state.upper) if is_overlap else built.batch

        def append(deadline: Deadline) -> Appended:
            with Spending() as spent:
                tables = self._checked(updates, low, upper, times)
                if self.schema.constraints:
                    return self._append_rest(tables, low, upper, deadline, token, spent)
                builder = self._builder(deadline)
                built = self._build(builder, tables, low, upper, deadline, by_time=True)
                return self._commit(builder, built, rest, c.Append, deadline, token, spent)

        return self._in_turn(timeout, append)

    def advance_upper(self, new_upper: object, *, timeout: float | None = None) -> Appended:
        """Advance upper to `new_upper` without writing updates, from wherever upper is now.

        This says that there are no more updates before `new_upper`. Does nothing when upper is there already or beyond.
        Raises ShardFinished for a tombstone.
        """
        upper = self._times().frontier(new_upper, "new_upper")

        def from_upper(built: Built, state: State) -> Batch:
            # If another writer has moved upper beyond this batch, the batch stays as it is. It is then wholly covered,
            # which is a success.
            return msgspec.structs.replace(built.batch, lower=state.upper) if state.upper < upper else built.batch

        def advance(deadline: Deadline) -> Appended:
            if upper <= self.upper and upper <= (version := self._fetch_writable()).state.upper:
                return Appended(version.seqno, version.state.upper, 0, token=b"", attempts=0)
            built = Built(Batch(0, 0, MINIMUM, upper, MINIMUM, 0, 0, 0))
            with Spending() as spent:
                while True:
                    try:
                        return self._commit(self._builder(deadline), built, from_upper, c.Append, deadline, None, spent)
                    except LeaseExpired:  # registered again: it is the same wherever upper is by then
                        if self._registration.is_closed or deadline.has_passed():
                            raise

        return self._in_turn(timeout, advance)

    def finish(self, expected_upper: object | None = None, *, timeout: float | None = None) -> Appended:
        """Close the shard for writing, for ever: upper becomes the empty frontier. The data stays readable.

        If `expected_upper` is given, upper must be exactly there; otherwise this raises UpperMismatch. Without it, the
        call does nothing when the shard is closed already.
        """
        if expected_upper is None:
            return self.advance_upper(TOP, timeout=timeout)
        return self.compare_and_append([], expected_upper, TOP, timeout=timeout)


def share_of(
    write: WriteHandle, updates: object, bounds: tuple[Antichain, Antichain], times: Times, deadline: Deadline,
    token: bytes, held: list[Lock], producer: tuple[str, int] | None,
) -> Share:  # fmt: skip
    """A handle's share of an append to several shards. While its lock is in `held`, it appends nothing else.

    `updates` may be what staged writes were prepared to.
    """
    write._begin(deadline.remaining_s(), held)
    if isinstance(updates, Prepared):
        return updates.share(write.machine, token, deadline)
    builder = write._builder(deadline)
    built = write._build(builder, write._checked(updates, *bounds, times), *bounds, deadline)
    return write._share(builder, built, whole, c.CompareAndAppend, deadline, token, producer)
