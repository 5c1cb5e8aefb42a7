"""What is in a store is not what was written there: it is found, and named, before a value of it is given.

Every kind of stored byte of every store, flipped, cut and swapped: damage that is named, or the right answer.

`python -m tests.unit.events.test_damage` writes the table of `docs/design/0045-event-stores.md`.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from persist_lib.errors import Corrupt, Damage, Missing, NewerFormat
from persist_lib.events import EVENTS, Key, Put
from persist_lib.events.record import decode_head
from persist_lib.events.store import LogStore
from tests import counted
from tests.eventlogs import KINDS, specifier, store_of, write
from tests.storedbytes import LOCAL, ask, make, wrongs
from tests.storedbytes_served import damage_served

Records = dict[tuple[int, int], bytes]
HEAD_BYTES = 66
"""Of a fragment of fewer than 128. Some drivers keep it apart from the body."""
PAYLOADS = [b"one" * 30, b"two" * 30, b"three" * 30, b"four" * 30, b"five" * 30]


class Bare:
    """A driver below the checks: it lists, replaces and removes the records of the events as they are."""

    def __init__(self, store: LogStore) -> None:
        self._store = store

    def read(self) -> Records:
        records: Records = {}
        opened = self._store.open_driver(create=False)
        for id_ in range(1, len(PAYLOADS) + 1):
            for fragment in itertools.count():
                held = opened.get(Key(EVENTS, id_, fragment))
                if held is None:
                    break
                records[id_, fragment] = bytes(held.record) + (b"" if held.body is None else bytes(held.body))
                held.release()
        opened.close()
        return records

    def write(self, records: Records) -> None:
        """Put these records, and no others, through the driver of a log that keeps its name."""
        kind = self._store.specifier.kind
        opened: Any = self._store.open_driver(create=True)
        epoch = 0 if kind == "s3" else opened.claim("")
        if kind == "s3":
            _write_s3(opened, records)
        elif kind == "disk":
            _write_disk(opened, records)
        elif kind == "persist":
            _write_persist(opened, records)
        else:
            opened.discard(epoch, 0)
            opened.put(epoch, [_put(key, record) for key, record in sorted(records.items(), key=_order)])
        opened.close()


def _order(item: tuple[tuple[int, int], bytes]) -> tuple[int, bool, int]:
    (id_, fragment), _ = item
    return id_, fragment == 0, fragment


def _put(key: tuple[int, int], record: bytes) -> Put:
    head = min(len(record), HEAD_BYTES)
    return Put(Key(EVENTS, *key), record[:head], record[head:])


def _write_disk(opened: Any, records: Records) -> None:
    for path in (opened._root / "events").iterdir():
        path.unlink()
    opened._begin(1)
    opened._append([_put(key, record) for key, record in sorted(records.items(), key=_order)])


def _write_s3(opened: Any, records: Records) -> None:
    opened._objects.delete(["hint", *opened._objects.names("events/")])
    for (id_, fragment), record in records.items():
        opened._objects.overwrite(f"events/{id_:020d}/{fragment:010d}", record)


def _write_persist(opened: Any, records: Records) -> None:
    writer = opened._writers[opened._shard]
    old = writer.machine.fetch().state.upper.time
    rows = [{"id": 0, "fragment": 0, "payload": b"", "head": b"", "_time": old, "_diff": 1}][:0]
    found = opened._client.open_reader(opened._shard).snapshot(diff=True).to_pylist()
    rows += [{**row, "_time": old, "_diff": -1} for row in found]
    for (id_, fragment), record in records.items():
        head = min(len(record), HEAD_BYTES)
        kept = {"id": id_, "fragment": fragment, "payload": record[head:], "head": record[:head]}
        rows.append({**kept, "_time": old, "_diff": 1})
    writer.compare_and_append(rows, old, old + 1)


class Case(NamedTuple):
    """A log, and the same payloads in another log."""

    store: LogStore
    bare: Bare
    records: Records
    foreign: Records


SLOW = ("pg", "s3", "persist")
IS_ALL = os.environ.get("PERSIST_EVENTS") == "all"
CASES = [(kind, limit) for kind in KINDS for limit in (None, 100) if limit or IS_ALL or kind not in SLOW]


@pytest.fixture(params=CASES, ids=lambda param: f"{param[0]}-{param[1]}")
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    kind, limit = request.param
    store, other = store_of(kind, tmp_path, limit), store_of("sqlt", tmp_path, limit)
    for one in (store, other):
        write(one, PAYLOADS)
    return Case(store, Bare(store), Bare(store).read(), Bare(other).read())


def outcome(case: Case, records: Records) -> Exception | list[bytes]:
    """What a program is given that reads all events from the third on, and then all."""
    case.bare.write(records)
    try:
        with case.store.reader() as reader:
            last = min(reader.last, len(PAYLOADS))  # changing a shard moves its upper
            for id_ in range(1, last + 1):
                with reader.read(id_) as view:
                    assert bytes(view) == PAYLOADS[id_ - 1], "a wrong value was given"
            return [bytes(event.payload) for event in reader.replay(1, last)]
    except Exception as error:  # noqa: BLE001 - what it is, is asked for
        return error


def cut(records: Records, case: Case) -> Records:
    return {**records, (3, 0): records[3, 0][:-5]}


def cut_in_head(records: Records, case: Case) -> Records:
    return {**records, (3, 0): records[3, 0][:20]}


def emptied(records: Records, case: Case) -> Records:
    return {**records, (3, 0): b""}


def grown(records: Records, case: Case) -> Records:
    return {**records, (3, 0): records[3, 0] + b"more"}


def swapped(records: Records, case: Case) -> Records:
    return {**records, (3, 0): records[4, 0], (4, 0): records[3, 0]}


def foreign(records: Records, case: Case) -> Records:
    return {**records, (3, 0): case.foreign[3, 0]}


def flipped(records: Records, case: Case) -> Records:
    data = bytearray(records[3, 0])
    data[-3] ^= 1
    return {**records, (3, 0): bytes(data)}


def unsupported_length(records: Records, case: Case) -> Records:
    return {**records, (3, 0): b"\x82" + records[3, 0][1:]}


def newer(records: Records, case: Case) -> Records:
    _, end = decode_head(memoryview(records[3, 0]), "it")
    at = end - 62
    assert records[3, 0][at] == 1
    return {**records, (3, 0): records[3, 0][:at] + b"\2" + records[3, 0][at + 1 :]}


def missing(records: Records, case: Case) -> Records:
    return {key: record for key, record in records.items() if key[0] != 3}


FOUND: dict[Callable[[Records, Case], Records], tuple[type[Damage], str]] = {
    cut: (Corrupt, "3:0.* it is cut"),
    cut_in_head: (Corrupt, "3:0.* cut in its head"),
    emptied: (Corrupt, "3:0.* cut in its head"),
    grown: (Corrupt, "3:0.* bytes too many"),
    swapped: (Corrupt, "3:0.* swapped: what is there is of id 4"),
    foreign: (Corrupt, "3:0.* of another log"),
    flipped: (Corrupt, "3:0.* its digest"),
    unsupported_length: (Corrupt, "3:0.* unsupported length 0x82"),
    newer: (NewerFormat, "3:0.* version 2"),
}


FEW = (swapped, flipped)


def test_damage_is_found_and_named(case: Case) -> None:
    assert outcome(case, case.records) == PAYLOADS
    is_slow = case.store.specifier.kind in SLOW and not IS_ALL
    for damage in FEW if is_slow else FOUND:
        kind, text = FOUND[damage]
        found = outcome(case, damage(case.records, case))
        counted.count("corruptions", made=1)
        assert isinstance(found, kind), (damage.__name__, found)
        with pytest.raises(kind, match=f"{text}|damaged: it is of log|of id 4, fragment"):
            raise found


def test_an_event_that_is_gone_is_missed(case: Case) -> None:
    found = outcome(case, missing(case.records, case))
    if case.store.specifier.kind == "s3":  # without the hint: what a crash leaves of writes that were under way
        assert found == PAYLOADS[:2]
    else:
        assert isinstance(found, Damage), found
        with pytest.raises(Damage, match=r"event 3|event 4 follows event 2|gone"):
            raise found


def test_damaged_fragments_are_found_and_named(case: Case) -> None:
    if case.store.specifier.options[-1:] != ("limit=100",):
        pytest.skip("there are no fragments")
    records = case.records
    last = max(fragment for id_, fragment in records if id_ == 3)
    assert last >= 2
    cases: list[tuple[dict[tuple[int, int], bytes | None], type[Damage], str]] = [
        ({(3, 1): records[3, 2], (3, 2): records[3, 1]}, Corrupt, "3:1.* out of order: what is there is fragment 2"),
        ({(3, 1): records[2, 1]}, Corrupt, "3:1.* swapped: what is there is of id 2"),
        ({(3, 1): case.foreign[3, 1]}, Corrupt, "3:1.* of another log"),
        ({(3, 1): records[3, 1][:-1]}, Corrupt, "3:1.* it is cut"),
        ({(3, last): None}, Missing, f"3:{last}.* is missing"),
        ({(3, 1): None}, Missing, "3:1.* is missing"),
    ]
    for wrong, kind, text in cases if case.store.specifier.kind not in SLOW or IS_ALL else cases[::4]:
        changed: dict[tuple[int, int], bytes | None] = {**records, **wrong}
        found = outcome(case, {key: record for key, record in changed.items() if record is not None})
        assert isinstance(found, kind), (wrong, found)
        with pytest.raises(kind, match=text):
            raise found


def test_an_event_of_another_history_of_the_same_log_is_found_by_the_chain(tmp_path: Path) -> None:
    place = specifier("sqlt", tmp_path)
    (path,) = [tmp_path / place.rpartition("/")[2]]
    from persist_lib.events import open_store  # noqa: PLC0415

    store = open_store(place)
    write(store, PAYLOADS[:2])
    copy = path.read_bytes() if not path.with_name(path.name + "-wal").exists() else None
    assert copy is not None
    write(store, PAYLOADS[2:])
    ours = Bare(store).read()
    store.close()
    path.write_bytes(copy)
    path.with_name(f"{path.name}-end").unlink()  # a whole copy of then has an older one
    write(store, [b"x" * 90, *PAYLOADS[3:]])
    theirs = Bare(store).read()
    assert ours[4, 0] != theirs[4, 0]
    Bare(store).write({**theirs, (4, 0): ours[4, 0]})
    with store.reader() as reader, pytest.raises(Corrupt, match=r"event 4.* follows another event 3"):
        for _ in reader.replay():
            pass


COUNT, COUNT_SLOW = (60, 8) if IS_ALL else (1, 1)
"""How many damages of each kind to each file or value; of kinds that take long, fewer."""
SEED = 1
STATES = {"closed": False, "killed": True}
BAD = ("WRONG", "OTHER", "UNTYPED", "CRASH", "HANG")
# A database whose number says that it is of another program may be that.
FOREIGN = "OTHER InvalidUsage: "
NOT_OURS = "not one of Persist's"
KEPT_AS = [(kind, state) for kind in LOCAL for state in STATES if (kind, state) != ("persist", "killed")]
"""A location in SQLite has nothing that says where its write-ahead log ended: what that means is in the table. What is
said of its damaged files is in `tests/unit/location/test_sqlite_damage.py`."""
CRASHES = ("rock", "OPTIONS")
"""RocksDB reads this file without a check, and of 80 flips one ended the process. `0045-event-stores.md` has it."""
DESIGN = Path("docs/design/0045-event-stores.md")
HEADING = "| Store | Region | Flip | Cut | Swap |"


def said_of(kind: str, folder: Path, state: str, count: int, step: int = 1) -> dict[tuple[str, str], list[str]]:
    """What is said, by region and kind of damage."""
    place = make(kind, folder, is_killed=STATES[state])
    cases = list(wrongs(place, count, SEED))[::step]
    found: dict[tuple[str, str], list[str]] = {}
    for wrong, said in zip(cases, ask(kind, place, cases, folder / "work"), strict=True):
        found.setdefault((region_of(wrong.file), wrong.kind), []).append(said)
    counted.count("corruptions", made=len(cases))
    return found


def region_of(file: str) -> str:
    """The name of a file without the numbers in it."""
    name = file.partition("/")[2] or {"events": "the database"}.get(file, file)
    if name.startswith("events/"):
        return "events/<segment>"
    return "".join(itertools.takewhile(lambda sign: not sign.isdigit(), name)).rstrip("-/") or f"*{Path(name).suffix}"


def is_bad(said: str) -> bool:
    """Whether that must not be said."""
    is_foreign = said.startswith(FOREIGN) and NOT_OURS in said
    return (said.startswith(BAD) and not is_foreign) or "UNNAMED" in said[:20]


@pytest.mark.parametrize(("kind", "state"), KEPT_AS)
def test_no_damage_to_a_file_gives_another_log(kind: str, state: str, tmp_path: Path) -> None:
    is_slow = kind == "persist"
    found = said_of(kind, tmp_path, state, COUNT_SLOW if is_slow else COUNT, 1 if IS_ALL or not is_slow else 4)
    found_bad = {region: bad for region, said in found.items() if (bad := [one for one in said if is_bad(one)])}
    known = {key: bad for key, bad in found_bad.items() if (kind, key[0]) == CRASHES and "HANG" not in bad}
    assert found_bad == known
    assert any("Corrupt" in one for said in found.values() for one in said), "nothing was damaged at all"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in LOCAL])
def test_no_damage_to_a_served_value_gives_another_log(kind: str, tmp_path: Path) -> None:
    found = damage_served(kind, tmp_path, COUNT_SLOW, is_sample=not IS_ALL)
    assert {region: bad for region, said in found.items() if (bad := [one for one in said if is_bad(one)])} == {}
    assert any("Corrupt" in one for said in found.values() for one in said), "nothing was damaged at all"


def _told(said: list[str]) -> str:
    """The outcomes and how often each was seen."""
    kinds = Counter(
        one.split(":")[0].replace("OTHER ", "").replace("right, without the snapshot", "right, no snapshot")
        for one in said
    )
    return ", ".join(f"{kind} {count}" for kind, count in kinds.most_common()) or "-"


def table(count: int, count_slow: int) -> list[str]:
    """The rows of the table."""
    rows = [HEADING, "|---|---|---|---|---|"]
    for kind in KINDS:
        found: dict[tuple[str, str], list[str]] = {}
        for state in STATES if kind in LOCAL else ("served",):
            with tempfile.TemporaryDirectory() as folder:
                size = count if kind in LOCAL and kind != "persist" else count_slow
                part = (
                    said_of(kind, Path(folder), state, size)
                    if kind in LOCAL
                    else damage_served(kind, Path(folder), size)
                )
            for key, said in part.items():
                found.setdefault(key, []).extend(said)
        for region in dict.fromkeys(region for region, _ in found):
            cells = " | ".join(_told(found.get((region, damage), [])) for damage in ("flip", "cut", "swap"))
            rows.append(f"| `{kind}` | {region} | {cells} |")
    return rows


def main() -> None:
    """Write the table into the design note."""
    before, _, rest = DESIGN.read_text().partition(HEADING)
    after = rest.partition("\n\n")[2]
    DESIGN.write_text(before + "\n".join(table(40, 4)) + "\n\n" + after)


if __name__ == "__main__":
    main()
