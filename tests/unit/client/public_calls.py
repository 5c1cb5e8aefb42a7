"""Every public callable with a legal call, which values each of its arguments takes, and values of every kind.

A name or an argument that is new has to be declared here: `test_arguments` finds it in `persist_lib.__all__` and in
signatures, and fails until then.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pydantic

import persist_lib as persist
from persist_lib.core.formats import NEWEST
from persist_lib.location import open_location

QUIET = persist.Runtime(background=False)
SCHEMA = persist.Schema(key={"id": "int64"}, value={"word": "string"})
CLOCK = persist.Schema(key={"id": "int64"}, value={"word": "string"}, times="ms")
WIDER = persist.Schema(key={"id": "int64"}, value={"word": "string", "more": "int64"})
UPPER = 10


class Row(pydantic.BaseModel):
    id: int
    word: str | None


class Unshowable:
    """Something whose repr fails."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


VALUES: dict[str, object] = {
    "None": None, "empty text": "", "text": "x", "any": "any", "long text": "x" * 100_000, "NUL": "a\0b",
    "lone surrogate": "\ud800", "newline": "a\nb", "digit": "5", "empty bytes": b"", "bytes": b"x",
    "long bytes": b"x" * 100_000, "5": 5, "0": 0, "-1": -1, "2**70": 2**70, "1.5": 1.5, "nan": math.nan,
    "inf": math.inf, "True": True, "False": False, "empty list": [], "list": ["a"], "one time": [5], "tuple": (),
    "empty dict": {}, "dict": {"id": "int64"}, "object": object(), "lambda": lambda *_: None, "class": int,
    "np.int64": np.int64(5), "np.uint64": np.uint64(5), "np.int64(-1)": np.int64(-1), "np.float64": np.float64(1.5),
    "np.nan": np.float64("nan"), "np.bool": np.bool_(True), "np.timedelta64": np.timedelta64(5, "s"),
    "np.array": np.arange(3), "nested": nested(20_000), "huge": [list(range(1000))] * 100, "unshowable": Unshowable(),
    "Unshowables": [Unshowable()], "Antichain": persist.at(5), "Schema": SCHEMA, "Prices": persist.Prices(),
    "table": pa.table({"a": [1]}),
}  # fmt: skip

# --- kinds: which of the values above are legal ----------------------------------------------------------------------

Kind = Callable[[Any], bool]


def integer(least: int, most: float) -> Kind:
    def check(value: Any) -> bool:
        is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.timedelta64))
        return is_integer and least <= int(value) <= most

    return check


def number(least: float, most: float) -> Kind:
    def check(value: Any) -> bool:
        is_number = isinstance(value, (int, float, np.integer, np.floating))
        return is_number and not isinstance(value, (bool, np.timedelta64)) and least <= value <= most

    return check


def instance(*kinds: type) -> Kind:
    return lambda value: isinstance(value, kinds)


def or_none(kind: Kind) -> Kind:
    return lambda value: value is None or kind(value)


def frontier(value: Any) -> bool:
    is_list = isinstance(value, (list, tuple)) and (len(value) == 0 or (len(value) == 1 and time(value[0])))
    return isinstance(value, persist.Antichain) or is_list or time(value)


def name(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\w[\w.-]{0,99}", value) is not None


def never(_value: Any) -> bool:
    return False


def anything(_value: Any) -> bool:
    return True


def is_empty(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and not value


def is_nothing_done(value: Any) -> bool:
    return isinstance(value, Mapping) and not value


def is_path(value: Any) -> bool:
    return isinstance(value, str) and value.isalnum()


def is_start(value: Any) -> bool:
    return value is None or integer(-1, UPPER - 1)(value)


def is_after(value: Any) -> bool:
    return value is None or time(value) or integer(-1, -1)(value)


def is_key(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(map(integer(-(2**63), 2**63 - 1), value))


def is_side(value: Any) -> bool:
    return isinstance(value, Mapping) or is_empty(value)


def by_name(value: Any) -> bool:
    return isinstance(value, Mapping)


def no_names(value: Any) -> bool:
    return isinstance(value, Mapping) and not value


def layer(value: Any) -> bool:
    return isinstance(value, str) and not value


def is_text(longest: int, *, least: int = 0) -> Kind:
    return lambda value: isinstance(value, str) and least <= len(value) <= longest and value.isprintable()


def expected(value: Any) -> bool:
    return isinstance(value, bytes) or (isinstance(value, str) and value == "any")


def is_setting(value: Any) -> bool:
    return (isinstance(value, str) and value == "5") or number(0, 2**62)(value)  # text of a number is one, for pydantic


time, flag, seconds, count = integer(0, 2**64 - 1), instance(bool, np.bool_), number(0, 1e9), integer(1, 2**62)
progress, timeout, share = or_none(callable), or_none(seconds), number(0, 1e300)
schema, policy, at = instance(persist.Schema), or_none(instance(persist.Policy)), instance(persist.Antichain)
token = or_none(lambda value: isinstance(value, bytes) and 1 <= len(value) <= 64)
append = {"updates": is_empty, "timeout": timeout, "token": token, "expected_upper": frontier, "new_upper": frontier}
producer = or_none(
    lambda value: isinstance(value, (tuple, list)) and len(value) == 2 and is_text(200, least=1)(value[0])
)

# --- a legal call of everything that is public, and which values each argument takes besides --------------------------


class Place:
    """A location of its own with two shards, and handles that may be used up: `renew` makes new ones."""

    def __init__(self, root: Path) -> None:
        self.url = f"file:{root}"
        self.client = persist.open(self.url, runtime=QUIET)
        self.shards = self.named = 0
        self.outside = open_location(self.url)
        self.renew()

    def renew(self) -> None:
        self.shards += 1
        self.name = f"s{self.shards}"
        self.write, self.read = self.client.open_shard(self.name, SCHEMA)
        rows = [{"id": n, "word": "w", "_time": n} for n in range(UPPER)]
        self.write.compare_and_append(rows, 0, UPPER)
        self.client.set_hold(self.name, "kept", 3, opaque=b"x")
        self.snapshot = self.read.snapshot(5)
        self.changes = self.read.changes(3, 5)
        self.split = self.snapshot.splits(2)[0]
        self.table = self.snapshot.to_arrow()
        self.front = self.client.table(self.name)
        self.front.append([])
        self.front.count()  # so that its handles are open

    def everything(self) -> list[object]:
        """All rows of the log and all objects, as somebody else finds them."""
        rows = [self.outside.consensus.scan(key, 0, 100_000) for key in self.outside.consensus.list_keys()]  # type: ignore[arg-type]
        return [*rows, sorted(self.outside.blob.list(""))]

    def close(self) -> None:
        self.client.close()
        self.outside.close()


def finished(p: Place) -> str:
    """A shard that may become a tombstone."""
    p.write.finish(UPPER)
    p.client.release_hold(p.name, "kept")
    p.read.close()
    p.front.close()
    return p.name


def droppable(p: Place) -> dict[str, Any]:
    """What drops the table of this place, whose shard only that uses."""
    finished(p)
    return {"dry_run": False}


def on_a_collection(p: Place) -> Any:
    """A table that can be renamed."""
    p.named += 1
    p.client.controller().create(f"c{p.named}", CLOCK)
    return p.client.table(f"c{p.named}")


def banked(p: Place) -> str:
    """A timeline with a WAL."""
    tables = p.client.controller().tables()
    if not tables.timelines():
        tables.create("account", CLOCK, mode="wal")
    return "default"


def streamed(p: Place) -> str:
    """A stream that this client writes."""
    return p.client.stream("stream", SCHEMA, reentrance_id="x")[0].name


def produced(p: Place) -> str:
    """A shard with a producer."""
    p.write.append_now([{"id": 5, "word": "w"}], producer=("query", 7))
    return p.name


def published(p: Place) -> str:
    """The format in which the shard is published."""
    p.client.publish(p.name)
    return "iceberg"


def is_format(value: Any) -> bool:
    return isinstance(value, str) and value in ("iceberg", "delta")


PUBLISHING = {"as_": "iceberg", "at": 5, "keep": 3, "follows": False, "dry_run": True}
PUBLISHED: dict[str, Kind] = {
    "as_": is_format, "at": or_none(integer(0, UPPER - 1)), "keep": or_none(integer(1, 1000)), "follows": or_none(flag),
}  # fmt: skip


def paused(p: Place) -> str:
    """A pattern that is paused."""
    return p.client.pause(p.name, owner="ann", reason="a test").patterns[0]


def appends(p: Place) -> dict[str, Any]:
    return {"updates": [{"id": 5, "word": "w"}], "expected_upper": UPPER, "new_upper": UPPER + 1, "timeout": 0.05,
            "token": b"token"}  # fmt: skip


def keyed(key: str, **more: Any) -> dict[str, Any]:
    return {"columns": ["id"], "as_of": 5, "timeout": 0.05, "key": None, "key_from": None, "key_to": None, "keys": None,
            key: (5,), "filter": None, "diff": True, **more}  # fmt: skip


def are_keys(value: Any) -> bool:
    """Lists of integers of 64 bits, an array of them among others; null is a key, as the column allows it."""
    is_list = isinstance(value, (list, tuple, np.ndarray)) and not isinstance(value, str)
    return is_list and all(integer(-(2**63), 2**63 - 1)(each) or each is None for each in value)


def deleting(_: Place) -> dict[str, Any]:
    return {"keys": [5], "filter": None, "timeout": 0.05, "token": None, "dry_run": False}


def updating(p: Place) -> dict[str, Any]:
    return {"change": {"word": "w"}, **deleting(p)}


def applying(_: Place) -> dict[str, Any]:
    return {"upserts": [{"id": 5, "word": "w"}], "deletes": [6], "appends": None, "only_if": None, "order_by": "word",
            "timeout": 0.05, "token": None, "dry_run": False}  # fmt: skip


deletes = {"keys": are_keys, "filter": or_none(never), "timeout": timeout, "token": or_none(never), "dry_run": flag}
updates = {**deletes, "change": callable, "keys": or_none(are_keys)}
applies = {"upserts": or_none(append["updates"]), "deletes": or_none(are_keys), "only_if": or_none(never),
           "appends": or_none(append["updates"]),
           "order_by": or_none(never), "timeout": timeout, "token": or_none(never), "dry_run": flag}  # fmt: skip
Arguments = Callable[[Place], dict[str, Any]]
USUAL: dict[str, tuple[Callable[[Place], Any] | None, Kind]] = {
    "prices": (lambda _: persist.Prices(), or_none(instance(persist.Prices))), "time": (lambda _: 5, time),
    "schema": (lambda _: SCHEMA, schema), "other": (lambda _: persist.TOP, at), "expected_upper": (None, frontier),
    "new_upper": (lambda _: UPPER + 1, frontier), "producer": (lambda _: ("query", 7), producer),
    "key": (None, or_none(is_key)), "times": (lambda _: "us", or_none(never)), "unique": (lambda _: True, flag),
    "non_negative": (lambda _: True, flag), "connection": (lambda _: None, or_none(never)),
    "model": (lambda _: Row, or_none(never)), "blob": (lambda p: p.client.blob, or_none(never)),
    "from_": (lambda _: 4, is_start), "to": (lambda _: 9, or_none(integer(4, 9))),
    "timeout": (lambda _: 0.05, timeout), "purpose": (lambda _: "x", is_text(200)), "since": (lambda _: 4, frontier),
    "as_of": (lambda _: 4, or_none(time)), "until": (lambda _: 8, frontier), "columns": (None, or_none(is_empty)),
    "key_from": (None, or_none(never)), "key_to": (None, or_none(never)), "keys": (None, or_none(never)),
    "filter": (None, or_none(never)), "diff": (None, flag),
    "rows": (lambda _: [{"id": 5, "word": "w"}], append["updates"]), "token": (lambda _: None, or_none(never)),
    "dry_run": (lambda _: False, flag), "hold": (lambda _: "kept", name), "distance": (lambda _: 5, or_none(time)),
    "ticket": (lambda p: p.write.stage().ticket, never), "staged": (lambda _: [], is_empty),
    "name": (lambda p: p.name, name), "policy": (lambda _: persist.Policy(), policy),
    "engine": (lambda _: None, progress), "alone": (lambda _: False, flag),
    "expected": (lambda _: b"x", or_none(expected)), "owner": (None, is_text(200)), "layer": (lambda _: "", layer),
    "progress": (lambda _: None, progress),
}  # fmt: skip
"""By the name of an argument: what is legal, and what else it takes, where a call below does not say another thing."""
ALL_USUAL = {
    "Antichain": "has_passed is_before is_top join meet __lt__ __le__ __gt__ __ge__",
    "Schema": "bytes json",
    "Spending": "again",
    "Snapshot": (
        "to_arrow to_duckdb to_models to_pandas to_polars to_pylist to_reader scan_polars batches count release"
    ),
    "Changes": "to_arrow to_duckdb to_models to_pandas to_polars to_pylist to_reader scan_polars batches release",
    "Split": "batches to_arrow",
    "Listen": "close poll",
    "ReadHandle": "changes clone close fetch_upper downgrade_since",
    "Table": (
        "append upsert changes writer kept_by hold_of describe set_retention downgrade_hold release_hold maintain close"
    ),
    "WriteHandle": "close fetch_upper advance_upper upsert resume_stage can_append flush",
    "Client": (
        "audit_orphans census close collect compact expire producers heartbeat inspect metrics open_shard "
        "rules repair retain set_retention shards tables sources worker keepers pauses even_if_paused"
    ),
}
"""The methods of each class whose arguments are all usual; so are those of `at`."""
SPECIAL: dict[str, tuple[Arguments | None, dict[str, Kind]]] = {
    "open": (
        lambda p: {"url": p.url, "consensus": None, "config": persist.Config(), "cache": persist.CacheConfig(),
                   "runtime": QUIET, "read_only": False, "create": True},
        {"url": is_path, "consensus": or_none(is_path), "config": or_none(never), "runtime": or_none(never),
         "cache": or_none(never), "read_only": flag, "create": flag},
    ),
    "old": (lambda _: {"column": "id"}, {"column": is_text(10_000)}),
    "decode_rows": (lambda p: {"table": p.table}, {"table": instance(pa.Table)}),
    "Antichain": (None, {"time": or_none(time)}),
    "Append": (
        lambda p: {"write": p.write, "updates": [], "expected_upper": 5, "new_upper": 6},
        {"write": never, "updates": anything},
    ),
    "Batching": (lambda _: {"bytes": 5, "age_s": 1.0}, {"bytes": integer(1, math.inf), "age_s": seconds}),
    "CacheConfig": (
        lambda _: {"path": "x", "disk_bytes": 5, "memory_bytes": 5},
        {"path": lambda value: value is None or (isinstance(value, str) and value not in ("", "a\0b", "\ud800")),
         "disk_bytes": is_setting, "memory_bytes": is_setting},
    ),
    "Config": (
        lambda _: persist.Config(cache=persist.CacheConfig()).model_dump(),
        {**dict.fromkeys(persist.Config.model_fields, is_setting),
         "cache": or_none(lambda value: isinstance(value, dict) and not value),
         "format": or_none(lambda value: is_setting(value) and number(0, 255)(int(value)))},
    ),
    "Cost.priced": (None, {"prices": instance(persist.Prices)}),
    "Policy": (
        lambda _: {"weight": 0.5, "advance": 0.5, "ahead": 0.5, "part_bytes": 5, "inline_fill": 0.5, "prices": None,
                   "merge_bytes": 5, "retention": "7 days", "format": 5, "cluster": "made"},
        {"weight": share, "advance": share, "ahead": share, "inline_fill": share, "retention": or_none(time),
         "cluster": or_none(lambda value: isinstance(value, str) and len(value) <= 500 and value.isprintable()),
         **dict.fromkeys(("part_bytes", "merge_bytes", "format"), or_none(integer(1, math.inf)))},
    ),
    "Prices": (
        lambda _: dict.fromkeys(persist.Prices.__struct_fields__, 0.5),
        dict.fromkeys(persist.Prices.__struct_fields__, share),
    ),
    "Runtime": (
        lambda _: {"monotonic": QUIET.monotonic, "sleep": QUIET.sleep, "random": QUIET.random, "background": False,
                   "clock_ms": QUIET.clock_ms},
        {"monotonic": callable, "sleep": callable, "random": never, "background": flag, "clock_ms": callable},
    ),
    "Schema": (
        lambda _: {"key": {"id": "int64"}, "value": {"word": "string"}, "codec": "columns", "times": "ms"},
        {"key": lambda value: isinstance(value, Mapping) and bool(value), "value": is_side, "codec": never},
    ),
    "Schema.add": (
        lambda _: {"columns": {"new": "int64"}, "defaults": None},
        {"columns": is_side, "defaults": or_none(no_names)},
    ),
    "Schema.rename": (lambda _: {"names": {"word": "text"}}, {"names": by_name}),
    "Schema.widen": (lambda _: {"types": {}}, {"types": no_names}),
    "Schema.drop": (lambda _: {"names": "word"}, {"names": is_empty}),
    "Schema.relax": (lambda _: {"names": "word"}, {"names": is_empty}),
    "Schema.reorder": (
        lambda _: {"names": "word", "after": None}, {"names": is_empty, "after": lambda value: value is None},
    ),
    "Schema.check_additive": (lambda _: {"newer": CLOCK}, {"newer": schema}),
    "Schema.show_as_of": (None, {"time": lambda value: at(value) or integer(-1, 2**64 - 1)(value)}),
    "Schema.show": (None, {"time": lambda value: at(value) or time(value)}),
    "Schema.moment": (None, {"time": lambda value: at(value) or time(value)}),
    "Spending": (lambda _: {"tally": None}, {"tally": or_none(never)}),
    "Spending.over": (lambda _: {"items": [1]}, {"items": lambda value: hasattr(type(value), "__iter__")}),
    "Survey.due": (lambda _: {"duty": "scrub"}, {"duty": never}),
    "Survey.paused": (lambda _: {"duty": "scrub"}, {"duty": never}),
    "Snapshot.of_keys": (
        lambda _: {"lower": None, "upper": None},
        {"lower": or_none(instance(bytes)), "upper": or_none(instance(bytes))},
    ),
    "Snapshot.splits": (lambda _: {"n": 2}, {"n": integer(1, 2**20)}),
    "ReadHandle.listen": (None, {"as_of": is_after}),
    "ReadHandle.snapshot": (lambda _: keyed("key"), {}),
    "ReadHandle.snapshot of keys": (
        lambda _: keyed("keys", keys=[5, 7]),
        {"keys": or_none(are_keys), **dict.fromkeys(("key", "key_from", "key_to", "filter"), or_none(never))},
    ),
    "ReadHandle.snapshot of a range": (
        lambda _: keyed("key_from", key_to=(7,)),
        {"key": or_none(never), "key_from": or_none(is_key), "key_to": or_none(is_key)},
    ),
    "ReadHandle.wait_for_upper": (lambda _: {"frontier": 5}, {"frontier": frontier}),
    "Table.delete": (deleting, deletes),
    "Table.update": (updating, updates),
    "Table.apply": (applying, applies),
    "Table.read": (lambda _: keyed("key", newest=False), {"newest": flag}),
    "Table.count": (lambda _: {"as_of": 5}, {}),
    "Table.listen": (lambda _: {"replace": False}, {"as_of": is_after, "replace": flag}),
    "Table.history": (lambda _: {"limit": 3}, {"limit": or_none(count)}),
    "Table.restore": (lambda _: {"to": 5, "timeout": 1.0}, {"to": integer(0, UPPER - 1)}),
    "Table.evolve": (lambda _: {"schema": WIDER}, {}),
    "Table.set_keep_deletes": (
        lambda _: {"column": None, "span": None}, {"column": or_none(never), "span": or_none(never)}
    ),
    "Table.set_hold": (
        lambda _: {"opaque": b"y"}, {"opaque": lambda value: isinstance(value, bytes) and len(value) <= 4096}
    ),
    "Table.publish": (lambda _: PUBLISHING, PUBLISHED),
    "Table.withdraw": (lambda p: {"as_": published(p)}, {"as_": is_format}),
    "Table.rename": (lambda p: {"to": f"d{p.named}"}, {"to": name}),
    "Table.drop": (droppable, {}),
    "Table.erase": (lambda _: {"keys": [5], "timeout": 1.0}, {"keys": are_keys}),
    "Table.promote": (
        lambda _: {"shards": None, "timeline": None, "make_timeline": False, "losing": ("loader",), "dry_run": True,
                   "timeout": 5.0},
        {"shards": or_none(integer(1, 1024)), "timeline": or_none(name), "make_timeline": flag,
         "losing": lambda value: isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value)},
    ),
    "WriteHandle.append": (
        lambda p: {"lower" if key == "expected_upper" else key: value for key, value in appends(p).items()},
        {"lower" if key == "expected_upper" else key: kind for key, kind in append.items()},
    ),
    "WriteHandle.append_now": (lambda _: {"updates": [{"id": 5, "word": "w"}]}, {"updates": append["updates"]}),
    "WriteHandle.delete": (deleting, deletes),
    "WriteHandle.update": (updating, updates),
    "WriteHandle.apply": (applying, applies),
    "WriteHandle.stage": (
        lambda _: {"lease_s": 60.0, "lower": UPPER}, {"lease_s": number(0.1, 400 * 86400), "lower": frontier}
    ),
    "WriteHandle.append_staged": (lambda _: {"at": UPPER, "producer": None}, {"at": or_none(time)}),
    "WriteHandle.upsert_staged": (lambda _: {"producer": None}, {}),
    "WriteHandle.overwrite_staged": (lambda _: {"upper": None, "producer": None}, {"upper": or_none(frontier)}),
    "WriteHandle.append_async": (lambda p: {**appends(p), "block": True}, {**append, "block": flag}),
    "WriteHandle.compare_and_append": (appends, append),
    "WriteHandle.finish": (lambda _: {"expected_upper": UPPER}, {"expected_upper": or_none(frontier)}),
    "Client.explain": (lambda _: {"key": "w/x"}, {"key": or_none(lambda value: isinstance(value, str))}),
    "Client.charge": (lambda _: {"cost": persist.Cost(gets=1)}, {"cost": instance(persist.Cost)}),
    "Client.pause": (
        lambda p: {"pattern": p.name, "owner": "ann", "reason": "a test", "only": [], "until": "2 days"},
        {**dict.fromkeys(("pattern", "owner", "reason"), is_text(500, least=1)), "only": is_empty,
         "until": or_none(instance(np.timedelta64))},
    ),
    "Client.set_rules": (
        lambda _: {"rules": []}, {"rules": lambda value: (isinstance(value, str) and not value) or is_empty(value)},
    ),
    "Client.budgets": (lambda p: {}, {}),
    "Client.rules_of": (lambda p: {"name": p.name}, {"name": is_text(500, least=1)}),
    "Client.policy": (None, {"name": or_none(name)}),
    "Client.plan": (lambda p: {"name": p.name, "only": []}, {"name": or_none(name), "only": is_empty}),
    "Client.apply": (lambda p: {"plan": p.client.plan(p.name)}, {"plan": never}),
    "Client.resume": (lambda p: {"pattern": paused(p)}, {"pattern": is_text(500, least=1)}),
    "Client.compare_and_append_many": (
        lambda p: {"appends": [persist.Append(p.write, [], UPPER, UPPER + 1)], "token": b"token"},
        {"appends": is_empty, "token": token},
    ),
    "Client.evolve_schema": (lambda _: {"schema": WIDER}, {}),
    "Client.finish": (lambda p: {"name": finished(p)}, {}),
    "Client.forget_producer": (
        lambda p: {"name": produced(p), "producer": "query", "expected": 7},
        {"producer": never, "expected": lambda value: type(value) is int and value == 7},
    ),
    "Client.judge_append": (
        lambda _: {"token": b"token", "expected_upper": 1, "new_upper": 2},
        {"token": lambda value: value is not None and token(value)},
    ),
    "Client.maintain": (None, {"name": or_none(name)}),
    "Client.open_reader": (None, {"schema": or_none(schema)}),
    "Client.open_writer": (
        lambda _: {"batching": persist.Batching(5, 1.0), "owner": "me"}, {"batching": or_none(never)}
    ),
    "Client.controller": (lambda p: {"catalog": p.name}, {"catalog": or_none(name)}),
    "Client.release_hold": (None, {"expected": expected}),
    "Client.restore": (lambda _: {"to": 5, "timeout": 1.0}, {"to": integer(0, UPPER - 1)}),
    "Client.roll_up": (lambda _: {"force": True}, {"force": flag}),
    "Client.scrub": (lambda _: {"after": 0, "new_only": False}, {"after": time, "new_only": flag}),
    "Client.verify": (lambda _: {"full": False}, {"full": flag}),
    "Client.set_hold": (
        lambda _: {"opaque": b"y"}, {"opaque": lambda value: isinstance(value, bytes) and len(value) <= 4096}
    ),
    "Client.downgrade_hold": (
        lambda _: {"opaque": b"y"}, {"opaque": or_none(lambda value: isinstance(value, bytes) and len(value) <= 4096)}
    ),
    "Client.table": (None, {"schema": or_none(schema)}),
    "Client.stream": (
        lambda p: {"name": streamed(p), "reentrance_id": "x", "owner": "x"},
        {"reentrance_id": lambda value: isinstance(value, str) and value in ("", "x")},
    ),
    "Client.transaction": (lambda p: {"timeline": banked(p)}, {"timeline": name}),
    "Client.survey": (
        lambda p: {"done": {"scrub": [p.name]}, "most": 5, "seconds": 0.05},
        {"done": is_nothing_done, "most": or_none(integer(0, math.inf)), "seconds": timeout},
    ),
    "Client.upgrade": (lambda _: {"to": NEWEST}, {"to": integer(1, NEWEST)}),
    "Client.publish": (lambda _: PUBLISHING, PUBLISHED),
    "Client.withdraw": (lambda p: {"as_": published(p)}, {"as_": is_format}),
}  # fmt: skip


def _parameters(what: str) -> list[str]:
    """The names of the arguments of a public call."""
    owner, _, method = what.partition(" ")[0].partition(".")
    found = getattr(persist, owner)
    parameters = inspect.signature(getattr(found, method) if method else found).parameters.values()
    return [one.name for one in parameters if one.kind is not one.VAR_KEYWORD and one.name not in ("self", "cls")]


def _with_usual(what: str, arguments: Arguments | None, kinds: dict[str, Kind]) -> tuple[Arguments, dict[str, Kind]]:
    usual = {one: USUAL[one] for one in _parameters(what) if one in USUAL}

    def legal(p: Place) -> dict[str, Any]:
        said = {} if arguments is None else arguments(p)
        made = {one: make(p) for one, (make, _) in usual.items() if one not in said and make is not None}
        return {**made, **said}

    return legal, {**{one: kind for one, (_, kind) in usual.items()}, **kinds}


LEGAL: dict[str, tuple[Arguments, dict[str, Kind]]] = {
    what: _with_usual(what, *said)
    for what, said in {
        **{f"{owner}.{one}": (None, {}) for owner, names in ALL_USUAL.items() for one in names.split()},
        "at": (None, {}), **SPECIAL,
    }.items()
}  # fmt: skip
RECEIVERS: dict[str, Callable[[Place], Any]] = {
    "Antichain": lambda _: persist.at(5), "Client": lambda p: p.client, "Cost": lambda _: persist.Cost(),
    "Listen": lambda p: p.read.listen(4), "ReadHandle": lambda p: p.read, "Schema": lambda _: CLOCK,
    "Snapshot": lambda p: p.snapshot, "Spending": lambda _: persist.Spending(), "Split": lambda p: p.split,
    "Survey": lambda p: p.client.survey(), "Table": lambda p: p.front,
    "Table.rename": on_a_collection, "Table.promote": on_a_collection, "Changes": lambda p: p.changes,
    "WriteHandle": lambda p: p.write,
}  # fmt: skip
ANSWERED = {
    "Appended", "Changed", "Changes", "Client", "Cost", "Done", "Listen", "Look", "Metrics", "Progress", "ReadHandle",
    "Restored", "Snapshot", "Split", "Survey", "Table", "TableDescription", "Updates", "Verdict", "WriteHandle",
}  # fmt: skip
"""What calls answer: it is not made by who calls."""
ROWS = {"Update"}
"""What is checked where it is appended, as any row."""
INNER = {"Runtime.deadline", "Runtime.entropy", "Runtime.pool", "Runtime.token"}
"""What the library itself calls, with arguments that it has checked."""

USES_UP = (
    "Table", "WriteHandle", "Client.compare_and_append_many", "Client.finish", "Client.release_hold", "Client.set_hold",
    "Client.evolve_schema", "Client.restore", "Client.forget_producer",
)  # fmt: skip
"""What needs a new shard for each call."""


def public() -> Iterator[str]:
    """The names of all public callables: functions, constructors and methods that are the library's own."""
    for each in persist.__all__:
        found = getattr(persist, each)
        if not callable(found) or (isinstance(found, type) and issubclass(found, persist.PersistError)):
            continue
        if each not in ANSWERED | ROWS:
            yield each
        for method in dir(found) if isinstance(found, type) else ():
            member = getattr(found, method)
            is_ours = (getattr(member, "__module__", None) or "").startswith("persist_lib")
            if not method.startswith("_") and is_ours and not isinstance(member, type) and callable(member):
                yield f"{each}.{method}"


def callable_of(what: str, place: Place) -> Callable[..., Any]:
    """`what` in `place`, ready to be called."""
    owner, _, method = what.partition(" ")[0].partition(".")
    return getattr(RECEIVERS.get(what, RECEIVERS[owner])(place), method) if method else getattr(persist, owner)


def call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Call it, positional-only parameters too; what it opens is closed, what it iterates over is begun."""
    kinds = inspect.signature(function).parameters
    first = [arguments[each] for each, kind in kinds.items() if kind.kind is kind.POSITIONAL_ONLY]
    rest = {each: value for each, value in arguments.items() if kinds[each].kind is not kinds[each].POSITIONAL_ONLY}
    answer = function(*first, **rest)
    if isinstance(answer, persist.Client):
        answer.close()
    elif hasattr(answer, "result"):
        answer.result(5)
