"""Writing a lone shard: one place, whose own state says all that a call has to know."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import msgspec
import pyarrow as pa

from persist_lib.convert.filling import Filling
from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.state import Outcome, Version
from persist_lib.errors import Indeterminate, LeaseExpired, PersistError, UpperMismatch
from persist_lib.format.parts import within as within_times
from persist_lib.frontier import MINIMUM, Antichain, at
from persist_lib.ids import SeqNo
from persist_lib.kernel.columns import at_time
from persist_lib.kernel.consolidate import consolidate
from persist_lib.kernel.keyset import Counts
from persist_lib.location.wrap.deadline import within
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.appends import Appended, Batching, Changed
from persist_lib.relation.commit import Appending, Kind, Place, Share, commit_shares
from persist_lib.relation.key_lookup import check_constraints
from persist_lib.relation.registration import (
    Named,
    Registration,
    format_since,
    inline_room,
    next_time,
    outrun,
    undoubted,
    whole,
)
from persist_lib.relation.verbs import NOTHING, UNKNOWN, Change, Changes, Turn, Verbs
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import Schema
from persist_lib.shard.batches import Builder, Built
from persist_lib.shard.commit import Machine
from persist_lib.shard.leases import Leases
from persist_lib.shard.numbers import filling_of
from persist_lib.shard.outcomes import Verdict, committed_before, find_since, judge

Batched = tuple[Builder, Built]
"""What one commit sends, and what uploaded it."""


class LoneWriter(Verbs[Batched, None, Appended, Changed]):
    """The steps of a writer's calls on one shard, under one writer id."""

    def __init__(
        self, machine: Machine, leases: Leases, schema: Schema, schema_id: int, batching: Batching | None = None,
        owner: str = "", registration: Registration | None = None, layer: str = "",
    ) -> None:  # fmt: skip
        self.machine, self.schema, self._schema_id, self._leases = machine, schema, schema_id, leases
        self._registration = registration or Registration(machine, leases, "ingest", owner, layer)
        config, runtime, now = machine.config, machine.runtime, machine.consensus.now
        super().__init__(f"shard {machine.shard}", machine.shard, runtime, config, now, batching)

    def _filling(self, *, is_dry: bool = False) -> Filling:
        return filling_of(self.machine, is_dry=is_dry) if self.schema.fills else Filling(self.machine.runtime)

    def _fetch_writable(self) -> Version:
        """The newest version, for a call that has nothing to write. Raises if every write would be refused."""
        if self._registration.is_closed:
            raise self._registration.closed_already()
        version = self.machine.fetch()
        if version.state.is_finished():
            raise self.machine.refused(r.Finished())
        return version

    # --- accepted appends -------------------------------------------------------------------------------------------

    def _check_verb(self, verb: str) -> None:
        if verb == "append_async" and self._registration.is_closed:
            raise self._registration.closed_already()

    def _producing(self) -> Machine:
        return self.machine

    def _bring(self, tables: Iterator[pa.Table], bounds: tuple[Antichain, Antichain], deadline: Deadline) -> Batched:
        builder = self._builder(deadline)
        return builder, self._build(builder, tables, *bounds, deadline)

    def _brought_again(self, brought: Batched, deadline: Deadline) -> Batched:
        return self._builder(deadline), brought[1]

    def _count_of(self, brought: Batched) -> int:
        return brought[1].batch.count

    def _commit_brought(
        self, brought: Batched, _bounds: tuple[Antichain, Antichain], deadline: Deadline, token: bytes | None,
        producer: tuple[str, int] | None, spent: Spending,
    ) -> Appended:  # fmt: skip
        return self._commit(*brought, self._how(c.CompareAndAppend, token, producer), deadline, spent)

    def _committed_before(
        self, token: bytes, bounds: tuple[Antichain, Antichain], count: int, refusal: PersistError, spent: Spending
    ) -> Appended:
        seqno = committed_before(self.machine, token, *bounds, refusal)
        return Appended(seqno, bounds[1], count, token, 0, spent.cost)

    def _retire(self) -> None:
        self._registration.close()

    # --- changes at the next time -----------------------------------------------------------------------------------

    def _judge(self, known: Named, deadline: Deadline) -> Verdict:
        return within(deadline, partial(judge, self.machine, *known))

    def _likely_turn(self) -> Turn[None] | None:
        version = None if self._registration.is_closed else self.machine.alone_at
        return None if version is None or version.state.upper.is_top() else self._turn_at(version)

    def _next_turn(self, deadline: Deadline) -> Turn[None]:
        return self._turn_at(within(deadline, self._fetch_writable))

    def _turn_at(self, version: Version) -> Turn[None]:
        return Turn(version.state.upper, ((self.machine, version),), lambda table: (table,), None)

    def _try_turn(
        self, call: Change, _turn: Turn[None], changes: Changes, named: Named, deadline: Deadline
    ) -> Changed | None:
        token, lower, upper = named
        builder, tables = self._builder(deadline), iter((at_time(changes.table, named.time),))
        built = self._build(builder, tables, lower, upper, deadline, is_checked=call.is_checked)
        how, spent = Appending(whole, c.CompareAndAppend, token, call.producer), call.spent
        try:
            done = self._commit(builder, built, how, deadline, spent)
        except UpperMismatch:
            return None
        return self._answer(
            done.upper, done.count, done.token, spent, named.time, changes.counts, done.seqno, done.attempts
        )

    def _answer(
        self, upper: Antichain, count: int, token: bytes, spent: Spending, time: int | None = None,
        counts: Counts = NOTHING, seqno: SeqNo = UNKNOWN, attempts: int = 0,
    ) -> Changed:  # fmt: skip
        return Changed(seqno, upper, count, token, attempts, spent.cost, time, *counts)

    def _plain(self, answer: Changed) -> Appended:
        return Appended(*msgspec.structs.astuple(answer)[: len(Appended.__struct_fields__)])

    def _is_closed(self) -> bool:
        return self._registration.is_closed

    def _gap(self, lower: Antichain, upper: Antichain) -> PersistError:
        return self.machine.refused(r.WrongUpper(lower, upper))

    def _outrun(self, deadline: Deadline, races: int) -> PersistError:
        return outrun(self.machine, self.schema, deadline, races, " or with fewer keys at once")

    def _is_placed(self) -> bool:
        """Whether a server puts appends where upper is (`core.outcomes`). Constraints are checked at one upper."""
        return self.machine.places_appends and not self.schema.constraints

    def _append_placed(
        self, table: pa.Table, deadline: Deadline, token: bytes | None, since: SeqNo | None,
        producer: tuple[str, int] | None,
    ) -> Appended:  # fmt: skip
        machine, races = self.machine, 0
        with Spending() as spent:
            while True:
                if since is not None and token is not None:
                    found = within(deadline, partial(find_since, machine, token, since))
                    if isinstance(found, Outcome):
                        return Appended(found.seqno, found.upper, 0, token, 0, spent.cost)
                    since = found
                if not table.num_rows:
                    return self._nothing(deadline, spent)
                sent = token or format_since(machine.runtime, machine.seen)
                # The next time as far as this process knows. It stays in the data if it is that; else it is moved.
                upper = machine.upper
                time = 0 if upper.is_top() else next_time(self.schema, self._what, upper, self._runtime, self._now)
                builder = self._builder(deadline)
                tables = iter((at_time(table, time),))
                built = self._build(builder, tables, MINIMUM, at(time + 1), deadline, is_checked=True)
                try:
                    return self._commit(
                        builder, built, Appending(whole, c.AppendNow, sent, producer, since), deadline, spent
                    )
                except LeaseExpired:
                    races += 1
                    if self._registration.is_closed:
                        raise
                if deadline.has_passed():
                    raise outrun(machine, self.schema, deadline, races)

    def _nothing(self, deadline: Deadline, spent: Spending) -> Appended:
        """No updates are no append."""
        version = self._before(lambda: within(deadline, self._fetch_writable))
        upper = version.state.upper
        if upper.is_top():
            raise self.machine.refused(r.WrongUpper(upper, upper))
        return Appended(version.seqno, upper, 0, b"", 0, spent.cost)

    # --- batches, and their shares of a commit ----------------------------------------------------------------------

    def _append_rest(
        self, tables: Iterator[pa.Table], lower: Antichain, upper: Antichain, deadline: Deadline,
        token: bytes | None, spent: Spending,
    ) -> Appended:  # fmt: skip
        """`append` where there are constraints: what lies beyond upper is checked there, and appended only there."""
        table = pa.concat_tables([empty_table(self.schema.updates), *tables])
        races = 0
        while True:
            reached = self._before(lambda: within(deadline, self._fetch_writable)).state.upper
            if reached < lower:
                raise self.machine.refused(r.WrongUpper(lower, reached))
            builder = self._builder(deadline)
            if upper <= reached:  # the shard has all of it, and never less: there is nothing to check
                built = self._build(builder, iter((table,)), lower, upper, deadline, is_checked=True)
                return self._commit(builder, built, self._how(c.Append, token), deadline, spent)
            rest = within_times(table, reached.time, None)
            built = self._build(builder, iter((rest,)), reached, upper, deadline)
            try:
                return self._commit(builder, built, self._how(c.CompareAndAppend, token), deadline, spent)
            except UpperMismatch:
                races += 1
            if deadline.has_passed():
                raise self._outrun(deadline, races)

    def _builder(self, deadline: Deadline) -> Builder:
        upload = partial(self._registration.register, deadline)
        return Builder(self.machine, upload, self.schema, self._schema_id, deadline)

    def _build(
        self, builder: Builder, tables: Iterator[pa.Table], lower: Antichain, upper: Antichain, deadline: Deadline,
        *, by_time: bool = False, is_checked: bool = False,
    ) -> Built:  # fmt: skip
        """The batch of these updates. Its constraints are checked, unless `is_checked` says that they hold."""
        try:
            if self.schema.constraints and not is_checked:
                tables = iter(self._constrained(tables, lower, deadline))
            inline_bytes = inline_room(self.machine, self.machine.version.state)
            if self._registration.is_closed:
                inline_bytes = sys.maxsize  # upload nothing: it can only have been committed before the handle closed
            return builder.build(tables, lower, upper, inline_bytes=inline_bytes, by_time=by_time)
        except Indeterminate as error:
            raise undoubted(self.machine.shard, error) from error

    def _constrained(self, tables: Iterator[pa.Table], lower: Antichain, deadline: Deadline) -> list[pa.Table]:
        """The same updates in one table. Raises ConstraintViolated if a constraint would not hold after them."""
        if not (held := list(tables)):
            return []
        table = consolidate(self.schema, pa.concat_tables(held))
        check_constraints(self.machine, self.schema, table, lower, deadline)
        return [table]

    def _how(
        self, kind: Kind, token: bytes | None, producer: tuple[str, int] | None = None, place: Place = whole
    ) -> Appending:  # fmt: skip
        return Appending(place, kind, token or self.machine.runtime.token(), producer)

    def _commit(
        self, builder: Builder, built: Built, how: Appending, deadline: Deadline, spent: Spending
    ) -> Appended:  # fmt: skip
        return commit_shares((self._share(builder, built, how, deadline),), deadline, how.token, spent)[0]

    def _share(self, builder: Builder, built: Built, how: Appending, deadline: Deadline) -> Share:
        """A share of the batch that was built, under this writer's id. Registers the writer if it has no id yet."""
        try:
            if builder.has_uploaded and deadline.has_passed():
                raise self._out_of_time(deadline, "its updates took that long to be uploaded")
            writer = self._registration.register(deadline)
        except Exception as error:
            builder.discard()  # no command refers to what was uploaded
            if isinstance(error, Indeterminate):
                raise undoubted(self.machine.shard, error) from error
            raise
        return Share(self.machine, self._registration, writer, builder, built, how)
