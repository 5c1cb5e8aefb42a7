"""Writing: one handle, one writer id, appends by compare-and-set.

A writer registers at its first append. Each append builds a batch, and uploads what does not fit in the state. The
batch is then its share of a commit, of this shard alone or of several: then the updates of all are built and uploaded
first, and one compare-and-set over the rows of all shards decides, which needs a Consensus with transactions. Appends
that `append_async` accepts wait in an outbox, and are written as if they were made one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import force_setattr

from persist_lib.arguments import shown
from persist_lib.core import commands as c
from persist_lib.core.state import Batch, State
from persist_lib.errors import InvalidUsage, LeaseExpired, PersistError
from persist_lib.frontier import MINIMUM, TOP, Antichain
from persist_lib.ids import SeqNo, WriterId, parse_producer, parse_token
from persist_lib.location.api import Consensus
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.appends import Appended, Batching, Changed
from persist_lib.relation.commit import Appending, Share, commit_shares
from persist_lib.relation.registration import parse_bounds, whole
from persist_lib.relation.staged_commit import Prepared
from persist_lib.relation.staging import Staging
from persist_lib.runtime.ambient import Deadline
from persist_lib.runtime.threads import Lock, giving_back
from persist_lib.shard.batches import Built
from persist_lib.shard.commit import Machine, Wanted
from persist_lib.shard.outcomes import REFUSED, forgotten, judge
from persist_lib.shard.refusals import named
from persist_lib.times import Times, once

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
                return self._commit(builder, built, self._how(c.Append, token, place=rest), deadline, spent)

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
                        how = self._how(c.Append, None, place=from_upper)
                        return self._commit(self._builder(deadline), built, how, deadline, spent)
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
    return write._share(builder, built, Appending(whole, c.CompareAndAppend, token, producer), deadline)


class Append(msgspec.Struct, frozen=True):
    """One of several appends to be committed together: the writer, and the arguments of its `compare_and_append`."""

    write: WriteHandle
    updates: object
    expected_upper: object
    new_upper: object
    producer: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.write, WriteHandle):
            raise _no_append(self)
        parse_bounds(self.expected_upper, self.new_upper, self.write._times())
        force_setattr(self, "producer", parse_producer(self.producer))


class _Checked(NamedTuple):
    write: WriteHandle
    updates: object
    bounds: tuple[Antichain, Antichain]
    times: Times
    producer: tuple[str, int] | None


def append_together(
    appends: Sequence[Append],
    consensus: Consensus,
    machine_of: Callable[[str], Machine],
    deadline: Deadline,
    token: bytes | None,
    beside: Sequence[Wanted] = (),
) -> list[Appended]:
    """Commit all appends, or raise why none was committed. Writers must be of the client whose `machine_of` this is.

    `beside` are transitions of other shards that are committed with the appends: all of it or nothing.
    """
    consensus.compare_and_set_many({})  # says whether it can, before anything is uploaded
    clock_ms = once(consensus.now)
    checked = [_check(append, machine_of, clock_ms) for append in appends]
    _check_distinct([one.write.shard for one in checked])
    if not checked:
        return []
    with Spending() as spent:
        try:
            return _append(checked, deadline, token or deadline.runtime.token(), spent, beside)
        except REFUSED as refusal:
            if token is None:
                raise
            return _committed_before(checked, token, refusal, spent)


def _append(
    checked: Sequence[_Checked], deadline: Deadline, token: bytes, spent: Spending, beside: Sequence[Wanted]
) -> list[Appended]:
    shares: dict[str, Share] = {}
    held: list[Lock] = []
    give_back = giving_back(held)
    try:
        # In the order of names: every such call takes its locks in this order, so none waits for another for ever.
        for one in sorted(checked, key=lambda one: one.write.shard):
            shares[one.write.shard] = share_of(
                one.write, one.updates, one.bounds, one.times, deadline, token, held, one.producer
            )
        return commit_shares([shares[one.write.shard] for one in checked], deadline, token, spent, beside)
    except Exception:
        for share in shares.values():
            share.give_up()
        raise
    finally:
        give_back()


def _committed_before(
    checked: Sequence[_Checked], token: bytes, refusal: PersistError, spent: Spending
) -> list[Appended]:
    """What an earlier call with this token did. Raises `refusal` if it did nothing, Indeterminate if that is unknown.

    The earlier call did all or nothing, so one shard that remembers it speaks for all. Others may have
    forgotten it.
    """
    verdicts = [judge(one.write.machine, token, *one.bounds) for one in checked]
    if any(verdict.answer == "committed" for verdict in verdicts):
        cost = spent.cost
        return [
            Appended(verdict.seqno or SeqNo(0), one.bounds[1], 0, token, 0, cost)
            for one, verdict in zip(checked, verdicts, strict=True)
        ]
    if all(verdict.answer == "unknown" for verdict in verdicts):
        raise forgotten(named([one.write.machine.shard for one in checked]), token, verdicts[0]) from refusal
    raise refusal


def _check(append: object, machine_of: Callable[[str], Machine], clock_ms: Callable[[], int]) -> _Checked:
    if not isinstance(append, Append):
        raise _no_append(append)
    write = append.write
    if (machine := machine_of(write.shard)) is not write.machine:
        write.machine.check_same(machine.state)  # it may be of another epoch
        raise InvalidUsage(
            f"shard {write.shard}: this writer was opened by another client. All writers in one call must be handles "
            "of the client that makes the call. Nothing was written",
            shard=write.shard,
        )
    times = Times(write.schema.times, clock_ms)
    bounds = parse_bounds(append.expected_upper, append.new_upper, times)
    return _Checked(write, append.updates, bounds, times, append.producer)


def _no_append(found: object) -> InvalidUsage:
    return InvalidUsage(
        "compare_and_append_many takes persist.Append(write, updates, expected_upper, new_upper), where `write` is a "
        f"handle that client.open_writer returned: got {shown(found)}"
    )


def _check_distinct(shards: Sequence[str]) -> None:
    twice = sorted(shard for shard, count in Counter(shards).items() if count > 1)
    if twice:
        raise InvalidUsage(
            f"shard {', '.join(twice)} is appended to twice in one call: make one append of both. Nothing was written",
            shard=twice[0],
        )
