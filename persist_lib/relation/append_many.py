"""Appends to several shards that are committed together: all of them or none.

Each append does what `WriteHandle.compare_and_append` does. The updates of all are built and uploaded first, then one
compare-and-set over the rows of all shards decides. This needs a Consensus with transactions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import force_setattr

from persist_lib.arguments import shown
from persist_lib.errors import InvalidUsage, PersistError
from persist_lib.frontier import Antichain
from persist_lib.ids import SeqNo, parse_producer
from persist_lib.location.api import Consensus
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.appends import Appended
from persist_lib.relation.commit import Share, commit_shares
from persist_lib.relation.registration import parse_bounds
from persist_lib.relation.writer import WriteHandle, share_of
from persist_lib.runtime.ambient import Deadline
from persist_lib.runtime.threads import Lock, giving_back
from persist_lib.shard.commit import Machine, Wanted
from persist_lib.shard.outcomes import REFUSED, forgotten, judge
from persist_lib.shard.refusals import named
from persist_lib.times import Times, once


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
        parse_bounds(self.expected_upper, self.new_upper, _times(self.write, self.write.machine.consensus.now))
        force_setattr(self, "producer", parse_producer(self.producer))


class _Checked(NamedTuple):
    write: WriteHandle
    updates: object
    bounds: tuple[Antichain, Antichain]
    times: Times
    producer: tuple[str, int] | None

    @property
    def shard(self) -> str:
        """The shard's name."""
        return self.write.shard


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
    _check_distinct([one.shard for one in checked])
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
        for one in sorted(checked, key=lambda one: one.shard):
            shares[one.shard] = share_of(
                one.write, one.updates, one.bounds, one.times, deadline, token, held, one.producer
            )
        return commit_shares([shares[one.shard] for one in checked], deadline, token, spent, beside)
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

    SUBTLE: the earlier call did all or nothing, so one shard that remembers it speaks for all. Others may have
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
    times = _times(write, clock_ms)
    bounds = parse_bounds(append.expected_upper, append.new_upper, times)
    return _Checked(write, append.updates, bounds, times, append.producer)


def _times(write: WriteHandle, clock_ms: Callable[[], int]) -> Times:
    return Times(write.schema.times, clock_ms)


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
