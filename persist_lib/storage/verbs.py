"""Writing a collection at its next time: updates without times, and changes by key.

What a change by key retracts is looked up in the rendition that is the collection by then; where a handover or another
writer was first, it looks again.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from persist_lib.arguments import parse_flag
from persist_lib.convert.by_key import parse_keys, parse_rows, without_times
from persist_lib.errors import Indeterminate, SchemaMismatch, UpperMismatch
from persist_lib.frontier import Antichain, at
from persist_lib.kernel.by_key import Counts, count_deleted, count_upserted, one_row_each, replacing
from persist_lib.kernel.columns import at_time
from persist_lib.kernel.consolidate import consolidate
from persist_lib.kernel.keyset import Keys
from persist_lib.location.wrap.spending import Spending
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.empty import empty_table
from persist_lib.storage.committing import Committing, HandedOver
from persist_lib.storage.routing import routed
from persist_lib.storage.timeline import Span
from persist_lib.storage.writing import Written
from persist_lib.write.looking import Looking
from persist_lib.write.times import bounds_of, format_token, next_time

Finding = Callable[[Span, Deadline], tuple[pa.Table, Counts]]
"""Makes of a rendition's newest contents the changes to append, and what they amount to."""


class Verbs(Committing):
    """The calls that take the next time: upper; where times are a clock, now if that is later."""

    def append_now(self, updates: object, *, timeout: float | None = None, token: bytes | None = None) -> Written:
        """Append updates at the next time: upper; where times are a clock, now if that is later.

        `updates` have no `_time`. No updates are no append. After Indeterminate, repeat with the token of the error.
        """
        self._check_mode("append_now")
        empty = empty_table(self.schema.contents)
        tables = [table.select(empty.schema.names) for table in without_times(self.schema, updates)]
        table = pa.concat_tables([empty, *tables])
        return self._change(lambda _span, _deadline: (table, Counts()), timeout, token, is_dry=False)

    def upsert(
        self, rows: object, *, timeout: float | None = None, token: bytes | None = None, dry_run: bool = False
    ) -> Written:
        """Make each of `rows` the one row of its key, at the next time. Rows of other keys stay as they are.

        As a shard's `upsert`: what is there for these keys is looked up and retracted in the same transaction; rows
        that are there already are not written again. If another writer is first, only what it changed is read again.
        """
        self._check_mode("upsert")
        new = one_row_each(self.schema, parse_rows(self.schema, rows))
        return self._change(_ByKey(self, new, new), timeout, token, is_dry=parse_flag(dry_run, "dry_run"))

    def delete(
        self, keys: object, *, timeout: float | None = None, token: bytes | None = None, dry_run: bool = False
    ) -> Written:
        """Retract all rows of these keys, at the next time. Keys that have none are left alone."""
        self._check_mode("delete")
        table = parse_keys(self.schema, keys)
        return self._change(_ByKey(self, table, None), timeout, token, is_dry=parse_flag(dry_run, "dry_run"))

    def _change(self, find: Finding, timeout: float | None, token: bytes | None, *, is_dry: bool) -> Written:
        """Append what `find` makes of the newest contents, at the next time; again if another writer was first."""
        deadline = self._deadline(timeout)
        known = None if token is None else bounds_of(token)
        self._settle(deadline)
        with self._turn, Spending() as spent:
            while True:
                timeline = self._timeline()
                span, later = self._span_to_write(timeline)
                if known is not None and self._was_committed(span, *known):
                    return Written(known[2], 0, known[0], spent.cost, (known[2].time or 1) - 1)
                upper = self._upper_to_change(span, deadline)
                table, counts = find(span, deadline)
                if not table.num_rows:
                    return Written(upper, 0, b"", spent.cost, None, *counts)
                time = next_time(self.schema, self.name, upper, self.client.runtime, self.client.consensus.now)
                sent = format_token(self.client.runtime, upper, at(time + 1))
                if known is not None and known[1] == upper:
                    sent, time = known[0], (known[2].time or 1) - 1
                if is_dry:
                    return Written(upper, table.num_rows, b"", spent.cost, None, *counts)
                try:
                    if later is not None and later <= time:
                        # What the keys have there is looked up in the rendition that is the collection by then.
                        self._close_old(table.slice(0, 0), timeline.over(upper.time or 0, time + 1), deadline, sent)
                        continue
                    seen = None if self._only is not None else span.command
                    self._commit(at_time(table, time), upper, at(time + 1), deadline, sent, None, seen)
                except UpperMismatch:
                    self._check_time(deadline, "other writers were first")
                except HandedOver:
                    self._check_time(deadline, "it was handed over meanwhile")
                else:
                    return Written(at(time + 1), table.num_rows, sent, spent.cost, time, *counts)

    def _was_committed(self, span: Span, token: bytes, lower: Antichain, upper: Antichain) -> bool:
        """Whether an earlier call with this token was committed. Raises Indeterminate if that is not known any more."""
        timeline = self._timeline()
        rendition = timeline.at(lower.time or 0).rendition if self._only is None else span.rendition
        verdict = self.client.judge_append(rendition.names[0], token, lower, upper)
        if verdict.answer == "unknown":
            raise Indeterminate(
                f"collection {self.name!r}: it is not known any more whether the append with this token was committed. "
                "Read the collection to find out",
                token=token, collection=self.name,
            )  # fmt: skip
        return verdict.seqno is not None


class _ByKey:
    """The changes that make rows the only ones of their keys (or, without rows, that take the keys' rows away)."""

    def __init__(self, writer: Verbs, keyed: pa.Table, rows: pa.Table | None) -> None:
        self._writer, self._keyed, self._rows = writer, keyed, rows
        self._keys = Keys.of(writer.schema, keyed)
        self._looking: dict[str, Looking] = {}

    def __call__(self, span: Span, deadline: Deadline) -> tuple[pa.Table, Counts]:
        schema = self._writer.schema
        found = [empty_table(schema.contents)]
        for name, share in zip(span.rendition.names, routed(span.rendition, self._keyed), strict=True):
            machine = self._writer.shard(name).machine
            looking = self._looking.setdefault(name, Looking(machine, Keys.of(schema, share)))
            found.append(self._narrow(looking.contents(machine.version, deadline)[1]))
        old = consolidate(schema, pa.concat_tables(found))
        new = old.slice(0, 0) if self._rows is None else self._rows
        changes = replacing(schema, old, new)
        counts = count_deleted(self._keys, old) if self._rows is None else count_upserted(self._keys, old, changes)
        return changes, counts

    def _narrow(self, rows: pa.Table) -> pa.Table:
        """Rows in the writer's columns. Raises SchemaMismatch where that would lose something of them."""
        schema = self._writer.schema
        added = [name for name in rows.schema.names if name not in schema.contents.names]
        if any(rows.column(name).null_count < len(rows) for name in added):
            raise SchemaMismatch(
                f"collection {self._writer.name!r} has the columns {added} since this writer was opened, and rows of "
                "these keys have something in them, which it cannot retract. Nothing was written; open a new writer",
                collection=self._writer.name, expected=schema,
            )  # fmt: skip
        return rows.select(schema.contents.names) if added else rows
