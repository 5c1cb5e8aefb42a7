"""Chains of evolutions beside a model that keeps everything: each reader has what its columns say, at every time."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field, replace
from decimal import Decimal
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import persist_lib as persist
from persist_lib.core.formats import VALUE_BOUNDS
from persist_lib.kernel.order import is_sorted
from persist_lib.schema.types import format_type, parse_type
from persist_lib.testing import check_world
from tests.circles import is_day
from tests.worlds import World

STEPS = 20
WIDER = {
    "int8": "int32", "int32": "int64", "uint16": "int32", "uint8": "uint16", "float32": "float64",
    "decimal128(5, 2)": "decimal128(9, 2)", "date32": "timestamp[us]", "timestamp[s]": "timestamp[us]",
    "timestamp[ms]": "timestamp[us]",
    "struct<a: int64>": "struct<a: int64, b: string>", "list<int8>": "list<int32>", "list<int32>": "list<int64>",
    "struct<a: int64, b: string>": "struct<a: int64, b: string, c: list<struct<d: float32>>>",
    "struct<a: int64, b: string, c: list<struct<d: float32>>>":
        "struct<a: int64, b: string, c: list<struct<d: float64, e: int8>>>",
    "struct<t: date32>": "struct<t: timestamp[us], u: uint8>",
    "struct<t: timestamp[us], u: uint8>": "struct<t: timestamp[us], u: int64>",
    "map<string, struct<a: int8>>": "map<string, struct<a: int16, b: list<int8>[2]>>",
    "map<string, struct<a: int16, b: list<int8>[2]>>": "map<string, struct<a: int64, b: list<int64>[2]>>",
}  # fmt: skip
VALUES: dict[str, list[Any]] = {
    "int8": [0, -1, 127], "int32": [7, -(2**31)], "int64": [2**40, 5], "uint8": [0, 255], "uint16": [65535, 3],
    "float32": [0.5, -0.0, float("inf")], "float64": [0.1, 1e300],
    "decimal128(5, 2)": [Decimal("1.50"), Decimal("-999.99")],
    "decimal128(9, 2)": [Decimal("1234567.89")], "date32": [dt.date(1969, 12, 31), dt.date(2026, 1, 1)],
    "timestamp[s]": [dt.datetime.fromisoformat("1969-12-31 23:59:59")],
    "timestamp[ms]": [
        dt.datetime.fromisoformat("2026-01-01 12:30:00.005"), dt.datetime.fromisoformat("2026-01-02"),
    ],
    "timestamp[us]": [
        dt.datetime.fromisoformat("1969-12-31 23:59:59.999999"), dt.datetime.fromisoformat("2026-01-01 12:30"),
    ],
    "string": ["", "web", "ü"],
    "struct<a: int64>": [{"a": 1}, {"a": None}], "struct<a: int64, b: string>": [{"a": 1, "b": ""}],
    "struct<a: int64, b: string, c: list<struct<d: float32>>>": [
        {"a": 1, "b": None, "c": [None, {"d": -0.0}]}, {"a": 1, "b": None, "c": []},
    ],
    "struct<a: int64, b: string, c: list<struct<d: float64, e: int8>>>": [
        {"a": None, "b": "x", "c": [{"d": 0.1, "e": None}]}, {"a": 1, "b": None, "c": [{"d": 0.5, "e": 3}]},
    ],
    "list<int8>": [[], [1, None, -128]], "list<int32>": [[1, 300]], "list<int64>": [[2**40], [300, 2**40, None]],
    "struct<t: date32>": [{"t": dt.date(2026, 1, 1)}],
    "struct<t: timestamp[us], u: uint8>": [{"t": dt.datetime.fromisoformat("2026-01-01 12:30"), "u": None}, {"u": 7}],
    "struct<t: timestamp[us], u: int64>": [{"t": None, "u": 2**40}],
    "map<string, struct<a: int8>>": [[], [("k", {"a": 1}), ("l", None)]],
    "map<string, struct<a: int16, b: list<int8>[2]>>": [
        [("k", {"a": 1, "b": [None, 2]})], [("k", {"a": 300, "b": None})],
    ],
    "map<string, struct<a: int64, b: list<int64>[2]>>": [[("k", {"a": 2**40, "b": [2, 2**40]})]],
}  # fmt: skip
NAMES = ["a", "b", "c", "d"]
Row = tuple[int, frozenset[tuple[int, Any]]]
"""A key, and what the row says: values by the number of their column."""


@dataclass(frozen=True)
class Col:
    """A column of the model: numbers never change, and are never used again."""

    number: int
    name: str
    kind: str
    nullable: bool = True
    default: Any = None


class Fields(dict[str, Any]):
    """A struct that can be counted."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(self))


class Items(list[Any]):
    """The same of a list, and of a map's pairs."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(self))


def fits(value: Any, col: Col) -> bool:
    """Whether a column of an older schema can hold a value."""
    return col.nullable if value is None else holds(value, col.kind)


def holds(value: Any, kind: str) -> bool:
    """Whether a type has a value."""
    if value is None:
        return True
    if "<" in kind:
        type_: Any = parse_type(kind)
        if kind.startswith("struct"):
            fields = {one.name: format_type(one.type) for one in type_}
            return all(one is None if name not in fields else holds(one, fields[name]) for name, one in value.items())
        inner = format_type(type_.item_type if kind.startswith("map") else type_.value_type)
        return all(holds(one[1] if kind.startswith("map") else one, inner) for one in value)
    if "int" in kind:
        least, most = (
            (0, 2 ** int(kind[4:]) - 1)
            if kind[0] == "u"
            else (-(2 ** (int(kind[3:]) - 1)), 2 ** (int(kind[3:]) - 1) - 1)
        )
        return bool(least <= value <= most)
    if kind == "float32":
        return value in VALUES["float32"]
    if kind.startswith("decimal128(5"):
        return bool(abs(value) < 1000)
    if kind.startswith("timestamp") and isinstance(value, dt.datetime):
        return bool(value.microsecond % {"s": 1_000_000, "ms": 1000, "us": 1}[kind[10:-1]] == 0)
    if kind == "date32":
        return not isinstance(value, dt.datetime) or value.time() == dt.time()
    return True


def as_kind(value: Any, kind: str) -> Any:
    """A value as a column of that type gives it."""
    if value is not None and "<" in kind:
        type_: Any = parse_type(kind)
        if kind.startswith("struct"):
            return Fields({one.name: as_kind(value.get(one.name), format_type(one.type)) for one in type_})
        if kind.startswith("map"):
            return Items((key, as_kind(one, format_type(type_.item_type))) for key, one in value)
        return Items(as_kind(one, format_type(type_.value_type)) for one in value)
    if isinstance(value, dt.date) and kind.startswith("timestamp"):
        return value if isinstance(value, dt.datetime) else dt.datetime.fromisoformat(value.isoformat())
    return value.date() if isinstance(value, dt.datetime) and kind == "date32" else value


@dataclass
class Kept:
    """All that was ever written, and a schema as the model and the library have it."""

    cols: list[Col]
    count: int = 0
    events: list[tuple[int, Row, int]] = field(default_factory=list)

    def at(self, time: int) -> Counter[Row]:
        found: Counter[Row] = Counter()
        for when, row, diff in self.events:
            if when <= time:
                found[row] += diff
        return Counter({row: diff for row, diff in found.items() if diff})

    def single(self, time: int) -> dict[int, Row]:
        """The keys that have one row, once."""
        there = self.at(time)
        several = Counter(row[0] for row in there)
        return {row[0]: row for row, diff in there.items() if diff == 1 and several[row[0]] == 1}

    def seen(self, cols: list[Col], time: int, *, misfits: bool = False) -> Counter[str]:
        """What a reader of these columns sees; or of that, the rows which they cannot hold."""
        found: Counter[str] = Counter()
        for (key, said), diff in self.at(time).items():
            values = dict(said)
            if misfits and all(fits(values.get(one.number, one.default), one) for one in cols):
                continue
            shown = {one.name: as_kind(values.get(one.number, one.default), one.kind) for one in cols}
            found[repr({"id": key, **shown})] += diff
        return Counter({row: diff for row, diff in found.items() if diff})

    def all_fit(self, cols: list[Col]) -> bool:
        return all(
            fits(dict(said).get(one.number, one.default), one) for _, (_, said), _ in self.events for one in cols
        )


class Chain:
    """One table, evolved at random: a lone shard, or a collection."""

    def __init__(self, rng: Random, kind: str) -> None:
        self.rng, self.kind = rng, kind
        config = persist.Config(inline_bytes=rng.choice([0, 4096]), format=rng.choice([None, VALUE_BOUNDS]))
        self.client = World(seed=rng.randrange(2**32)).client(config)
        self.kept = Kept([Col(0, "a", "int8"), Col(1, "b", "string", nullable=False)], 2)
        self.time = self.next_id = 0
        self.controller = None if kind == "shard" else self.client.controller()
        self.create()
        self.times: list[int] = []
        self.pasts: list[tuple[list[Col], Any, Any]] = []
        self.remember()

    def create(self) -> None:
        schema = persist.Schema({"id": "int64"}, {"a": "int8", "b": "string not null"})
        if self.controller is None:
            self.client.open_writer("t", schema).close()
        else:
            shards = 3 if self.kind == "three" else 1
            self.controller.create("t", schema, shards=shards, mode="compare_and_append")

    def open(self, what: str, schema: persist.Schema | None = None) -> Any:
        on = self.client if self.controller is None else self.controller
        if what == "writer" and schema is None and self.controller is None:
            schema = self.newest
        return getattr(on, f"open_{what}")("t", *([] if schema is None else [schema]))

    @property
    def newest(self) -> persist.Schema:
        with self.client.table("t") as table:
            return table.describe().schema

    def remember(self) -> None:
        """Keep a reader and a writer in the columns of now."""
        self.pasts.append((list(self.kept.cols), self.open("reader"), self.open("writer")))

    def value(self, col: Col) -> Any:
        kinds = [col.kind, *[narrow for narrow, wide in WIDER.items() if wide == col.kind]]
        choices = [value for kind in kinds for value in VALUES[kind] if fits(value, col)] + [None] * col.nullable
        return as_kind(self.rng.choice(choices), col.kind)

    def rows(self, cols: list[Col], ids: list[int]) -> tuple[list[dict[str, Any]], list[Row]]:
        given, said = [], []
        for id_ in ids:
            values = {one: self.value(one) for one in cols if one.default is None or self.rng.random() < 0.6}
            given.append({"id": id_, **{one.name: value for one, value in values.items()}})
            said.append((id_, frozenset((one.number, value) for one, value in values.items())))
        return given, said

    def append(self) -> None:
        """New rows, by a writer of now or one of the past."""
        cols, _, write = self.rng.choice([self.pasts[-1], self.rng.choice(self.pasts)])
        ids = list(range(self.next_id, self.next_id + self.rng.randint(1, 4)))
        self.next_id = ids[-1] + 1
        given, said = self.rows(cols, ids)
        self.put(write, given)
        self.kept.events += [(self.time, row, 1) for row in said]
        self.time += 1

    def put(self, write: Any, rows: list[dict[str, Any]]) -> None:
        """Append rows at `time`."""
        write.compare_and_append([{**row, "_time": self.time} for row in rows], self.time, self.time + 1)

    def upsert(self) -> None:
        """Rows of now in place of what is there."""
        cols, _, write = self.pasts[-1]
        there = self.kept.single(self.time)
        ids = self.rng.sample(sorted(there), min(len(there), 2))
        gone = [there[id_] for id_ in ids[:1]]
        given, said = [], []
        for id_ in ids[1:]:
            had = dict(there[id_][1])
            values = {one.number: had.get(one.number, one.default) for one in cols}
            lacks = [one for one in cols if self.rng.random() < 0.3]
            new = {one: self.value(one) for one in cols if one not in lacks}
            values |= {one.number: value for one, value in new.items()}
            given.append({"id": id_, **{one.name: value for one, value in new.items()}})
            said.append((id_, frozenset(values.items())))
            gone.append(there[id_])
        done = write.apply(given or None, [row[0] for row in gone[:1]] or None)
        upper = self.reached(write, done)
        self.kept.events += [(upper - 1, row, -1) for row in gone] + [(upper - 1, row, 1) for row in said]
        self.time = upper

    def reached(self, write: Any, _done: Any) -> int:
        return int(write.fetch_upper().time)

    def retract(self) -> None:
        """A row of now taken back as it is seen, whatever it has in columns that were dropped."""
        cols, _, write = self.pasts[-1]
        there = self.kept.single(self.time)
        if not there:
            return
        key, said = self.rng.choice(sorted(there.values(), key=repr))
        values = {one: as_kind(dict(said).get(one.number, one.default), one.kind) for one in cols}
        row = {"id": key, **{one.name: value for one, value in values.items()}, "_time": self.time, "_diff": -1}
        write.compare_and_append([row], self.time, self.time + 1)
        mine = (key, frozenset((one.number, value) for one, value in values.items()))
        self.kept.events.append((self.time, mine, -1))
        self.time += 1

    def evolve(self) -> None:
        """One to three changes at once."""
        schema, cols = self.newest, list(self.kept.cols)
        for _ in range(self.rng.randint(1, 3)):
            schema, cols = self.changed(schema, cols)
        self.change(schema)
        self.kept.cols = cols
        assert self.newest.names == ["id", *(one.name for one in cols)]
        self.remember()

    def change(self, schema: persist.Schema) -> None:
        if self.controller is None:
            self.client.evolve_schema("t", schema)
        else:
            self.controller.evolve("t", schema)

    def changed(self, schema: persist.Schema, cols: list[Col]) -> tuple[persist.Schema, list[Col]]:
        what = self.rng.choice(
            ["add", "add", "default", "rename", "swap", "widen", "widen", "drop", "relax", "reorder"]
        )
        free = [name for name in NAMES if name not in {one.name for one in cols}]
        at = self.rng.randrange(len(cols)) if cols else 0
        if what in ("add", "default") and free:
            kinds = [kind for kind in VALUES for _ in range(1 + ("<" in kind)) if what == "add" or "<" not in kind]
            name, kind = self.rng.choice(free), self.rng.choice(kinds)
            nullable = what == "add" or self.rng.random() < 0.5
            default = None if what == "add" else self.rng.choice([one for one in VALUES[kind] if one != float("inf")])
            col = Col(self.kept.count, name, kind, nullable, default)
            self.kept.count += 1
            added = {name: kind + ("" if nullable else " not null")}
            return schema.add(added, defaults={} if default is None else {name: default}), [*cols, col]
        if what == "rename" and cols and free:
            name = self.rng.choice(free)
            return schema.rename({cols[at].name: name}), [*cols[:at], replace(cols[at], name=name), *cols[at + 1 :]]
        if what == "swap" and len(cols) > 1:
            one, other = cols[0], cols[-1]
            mine = [replace(one, name=other.name), *cols[1:-1], replace(other, name=one.name)]
            return schema.rename({one.name: other.name, other.name: one.name}), mine
        if what == "widen" and (narrow := [place for place, one in enumerate(cols) if one.kind in WIDER]):
            at = self.rng.choice(narrow)
            kind = WIDER[cols[at].kind]
            default = as_kind(cols[at].default, kind)
            wide = replace(cols[at], kind=kind, default=default)
            return schema.widen({cols[at].name: kind}), [*cols[:at], wide, *cols[at + 1 :]]
        if what == "drop" and cols:
            return schema.drop(cols[at].name), cols[:at] + cols[at + 1 :]
        if what == "reorder" and cols:
            moved = self.rng.sample(cols, self.rng.randint(1, len(cols)))
            rest = [one for one in cols if one not in moved]
            place = self.rng.randint(0, len(rest))
            after = rest[place - 1].name if place else None
            return schema.reorder([one.name for one in moved], after), [*rest[:place], *moved, *rest[place:]]
        if what == "relax" and cols:
            return schema.relax(cols[at].name), [*cols[:at], replace(cols[at], nullable=True), *cols[at + 1 :]]
        return schema, cols

    def maintain(self) -> None:
        """By the rules, or by all of what is there, in clusters by some column of now."""
        cols = self.pasts[-1][0]
        cluster = self.rng.choice(cols).name if cols and self.rng.random() < 0.3 else None
        policy = persist.Policy(weight=1e9, advance=0.01, part_bytes=1024, cluster=cluster) if cluster else None
        for shard in self.every:
            self.client.maintain(shard, policy=policy)

    @property
    def every(self) -> list[str]:
        with self.client.table("t") as table:
            return list(table.describe().shards)

    def check(self) -> None:
        """Readers of now, and one of the past, at the newest time and at another one."""
        for cols, read, _ in {id(one): one for one in (self.pasts[-1], self.rng.choice(self.pasts))}.values():
            for time in {self.time - 1, self.some_time()}:
                try:
                    table = self.contents(read, time)
                except persist.SchemaMismatch:
                    assert not self.kept.all_fit(cols), "refused, though its columns hold everything"
                    continue
                assert table.schema.equals(read.schema.contents)
                assert self.kind != "shard" or is_sorted(read.schema, table)
                # A row without a column, and one that says its default, take each other back in compactions as well.
                assert not self.kept.seen(cols, time, misfits=True)
                found: Counter[str] = Counter()
                for row in table.to_pylist():
                    diff = row.pop("_diff")
                    found[repr(row)] += diff
                assert found == self.kept.seen(cols, time)
                if cols and self.rng.random() < 0.5:
                    wanted = self.filter(self.rng.choice(cols))
                    some = self.contents(read, time, filter=wanted)
                    assert Counter(map(repr, some.to_pylist())) == Counter(map(repr, table.filter(wanted).to_pylist()))
        for shard in self.every:
            check_world(self.client, shard)

    def filter(self, col: Col) -> Any:
        """A filter on a column, of whose values parts may have bounds."""
        field, value = pc.field(col.name), self.value(col)
        if value is None or "<" in col.kind:
            return self.rng.choice([field.is_null(), field.is_valid()])
        literal = pa.scalar(value, parse_type(col.kind))
        return self.rng.choice(
            [field > literal, field <= literal, field == literal, field != literal, ~(field < literal)]
        )

    def some_time(self) -> int:
        return self.rng.randrange(self.time)

    def contents(self, read: Any, time: int, **rows: Any) -> Any:
        return read.snapshot(time, diff=True, **rows).to_arrow()

    def others(self) -> None:
        """Nothing: what else is done to tables of some kinds."""


class Timeline(Chain):
    """A table of a timeline, or a shard that is promoted to one somewhere on its way. Times are those of the clock."""

    def create(self) -> None:
        schema = persist.Schema({"id": "int64"}, {"a": "int8", "b": "string not null"}, times="ms")
        self.tables = self.client.controller().tables()
        self.beside = Counter[int]()
        self.tables.create("u", schema, mode="yolo" if self.kind == "direct" else "wal")
        if self.kind == "promoted":
            self.client.open_writer("t", schema).close()
            self.client.upgrade("t")
        else:
            self.tables.create("t", schema, shards=2 if self.kind == "wal" else 1)

    def remember(self) -> None:
        self.pasts.append((list(self.kept.cols), table := self.client.table("t"), table))

    def change(self, schema: persist.Schema) -> None:
        self.client.table("t").evolve(schema)

    def put(self, write: Any, rows: list[dict[str, Any]]) -> None:
        self.time = write.append(rows).time
        self.times.append(self.time)

    def reached(self, write: Any, done: Any) -> int:
        if done.time is None:
            return self.time
        self.times.append(done.time)
        return int(done.time) + 1

    def some_time(self) -> int:
        return self.rng.choice(self.times)

    def contents(self, read: Any, time: int, **rows: Any) -> Any:
        return read.read(time, diff=True, **rows).to_arrow()

    def retract(self) -> None:
        there = self.kept.single(self.time)
        if not there:
            return
        row = self.rng.choice(sorted(there.values(), key=repr))
        self.time = self.reached(None, self.pasts[-1][2].delete([row[0]]))
        self.kept.events.append((self.time - 1, row, -1))

    def maintain(self) -> None:
        self.tables.apply()
        self.tables.tidy()
        super().maintain()

    def others(self) -> None:
        """A promotion; or a transaction that has looked before an evolution, and commits to both tables after it."""
        if self.kind == "promoted" and self.client.table("t").describe().carrier == "shard":
            if self.rng.random() < 0.2:
                self.client.table("t").promote(timeline="default")
            return
        if self.kind == "direct" or self.rng.random() < 0.5:
            return
        began, number = self.tables.transaction(), self.next_id
        given, said = self.rows(self.kept.cols, [number])
        self.next_id += 2
        began.insert("t", given)
        began.upsert("u", [{"id": number, "a": 1, "b": "x"}])
        self.evolve()
        given, more = self.rows(self.kept.cols, [number + 1])
        began.insert("t", given)
        said += more
        assert len(began.read("t").to_pylist()) == len(list(self.kept.at(self.time).elements())) + len(said)
        done: Any = began.commit()
        self.times.append(done.time)
        self.kept.events += [(done.time, row, 1) for row in said]
        self.time = done.time + 1
        self.beside[number] += 1
        assert [row["id"] for row in self.tables.read("u").to_pylist()] == sorted(self.beside)


def run(chain: Chain) -> None:
    with closing(chain.client):
        chain.append()
        for _ in range(STEPS):
            chain.evolve()
            chain.others()
            chain.rng.choice([chain.append, chain.upsert, chain.retract, chain.maintain])()
            if chain.rng.random() < 0.4:
                chain.check()
        chain.maintain()
        chain.check()


def seeds(by_day: int) -> settings:
    """So many by day, without shrinking: a seed has no less."""
    return settings(
        max_examples=by_day if is_day() else 24, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
    )


@pytest.mark.parametrize("kind", ["shard", "collection", "three"])
@seeds(12)
@given(seed=st.integers(0, 2**32))
def test_chains_of_evolutions_read_as_the_model_says(kind: str, seed: int) -> None:
    run(Chain(Random(seed), kind))


@pytest.mark.parametrize("kind", ["wal", "direct", "promoted"])
@seeds(2)
@given(seed=st.integers(0, 2**32))
def test_chains_of_evolutions_of_tables_on_timelines_read_as_the_model_says(kind: str, seed: int) -> None:
    run(Timeline(Random(seed), kind))
