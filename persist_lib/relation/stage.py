"""Staged writes, the half of the tasks: processes anywhere write parts, and one commit appends all of them, or none.

    stage = write.stage()                             # registers one writer id, with a long lease
    staged = stage.ticket.write(tables)               # in any process, any number of times; a small value comes back
    write.append_staged([staged, ...])                # one compare-and-append, at the next time
    stage.close()                                     # retires the id; what was not appended is then an orphan

Parts are written at time 0, sorted and consolidated, and the commit says at which time they count (`Part.at`). So it
does not matter what other writers append in the meantime. A task that runs twice, or whose answer is lost, leaves
orphans, which the audit deletes once the id is retired: before that they could still be appended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from persist_lib.arguments import LONGEST_S, not_pickled, shown
from persist_lib.config import Config
from persist_lib.convert.by_key import without_times
from persist_lib.convert.updates import check_times, iter_updates
from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.cost import Cost
from persist_lib.core.outcomes import staged_before
from persist_lib.core.state import Outcome, Part, State
from persist_lib.core.sums import Sums
from persist_lib.errors import InvalidUsage, LeaseExpired
from persist_lib.frontier import Antichain
from persist_lib.ids import ShardId, WriterId
from persist_lib.kernel.consolidate import I64_MAX
from persist_lib.location.stack import open_stack
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.registration import Lent, lease_ended
from persist_lib.runtime.ambient import Runtime
from persist_lib.schema.schema import Schema
from persist_lib.shard.batches import Builder
from persist_lib.shard.commit import Machine
from persist_lib.shard.leases import Leased, Leases
from persist_lib.shard.numbers import filling_of
from persist_lib.times import Times

A = TypeVar("A", bound=Any)
"""The kind of the answers of tasks."""
LEASE_S = 86_400.0
"""How long a stage's id lives without a heartbeat. It is long, as a job may compute for hours before the first of its
tasks writes, and only tasks that write extend it. It delays nothing but the deletion of the stage's own orphans."""
STAGED_MOST = 4096
"""How many answers a stage should remember that were appended under it: some 30 bytes each, in the shard's state."""
PART_BYTES = 64 << 20
"""The most memory of the rows of one staged part. A task holds about four times that."""

_machines: dict[tuple[str, str, str], Machine] = {}


class Staged(msgspec.Struct, frozen=True, array_like=True):
    """What one task wrote: parts that nothing refers to yet. It is small: encode it with `msgspec.msgpack`, or pickle.

    `id` tells it from every other one. `bounds` are the times that the rows have of their own; None: the commit says
    the time. `most` is at least the absolute value of the sum of the diffs of any one data. `rows` counts those given.
    """

    id: bytes
    writer: WriterId
    shard: ShardId
    schema: int
    parts: tuple[Part, ...]
    sums: Sums
    most: int
    bounds: tuple[Antichain, Antichain] | None
    lease_ms: int
    rows: int = 0
    cost: Cost = Cost()

    @property
    def size(self) -> int:
        """Bytes of its parts."""
        return sum(part.size for part in self.parts)

    @property
    def is_empty(self) -> bool:
        """Whether it has no rows."""
        return not self.parts

    @property
    def name(self) -> tuple[WriterId, bytes]:
        """By which the shard remembers that it was appended, for as long as its stage is open."""
        return self.writer, self.id


def can_append(state: State, ticket: Ticket) -> bool:
    """Whether the stage of a ticket is open, and remembers no more answers than a stage should."""
    writer = state.writers.get(ticket.writer)
    return writer is not None and len(writer.staged) < STAGED_MOST


def token_of(ids: Iterable[bytes]) -> bytes:
    """What the token of an append of these answers ends with, and of no others: shards remember those of the last."""
    return blake2b(b"".join(sorted(ids)), digest_size=16).digest()


def appended_before(machine: Machine, staged: Sequence[Staged], token: bytes) -> Outcome | None:
    """The outcome of the append of all of these answers, if it was made; as far as the known version tells.

    Raises InvalidUsage where some of them were appended, and others not.
    """
    state = machine.state
    found = staged_before(state, [one.name for one in staged])
    if found and len(found) == len(staged):
        return max(found, key=lambda outcome: outcome.seqno)
    if found:
        raise machine.refused(r.Exists(f"{r.STAGED}{found[0].token.hex()}"))
    return next((outcome for outcome in reversed(state.outcomes) if outcome.token.endswith(token)), None)


class Ticket(msgspec.Struct, frozen=True):
    """What a process needs to write parts for a stage. It pickles, and has no secrets beside those of the URLs."""

    url: str
    consensus_url: str
    shard: ShardId
    schema: Schema
    schema_id: int
    writer: WriterId
    lease_ms: int
    bounds: tuple[Antichain, Antichain] | None
    config: Config

    def write(self, updates: object) -> Staged:
        """Write updates as parts, in bounded memory. Nothing refers to them before they are appended.

        `updates` is what `compare_and_append` takes, without `_time` unless the stage has bounds. A few rows are not
        written, but carried by the answer. If the call fails, its objects are deleted as far as possible; it can be
        made again. Extends the stage's lease when less than half of it is left. Raises LeaseExpired when it has ended.
        """
        return write_parts(self.machine(), self, updates)

    def checked(self, updates: object, machine: Machine) -> Iterator[pa.Table]:
        """What `write` takes as tables of `schema.updates`: at time 0, or with times within the stage's bounds."""
        filling = filling_of(machine)
        if self.bounds is None:
            yield from without_times(self.schema, updates, filling=filling)
            return
        times = Times(self.schema.times, machine.consensus.now)
        for table in iter_updates(self.schema, updates, times=times, filling=filling):
            check_times(table, *self.bounds, times)
            yield table

    def machine(self) -> Machine:
        """The shard as this process sees it, which is opened once in each process."""
        place = (self.url, self.consensus_url, self.shard)
        if (found := _machines.get(place)) is None:
            runtime = Runtime()
            stack = open_stack(self.url, self.consensus_url, self.config, runtime)
            machine = Machine(self.shard, stack.blob, stack.consensus, self.config, runtime, stack.reads)
            found = _machines.setdefault(place, machine)
        return found


class Stage(Leased):
    """One writer id for the parts of many tasks. `close` retires it: what is not appended then never can be."""

    def __init__(self, machine: Machine, leases: Leases, ticket: Ticket) -> None:
        self._machine, self._leases, self._ticket = machine, leases, ticket
        self._registration = Lent(machine, leases, ticket.writer)

    @property
    def id(self) -> WriterId:
        """The writer id."""
        return self._ticket.writer

    @property
    def ticket(self) -> Ticket:
        """What other processes need to write. Raises InvalidUsage for a location that lives in this process only."""
        if self._leases.urls is None:
            raise InvalidUsage(
                f"shard {self._machine.shard} lives in the memory of this process, so that no other can write to it. "
                "Use stage.write here, or a location such as file:./data",
                shard=self._machine.shard,
            )
        return self._ticket

    @property
    def local(self) -> Ticket:
        """The ticket, for this process only."""
        return self._ticket

    def write(self, updates: object) -> Staged:
        """Do in this process what `ticket.write` does in another."""
        return write_parts(self._machine, self._ticket, updates)

    def close(self) -> None:
        """Retire the id. Idempotent. Parts that were appended stay; the audit of orphans deletes the others."""
        self._registration.close()

    __reduce__ = not_pickled("A stage", "Pass its ticket")


def write_parts(machine: Machine, ticket: Ticket, updates: object) -> Staged:
    """Write updates as parts for the ticket's stage."""
    config, lease, rows = ticket.config, Lease(machine, ticket.writer, ticket.lease_ms), 0
    small = config.model_copy(update={"part_bytes": min(config.part_bytes, PART_BYTES)})
    deadline = machine.runtime.deadline(LONGEST_S)
    builder = Builder(machine, lease, ticket.schema, ticket.schema_id, deadline, small)

    def counted() -> Iterator[pa.Table]:
        nonlocal rows
        for table in ticket.checked(updates, machine):
            rows += table.num_rows
            yield table

    with Spending() as spent:
        laid = builder.lay(counted(), inline_bytes=config.inline_bytes)
    return Staged(
        machine.runtime.token(), ticket.writer, ticket.shard, ticket.schema_id, laid.parts, laid.sums,
        min(laid.most, I64_MAX), ticket.bounds, ticket.lease_ms, rows, spent.cost,
    )  # fmt: skip


class Lease:
    """The writer id of a stage, for uploads. Each call sees to it that the lease lasts, or raises when it has ended."""

    def __init__(self, machine: Machine, writer: WriterId, lease_ms: int) -> None:
        self._machine, self._writer, self._lease_ms = machine, writer, lease_ms
        self._look_at = -float("inf")

    def __call__(self) -> WriterId:
        if self._machine.runtime.monotonic() >= self._look_at:
            left_ms = self._left_ms()
            # Half of what is above half: so that this process looks again long before less than half is left for long.
            wait_s = max(left_ms - self._lease_ms / 2, self._lease_ms / 20) / 1000
            self._look_at = self._machine.runtime.monotonic() + wait_s
        return self._writer

    def _left_ms(self) -> float:
        machine, writer = self._machine, self._writer
        entry = machine.fetch().state.writers.get(writer)
        if entry is None:
            raise lease_ended(machine, writer)
        left = entry.lease_until - machine.consensus.now()
        if left >= self._lease_ms / 2:
            return left
        try:
            machine.commit(lambda _state, now: c.Heartbeat((writer,), now + self._lease_ms))
        except LeaseExpired as error:
            raise lease_ended(machine, writer) from error
        return self._lease_ms


def parse_staged(
    staged: object, kind: type[A], what: str, fields: Mapping[str, object], other: Callable[[A], str | None]
) -> list[A]:
    """A list of what tasks wrote for `what`, each of them once. Raises InvalidUsage.

    `other` names what else an answer was written for.
    """
    is_list = isinstance(staged, Iterable) and not isinstance(staged, (str, bytes, Mapping, np.ndarray))
    given: list[object] = list(staged) if is_list else [staged]  # type: ignore[call-overload]
    found: list[A] = []
    told = "persist.Staged" if kind is Staged else kind.__name__
    for one in given:
        if not isinstance(one, kind):
            raise InvalidUsage(
                f"staged must be a list of what ticket.write answered, {told}: got {shown(one)}. Nothing was appended",
                value=one,
            )
        if (place := other(one)) is not None:
            raise InvalidUsage(
                f"{what}: these parts were written for {place}. Nothing was appended; pass them to a writer of that",
                **fields, other=place,
            )  # fmt: skip
        found.append(one)
    if len({one.id for one in found}) < len(found):
        raise InvalidUsage(
            f"{what}: the answer of a task is there twice, and would be appended twice. Nothing was appended; pass the "
            "one answer of each task whose result counts",
            **fields,
        )
    if len({one.bounds for one in found}) > 1:
        raise InvalidUsage(
            f"{what}: these parts come from stages with different bounds of times. Nothing was appended; append those "
            "of each stage by themselves",
            **fields,
        )
    return found
