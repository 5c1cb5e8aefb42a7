"""What Persist has stored: the log, rollups, parts, marks, records, and events.

Checksums are set right after each change, as a fuzzer would never find one: what is tried is what a decoder makes of
bytes that were written so.
"""

from __future__ import annotations

import struct
import tempfile
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
from xxhash import xxh3_64_digest

from persist_lib.catalog import records
from persist_lib.core.budgets import Entry, Spent
from persist_lib.core.pauses import Pause
from persist_lib.core.pending import PendingName, parse_pending_key
from persist_lib.core.plan.look import Look
from persist_lib.core.rules import Rule
from persist_lib.events.api import EVENTS, Held, Key
from persist_lib.events.log import cut
from persist_lib.events.record import check_digest, check_place, open_record
from persist_lib.events.stores.segments import (
    FRAME,
    FRAME_BYTES,
    Segment,
    encode_frame,
    encode_header,
    segment_name,
)
from persist_lib.events.stores.shared import open_meta, parse_epoch
from persist_lib.format import log, pause_list, scrub_marks, survey_cache
from persist_lib.format.digest import digest
from persist_lib.format.frame import HEADER_BYTES, Form, framed
from persist_lib.format.parts import decode_inline, decode_part, encode_inline, encode_part
from persist_lib.frontier import Antichain
from persist_lib.ids import SeqNo
from persist_lib.kernel.columns import packed, unpacked
from persist_lib.kernel.keys import decode_key, encode_key
from persist_lib.kernel.order import sort_updates
from persist_lib.location.contract import MARKER_BODY, check_marker
from persist_lib.pending_area import objects
from persist_lib.schema.schema import Schema
from persist_lib.sources import kinds
from persist_lib.sources.decoding import Decoding
from persist_lib.sources.envelopes import Meaning
from persist_lib.sources.files.kind import Files
from persist_lib.sources.records import SourceRecord
from tests.fuzz.target import Target

GOLDEN = Path(__file__).parent.parent / "golden"
SCHEMAS = (
    Schema(key={"id": "int64 not null"}, value={"word": "string", "ok": "bool"}),
    Schema(key={"k": "string", "at": "timestamp[us, UTC]"}, value={"f": "float64", "d": "decimal128(18, 2)"}),
    Schema(key={"k": "binary"}, value={"xs": "list<int64>", "s": "struct<a: string, b: int32>"}),
)
ROWS: tuple[list[dict[str, Any]], ...] = (
    [{"id": n, "word": None if n % 3 == 0 else f"w{n}", "ok": n % 2 == 0} for n in range(9)],
    [{"k": f"k{n}", "at": n * 1_000_000, "f": n / 3, "d": None} for n in range(5)],
    [{"k": bytes([n]), "xs": [n, None], "s": {"a": "x", "b": n}} for n in range(4)],
)


def table_of(which: int) -> pa.Table:
    """Updates of one of the schemas."""
    schema = SCHEMAS[which]
    rows = [{**row, "_time": 7 + n, "_diff": 1} for n, row in enumerate(ROWS[which])]
    return sort_updates(schema, pa.Table.from_pylist(rows, schema=schema.updates))


def golden(prefix: str) -> list[bytes]:
    """The version and the body of golden files."""
    files = [path.read_bytes() for path in sorted(GOLDEN.glob(f"{prefix}_*.bin"))]
    return [data[4:5] + data[HEADER_BYTES:] for data in files]


def _framed(magic: bytes, data: bytes) -> bytes:
    return framed(magic, data[0] if data else 0, data[1:])


def _unframed(data: bytes) -> bytes:
    return data[4:5] + data[HEADER_BYTES:]


def _row(data: bytes) -> tuple[log.LogRow, int]:
    whole = _framed(log.ROW_MAGIC, data)
    return log.decode_row(whole, "the row"), log.row_format(whole)


def _state(data: bytes) -> log.StoredState:
    return log.decode_state(_framed(log.ROLLUP_MAGIC, data), "the rollup")


def _of_form(name: str, form: Form[Any], *values: Any) -> Target:
    return _of_frame(name, form.magic, form.decode, form.encode, *values)


def _of_frame(
    name: str, magic: bytes, decode: Callable[..., Any], encode: Callable[..., bytes], *values: Any
) -> Target:
    return Target(
        name, lambda data: decode(_framed(magic, data), "the object"),
        lambda: [_unframed(encode(value)) for value in values],
        encode=lambda value: _unframed(encode(value)),
    )  # fmt: skip


WISHES = (
    pause_list.Wishes((Pause(("orders*",), ("compaction",), "ann", "why", 1, 2),)),
    pause_list.Wishes((), (Rule("o*", retention="7 days", quiet=("08:00-18:00",)), Rule("*", bytes_day=5))),
)  # fmt: skip
MARKS = scrub_marks.Marks(SeqNo(4), (b"0" * 16,), (scrub_marks.Mark(b"1" * 16, 0, 3, "damaged", 17),))
MEMORY = survey_cache.Memory("settings", {"s": Look(SeqNo(3), 17)}, {"t": (5, "why")})


def _memory(data: bytes) -> survey_cache.Memory:
    found = survey_cache.decode_memory(_framed(survey_cache.MEMORY_FORM.magic, data))
    return survey_cache.Memory() if found is None else found


INLINE = struct.Struct("<3sBI")


def _inline(data: bytes) -> pa.Table:
    """The first byte says which schema; the rest is Arrow's. All values are looked at."""
    schema, body = SCHEMAS[(data[0] if data else 0) % len(SCHEMAS)], data[1:]
    table = decode_inline("the part", INLINE.pack(b"PIB", 1, zlib.crc32(body)) + body, schema)
    table.validate(full=True)
    return table


def _inline_seeds() -> list[bytes]:
    made = [encode_inline(schema, 0, table_of(n)) for n, schema in enumerate(SCHEMAS)]
    return [bytes([n]) + bytes(part.data)[INLINE.size :] for n, part in enumerate(made)]


def _part(data: bytes) -> pa.Table:
    schema, body = SCHEMAS[(data[0] if data else 0) % len(SCHEMAS)], data[1:]
    table = decode_part("the part", body, digest(body), schema)
    table.validate()  # not whether texts are UTF-8, which is seen to where they are written
    return table


def _part_seeds() -> list[bytes]:
    return [bytes([n]) + bytes(encode_part(schema, 0, table_of(n)).data) for n, schema in enumerate(SCHEMAS)]


def _pending(data: bytes) -> objects.Batch:
    schema, body = SCHEMAS[(data[0] if data else 0) % len(SCHEMAS)], data[1:]
    count = len(ROWS[SCHEMAS.index(schema)]) if body else 0
    name = PendingName("w", 0, Antichain(100), count, objects.name_digest(body))
    batch = objects.decode(name, body, (schema,), adopt_from=0)
    batch.table.validate(full=True)
    return batch


def _pending_seeds() -> list[bytes]:
    made = [objects.encode(schema, table_of(n), "w", 0, Antichain(100))[1] for n, schema in enumerate(SCHEMAS)]
    return [bytes([n]) + bytes(data) for n, data in enumerate(made)]


def _key(data: bytes) -> tuple[Any, ...]:
    schema = SCHEMAS[(data[0] if data else 0) % 2]
    return tuple(value.as_py() for value in decode_key(schema, data[1:]))


def _key_seeds() -> list[bytes]:
    return [b"\0" + encode_key(SCHEMAS[0], [5]), b"\1" + encode_key(SCHEMAS[1], ["wörd", None])]


def _pending_key(data: bytes) -> PendingName | None:
    name = parse_pending_key(data.decode("latin-1"))
    assert name is None or parse_pending_key(name.key) == name
    return name


LOG = b"a log id"


def _event(data: bytes) -> bytes:
    """A record of an event as a store gives it."""
    held = Held(Key(EVENTS, 5, 0), memoryview(data))
    label, head, body = open_record(held, "the log")
    check_place(label, held.key, None, LOG, "the log")
    check_digest(label, held.key, head, body, (), "the log")
    return bytes(body)


@cache
def _event_seeds() -> list[bytes]:
    puts = [
        cut(EVENTS, 5, payload, log=LOG, epoch=3, previous=bytes(16), limit=None)[0] for payload in (b"", b"event " * 9)
    ]
    return [bytes(put.head) + bytes(put.body) for (put,) in puts]


def _segment(data: bytes) -> int:
    """A file of events as `disk:` has it, behind its head; the digest of the first frame is set right."""
    folder = _folder()
    head = FRAME.size
    if len(data) >= FRAME_BYTES:
        length = FRAME.unpack_from(data)[2]
        digest = xxh3_64_digest(data[:head] + data[FRAME_BYTES : FRAME_BYTES + length])
        data = data[:head] + digest + data[FRAME_BYTES:]
    path = folder / segment_name(3, 1)
    path.write_bytes(encode_header(LOG, 3, 1) + data)
    segment = Segment(path, LOG, 3, 1)
    try:
        segment.scan()
        return sum(held.record.nbytes for held in segment.read(1, 1 << 40))
    finally:
        segment.close()


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="persist-fuzz-"))


def _segment_seeds() -> list[bytes]:
    puts = [cut(EVENTS, id_, b"event " * id_, log=LOG, epoch=3, previous=bytes(16), limit=None)[0][0] for id_ in (1, 2)]
    frames = [encode_frame(put, n, is_last=True) + bytes(put.head) + bytes(put.body) for n, put in enumerate(puts)]
    return [b"", frames[0], b"".join(frames)]


def text(data: bytes) -> str:
    """Bytes as a text, as a column of texts gives it."""
    return data.decode(errors="replace")


def _source_seeds() -> list[bytes]:
    schema, meaning = SCHEMAS[0], Meaning(envelope="upsert", deletes="gone", most_errors=3)
    reader = Files(place="/data", format="jsonl")
    record = SourceRecord(id="s1", name="s", reader=reader, decoding=Decoding(), meaning=meaning, schema=schema)
    return [kinds.encode(record).encode()]


def _collection_seeds() -> list[bytes]:
    made = records.CollectionRecord(id="c1", name="c", retention=5, keep_deletes=records.KeptDeletes("seq", 9, "c2"))
    return [records.encode(made).encode()]


TARGETS: Sequence[Target] = (
    Target("log-row", _row, lambda: golden("row"), encode=lambda row: _unframed(log.encode_row(*row))),
    Target("log-row-bytes", lambda data: log.decode_row(data, "the row"), lambda: [
        path.read_bytes() for path in sorted(GOLDEN.glob("row_*.bin"))]),
    Target("rollup", _state, lambda: golden("rollup"), encode=lambda state: _unframed(log.encode_state(state))),
    _of_frame("pauses", pause_list.MAGIC, pause_list.decode_wishes, pause_list.encode_wishes, *WISHES),
    _of_form("spent", pause_list.SPENT_FORM, Spent((Entry(1, "bytes_day", "o*", 5, 7),), (9,))),
    _of_form("scrub-marks", scrub_marks.MARKS_FORM, MARKS),
    _of_form("verdicts", scrub_marks.WALKED_FORM, scrub_marks.Walked(SeqNo(4), b"0" * 16)),
    Target("survey-cache", _memory, lambda: [_unframed(survey_cache.MEMORY_FORM.encode(MEMORY))]),
    Target("inline-part", _inline, _inline_seeds),
    Target("part", _part, _part_seeds),
    Target("pending-batch", _pending, _pending_seeds),
    Target("pending-key", _pending_key, lambda: [PendingName("w", 0, Antichain(9), 4, "0" * 32).key.encode()]),
    Target("key-bound", _key, _key_seeds, errors=(ValueError, OverflowError)),
    Target("packed-table", lambda data: unpacked(data).validate(full=True), lambda: [
        packed(table_of(n)) for n in range(len(SCHEMAS))]),
    Target("event-record", _event, _event_seeds),
    Target("event-segment", _segment, _segment_seeds),
    Target("event-log-name", lambda data: open_meta(data, "the log"), lambda: [b'{"events": 1, "log": "%016x"}' % 255]),
    Target("event-epoch", lambda data: parse_epoch(data, "the log"), lambda: [b"17"]),
    Target("location-marker", lambda data: check_marker(data, "the location"), lambda: [MARKER_BODY]),
    Target("source-record", lambda data: kinds.decode("s", text(data)), _source_seeds,
           encode=lambda record: kinds.encode(record).encode()),
    Target("collection-record", lambda data: records.decode(records.CollectionRecord, text(data), "the row"),
           _collection_seeds, encode=lambda record: records.encode(record).encode()),
)  # fmt: skip
