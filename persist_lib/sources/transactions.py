"""Debezium's transactions: changes wait until all of theirs are there, so that no time shows half of one. Pure.

A change names its transaction and its number in it; another topic says how many changes a transaction has:

    {"before": …, "after": …, "op": "u", "transaction": {"id": "571:5319", "total_order": 1, …}}
    {"status": "END", "id": "571:5319", "event_count": 2, "data_collections": …}

A transaction is given out at the time at which it is whole, unless a change of it comes after one, in its partition, of
a transaction that waits: then it waits too, as the order of a partition is the order of its keys. A message without a
transaction is one of its own. Connectors repeat messages: those of transactions that are done, and second ones with the
same number, say nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from persist_lib.arguments import UNREADABLE, parse_flag, parse_integer, parse_text, shown
from persist_lib.errors import InvalidUsage
from persist_lib.kernel.columns import integers, plain
from persist_lib.kernel.consolidate import consolidate
from persist_lib.schema.schema import DIFF, TIME, Schema

WAITING = Schema(
    key={"transaction": "string not null", "partition": "string not null", "address": "uint64 not null"},
    value={
        "what": "string not null", "number": "int64", "value": "binary", "key": "binary", "headers": "string",
        "timestamp": "timestamp[ms, UTC]", "problem": "string",
    },
    times="ms",
)  # fmt: skip
"""What waits: a `change`, with its number in the transaction; a `begin`; an `end`, with how many changes there are. And
what is `done`: transactions that were given out, with the number of each among them."""
COLUMNS = ("partition", "address", "value", "key", "headers", "timestamp", "problem")
ALONE = "\0"
"""What no id of a transaction begins with."""
Place = tuple[str, int]
"""A partition and an address in it."""


class Transactions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Changes of Debezium wait until their transaction is whole, as the messages of `topic` say.

    `topic` is the topic of transactions (one of the source's), or a partition's name. `collections` are those whose
    changes the source reads, as the messages name them; by default all. With `in_order` a transaction also waits for
    all that begin before it. The last `remembered` ones that were whole are known, so that their changes say nothing
    when a connector repeats them.
    """

    topic: str
    collections: tuple[str, ...] = ()
    in_order: bool = False
    remembered: int = 10_000

    def __post_init__(self) -> None:
        if not parse_text(self.topic, "topic", 4096):
            raise InvalidUsage("topic must be the name of the topic of transactions: got ''")
        if not isinstance(self.collections, tuple) or not all(isinstance(one, str) and one for one in self.collections):
            raise InvalidUsage(
                f"collections must be a tuple of texts such as ('public.users',): got {shown(self.collections)}"
            )
        parse_flag(self.in_order, "in_order")
        parse_integer(self.remembered, "remembered", 0, 1_000_000)


class _Named(msgspec.Struct, frozen=True):
    id: str
    total_order: int | None = None


class _Change(msgspec.Struct, frozen=True, rename={"what": "op"}):
    what: str | None = None
    transaction: _Named | None = None
    payload: msgspec.Raw = msgspec.Raw(b"null")


class _Count(msgspec.Struct, frozen=True):
    data_collection: str
    event_count: int


class _Mark(msgspec.Struct, frozen=True, rename={"what": "status"}):
    what: str | None = None
    id: str | None = None
    event_count: int | None = None
    data_collections: list[_Count] | None = None
    payload: msgspec.Raw = msgspec.Raw(b"null")


M = TypeVar("M", _Change, _Mark)
_changes, _marks = msgspec.json.Decoder(_Change), msgspec.json.Decoder(_Mark)


class _Waiting(NamedTuple):
    """A row of the state, without its time."""

    transaction: str
    partition: str
    address: int
    what: str
    number: int | None
    value: bytes | None = None
    key: bytes | None = None
    headers: str | None = None
    timestamp: Any = None
    problem: str | None = None


@dataclass
class _Transaction:
    """What is there of a transaction. `spans` says from where to where its changes are in each partition."""

    begin: Place | None = None
    expected: int | None = None
    marks: list[_Waiting] = field(default_factory=list)
    changes: dict[object, _Waiting] = field(default_factory=dict)
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return self.expected is not None and len(self.changes) >= self.expected

    def add(self, number: object, row: _Waiting) -> bool:
        """Take a change, or say that it is there already."""
        if number in self.changes:
            return False
        self.changes[number] = row
        low, high = self.spans.get(row.partition, (row.address, row.address))
        self.spans[row.partition] = min(low, row.address), max(high, row.address)
        return True


class Released(NamedTuple):
    """Messages that wait no longer, at the times at which they are given out, and updates of the state."""

    messages: pa.Table
    state: pa.Table


def hold_back(how: Transactions, messages: pa.Table, state: pa.Table) -> Released:
    """Make of messages, in the order of their times, and of what waited before, what is to be processed at each time.

    `state` has the rows of WAITING as of just before the first time. Whatever times are given at once, the answer is
    that of giving each time alone.
    """
    held = _Held(how, state)
    out: list[tuple[int, _Waiting]] = []
    updates: list[tuple[int, _Waiting, int]] = []
    for time, rows in _by_time(messages):
        updates += [(time, row, 1) for row in rows_of(how, rows) if row.transaction not in held.done and held.put(row)]
        released = sorted(held.release(time, updates), key=lambda one: (one.partition, one.address))
        out += [(time, row) for row in released]
    return Released(_messages_of(out, messages), _updates_of(updates))


class _Held:
    def __init__(self, how: Transactions, state: pa.Table) -> None:
        self._how = how
        self._waiting: dict[str, _Transaction] = {}
        columns = [plain(state.column(name)).to_pylist() for name in _Waiting._fields]
        rows = [_Waiting(*values) for values in zip(*columns, strict=True)]
        done = sorted((row for row in rows if row.what == "done"), key=lambda row: row.number or 0)
        self.done = {row.transaction: row for row in done}
        self._next = (done[-1].number or 0) + 1 if done else 0
        for row in sorted((row for row in rows if row.what != "done"), key=lambda row: (row.partition, row.address)):
            self.put(row)

    def put(self, row: _Waiting) -> bool:
        """Take a row in. False if it says nothing new."""
        is_alone = row.what == "change" and not row.transaction
        name = f"{ALONE}{row.partition}{ALONE}{row.address}" if is_alone else row.transaction
        one = self._waiting.setdefault(name, _Transaction(expected=1 if is_alone else None))
        match row.what:
            case "begin":
                if one.begin is not None:
                    return False
                one.begin = row.partition, row.address
            case "end":
                if one.expected is not None:
                    return False
                one.expected = row.number
                one.begin = one.begin or (row.partition, row.address)
            case _:
                return one.add((row.partition, row.address) if row.number is None else row.number, row)
        one.marks.append(row)
        return True

    def release(self, time: int, updates: list[tuple[int, _Waiting, int]]) -> Iterator[_Waiting]:
        """Give out what is whole and waits for nothing."""
        blocked = self._blocked(self._waiting)
        ready = [name for name in self._waiting if name not in blocked]
        for name in sorted(ready, key=lambda name: (self._waiting[name].begin or ("", 0), name)):
            one = self._waiting.pop(name)
            updates += [(time, row, -1) for row in (*one.marks, *one.changes.values())]
            yield from one.changes.values()
            if one.changes and not name.startswith(ALONE):
                partition, address = one.begin or ("", 0)
                self.done[name] = _Waiting(name, partition, address, "done", self._next)
                updates.append((time, self.done[name], 1))
                self._next += 1
        while len(self.done) > self._how.remembered:
            updates.append((time, self.done.pop(next(iter(self.done))), -1))

    def _blocked(self, every: dict[str, _Transaction]) -> set[str]:
        """Those that have to wait: what is not whole, and what comes after something that waits, in any partition."""
        blocked = {name for name, one in every.items() if not one.is_whole}
        first: dict[str, int] = {}
        fresh = set(blocked)
        while fresh:
            for name in fresh:
                for partition, (low, _) in self._spans(every[name]):
                    first[partition] = min(first.get(partition, low), low)
            fresh = {
                name
                for name, one in every.items()
                if name not in blocked and any(high > first.get(where, high) for where, (_, high) in self._spans(one))
            }
            blocked |= fresh
        return blocked

    def _spans(self, one: _Transaction) -> Iterator[tuple[str, tuple[int, int]]]:
        """Where its changes are; and, in order of all transactions, where it begins."""
        yield from one.spans.items()
        if self._how.in_order and one.begin is not None:
            yield f"{ALONE}{one.begin[0]}", (one.begin[1], one.begin[1])


def rows_of(how: Transactions, messages: pa.Table) -> Iterator[_Waiting]:
    """Each message as it would wait. One without a transaction is left out, or is a transaction of its own."""
    columns = [
        plain(messages.column(name)).to_pylist() if name in messages.column_names else [None] * messages.num_rows
        for name in COLUMNS
    ]
    for values in zip(*columns, strict=True):
        partition, address, value, *_, problem = values
        if partition == how.topic or partition.startswith(f"{how.topic}/"):
            found = _mark_of(how, value)
        else:
            found = _change_of(value if problem is None else b"")
        if found is not None:
            what, transaction, number = found
            yield _Waiting(transaction, partition, address, what, number, *values[2:])


def _read(decoder: msgspec.json.Decoder[M], value: bytes) -> M | None:
    """What a message says, or what is in its payload; None for one that cannot be read."""
    try:
        found = decoder.decode(value)
        is_wrapped = found.what is None and bytes(found.payload) != b"null"
        return decoder.decode(found.payload) if is_wrapped else found
    except UNREADABLE:
        return None


def _change_of(value: bytes | None) -> tuple[str, str, int | None]:
    """What a change says of its transaction. One that cannot be read is of none; its decoder says why it is bad."""
    change = _read(_changes, value or b"null")
    if change is None or change.transaction is None or not change.transaction.id:
        return "change", "", None
    return "change", change.transaction.id, change.transaction.total_order


def _mark_of(how: Transactions, value: bytes | None) -> tuple[str, str, int | None] | None:
    """What the topic of transactions says. A message that is neither mark is bad, like a change that cannot be read."""
    if value is None:
        return None
    mark = _read(_marks, value)
    if mark is None or not mark.id:
        return "change", "", None
    if mark.what == "BEGIN":
        return ("begin", mark.id, None) if how.in_order else None
    if mark.what == "END" and mark.event_count is not None:
        if not how.collections:
            return "end", mark.id, mark.event_count
        counts = mark.data_collections or ()
        return "end", mark.id, sum(one.event_count for one in counts if one.data_collection in how.collections)
    return "change", "", None


def _by_time(messages: pa.Table) -> Iterator[tuple[int, pa.Table]]:
    times = integers(messages.column(TIME))
    bounds = [0, *(np.flatnonzero(np.diff(times)) + 1).tolist(), len(times)]
    for low, high in pairwise(bounds):
        if low < high:
            yield int(times[low]), messages.slice(low, high - low)


def _messages_of(out: list[tuple[int, _Waiting]], like: pa.Table) -> pa.Table:
    types = {name: WAITING.data.field(name).type for name in COLUMNS}
    columns = {name: pa.array([getattr(row, name) for _, row in out], kind) for name, kind in types.items()}
    return pa.table({**columns, TIME: pa.array([time for time, _ in out], like.column(TIME).type)})


def _updates_of(updates: list[tuple[int, _Waiting, int]]) -> pa.Table:
    columns = {name: [getattr(row, name) for _, row, _ in updates] for name in WAITING.names}
    columns |= {TIME: [time for time, _, _ in updates], DIFF: [diff for _, _, diff in updates]}
    table = pa.table([pa.array(columns[one.name], one.type) for one in WAITING.updates], schema=WAITING.updates)
    return consolidate(WAITING, table)
