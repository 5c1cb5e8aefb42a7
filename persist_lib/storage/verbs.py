"""Writing a collection at its next time: updates without times, and changes by key.

What a change by key retracts is looked up in the rendition that is the collection by then; where a handover or another
writer was first, it looks again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pyarrow as pa

from persist_lib.arguments import parse_flag
from persist_lib.convert.by_key import parse_keys, parse_rows, without_times
from persist_lib.core.state import Outcome
from persist_lib.errors import Indeterminate, PersistError, SchemaMismatch, UpperMismatch
from persist_lib.frontier import Antichain
from persist_lib.ids import SeqNo, parse_token
from persist_lib.kernel.by_key import Counts, count_deleted, count_upserted, one_row_each, replacing
from persist_lib.kernel.columns import at_time
from persist_lib.kernel.consolidate import consolidate
from persist_lib.kernel.keyset import Keys
from persist_lib.location.wrap.deadline import within
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.key_lookup import Looking
from persist_lib.relation.next_time import AtNextTime, Named, Turn, next_time, since_of
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.empty import empty_table
from persist_lib.shard.outcomes import Verdict, find_since
from persist_lib.storage.committing import Committing, HandedOver
from persist_lib.storage.partition_rows import routed
from persist_lib.storage.renditions import Span, Timeline
from persist_lib.storage.writing import Written

Finding = Callable[[Span, Deadline], tuple[pa.Table, Counts]]
"""Makes of a rendition's newest contents the changes to append, and what they amount to."""


class Change(NamedTuple):
    """What a call at the next time appends."""

    find: Finding
    spent: Spending


class Place(NamedTuple):
    """The span that is written, and where another one follows."""

    timeline: Timeline
    span: Span
    later: int | None


class Verbs(AtNextTime[Change, Place, Written], Committing):
    """The calls that take the next time: upper; where times are a clock, now if that is later."""

    def append_now(self, updates: object, *, timeout: float | None = None, token: bytes | None = None) -> Written:
        """Append updates at the next time: upper; where times are a clock, now if that is later.

        `updates` have no `_time`. No updates are no append. After Indeterminate, repeat with the token of the error.
        """
        self._check_mode("append_now")
        if token is not None and (since := since_of(parse_token(token))) is not None:
            return self._was_placed(token, since, self._deadline(timeout))
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
        deadline, known = self._deadline(timeout), Named.of(token)
        self._settle(deadline)
        with self._turn, Spending() as spent:
            return self._at_next_time(Change(find, spent), known, deadline, is_dry=is_dry)

    def _was_placed(self, token: bytes, since: SeqNo, deadline: Deadline) -> Written:
        """What became of an append that a server placed in a shard by its own name: of one of this collection's.

        Raises Indeterminate if that is not in the shard: it may be on its way, and no append here would exclude it.
        """
        with Spending() as spent:
            shard = (self._only or self._timeline().spans[0].rendition).names[0]
            found = within(deadline, partial(find_since, self.client.machine(shard), token, since))
            if isinstance(found, Outcome):
                return Written(found.upper, 0, token, spent.cost, (found.upper.time or 1) - 1)
        raise Indeterminate(
            f"collection {self.name!r}: the append with this token was made to the shard {shard} by its own name. It "
            f"is not there up to v{found}, and may still be on its way. This call wrote nothing. Read the collection "
            "later to find out what became of it",
            token=token, collection=self.name,
        )  # fmt: skip

    def _place(self) -> str:
        return f"collection {self.name!r}"

    def _judge(self, known: Named, deadline: Deadline) -> Verdict:
        """In the rendition that was the collection at its lower.

        Where that is not known any more, the oldest one that is known may still say that it has the append.
        """
        timeline, lower = self._timeline(), known.lower.time or 0
        is_known = self._only is not None or timeline.since <= lower
        rendition = self._only or timeline.at(max(lower, timeline.since)).rendition
        verdict = within(deadline, partial(self.client.judge_append, rendition.names[0], *known))
        if is_known or verdict.seqno is not None:
            return verdict
        show = self.schema.show
        why = (
            f"which rendition was the collection at {show(lower)} is given up: history begins at {show(timeline.since)}"
        )
        return Verdict("unknown", None, why)

    def _next_turn(self, call: Change, deadline: Deadline) -> Turn[Place]:
        timeline = self._timeline()
        span, later = self._span_to_write(timeline)
        upper = self._upper_to_change(span, deadline)
        return Turn(upper, *call.find(span, deadline), Place(timeline, span, later))

    def _fresh(self, _call: Change, turn: Turn[Place]) -> Named:
        runtime = self.client.runtime
        time = next_time(self.schema, self.name, turn.lower, runtime, self.client.consensus.now)
        return Named.fresh(runtime, turn.lower, time)

    def _try_turn(self, call: Change, turn: Turn[Place], named: Named, deadline: Deadline) -> Written | None:
        (token, lower, upper), (timeline, span, later) = named, turn.basis
        try:
            if later is not None and later <= named.time:
                # What the keys have there is looked up in the rendition that is the collection by then.
                over = timeline.over(lower.time or 0, upper.time)
                self._close_old(turn.changes.slice(0, 0), over, deadline, token)
                return None
            seen = None if self._only is not None else span.command
            self._commit(at_time(turn.changes, named.time), lower, upper, deadline, token, None, seen)
        except (UpperMismatch, HandedOver):
            return None
        return Written(upper, turn.changes.num_rows, token, call.spent.cost, named.time, *turn.counts)

    def _repeated(self, call: Change, known: Named, seqno: SeqNo) -> Written:  # noqa: ARG002 - it has none of its own
        return Written(known.upper, 0, known.token, call.spent.cost, known.time)

    def _unwritten(self, call: Change, turn: Turn[Place]) -> Written:
        return Written(turn.lower, turn.changes.num_rows, b"", call.spent.cost, None, *turn.counts)

    def _registers_again(self) -> bool:
        return not self._closed

    def _gap(self, known: Named, upper: Antichain) -> PersistError:
        return self._mismatch(known.lower, UpperMismatch("", expected=known.lower, actual=upper))

    def _outrun(self, deadline: Deadline, races: int) -> PersistError:
        return self._out_of_time(deadline, f"other writers, or a handover, were first {races} times")


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
