"""Restoring: an append that makes a shard's contents what they were at an earlier time.

Nothing is taken back: what happened since stays readable as of its times. What is appended is the sum of the updates
since then with their signs turned around. So only these are read, and not the contents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import msgspec
import numpy as np
import pyarrow as pa

from persist_lib.core.cost import Cost
from persist_lib.core.holds import layer_of
from persist_lib.core.plan.requests import TaskInput
from persist_lib.core.state import State
from persist_lib.errors import DiffOverflow, Missing, NotAllowed, NotComplete, UpperMismatch
from persist_lib.frontier import MAX_TIME, at
from persist_lib.kernel.columns import array_of, at_time, integers
from persist_lib.kernel.consolidate import I64_MIN
from persist_lib.relation import contents
from persist_lib.relation.appends import Appended
from persist_lib.relation.held import kept_of
from persist_lib.relation.reader import ReadHandle
from persist_lib.relation.reader_lease import Reading
from persist_lib.relation.registration import FAR_MS, check_clock, format_token, is_chosen, next_time
from persist_lib.relation.writer import WriteHandle
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import DIFF, DIFF_FIELD, Schema
from persist_lib.shard.commit import Machine
from persist_lib.shard.runs import Stored, inputs_of, overlapping
from persist_lib.times import PER_SECOND

SAMPLE_ROWS = 100


class Restored(msgspec.Struct, frozen=True):
    """What a restore appended, or would append in a dry run.

    `rows` is how many distinct data change, `added` and `retracted` by how much their multiplicities rise and fall
    together. `sample` has the first hundred of them, as an Arrow table of the schema's columns and `_diff`. `upper` is
    the shard's upper that this was found at. `appended` is the append; None in a dry run, and where the contents are
    the same already.
    """

    to: int
    upper: int | None
    rows: int
    added: int
    retracted: int
    sample: pa.Table
    appended: Appended | None = None
    cost: Cost = Cost()


class _Counting:
    """Counts what passes through."""

    def __init__(self, schema: Schema) -> None:
        self.rows = self.added = self.retracted = 0
        self.sample = empty_table(schema.contents)

    def over(self, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
        for table in tables:
            diffs = integers(table.column(DIFF))
            if np.abs(diffs.astype(np.float64)).sum() >= 2.0**62:  # in 64 bits their sum could overflow
                diffs = diffs.astype(object)
            self.rows += table.num_rows
            self.added += int(diffs[diffs > 0].sum())
            self.retracted -= int(diffs[diffs < 0].sum())
            if (room := SAMPLE_ROWS - self.sample.num_rows) > 0:
                self.sample = pa.concat_tables([self.sample, table.slice(0, room)])
            yield table


def restore(
    open_reader: Callable[[], ReadHandle],
    open_writer: Callable[[Schema], WriteHandle] | None,
    to: int,
    deadline: Deadline,
) -> Restored:
    """Append what leads from the contents now to those as of `to`; without a writer, only say what that is.

    Another append in between makes it begin again, so that it takes back what is there at the time of the append.
    """
    while True:
        with open_reader() as read:
            reading = kept_of(read).acquire(to)
            state = reading.version.state
            if state.schemas[-1].shown != read.schema:
                continue  # it has evolved since: what is in new columns has to be taken back too
            now = read.machine.consensus.now()
            _check(read.schema, read.shard, to, state, now, writes=open_writer is not None)
            try:
                if (done := _restore(read, reading, open_writer, to, deadline)) is not None:
                    return done
            except Missing as missing:  # where blobs may vanish, it continues from a newer state
                kept_of(read).look_again(reading, to, missing)
            else:
                if deadline.has_passed():
                    why = "as other writers were always first"
                    raise deadline.gave_up(f"shard {read.shard}: restoring", why, shard=read.shard)


def _restore(
    read: ReadHandle, reading: Reading, open_writer: Callable[[Schema], WriteHandle] | None, to: int, deadline: Deadline
) -> Restored | None:
    """What was appended, or would be; None if another append was first."""
    state = reading.version.state
    schema = state.schemas[-1]  # with dropped columns: what older rows have in them is taken back, too
    counting = _Counting(schema)
    tables = counting.over(_difference(read, state, to))
    first = next(tables, None)
    appended = None
    if open_writer is not None and (first is not None or not state.upper.has_passed(to)):
        try:
            found = iter(()) if first is None else chain([first], tables)
            appended = _append(open_writer, schema, found, state, deadline)
        except UpperMismatch:
            return None
    else:
        for _ in tables:
            pass
    reading.release()
    return Restored(
        to, state.upper.time, counting.rows, counting.added, counting.retracted,
        counting.sample.select(read.schema.contents.names).combine_chunks(),
        appended,
    )  # fmt: skip


def _append(
    open_writer: Callable[[Schema], WriteHandle],
    schema: Schema,
    tables: Iterator[pa.Table],
    state: State,
    deadline: Deadline,
) -> Appended:
    with open_writer(schema) as write:
        time = next_time(schema, f"shard {write.shard}", state.upper, deadline.runtime, write.machine.consensus.now)
        timed = (at_time(table, time) for table in tables)
        timeout = deadline.left_s()
        token = format_token(deadline.runtime, state.upper, at(time + 1))
        return write.compare_and_append(timed, state.upper, at(time + 1), timeout=timeout, token=token)


def _check(schema: Schema, shard: str, to: int, state: State, now: int, *, writes: bool) -> None:
    """Raise unless the contents as of `to` can be restored at `now`, in ms of the store's clock.

    Where times are a clock, nothing has come since upper. A restore appends at now, so that nothing comes there later.
    """
    if not state.upper.has_passed(to) and not (schema.times and to <= now * PER_SECOND[schema.times] // 1_000):
        raise NotComplete(
            f"shard {shard}: the contents as of {schema.show(to)} are not complete yet, as upper is "
            f"{schema.show(state.upper)}. Nothing was appended; restore to an earlier time",
            as_of=to, upper=state.upper, timeout_s=0.0, shard=shard,
        )  # fmt: skip
    if writes and (state.upper.time is None or state.upper.time == MAX_TIME):
        raise UpperMismatch(
            f"shard {shard}: its upper is {schema.show(state.upper)}, so nothing can be appended to it any "
            "more. This call appended nothing; read the contents with snapshot(to), and write them to another shard",
            expected=at(to), actual=state.upper, shard=shard,
        )  # fmt: skip


def _difference(read: ReadHandle, state: State, to: int) -> Iterator[pa.Table]:
    """What leads from the contents of the state to those as of `to`."""
    machine, schema = read.machine, state.schemas[-1]
    inputs: list[TaskInput] = overlapping(inputs_of((b for b in state.trace if b.count), to + 1), None, None)
    stored = Stored(machine.reads, machine.shard, state.schemas, schema)
    with machine.runtime.pool(machine.config.read_threads, "persist-restore") as pool:
        tables = contents.stream(stored, inputs, machine.config.merge_bytes, pool)
    for table in tables:
        if table.num_rows:
            yield _turned_around(table)


def _turned_around(table: pa.Table) -> pa.Table:
    """The rows with their diffs negated. Raises DiffOverflow for the least diff, which has no opposite in 64 bits."""
    diffs = integers(table.column(DIFF))
    if diffs.size and diffs.min() == I64_MIN:
        data = table.drop_columns([DIFF]).slice(int(diffs.argmin()), 1).to_pylist()[0]
        raise DiffOverflow(
            f"{data} was retracted {-I64_MIN} times since, and that cannot be taken back at one time, as it is beyond "
            "a signed 64-bit integer. This call appended nothing; append some of it first",
            data=data, total=-I64_MIN,
        )  # fmt: skip
    return table.set_column(table.num_columns - 1, DIFF_FIELD, array_of(-diffs))


LEAST_S = 5.0
"""The least time for the append, also for a caller who does not wait."""


def time_passed(machine: Machine, state: State, time: int) -> int | None:
    """The time of the store's clock, if `time` is at or beyond upper and may be completed: up to which all then is.

    None for a time to come, and unless times are a clock, and the library has chosen the time of each append that the
    state remembers: where callers bring times, moving upper to now would lock them out of theirs.
    """
    tokens = [outcome.token for outcome in state.outcomes if outcome.token]
    if state.times is None or state.upper.is_top() or not tokens or not all(map(is_chosen, tokens)):
        return None
    now, own = machine.consensus.now(), machine.runtime.clock_ms()
    if time > (last := now * PER_SECOND[state.times] // 1_000):
        return None
    check_clock(f"shard {machine.shard}", now, own, FAR_MS, "the store's clock", "this machine's clock")
    return last


def complete(
    machine: Machine, open_writer: Callable[[Schema], WriteHandle], state: State, time: int, deadline: Deadline
) -> bool:
    """Complete a time that is at or beyond upper, and all others up to the store's clock. Whether to look again.

    Does nothing where `time_passed` is None, where this client may not write, and to the shard of a layer, which moves
    with its others.
    """
    if layer_of(state) or (last := time_passed(machine, state, time)) is None:
        return False
    token = format_token(machine.runtime, state.upper, at(last + 1))
    try:
        with open_writer(state.schemas[-1]) as write:
            write.compare_and_append(
                [], state.upper, at(last + 1), timeout=max(LEAST_S, deadline.remaining_s()), token=token
            )
    except UpperMismatch:  # another writer was first
        return True
    except NotAllowed:
        return False
    return True
