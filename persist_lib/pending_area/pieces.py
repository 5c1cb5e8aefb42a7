"""A piece: pending batches that follow one another and enter the shard in one transition, rewritten or adopted.

Small batches are rewritten together into one part. Large ones that are what this library would have written are
adopted: the trace refers to them where they are, and their bytes are not sent again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import pyarrow as pa

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.state import Batch as TraceBatch
from persist_lib.core.state import Part, State
from persist_lib.core.sums import Sums, total
from persist_lib.errors import Indeterminate
from persist_lib.format.descriptions import describe
from persist_lib.format.parts import within
from persist_lib.frontier import MINIMUM, at
from persist_lib.ids import PartKey
from persist_lib.location.wrap.deadline import within as within_deadline
from persist_lib.pending_area.listing import Content
from persist_lib.pending_area.objects import Batch
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import Schema
from persist_lib.shard.batches import Builder, Built
from persist_lib.shard.commit import Committed, Machine
from persist_lib.write.appending import inline_room, undoubted
from persist_lib.write.registration import Registration

PIECE_BYTES = 32 << 20
"""The most bytes of pending objects in one piece, unless a single one has more."""
PIECE_BATCHES = 1000
ADOPTED_MOST = 8
"""The most adopted objects in one batch: each is a run of its own for every reader, until it is compacted."""

Keys = tuple[tuple[PartKey, int], ...]


class Pick(NamedTuple):
    """A pending batch that goes on from `lower`: `table` has its updates from there on."""

    content: Content
    batch: Batch
    lower: int
    table: pa.Table

    @property
    def is_adopted(self) -> bool:
        """Whether its object enters the trace as it is."""
        return self.batch.part is not None and self.table.num_rows > 0


def pick_of(content: Content, batch: Batch, frontier: int) -> Pick:
    """The part of a pending batch that lies at or beyond the frontier."""
    table = batch.table if frontier <= content.lower else within(batch.table, frontier, None)
    return Pick(content, batch, frontier, table)


def fits(piece: list[Pick], size: int, pick: Pick) -> bool:
    """Whether a batch can enter the shard in the same transition as those before it, which have `size` bytes."""
    if not piece:
        return True
    is_full = size + pick.batch.size > PIECE_BYTES or len(piece) >= PIECE_BATCHES
    if is_full or pick.is_adopted != piece[0].is_adopted:
        return False
    # What is adopted counts from the batch's lower on, so only the first of several can be cut.
    return not pick.is_adopted or (len(piece) < ADOPTED_MOST and pick.lower == pick.content.lower)


class Committer:
    """Commits pieces for one absorber. `schemas` are those that the pieces' tables were read with."""

    def __init__(self, machine: Machine, registration: Registration, schemas: Sequence[Schema]) -> None:
        self._machine, self._registration, self._schemas = machine, registration, schemas

    def commit(self, piece: list[Pick], gone: Keys) -> Committed | r.Refusal:
        """Have a piece enter the shard. `gone` are the pending batches that become garbage with it.

        Raises Indeterminate when it is not known whether it did. The next pass looks at the shard, and goes on from
        there: its upper decides, so nothing is absorbed twice.
        """
        machine, registration = self._machine, self._registration
        deadline = machine.runtime.deadline(machine.config.timeout_s)
        builder = Builder(
            machine.shard, lambda: registration.register(deadline), self._schemas[-1], len(self._schemas) - 1,
            machine.blob, machine.config, machine.runtime, deadline,
        )  # fmt: skip
        built = self._adopted(piece) if piece[0].is_adopted else self._rewritten(builder, piece, deadline)
        token = machine.runtime.token()
        while True:
            command = c.Absorb(registration.register(deadline), token, built.batch, gone, 0)
            answer = machine.try_commit(partial(self._lasting, command), deadline.left_s(), token)
            if isinstance(answer, r.InlineFull):
                built = builder.externalised(built)
                continue
            if isinstance(answer, r.NotLive):
                registration.forget()
            return answer

    def _lasting(self, command: c.Absorb, _state: State, now: int) -> c.Absorb:
        """The command, with a lease from now on."""
        return msgspec.structs.replace(command, lease_until=now + self._machine.config.lease_ms)

    def _rewritten(self, builder: Builder, piece: list[Pick], deadline: Deadline) -> Built:
        lower, upper = at(piece[0].lower), at(piece[-1].content.upper)
        room = inline_room(self._machine, self._machine.state)
        tables = (pick.table for pick in piece if pick.table.num_rows)
        try:
            return within_deadline(deadline, lambda: builder.build(tables, lower, upper, inline_bytes=room))
        except Indeterminate as error:
            raise undoubted(self._machine.shard, error) from error

    def _adopted(self, piece: list[Pick]) -> Built:
        schema, parts, sums = self._schemas[-1], list[Part](), list[Sums]()
        for pick in piece:
            if pick.batch.part is not None:
                parts.append(pick.batch.part)
                sums.append(describe(schema, pick.table).sums)
        all_, is_cut = total(sums), piece[0].lower > piece[0].content.lower
        return Built(
            TraceBatch(
                0, 0, at(piece[0].lower), at(piece[-1].content.upper), MINIMUM, all_.count, all_.diff_sum,
                all_.fingerprint, tuple(parts), tuple(range(len(parts))), exact=not is_cut,
            )
        )  # fmt: skip
