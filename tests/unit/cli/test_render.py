"""What the command prints, without any location: units, tables, JSON, frontiers as people type them."""

from __future__ import annotations

import json
import subprocess
import sys
from io import BytesIO, StringIO

import pyarrow as pa
import pytest
from rich.console import Console, RenderableType

from persist_lib import errors
from persist_lib.cli import json_values, render
from persist_lib.cli.history import changes
from persist_lib.cli.row_formats import Counted, write_json
from persist_lib.cli.shard_commands import holders, readable
from persist_lib.cli.shared_options import parse_frontier
from persist_lib.core import units
from persist_lib.core.cost import S3_LIST
from persist_lib.core.diff import StateDiff, TraceEdit
from persist_lib.core.plan.compaction import plan_compaction
from persist_lib.core.plan.keepers import keepers_of
from persist_lib.core.state import Batch, Garbage, Hold, Part, Reader, State, Version, Writer
from persist_lib.errors import InvalidUsage, PersistError
from persist_lib.frontier import TOP, Antichain, at
from persist_lib.ids import PartKey, ReaderId, SeqNo, WriterId
from persist_lib.maintain import Census, census_of
from persist_lib.schema.schema import Schema

WRITER = WriterId("w00000000000000aa")
READER = ReaderId("r00000000000000bb")
NOW = 1_000_000


def printed(renderable: RenderableType) -> str:
    out = Console(file=StringIO(), width=400)
    out.print(renderable)
    return str(out.file.getvalue())  # type: ignore[attr-defined]


def batch(place: int, count: int, upper: Antichain | None = None) -> Batch:
    key = PartKey(f"{WRITER}/{place:016x}.parquet")
    part = Part(key, 100 * count, count, bytes(16), b"a", b"z", place, place, 0)
    end = at(place + 1) if upper is None else upper
    return Batch(place, place + 1, at(place), end, at(0), count, count, count * 7, (part,), (0,))


def state(*counts: int, **more: object) -> State:
    trace = tuple(batch(place, count) for place, count in enumerate(counts))
    totals = {"count": sum(counts), "size": 100 * sum(counts), "fingerprint": 7 * sum(counts)}
    return State(trace=trace, schemas=(Schema(key={"k": "int64"}, value={"v": "string"}),), **totals, **more)  # type: ignore[arg-type]


def version(of: State) -> Version:
    return Version(SeqNo(9), of, bytes(16))


def census(of: State, name: str = "orders") -> Census:
    return census_of(name, version(of), NOW)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024 * 1024 - 1, "1.0 MiB"),
        (117 * 2**20, "117 MiB"),
        (3 * 2**40, "3.0 TiB"),
    ],
)
def test_sizes_have_binary_units(count: int, text: str):
    assert units.size(count) == text


def test_durations_money_and_counts_read_like_a_sentence():
    assert [units.duration(ms) for ms in (5, 90_000, 600_000, 7_200_000 * 6, 86_400_000 * 9)] == [
        "5 ms", "90 s", "10 min", "12.0 h", "9 d",
    ]  # fmt: skip
    assert [units.dollars(sum_) for sum_ in (0, 1e-9, 0.0042, 1234.5)] == ["$0", "<$0.0001", "$0.0042", "$1,234.50"]
    assert [units.of(count, "batch") for count in (0, 1, 1000)] == ["0 batches", "1 batch", "1,000 batches"]
    assert units.moment(0) == "1970-01-01 00:00:00Z"
    assert [units.size_class(level) for level in (-1, 0, 12)] == ["empty", "2⁰", "2¹²"]


@pytest.mark.parametrize(
    ("text", "frontier"), [("5", at(5)), ("[5]", at(5)), ("[]", TOP), (" [ 1_000 ] ", at(1000)), ("0", at(0))]
)
def test_a_frontier_is_read_as_people_write_it(text: str, frontier: Antichain):
    assert parse_frontier(text, "lower") == frontier


@pytest.mark.parametrize("text", ["", "-1", "5.0", "five", "[5, 6]", str(2**64), "٣"])
def test_what_is_no_frontier_is_refused_with_the_text(text: str):
    with pytest.raises(InvalidUsage, match="lower"):
        parse_frontier(text, "lower")


def test_frontiers_and_bytes_and_fingerprints_have_one_form_in_json():
    hold = json_values.jsonable({"a": Hold(TOP, b"\x01\xff"), "b": Hold(at(5))})
    assert hold == {"a": {"since": [], "opaque": "01ff"}, "b": {"since": [5], "opaque": ""}}
    found = json.loads(json_values.encode(json_values.state_value(state(3, 1))))
    assert (found["upper"], found["fingerprint"], found["finished"]) == ([2], f"{28:016x}", False)
    part = found["trace"][0]["parts"][0]
    assert part.keys() == {"key", "size", "rows", "time_lower", "time_upper", "schema", "earliest", "at", "sums"}


def every_error(kind: type[PersistError] = PersistError) -> list[type[PersistError]]:
    return [kind, *(found for child in kind.__subclasses__() for found in every_error(child))]


@pytest.mark.parametrize("kind", every_error())
def test_every_error_has_the_documented_exit_code(kind: type[PersistError]):
    expected = 3 if issubclass(kind, errors.Damage) else 2 if issubclass(kind, errors.InvalidUsage) else 1
    assert json_values.exit_code(kind("no")) == expected
    assert json_values.error_value(kind("no", upper=TOP)) == {
        "error": kind.__name__,
        "message": "no",
        "fields": {"upper": []},
    }


def test_a_line_of_the_shards_says_what_needs_work():
    wide = printed(render.shards_table([census(state(*[1] * 40))], [("broken", "it is damaged")]))
    line = next(line for line in wide.splitlines() if line.startswith(" orders"))
    assert line.split()[:6] == ["orders", "[0]", "[40]", "40", "3.9", "KiB"]
    assert "40 of 14" in line
    assert "40·2⁰" in line
    assert "nothing" in line
    assert "cannot be read: it is damaged" in wide


def test_many_levels_are_summed_up_in_a_cell_and_none_is_dropped():
    counts = [2**level for level in range(9, -1, -1)]
    found = census(state(*counts)).levels
    assert render.by_level(found) == "1·2⁹ 1·2⁸ 1·2⁷ 1·2⁶ 1·2⁵ +5 smaller"
    assert "smaller" not in render.by_level(found, shown=64)


def test_two_moments_stand_side_by_side_and_shards_of_one_of_them_are_left_out():
    before, gone = census(state(*[1] * 40)), census(state(1), "gone")
    text = printed(render.compare_table([before, gone], [census(state(40))]))
    assert any(line.split() == ["batches", "40", "1"] for line in text.splitlines())
    assert "gone" not in text


def test_a_plan_says_why_and_names_what_it_leaves():
    text = printed(render.plan_table(plan_compaction(state(1000, 1, 1, 2, 9))))
    assert "merge" in text
    assert "1..2 2..3 3..4 4..5" in text
    assert "small batches" in text
    assert "weigh enough" in text


def test_who_holds_what_back_is_told_apart():
    reader, idle = Reader(at(0), SeqNo(5), NOW - 1, "report"), Reader(at(3), SeqNo(9), NOW + 60_000)
    found = state(
        2, 2, 2, 2,
        readers={READER: reader, ReaderId("r00000000000000cc"): idle},
        writers={WRITER: Writer("ingest", NOW + 1000)}, holds={"audit": Hold(at(0))},
        garbage={PartKey("a"): Garbage(SeqNo(6), 10), PartKey("b"): Garbage(SeqNo(2), 5)},
    )  # fmt: skip
    keepers = keepers_of(found, version(found).seqno)
    people = {who["name"]: who for who in holders(keepers, found.since, NOW, S3_LIST)}
    assert [people[READER][name] for name in ("holds_since", "garbage", "garbage_size", "lease_ms")] == [
        True,
        1,
        10,
        -1,
    ]
    assert [people["r00000000000000cc"][name] for name in ("holds_since", "garbage")] == [False, 0]
    assert [people["audit"][name] for name in ("holds_since", "lease_ms")] == [True, None]
    assert people[WRITER]["lease_ms"] == 1000


def test_the_times_that_can_be_read_are_said_in_words():
    assert "as of 0 to 1" in readable(state(1, 1))
    assert "nothing can be read before upper passes 2" in readable(state(1, 1, since=at(2)))
    assert "given up" in readable(state(1, since=TOP))
    closed = State(trace=(batch(0, 1, TOP),))
    assert "complete" in readable(closed)


def test_a_transition_is_told_in_sentences():
    edit = TraceEdit(tuple((place, place + 1) for place in range(9)), (batch(0, 50),))
    told = list(
        changes(StateDiff(since=(at(0), at(4)), trace=edit, retired=((WRITER, None, SeqNo(3)),), retention=(None, 5)))
    )
    assert told[0].startswith("batches 0..9 (9) → batch 0..1")
    assert told[1:] == ["since [0] → [4]", "retention none → 5", f"retired {WRITER}"]


def test_help_is_quick_because_it_loads_neither_arrow_nor_pandas():
    program = """
import sys
from persist_lib.cli.app import app
app(["--help"], standalone_mode=False)
print(sorted({"pyarrow", "numpy", "pandas", "pydantic", "apsw", "persist_lib.client"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "maintain" in done.stdout


@pytest.mark.slow
def test_the_face_of_the_library_has_its_names_and_modules_however_they_are_asked_for():
    program = """
import sys
import persist_lib as persist
assert "pyarrow" not in sys.modules
assert persist.errors.NotFound is persist.NotFound
assert not hasattr(persist, "nonsense")
assert {*persist.__all__} < {*dir(persist)}
from persist_lib import *
assert all(eval(name) is getattr(persist, name) for name in persist.__all__)
print("all are there")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "all are there\n"


def test_rows_in_chunks_of_which_some_are_empty_are_one_list() -> None:
    """As contents are where a shard, or what the WAL has, gives no row."""
    rows = pa.chunked_array([[1], [], [2], []], pa.int64())
    out = BytesIO()
    write_json(out, None, Counted(iter([pa.table({"id": rows})]), 0), {"table": "t"})
    assert json.loads(out.getvalue()) == {"table": "t", "rows": [{"id": 1}, {"id": 2}]}
