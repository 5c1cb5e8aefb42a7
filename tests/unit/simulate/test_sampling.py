"""Rows of any schema, made of a seed and a number; and what a table may hold after appends with these outcomes."""

from __future__ import annotations

import math
from collections import Counter

import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib.simulate.sampling import Sampler
from persist_lib.simulate.story import Ledger
from persist_lib.testing import contents_of, updates_of

TYPES = (
    "bool", "int8", "uint16", "int64", "uint64", "float32", "float64", "string", "binary", "date32", "time64[us]",
    "timestamp[s]", "timestamp[us, UTC]", "timestamp[ns]", "duration[ms]", "decimal128(18, 2)", "decimal256(50, 3)",
    "fixed_size_binary[16]", "list<string>", "list<float32>[3]", "struct<a: int64, b: list<bool>>",
    "map<string, timestamp[us, UTC]>",
)  # fmt: skip
EVERY = persist.Schema({"id": "int64"}, {f"c{place}": type_ for place, type_ in enumerate(TYPES)})


@pytest.mark.parametrize(
    "schema", [EVERY, persist.Schema.json(), persist.Schema.bytes()], ids=["types", "json", "bytes"]
)
def test_rows_of_every_type_are_stored_and_read_back_as_they_are(schema: persist.Schema) -> None:
    rows = Sampler(schema, 7).table(range(200), [0] * 200)
    with persist.open("memory:", create=True) as client:
        client.open_writer("s", schema).compare_and_append(rows, 0, 1)
        read = client.open_reader("s").snapshot(0, diff=True).to_arrow()
    assert contents_of(read) == Counter({data: diff for data, _, diff in updates_of(rows)})
    assert len({data for data, *_ in updates_of(rows)}) == 200


def test_the_same_seed_and_number_give_the_same_row_and_others_give_others() -> None:
    def table(seed: int, number: int, variant: int = 0) -> pa.Table:
        return Sampler(EVERY, seed).table([number], variant=variant)

    assert repr(updates_of(Sampler(EVERY, 1).table([5], [0]))) == repr(updates_of(Sampler(EVERY, 1).table([5], [0])))
    assert table(1, 5) != table(2, 5)
    assert table(1, 5).column("id") == table(1, 5, variant=1).column("id")
    assert table(1, 5) != table(1, 5, variant=1)


def test_the_values_that_programs_get_wrong_are_among_them() -> None:
    rows = Sampler(EVERY, 3).table(range(400))
    floats = rows.column(f"c{TYPES.index('float64')}").to_pylist()
    assert None in floats
    assert any(value is not None and math.isnan(value) for value in floats)
    assert any(value == 0 and math.copysign(1, value) < 0 for value in floats if value is not None)
    assert "" in rows.column(f"c{TYPES.index('string')}").to_pylist()
    assert (1 << 63) - 1 in rows.column(f"c{TYPES.index('int64')}").to_pylist()
    assert [] in rows.column(f"c{TYPES.index('list<string>')}").to_pylist()


def ledger(*outcomes: str) -> Ledger:
    """Appends of two rows each, at the times 0, 1, …, with these outcomes."""
    made = Ledger()
    for number, outcome in enumerate(outcomes):
        updates = [((number, part), number, 1) for part in "ab"]
        made.begin(updates, (number, number + 1)).outcome = outcome  # type: ignore[assignment]
    return made


def rows(*numbers: int) -> Counter[tuple[object, ...]]:
    return Counter({(number, part): 1 for number in numbers for part in "ab"})


def test_acknowledged_is_there_refused_is_not_and_unknown_may_be() -> None:
    made = ledger("acknowledged", "refused", "unknown")
    assert made.problems(rows(0)) == made.problems(rows(0, 2)) == []
    assert made.problems(rows(2)) == ["(0, 'a') is there 0 times, and not 1", "(0, 'b') is there 0 times, and not 1"]
    assert len(made.problems(rows(0, 1))) == 2, "what was refused"
    assert len(made.problems(rows(0) + rows(0))) == 2, "doubled"
    assert len(made.problems(rows(0, 9))) == 2, "invented"
    assert made.outcomes == {"acknowledged": 1, "refused": 1, "unknown": 1}


def test_as_of_a_time_only_what_is_complete_by_then_must_be_there() -> None:
    made = ledger("acknowledged", "acknowledged")
    assert made.problems(rows(0), as_of=0) == made.problems(rows(0, 1), as_of=0) == []
    assert made.problems(rows(0), as_of=1)
    assert made.problems(rows(1), as_of=0)


def test_a_part_of_an_append_and_two_appends_at_one_time_are_seen() -> None:
    made = ledger("unknown", "acknowledged")
    assert made.parts(rows(0, 1)) == made.overlaps(rows(0, 1)) == []
    assert made.parts(rows(1) + Counter({(0, "a"): 1})) == ["append 0 is there in part: 1 of 2 rows"]
    made.begin([((7, "a"), 1, 1)], (1, 3))
    assert made.overlaps(rows(1) + Counter({(7, "a"): 1})) == ["(1, 2) and (1, 3) overlap"]
