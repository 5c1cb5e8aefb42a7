"""What others have written: messages of topics and tables, files, and what registries answer.

Messages that are decoded together do not change one another: each target of messages decodes those of an input
together, and the first of them alone.
"""

from __future__ import annotations

import io
import json
import struct
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq

from persist_lib.convert.lines.decompression import DamagedFile, unpacked
from persist_lib.errors import PersistError
from persist_lib.schema.schema import Schema
from persist_lib.sources import schema_registry
from persist_lib.sources.decoding import Decoding
from persist_lib.sources.envelopes import Meaning
from persist_lib.sources.files import avro as container
from persist_lib.sources.files.kind import Files
from persist_lib.sources.kafka.cluster import chunks_of
from persist_lib.sources.pipeline import Made, Pipeline
from persist_lib.sources.postgres.columns import Column, Header
from persist_lib.sources.postgres.log_messages import Logged, LogMessages
from persist_lib.sources.protocol import START
from persist_lib.sources.schema_registry import Registry, Written
from persist_lib.sources.transactions import Transactions
from tests.fuzz.target import CUT, Target
from tests.unit.sources.messages import applied

SCHEMA = Schema(
    key={"id": "int64 not null"},
    value={
        "word": "string", "at": "timestamp[us, UTC]", "price": "decimal128(18, 2)", "ok": "bool", "xs": "list<int32>",
    },
    times="ms",
)  # fmt: skip
FLAT = Schema(
    key={"id": "int64 not null"}, value={"word": "string", "at": "timestamp[us, UTC]", "ok": "bool"}, times="ms"
)
TABLE = Schema(key={"id": "int32 not null"}, value={"word": "string", "count": "int64", "raw": "binary"}, times="ms")
AVRO = {
    "type": "record", "name": "Row",
    "fields": [
        {"name": "id", "type": "long"}, {"name": "word", "type": ["null", "string"], "default": None},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "ok", "type": "boolean", "default": True},
    ],
}  # fmt: skip
AVRO_TEXT = json.dumps(AVRO)
MOST_BYTES = 64 << 20
"""Of what is unpacked, no more is looked at."""


def table_of(values: Sequence[bytes | None], **more: Any) -> pa.Table:
    """Messages, one at each address and time."""
    count = len(values)
    columns = {
        "partition": pa.array(["t/0"] * count, pa.string()), "address": pa.array(range(count), pa.uint64()),
        "value": pa.array(values, pa.binary()), "_time": pa.array(range(1, count + 1), pa.uint64()),
    }  # fmt: skip
    return pa.table({**columns, **more})


class Messages:
    """Messages by one declaration. A message that is empty is one without a value."""

    def __init__(
        self, decoding: Decoding, schema: Schema = SCHEMA, meaning: Meaning | None = None, *,
        header: str | None = None, is_keyed: bool = False, schemas: Mapping[int, Written] | None = None,
        keyless: bool = False,
    ) -> None:  # fmt: skip
        self._pipeline = Pipeline(decoding, meaning or Meaning(), schema, keyless=keyless)
        self._schema, self._header, self._is_keyed, self._schemas = schema, header, is_keyed, schemas or {}

    def __call__(self, data: bytes) -> Made:
        values = [value or None for value in data.split(CUT)][:16]
        found = self._made(values)
        alone = self._made(values[:1])
        assert found.errors.slice(0, alone.errors.num_rows).equals(alone.errors), "others change what a message is"
        return found

    def _made(self, values: Sequence[bytes | None]) -> Made:
        more: dict[str, Any] = {}
        if self._header is not None:
            texts = pa.DictionaryArray.from_arrays(pa.array([0] * len(values), pa.int8()), pa.array([self._header]))
            more["header"] = texts
        if self._is_keyed:
            keys = [None if value is None else value[: value[0] % 16] for value in values]
            more["key"] = pa.array(keys, pa.binary())
            values = [None if value is None else value[value[0] % 16 :] or None for value in values]
        made = applied(
            self._pipeline, table_of(values, **more), lambda _: self._schema.contents.empty_table(), self._schemas
        )
        made.output.validate(full=True)
        return made


def _joined(*values: bytes) -> list[bytes]:
    return [*values, CUT.join(values)]


JSON = _joined(
    b'{"id":1,"word":"a","at":"2026-01-02T03:04:05Z","price":"1.25","ok":true,"xs":[1,null]}', b'{"id":2,"word":null}',
    b'{"id": 3,\n "word": "\\u00e9\\ud83d\\ude00", "at": null, "price": 7, "xs": []}',
)  # fmt: skip
CSV = _joined(b"1,a,2026-01-02T03:04:05Z,true", b'2,"a ""quoted"", one",,', b"3,,2026-01-02 03:04:05,0")
CSV_FILE = b"id,word,at,ok\n" + b"\n".join(CSV[:3]) + b"\n"
CHANGES = _joined(
    b'{"before":null,"after":{"id":1,"word":"a"},"op":"c","transaction":{"id":"t1","total_order":1}}',
    b'{"payload":{"before":{"id":1},"after":null,"op":"d"},"schema":{}}',
    b'{"before":{"id":1},"after":{"id":2,"word":"b"},"op":"u","source":{"txId":5}}', b'{"op":"t"}',
    b'{"status":"END","id":"t1","event_count":1}',
)  # fmt: skip
KEYED = _joined(*(bytes([8]) + b'"id": 1' + value for value in JSON[:2]), b'\x09{"id": 1}')


def datum(row: Any, schema: Any = AVRO) -> bytes:
    """One value as Avro writes it."""
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), row)
    return stream.getvalue()


ROWS = [{"id": n, "word": None if n % 5 == 0 else "w" * n, "at": n * 1_000_000, "ok": n % 2 == 0} for n in range(12)]


def _avro_seeds(head: bytes = b"") -> list[bytes]:
    return _joined(*(head + datum(row) for row in ROWS[:3]))


def _schema_text(data: bytes) -> Made:
    """A schema from a registry, and a message of it: its text goes up to the first mark."""
    text, _, value = data.partition(CUT)
    schemas = {7: Written(text.decode(errors="replace"))}
    registry = Registry(place="/registry")
    return Messages(Decoding(decoder="avro", registry=registry), FLAT, schemas=schemas)(b"\0\0\0\0\7" + value)


class Whole:
    """The bytes of a file, as a folder or an object store gives them."""

    def __init__(self, data: bytes) -> None:
        self.data, self.size = data, len(data)

    def range(self, start: int, end: int) -> bytes:
        return self.data[start:end]


def _container(data: bytes) -> int:
    """A file of Avro, up to its last whole block."""
    whole: Any = Whole(data)
    at, damaged = 0, False
    while not damaged:
        end, damaged = container.last_block(container.Bytes(whole), at, at + len(data), may_grow=False)
        if end == at and not damaged:
            break
        end = len(data) if damaged else end
        for table in container.messages_of(container.Bytes(whole, end), at, end):
            table.validate(full=True)
        at = end
    return at


def container_of(codec: str) -> bytes:
    """A file with some rows."""
    stream = io.BytesIO()
    fastavro.writer(
        stream, fastavro.parse_schema(AVRO), ROWS, codec=codec, sync_interval=100, sync_marker=b"0123456789abcdef"
    )
    return stream.getvalue()


@cache
def _place() -> Path:
    return Path(tempfile.mkdtemp(prefix="persist-fuzz-"))


def _parquet(data: bytes) -> int:
    """A file of Parquet in a folder that is a source, decoded as rows."""
    path = _place() / "a.parquet"
    path.write_bytes(data)
    return _applied(Files(place=str(_place()), format="parquet"), Pipeline(Decoding(decoder="rows"), Meaning(), FLAT))


def _applied(files: Files, pipeline: Pipeline) -> int:
    """Decode all messages of files that are a source, and answer how many there are."""
    count = 0
    with closing(files.open()) as reader:
        for partition, mark in reader.high_watermarks({}, 1 << 20).items():
            for table in reader.read(partition, START, mark):
                whole = table.append_column("_time", table.column("address"))
                whole = whole.append_column("partition", pa.array(["a"] * table.num_rows, pa.string()))
                applied(pipeline, whole, lambda _: FLAT.contents.empty_table()).output.validate(full=True)
                count += table.num_rows
    return count


def _lines_of(name: str, decoding: Decoding) -> Callable[[bytes], int]:
    """A file of lines in a folder that is a source, cut into messages and decoded as rows."""
    pipeline = Pipeline(decoding, Meaning(), FLAT)

    def decode(data: bytes) -> int:
        place = _place() / name
        place.mkdir(exist_ok=True)
        (place / name).write_bytes(data)
        return _applied(Files(place=str(place), format="csv" if "csv" in name else "jsonl"), pipeline)

    return decode


def parquet_seeds() -> list[bytes]:
    found = []
    table = pa.Table.from_pylist(ROWS, schema=pa.schema(list(FLAT.data)))
    for more in (
        {},
        {"compression": "zstd", "row_group_size": 5},
        {"use_dictionary": False, "data_page_version": "2.0"},
    ):
        sink = io.BytesIO()
        pq.write_table(table, sink, **more)
        found.append(sink.getvalue())
    return found


def _packed(suffix: str) -> Callable[[bytes], int]:
    def decode(data: bytes) -> int:
        count = 0
        for piece in unpacked(iter([data[:100], data[100:]]), suffix):
            count += len(piece)
            if count > MOST_BYTES:
                break
        return count

    return decode


HEADER = Header(tuple(
    Column(name, type_, -1, name == "id") for name, type_ in (("id", 23), ("word", 25), ("count", 20), ("raw", 17))
))  # fmt: skip
WHOLE = Header(tuple(column._replace(is_key=True) for column in HEADER.columns))


def _texts(*values: bytes | None) -> bytes:
    cells = [
        b"n" if one is None else b"u" if one == b"?" else b"t" + struct.pack(">I", len(one)) + one for one in values
    ]
    return struct.pack(">H", len(values)) + b"".join(cells)


PG = (
    b"I\0\0\0\7N" + _texts(b"1", b"word", b"5", b"\\x00ff"), b"U\0\0\0\7N" + _texts(b"1", b"?", None, b"?"),
    b"U\0\0\0\7K" + _texts(b"1", None, None, None) + b"N" + _texts(b"2", b"x", b"1", None),
    b"U\0\0\0\7O" + _texts(b"1", b"a", b"2", None) + b"N" + _texts(b"1", b"?", b"1", None),
    b"D\0\0\0\7K" + _texts(b"1", None, None, None), b"T\0\0\0\1\0\0\0\0\7",
)  # fmt: skip
RELATION = b"R\0\0\0\7public\0t\0d\0\2\1id\0\0\0\0\x17\xff\xff\xff\xff\0word\0\0\0\0\x19\xff\xff\xff\xff"
COPIED = _joined(b'"1","a ""b""","5","\\x00"\n', b'"2",,"7",\n', b'"3","line\nend",,\n')


def _stream(data: bytes) -> list[Any]:
    """A slot's stream: its messages, one after the other."""
    log = LogMessages({7: Logged("t", {"id": 1, "word": 2})}, 0)
    return [done for one in data.split(CUT)[:64] if (done := log.take(one)) is not None]


def _stream_seeds() -> list[bytes]:
    head = b"w" + bytes(24)
    begin, end = b"B" + struct.pack(">Qqi", 100, 0, 5), b"C" + struct.pack(">BQQq", 0, 100, 200, 0)
    return _joined(*(head + one for one in (begin, RELATION, *PG, end)), b"k" + bytes(17))[-1:]


class _Message:
    """A message as a Kafka client gives it, made of bytes: its headers, key and value."""

    def __init__(self, data: bytes) -> None:
        self._parts = data.split(b"\xfe")

    def offset(self) -> int:
        return 5

    def partition(self) -> int:
        return 0

    def leader_epoch(self) -> int | None:
        return len(self._parts[0]) or None

    def topic(self) -> str:
        return "t"

    def timestamp(self) -> tuple[int, int]:
        return 1, int.from_bytes(self._parts[0][:8], "big", signed=True)

    def value(self) -> bytes | None:
        return self._parts[0] or None

    def key(self) -> bytes | None:
        return self._parts[1] if len(self._parts) > 1 else None

    def headers(self) -> list[tuple[str, bytes | None]]:
        return [(part[:4].decode(errors="replace"), part[4:] or None) for part in self._parts[2:]]


def _kafka(data: bytes) -> int:
    return sum(chunk.table.num_rows for _, _, chunk in chunks_of([_Message(one) for one in data.split(CUT)], {"t": 0}))


class _Answer(io.BytesIO):
    """What a registry answers."""


def _registry(data: bytes) -> Written | None:
    """Answers of a registry, one after the other; the last one again where there are no more."""
    answers = data.split(CUT)
    taken = iter(answers)
    with mock.patch.object(schema_registry, "urlopen", side_effect=lambda *_, **__: _Answer(next(taken, answers[-1]))):
        return Registry(place="http://registry").fetch(7)


REGISTRY = _joined(
    b'{"schema":"{\\"type\\":\\"long\\"}","references":[{"name":"a","subject":"a-value","version":2}]}',
    b'{"schema":"\\"string\\"","schemaType":"AVRO"}',
)  # fmt: skip


def _gz(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=31)
    return packer.compress(data) + packer.flush()


TEXT = Schema(key={"line": "string"}, times="ms")
BYTES = Schema(key={"line": "binary"}, times="ms")
UPSERT = Meaning(envelope="upsert")
TX = Meaning(envelope="debezium", transactions=Transactions(topic="t"))
TARGETS: Sequence[Target] = (
    Target("json-messages", Messages(Decoding()), lambda: JSON),
    Target("json-upserts", Messages(Decoding(extra="ignore", missing="null"), SCHEMA, UPSERT), lambda: JSON),
    Target("keyed-messages", Messages(Decoding(key="json"), meaning=UPSERT, is_keyed=True), lambda: KEYED),
    Target("csv-messages", Messages(Decoding(decoder="csv"), FLAT), lambda: CSV),
    Target("csv-of-a-file", Messages(Decoding(decoder="csv", encoding="latin-1", nulls=("", "NULL")), FLAT,
                                     header="id,word,at,ok"), lambda: CSV),
    Target("text-messages", Messages(Decoding(decoder="text"), TEXT), lambda: JSON),
    Target("bytes-messages", Messages(Decoding(decoder="bytes"), BYTES), lambda: JSON),
    Target("debezium", Messages(Decoding(), FLAT, Meaning(envelope="debezium")), lambda: CHANGES),
    Target("debezium-transactions", Messages(Decoding(), FLAT, TX), lambda: CHANGES),
    Target("avro-messages", Messages(Decoding(decoder="avro", avro=AVRO_TEXT), FLAT), _avro_seeds),
    Target("avro-of-a-registry", Messages(Decoding(decoder="avro", registry=Registry(place="/registry")), FLAT,
                                          schemas={id_: Written(AVRO_TEXT) for id_ in range(256)}),
           lambda: _avro_seeds(b"\0\0\0\0\7"), errors=(PersistError, KeyError)),
    Target("avro-schema", _schema_text, lambda: [AVRO_TEXT.encode() + CUT + datum(ROWS[1])],
           errors=(PersistError, KeyError)),
    Target("avro-file", _container, lambda: [container_of(codec) for codec in ("null", "deflate", "bzip2", "xz")]),
    Target("parquet-file", _parquet, parquet_seeds),
    Target("file-of-json", _lines_of("a.jsonl", Decoding()), lambda: [b"\n".join(JSON[:2]) + b"\n"]),
    Target("file-of-csv", _lines_of("a.csv", Decoding(decoder="csv")), lambda: [CSV_FILE]),
    Target("packed-file-of-csv", _lines_of("a.csv.gz", Decoding(decoder="csv")), lambda: [_gz(CSV_FILE)]),
    Target("gzip-file", _packed(".gz"), lambda: [_gz(b"some text " * 50), _gz(b"a") + _gz(b"b") + bytes(9)],
           errors=(PersistError, DamagedFile)),
    Target("zstd-file", _packed(".zst"), lambda: [pa.compress(b"some text " * 50, "zstd", asbytes=True)],
           errors=(PersistError, DamagedFile)),
    Target("pgoutput-changes", Messages(Decoding(decoder="pgoutput"), TABLE, Meaning(envelope="changes"),
                                        header=HEADER.text()), lambda: _joined(*PG)),
    Target("pgoutput-whole-rows", Messages(Decoding(decoder="pgoutput"), TABLE, Meaning(envelope="changes"),
                                           header=WHOLE.text(), keyless=True), lambda: _joined(PG[0], PG[3], PG[5])),
    Target("pg-copied-rows", Messages(Decoding(decoder="pgoutput"), TABLE, Meaning(envelope="changes"),
                                      header=Header(HEADER.columns, copied=True).text()), lambda: COPIED),
    Target("pg-stream", _stream, _stream_seeds),
    Target("kafka-messages", _kafka, lambda: [b"value\xfekey\xfename\xff\xfebyte" + CUT + b"x"]),
    Target("registry-answer", _registry, lambda: REGISTRY),
)  # fmt: skip
