"""The peers of an upsert: merges by deltalake and by DuckLake, and the rows and keys that all sides have.

Nothing of ours is imported here. DuckLake is an extension of a DuckDB of its own version, which is installed into a
folder of its own when it is first needed, and which only its own process sees.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa

from bench.peer import ROOT, Ready, install

ROWS, QUICK_ROWS = 10_000_000, 200_000
KEYS, QUICK_KEYS = (1_000, 100_000), (100, 2_000)
MIB = 1 << 20
TURNS = itertools.count(1)
"""Each change has other values than those before it."""
LAKE = ROOT / "build" / "ducklake"
LAKE_PINS = ROOT / "requirements" / "ducklake.txt"


def table_of(ids: np.ndarray, round_: int) -> pa.Table:
    """Rows for these ids, other ones in each round."""
    states = np.array(["placed", "paid", "packed", "sent"])[(ids + round_) % 4]
    cents = (ids * 7919 + round_) % 100_000
    notes = np.char.add("note ", ((ids * 104_729) % 1_000_003).astype(str))
    return pa.table({"id": ids, "state": pa.array(states), "cents": cents, "note": pa.array(notes)})


def ids_of(rows: int, keys: int, round_: int) -> np.ndarray:
    """Half of them even, so that they are there, and half of them odd."""
    random = np.random.default_rng(round_)
    there = random.choice(rows, keys // 2, replace=False) * 2
    return np.sort(np.concatenate([there, random.choice(rows, keys - keys // 2, replace=False) * 2 + 1]))


@contextmanager
def delta(folder: str, rows: str) -> Iterator[Ready]:
    """A Delta table with the same rows, and merges of the same keys."""
    import deltalake  # noqa: PLC0415 - only its process needs it

    place, count = str(Path(folder, "delta")), int(rows)
    for start in range(0, count, MIB):
        deltalake.write_deltalake(place, table_of(np.arange(start, min(start + MIB, count)) * 2, 0), mode="append")
    deltalake.DeltaTable(place).optimize.compact()
    sizes: list[int] = []

    def merge(source: pa.Table) -> None:
        before = _size(place)
        table = deltalake.DeltaTable(place)
        merging = table.merge(source, predicate="t.id = s.id", source_alias="s", target_alias="t")
        merging.when_matched_update_all().when_not_matched_insert_all().execute()
        sizes.append(_size(place) - before)

    yield Ready(
        f"deltalake {deltalake.__version__}, its defaults, all cores, opened again each time, files compacted before; "
        "merge on t.id = s.id, update all, insert all",
        _calls(count, merge, sizes),
    )


def install_ducklake() -> None:
    """Put DuckLake, its DuckDB, and what that needs for S3 into `LAKE`, unless they are there."""
    if not all((LAKE / f"duckdb_extension_{name}").is_dir() for name in ("ducklake", "httpfs")):
        install(LAKE, LAKE_PINS)


@contextmanager
def ducklake(folder: str, rows: str) -> Iterator[Ready]:
    """A DuckLake table with the same rows, its catalog in a DuckDB file, and merges of the same keys."""
    sys.path.insert(0, str(LAKE))
    import duckdb  # noqa: PLC0415 - of another version than ours

    place, count = Path(folder, "ducklake"), int(rows)
    (place / "data").mkdir(parents=True)
    (extension,) = (LAKE / "duckdb_extension_ducklake").rglob("*.duckdb_extension")

    def change(*statements: str, **tables: pa.Table) -> None:
        with duckdb.connect() as connection:
            connection.execute(f"load '{extension}'")
            connection.execute(f"attach 'ducklake:{place}/catalog.ducklake' as lake (data_path '{place}/data/')")
            for name, table in tables.items():
                connection.register(name, table)
            for statement in statements:
                connection.execute(statement)

    change("create table lake.orders (id bigint, state varchar, cents bigint, note varchar)")
    for start in range(0, count, MIB):
        some = table_of(np.arange(start, min(start + MIB, count)) * 2, 0)
        change("insert into lake.orders select * from source", source=some)
    change("call ducklake_merge_adjacent_files('lake')")
    sizes: list[int] = []

    def merge(source: pa.Table) -> None:
        before = _size(str(place / "data"))
        change(
            "merge into lake.orders t using source s on t.id = s.id "
            "when matched then update set state = s.state, cents = s.cents, note = s.note "
            "when not matched then insert values (s.id, s.state, s.cents, s.note)",
            source=source,
        )
        sizes.append(_size(str(place / "data")) - before)

    yield Ready(
        f"DuckLake of duckdb {duckdb.__version__}, its defaults, all cores, catalog in a DuckDB file, whose growth "
        "does not count; opened again each time, files merged before; merge on t.id = s.id",
        _calls(count, merge, sizes),
    )


def _calls(rows: int, merge: Callable[[pa.Table], None], sizes: list[int]) -> dict[str, Callable[[], object]]:
    def spread(keys: int) -> Callable[[], None]:
        return lambda: merge(table_of(ids_of(rows, keys, next(TURNS)), next(TURNS)))

    def together() -> None:
        few = (KEYS if rows == ROWS else QUICK_KEYS)[0]
        merge(table_of(np.arange(rows * 2, rows * 2 + few), next(TURNS)))

    calls: dict[str, Callable[[], object]] = {f"merge {keys}": spread(keys) for keys in (*KEYS, *QUICK_KEYS)}
    return calls | {"merge together": together, "written": lambda: sizes[-1]}


def _size(place: str) -> int:
    return sum(file.stat().st_size for file in Path(place).rglob("*") if file.is_file())
