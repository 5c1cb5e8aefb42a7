"""What people and programs hand over as text or as files: URLs, times, filters, plans, settings, tokens, rows."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from persist_lib import settings
from persist_lib.catalog.records import parse_collection_name
from persist_lib.cli import input_files, query
from persist_lib.cli import shared_options as opt
from persist_lib.core.cost import parse_prices
from persist_lib.core.plan import written
from persist_lib.core.rules import parse_rules
from persist_lib.core.state import Hold, State
from persist_lib.events.store import parse_specifier
from persist_lib.events.stores import persist as event_shard
from persist_lib.frontier import MINIMUM
from persist_lib.ids import parse_hold_name, parse_producer_name, parse_shard_id
from persist_lib.location.objects import target as objects
from persist_lib.location.open import scheme_of, url_of
from persist_lib.location.postgres import consensus as postgres
from persist_lib.location.rpc import consensus as rpc
from persist_lib.schema.json_text import parsed, text_of
from persist_lib.schema.schema import Schema
from persist_lib.schema.types import format_type, parse_type
from persist_lib.server.access import Access
from persist_lib.simulate.scene import parse_faults
from persist_lib.sources import declaration_file
from persist_lib.sources.kafka.kind import parse_kafka_url
from persist_lib.spark import offsets
from persist_lib.spark.filters import parse_where
from persist_lib.streams import lock
from persist_lib.times import parse_unit
from tests.fuzz.foreign import ROWS, parquet_seeds
from tests.fuzz.stored import text
from tests.fuzz.target import Target


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="persist-fuzz-"))


def _file(name: str, read: Callable[[Path], Any]) -> Callable[[bytes], Any]:
    """A target that reads a file."""

    def decode(data: bytes) -> Any:
        path = _folder() / name
        path.write_bytes(data)
        return read(path)

    return decode


def _texts(name: str, parse: Callable[[str], Any], *seeds: str, **more: Any) -> Target:
    return Target(name, lambda data: parse(text(data)), lambda: [seed.encode() for seed in seeds], **more)


def _held(name: str, lock_of: Callable[[State], Any]) -> Callable[[bytes], Any]:
    return lambda data: lock_of(State(holds={name: Hold(MINIMUM, data)}))


def _offset(given: str) -> Any:
    """An offset of a stream. Spark hands over a JSON object."""
    try:
        value = json.loads(given)
    except (ValueError, RecursionError):
        return None
    return offsets.decode(value, "s", "shard s") if isinstance(value, dict) else None


def _canonical(given: str) -> str:
    found = text_of(parsed(given))
    assert text_of(parsed(found)) == found
    return found


def _type(given: str) -> Any:
    found = parse_type(given)
    assert parse_type(format_type(found)) == found
    return found


def _rows(path: Path) -> int:
    return sum(table.num_rows for table in input_files.read_file(path, INPUT))


INPUT = Schema(key={"id": "int64 not null"}, value={"word": "string", "at": "timestamp[us, UTC]", "ok": "bool"})
TOKENS = (
    b'[clients.a]\ntoken = "0123456789abcdefghij"\nrights = { "orders.*" = ["read", "append"] }\nholds = ["spark-*"]\n'
)
SOURCE = (
    b'shards = 2\nretention = "7 days"\n[reader]\ntype = "files"\nplace = "/data"\nformat = "jsonl"\n'
    b'[decoding]\nextra = "ignore"\n[meaning]\nenvelope = "upsert"\n[schema]\nkey = { id = "int64 not null" }\n'
    b'value = { word = "string" }\n'
)
PERSIST = b'location = "file:./data"\n[config]\nrollup_every = 128\ncache = { path = "c" }\n'
RULES = '[[rule]]\npattern = "o*"\nretention = "7 days"\nquiet = ["08:00-18:00"]\nbytes_day = 5\n'
JSONL = b"\n".join(json.dumps({**row, "at": "2026-01-02T03:04:05Z"}).encode() for row in ROWS[:3]) + b"\n"
STATEMENTS = (
    b'{"table": "t", "op": "upsert", "row": {"id": 1, "word": "a"}}\n{"table": "t", "op": "delete", "row": {"id": 2}}\n'
)
WHERE = "id BETWEEN 1 AND 5 AND word IN ('a', 'b''c') AND at >= '2026-01-01' AND ok IS NOT NULL"
PLAN = (
    '{"kind":"persist.plan","format":1,"shards":[{"shard":"s","seqno":3,"made_ms":5,"duties":["garbage"],"settings":"x",'
    '"marks":{"seqno":"3"},"steps":[]}]}'
)
CSV = b'id,word,at,ok\n1,"a ""b""",2026-01-02 03:04:05Z,true\n2,,,\n'
TARGETS: Sequence[Target] = (
    _texts("plan", written.parse_plan, PLAN),
    _texts("rules", parse_rules, RULES),
    _texts("prices", parse_prices, "s3", '{"egress_gib": 0.09}'),
    _texts("faults", parse_faults, '{"crash": 0.01}'),
    _texts("config", settings.parse_config, '{"rollup_every": 128}'),
    _texts("type", _type, "decimal128(18, 2)", "list<struct<a: int32, b: map<string, timestamp[us, UTC]>>>"),
    _texts("json-codec", _canonical, '{"b": [1, 2.5, null], "a": "\\u00e9"}', errors=(ValueError, RecursionError)),
    _texts("event-store", parse_specifier, "disk:./a\\:b:limit=5", "pg:postgresql://u@h/d:log"),
    _texts("url", lambda given: scheme_of(url_of(given)), "s3://bucket/a?region=x", "file:./data", "memory:x"),
    _texts("s3-url", lambda given: objects.canonical("s3:" + given), "//bucket/pre%20fix?region=eu"),
    _texts("postgres-url", lambda given: postgres.parse_url("postgresql:" + given), "//u:p@h:5/d?sslmode=require"),
    _texts("server-url", lambda given: rpc.canonical("rpc:" + given), "//a:1,b:2?ca=/t&store=postgresql%3A//u@h/d"),
    _texts("kafka-url", lambda given: parse_kafka_url("kafka:" + given), "//a:1,b:2/topic?x=y"),
    _texts("sql", query.parse_query, 'select * from "a.b" as of 5 x join c as of \'1 hour ago\' on true'),
    _texts("spark-filter", lambda given: parse_where(given, INPUT, INPUT.data), WHERE),
    _texts("spark-offset", _offset, '{"version":1,"shard":"s","hold":"h","at":5,"until":7,"key":"00ff"}',
           '{"version":1,"shard":"s","hold":"h","contents":5,"key":""}'),
    _texts("typed-time", lambda given: opt.parse_frontier(given, "as_of"), "[5]", "2026-11-22", "1 hour ago", "[]"),
    _texts("typed-retention", opt.parse_distance, "7 days", "5"),
    _texts("typed-token", opt.parse_token, "00ff"),
    _texts("shard-name", parse_shard_id, "orders.eu"),
    _texts("hold-name", parse_hold_name, "audit"),
    _texts("producer-name", parse_producer_name, "nightly"),
    _texts("collection-name", parse_collection_name, "orders"),
    _texts("unit-of-times", parse_unit, "ms"),
    Target("stream-lock", _held(lock.WRITER, lock.lock_of), lambda: [msgspec.json.encode(lock.Lock(3, "i", "r"))]),
    Target("event-lock", _held(event_shard.HOLD, lambda state: event_shard.lock_of(state, "the log")),
           lambda: [msgspec.json.encode(event_shard.Lock(1, "ff", 3, "o"))]),
    Target("token-file", _file("tokens.toml", Access), lambda: [TOKENS]),
    Target("settings-file", _file("persist.toml", settings.read_file), lambda: [PERSIST]),
    Target("source-file", _file("source.toml", declaration_file.read), lambda: [SOURCE]),
    Target("rows-of-json", _file("rows.jsonl", _rows), lambda: [JSONL]),
    Target("rows-of-csv", _file("rows.csv", _rows), lambda: [CSV]),
    Target("rows-of-parquet", _file("rows.parquet", _rows), parquet_seeds),
    Target("statements", _file("lines.jsonl", lambda path: input_files.parse_statements(path, "lines")),
           lambda: [STATEMENTS]),
)  # fmt: skip
