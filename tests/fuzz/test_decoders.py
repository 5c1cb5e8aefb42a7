"""Any bytes that come from outside give a value or an error that is documented: never a crash, a hang, or too much
memory. Valid bytes are changed here, for a moment each; `make fuzz` looks for new ground by coverage, for minutes."""

from __future__ import annotations

import bz2
import io
import json
import lzma
import os
import struct
import time
import tracemalloc
import zlib
from collections.abc import Callable
from random import Random

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persist_lib.errors import Corrupt, Determinate, InvalidUsage, PersistError, redacted
from persist_lib.format.predicate import Where
from persist_lib.kernel.columns import packed, unpacked
from persist_lib.sources.decoding import Decoding
from persist_lib.sources.envelopes import Meaning
from persist_lib.sources.files import avro as container
from persist_lib.sources.pipeline import Pipeline
from persist_lib.sources.schema_registry import Registry
from tests.circles import is_day
from tests.fuzz import foreign, stored
from tests.fuzz.table import TARGETS
from tests.fuzz.target import CUT, check, mutated
from tests.unit.sources.messages import applied

BUDGET_S = 0.1 if is_day() else 2.0
"""For how long a target is tried. What is tried depends on the seed alone, and how much of that on the machine."""
MOST = 2000
DEEP = 3000
TELLS = {"reply": 1, "registry-answer": 1}
"""How many of the seeds are errors that the other side tells."""


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_valid(name: str) -> None:
    seeds = TARGETS[name].seeds()
    assert seeds
    assert sum(check(TARGETS[name], seed) for seed in seeds) == len(seeds) - TELLS.get(name, 0)


@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes_give_a_value_or_an_error_that_is_documented(name: str) -> None:
    chance = Random(f"{os.environ.get('PERSIST_SEED', 'fixed')} {name}")
    end = time.monotonic() + BUDGET_S
    for data in mutated(TARGETS[name].seeds(), MOST, chance):
        check(TARGETS[name], data)
        if time.monotonic() > end:
            break


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(TARGETS)), st.binary(max_size=120))
def test_so_do_bytes_that_are_nothing(name: str, data: bytes) -> None:
    check(TARGETS[name], data)


NESTED = b'{"a":' * DEEP
"""JSON within JSON, which ends too early; parsers see that it is too deep first."""
BLOWN = b"\x91" * DEEP
"""The same in msgpack."""


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("log-row", b"\x03" + BLOWN), ("rollup", b"\x04" + BLOWN), ("pauses", b"\x03" + BLOWN),
        ("collection-record", b'{"asked":' + NESTED), ("source-record", b'{"meaning":{"x":' + NESTED),
        ("stream-lock", b'{"x":' + NESTED), ("event-lock", b'{"x":' + NESTED), ("location-marker", b"[" * DEEP),
        ("event-log-name", b"[" * DEEP), ("prices", b"[" * DEEP), ("config", NESTED), ("plan", b'{"x":' + NESTED),
        ("token-file", b"a = " + b"[" * DEEP), ("settings-file", b"a = " + b"[" * DEEP),
        ("source-file", b"a = " + b"{a=" * DEEP), ("rows-of-json", NESTED), ("registry-answer", NESTED),
        ("statements", b'{"table": "t", "op": "upsert", "row": ' + NESTED),
    ],
)  # fmt: skip
def test_what_is_nested_without_end_is_refused(name: str, data: bytes) -> None:
    with pytest.raises(TARGETS[name].errors):
        TARGETS[name].decode(data)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("event-epoch", b"7" * 5000), ("config", b'{"a": ' + b"7" * 5000 + b"}"), ("typed-retention", b"7" * 5000),
        ("typed-time", b"7" * 5000), ("rules", b"a = " + b"7" * 5000), ("token-file", b"a = " + b"7" * 5000),
        ("settings-file", b"a = " + b"7" * 5000), ("source-file", b"a = " + b"7" * 5000),
    ],
)  # fmt: skip
def test_a_number_of_thousands_of_digits_is_refused(name: str, data: bytes) -> None:
    with pytest.raises(PersistError):
        TARGETS[name].decode(data)


@pytest.mark.parametrize("name", ["stream-lock", "event-lock"])
def test_a_lock_that_is_no_utf_8_is_damage(name: str) -> None:
    (seed,) = TARGETS[name].seeds()
    with pytest.raises(Corrupt):
        TARGETS[name].decode(seed[:-1] + b',"\x81":1}')


def test_offsets_that_point_elsewhere_are_damage_of_an_inline_part() -> None:
    """They would be followed, and a reader's memory be read: a client of a shard server sends any bytes it likes."""
    (whole,) = (seed for seed in TARGETS["inline-part"].seeds() if seed[:1] == b"\0")
    at = whole.index(b"".join(f"w{n}".encode() for n in range(9) if n % 3)) - 40
    changed = whole[:at] + struct.pack("<10i", 0, *[2**30] * 9) + whole[at + 40 :]
    with pytest.raises(Corrupt):
        TARGETS["inline-part"].decode(changed)
    with pytest.raises(Corrupt):
        TARGETS["inline-part"].decode(b"\0" + b"\xff" * 4 + bytes(4) + whole[9:])  # the end of a stream


def test_rows_of_a_wal_that_point_elsewhere_are_damage() -> None:
    whole = packed(stored.table_of(0))
    texts = b"".join(f"w{n}".encode() for n in range(9) if n % 3)
    at = whole.index(texts) - 40
    with pytest.raises(Corrupt):
        unpacked(whole[:at] + struct.pack("<10i", 0, *[2**30] * 9) + whole[at + 40 :])
    with pytest.raises(Corrupt):
        unpacked(b"\xff" * 64)


def test_a_bad_message_of_avro_is_bad_for_the_same_reason_in_every_process() -> None:
    """Instances write the errors of a source alike, so no reason may have an address in memory in it."""
    cut = foreign.datum(foreign.ROWS[1])[:-1]
    made = TARGETS["avro-messages"].decode(cut)
    (reason,) = made.errors.column("reason").to_pylist()
    assert reason == "it is not what its schema says: EOFError cannot read boolean from the message"


def _blocks(codec: str, payload: bytes, records: int = 1, schema: object = "bytes") -> bytes:
    """A file of Avro with one block of these bytes."""
    head = {"avro.codec": codec.encode(), "avro.schema": json.dumps(schema).encode()}
    fields = foreign.datum(head, {"type": "map", "values": "bytes"})
    sizes = foreign.datum(records, "long") + foreign.datum(len(payload), "long")
    sync = b"0123456789abcdef"
    return b"Obj\x01" + fields + sync + sizes + payload + sync


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "deflate": lambda data: zlib.compress(data)[2:-4], "bzip2": bz2.compress, "xz": lzma.compress,
    "zstandard": lambda data: pa.compress(data, "zstd", asbytes=True),
}  # fmt: skip


@pytest.mark.parametrize("codec", PACKERS)
def test_a_block_of_avro_that_unpacks_to_too_much_is_bad(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "LONGEST_BLOCK", 1 << 20)
    whole: object = foreign.Whole(_blocks(codec, PACKERS[codec](bytes(32 << 20))))
    tracemalloc.start()
    (table,) = container.messages_of(container.Bytes(whole), 0, len(whole.data))  # type: ignore[arg-type, attr-defined]
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    (problem,) = table.column("problem").to_pylist()
    assert "too large" in problem
    assert most < 16 << 20  # of it xz has 8 MiB for itself
    right: object = foreign.Whole(_blocks(codec, PACKERS[codec](foreign.datum(b"x" * 5, "bytes"))))
    (table,) = container.messages_of(container.Bytes(right), 0, len(right.data))  # type: ignore[arg-type, attr-defined]
    assert table.column("problem").to_pylist() == [None]


def test_a_block_of_avro_says_how_many_records_without_a_byte_it_has_and_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(container, "RECORDS_MOST", 100)
    whole: object = foreign.Whole(_blocks("null", b"", records=1 << 60, schema="null"))
    (table,) = container.messages_of(container.Bytes(whole), 0, len(whole.data))  # type: ignore[arg-type, attr-defined]
    assert table.num_rows == 101
    assert "without a byte" in table.column("problem")[-1].as_py()


@pytest.mark.parametrize("data", [b"", b"I", b"U\0\0\0\7O\0\4t\0\x80\0\0001tN", b"D\0\0\0\7K\0\4t\xff\xff\xff\xff"])
def test_a_change_of_postgresql_that_is_cut_is_damage(data: bytes) -> None:
    whole = foreign.PG[0]
    with pytest.raises(Corrupt):
        TARGETS["pgoutput-changes"].decode((data or whole[:3]) + CUT + whole)
    with pytest.raises(Corrupt):
        TARGETS["pgoutput-changes"].decode(data)


@pytest.mark.parametrize("kind", [b"B", b"C", b"R", b"T", b"I"])
def test_a_message_of_a_slot_that_is_cut_is_damage(kind: bytes) -> None:
    head = b"w" + bytes(24)
    whole = {
        b"B": b"B" + bytes(20),
        b"C": b"C" + bytes(25),
        b"R": foreign.RELATION,
        b"T": foreign.PG[5],
        b"I": foreign.PG[0],
    }
    begin = head + b"B" + struct.pack(">Qqi", 100, 0, 5)
    relation = head + foreign.RELATION
    for end in (1, 3, len(whole[kind]) - 1):
        if kind == b"I" and end > 3:
            continue  # what is in a row is read later
        with pytest.raises(Corrupt, match="cannot be read"):
            TARGETS["pg-stream"].decode(CUT.join([relation, begin, head + whole[kind][:end]]))
    with pytest.raises(Corrupt, match="cannot be read"):
        TARGETS["pg-stream"].decode(head + foreign.RELATION.replace(b"word", b"\xff\xff\xff\xff"))


def test_copied_rows_of_another_width_are_damage() -> None:
    with pytest.raises(Corrupt, match="do not have 4 columns"):
        TARGETS["pg-copied-rows"].decode(b'"1","a"\n')


@pytest.mark.parametrize(
    "references", ['[{"name": "a"}]', '[{"name": "a", "subject": "s", "version": "x"}]', '{"name": 1}', "[5]"]
)
def test_references_that_a_registry_does_not_say_as_it_should_are_no_answer(references: str) -> None:
    with pytest.raises(Determinate, match="references cannot be read"):
        TARGETS["registry-answer"].decode(f'{{"schema": "x", "references": {references}}}'.encode())


def test_references_without_a_schema_and_without_end_are_no_answer() -> None:
    first = b'{"schema": "x", "references": [{"name": "a", "subject": "s", "version": 1}]}'
    with pytest.raises(Determinate, match="no schema of a"):
        TARGETS["registry-answer"].decode(first + CUT + b"{}")
    many = ",".join(f'{{"name": "n{n}", "subject": "s", "version": 1}}' for n in range(1500))
    with pytest.raises(Determinate, match="too many"):
        TARGETS["registry-answer"].decode(
            f'{{"schema": "x", "references": [{many}]}}'.encode() + CUT + b'{"schema": "x"}'
        )


def test_a_text_of_parquet_that_is_no_utf_8_is_a_bad_message(tmp_path: object) -> None:
    """It could be written to a shard, and never be read again."""
    words = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(struct.pack("<3i", 0, 1, 3)), pa.py_buffer(b"a\xff\xfe")]
    )
    table = pa.table({"id": [1, 2], "word": words, "at": pa.nulls(2, pa.timestamp("us", "UTC")), "ok": [True, True]})
    sink = io.BytesIO()
    pq.write_table(table, sink)
    made = TARGETS["parquet-file"].decode(sink.getvalue())
    assert made == 2
    rows = foreign.table_of([None, None]).drop_columns(["value"]).append_column("value", table.to_struct_array())
    found = applied(
        Pipeline(Decoding(decoder="rows"), Meaning(), foreign.FLAT), rows, lambda _: foreign.FLAT.contents.empty_table()
    )
    assert found.output.column("id").to_pylist() == [1]
    (error,) = found.errors.to_pylist()
    assert "no UTF-8" in error["reason"]
    assert json.loads(error["raw"]) == {"id": 2, "word": "//4=", "at": None, "ok": True}


def test_a_file_of_parquet_with_a_name_that_is_no_utf_8_is_not_read_and_stops_no_source() -> None:
    (data, *_) = TARGETS["parquet-file"].seeds()
    assert TARGETS["parquet-file"].decode(data) == len(foreign.ROWS)
    assert TARGETS["parquet-file"].decode(data.replace(b"word", b"wo\xebd")) == 0


def test_a_text_of_a_pending_batch_that_is_no_utf_8_is_damage() -> None:
    (data,) = (seed for seed in TARGETS["pending-batch"].seeds() if seed[:1] == b"\0")
    assert b"w1" in data
    with pytest.raises(Corrupt, match="does not decode as a part: ArrowInvalid"):
        TARGETS["pending-batch"].decode(data.replace(b"w1", b"\xff1"))


def test_a_filter_with_a_long_text_that_is_not_ascii_is_one() -> None:
    columns = pa.schema([("w", pa.string()), ("v", pa.string())])
    expression = pc.field("w").isin(["漢字かな" * 40])
    with pytest.raises(UnicodeDecodeError):
        str(expression)  # Arrow cuts it within a character
    where = Where.of(columns, expression)
    assert where is not None
    assert where.names == ("w",)
    with pytest.raises(InvalidUsage, match="on the columns"):
        Where.of(columns, pc.field("other").isin(["漢字かな" * 40]))


def test_a_url_within_a_url_without_end_is_left_out_of_a_message() -> None:
    assert redacted("store=" * DEEP + "x") == "store=" * DEEP + "x"
    assert "secret" not in redacted("store=a%3A" + "store=" * DEEP + "%3Fpassword%3Dsecret")
    assert redacted("rpc://h?store=s3%3A//b/p") == "rpc://h?store=s3%3A//b/p"
    assert "secret" not in redacted("rpc://h?store=postgres%3A//u%3Asecret%40h/d")


@pytest.mark.parametrize("url", ["//[[a:1/topic", "//[::1/topic"])
def test_a_url_of_kafka_that_is_none_is_refused_as_such(url: str) -> None:
    with pytest.raises(InvalidUsage, match="Kafka's topics"):
        TARGETS["kafka-url"].decode(url.encode())
    with pytest.raises(InvalidUsage):
        Registry(place="http:" + url)


def test_a_file_of_parquet_that_is_damaged_is_refused_by_its_name() -> None:
    (data, *_) = TARGETS["rows-of-parquet"].seeds()
    with pytest.raises(PersistError, match=r"rows.parquet cannot be read"):
        TARGETS["rows-of-parquet"].decode(data[:20] + b"\x91" * 60 + data[80:])
