"""Appends at the next time, where the library chooses it: the shard's upper; where times are a clock, now if later."""

from __future__ import annotations

from functools import partial

import msgspec
import pyarrow as pa

from persist_lib.convert.by_key import without_times
from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.state import Outcome
from persist_lib.errors import LeaseExpired
from persist_lib.frontier import MINIMUM, at
from persist_lib.ids import SeqNo, parse_producer, parse_token
from persist_lib.kernel.by_key import Counts
from persist_lib.kernel.columns import at_time
from persist_lib.location.wrap.deadline import within
from persist_lib.location.wrap.spending import Spending
from persist_lib.runtime.ambient import Deadline
from persist_lib.runtime.threads import Lock
from persist_lib.schema.empty import empty_table
from persist_lib.shard.outcomes import find_since
from persist_lib.write.appending import check_produced, outrun, whole
from persist_lib.write.pending import Appended
from persist_lib.write.times import format_since, next_time, since_of
from persist_lib.write.turns import Named
from persist_lib.write.verbs import Change, Verbs


class AppendsNow(Verbs):
    """The call of a write handle that appends at the next time.

    Without a server, this process makes the append for the upper that it knows, and again after a lost race. A server
    puts it where upper is when its turn comes, so that no race is lost (`core.placing`).
    """

    def append_now(
        self,
        updates: object,
        *,
        timeout: float | None = None,
        token: bytes | None = None,
        producer: tuple[str, int] | None = None,
    ) -> Appended:
        """Append updates at the next time: the shard's upper; where times are a clock, now if that is later.

        `updates` is what `compare_and_append` takes, without `_time`; all of it is held in memory. The time is
        `answer.upper.time - 1`. No updates are no append: nothing is written, and upper stays. `timeout`, `token` and
        errors are those of `upsert`. SUBTLE: unlike an upsert, this call does the same again when it is repeated
        without the token of its Indeterminate. With a `producer`, a name and a sequence number, it does not: it raises
        AlreadyProduced, as `compare_and_append` says.
        """
        held: list[Lock] = []
        try:
            since, producer = None if token is None else since_of(parse_token(token)), parse_producer(producer)
            known = Named.of(token) if since is None else None
            empty = empty_table(self.schema.contents)
            tables = [table.select(empty.schema.names) for table in without_times(self.schema, updates)]
            table = pa.concat_tables([empty, *tables])
            deadline = self._begin(timeout, held)
            if token is None:
                check_produced(self.machine, producer)
            # Constraints are checked at one upper, which must then still be there.
            is_placed = token is None and self.machine.places_appends and not self.schema.constraints
            if since is not None or is_placed:
                return self._append_placed(table, deadline, token, since, producer)
            with Spending() as spent:
                change = Change(lambda version, _: (version, table, Counts()), spent, False, producer)
                answer = self._at_next_time(change, known, deadline)
            return Appended(*msgspec.structs.astuple(answer)[: len(Appended.__struct_fields__)])
        finally:
            if held:
                self._lock.release()

    def _append_placed(
        self, table: pa.Table, deadline: Deadline, token: bytes | None, since: SeqNo | None,
        producer: tuple[str, int] | None,
    ) -> Appended:  # fmt: skip
        """Append wherever upper is then. A call with the token of an earlier one appends only if that did not."""
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
                time = self._likely_time()
                builder = self._builder(deadline)
                tables = iter((at_time(table, time),))
                built = self._build(builder, tables, MINIMUM, at(time + 1), deadline, is_checked=True)
                try:
                    return self._commit(builder, built, whole, c.AppendNow, deadline, sent, spent, producer, since)
                except LeaseExpired:
                    races += 1
                    if self._registration.is_closed:
                        raise
                if deadline.has_passed():
                    raise outrun(machine, self.schema, deadline, races)

    def _likely_time(self) -> int:
        """The next time as far as this process knows. It stays in the data if it is that; else it is moved."""
        upper = self.machine.upper
        return (
            0
            if upper.is_top()
            else next_time(self.schema, self.machine.shard, upper, self.machine.runtime, self.machine.consensus.now)
        )

    def _nothing(self, deadline: Deadline, spent: Spending) -> Appended:
        """No updates are no append."""
        version = self._before(lambda: within(deadline, self._fetch_writable))
        upper = version.state.upper
        if upper.is_top():
            raise self.machine.refused(r.WrongUpper(upper, upper))
        return Appended(version.seqno, upper, 0, b"", 0, spent.cost)
