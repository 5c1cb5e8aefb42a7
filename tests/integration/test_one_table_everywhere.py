"""One program over each carrier of a table, through Python and through the command with SQL: the same answers.

Seventy steps, misuse among them. Each answer is what a user sees of it: counts, rows, or the kind of the error. Times
are compared by their order. What a carrier cannot do is one error of the same kind, at the same step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest

import persist_lib as persist
from tests.carriers import CARRIERS, SCHEMA
from tests.circles import by_day
from tests.integration.test_cli import Shell
from tests.integration.test_cli_collections import jsonl

WIDER = persist.Schema(SCHEMA.key, [*SCHEMA.value, *persist.Schema({"x": "int64"}).key], unique=True, times="ms")
COUNTS = ("inserted", "updated", "unchanged", "deleted", "late")
Answer = object


def row(id_: int, seq: int | None, word: str = "w") -> dict[str, Any]:
    return {"id": id_, "seq": seq, "word": word}


def rows_of(found: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return sorted(tuple(one.get(name) for name in ("id", "seq", "word", "_diff")) for one in found)


class Python:
    """A table through the library."""

    def __init__(self, root: Path, _scratch: Path) -> None:
        self.db = persist.open(f"file:{root}")
        self.name = "t"

    @property
    def table(self) -> persist.Table:
        return self.db.table(self.name)

    def change(self, verb: str, *parts: Any, dry_run: bool = False, newer: str | None = None) -> Answer:
        options: dict[str, Any] = {"dry_run": dry_run}
        if newer is not None:
            options |= {"order_by": newer, "only_if": persist_newer(newer)}
        if verb == "update":
            (new,) = parts
            parts = ({name: value for name, value in new.items() if name != "id"}, [new["id"]])
        done = getattr(self.table, verb)(*parts, **options)
        self.last = done.time
        return done.count, *(getattr(done, name) for name in COUNTS), done.time is None

    def read(self, as_of: int | None = None, **wanted: Any) -> Answer:
        with self.table.read(as_of, **wanted) as found:
            return rows_of(found.to_pylist())

    def changes(self, from_: int, to: int | None = None) -> Answer:
        return rows_of(self.table.changes(from_, to).to_pylist())

    def history(self) -> Answer:
        found = self.table.history()
        return found.column("added").to_pylist(), found.column("retracted").to_pylist()

    def restore(self, to: int, *, dry_run: bool = False) -> Answer:
        return self.table.restore(to, dry_run=dry_run).count

    def describe(self) -> Answer:
        found = self.table.describe()
        return list(found.schema.names), found.retention, sorted(found.holds), found.since.time == 0

    def set_retention(self, distance: Any, *, dry_run: bool = False) -> Answer:
        found = self.table.set_retention(distance, dry_run=dry_run)
        return found.before == found.after

    def keep_deletes(self) -> Answer:
        self.table.set_keep_deletes("seq", "7 days")
        return "kept"

    def hold(self, name: str, since: int) -> Answer:
        self.table.set_hold(name, since)
        return "held"

    def release(self, name: str) -> Answer:
        self.table.release_hold(name)
        return "released"

    def evolve(self, *, dry_run: bool = False) -> Answer:
        return len(self.table.evolve(WIDER, dry_run=dry_run))

    def rename(self, to: str) -> Answer:
        self.table.rename(to)
        self.name = to
        return "renamed"

    def drop(self, *, dry_run: bool = False) -> Answer:
        self.table.drop(dry_run=dry_run)
        return "dropped"

    def tables(self) -> Answer:
        return self.db.tables()

    def maintain(self) -> Answer:
        self.db.maintain()
        return "maintained"

    def new_column(self) -> Answer:
        return {one["id"]: one["x"] for one in self.table.read(filter=pc.field("x") > 0).to_pylist()}

    def sql(self) -> Answer:
        return [self.table.count(), sum(one["seq"] or 0 for one in self.table.read().to_pylist())]

    def close(self) -> None:
        self.db.close()


def persist_newer(column: str) -> Any:
    return pc.field(column) > persist.old(column)


class Failed(Exception):
    """A command that failed; `kind` is the error's name."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class Command:
    """A table through `persist`."""

    def __init__(self, root: Path, scratch: Path) -> None:
        self.sh, self.scratch, self.name = Shell(root), scratch, "t"
        self.files = 0

    def ask(self, *words: object) -> Any:
        done = self.sh.run(*words, "--json")
        if done.exit_code:
            raise Failed(json.loads(done.stderr.splitlines()[-1])["error"])
        return json.loads(done.stdout)

    def file(self, rows: Any) -> Path:
        self.files += 1
        return jsonl(
            self.scratch / f"{self.files}.jsonl", *(row if isinstance(row, dict) else {"id": row} for row in rows)
        )

    def change(self, verb: str, *parts: Any, dry_run: bool = False, newer: str | None = None) -> Answer:
        words: list[object] = [verb, self.name]
        if verb == "update":
            parts = (list(parts),)
        words.append(self.file(parts[0]))
        if len(parts) > 1:
            words += ["--deletes", self.file(parts[1])]
        if newer is not None:
            words += ["--newer", newer]
        found = self.ask(*words, *["--dry-run"] * dry_run)
        self.last = found["time"]
        counts = [found[name] for name in COUNTS]
        return found["updates"], *counts, found["time"] is None

    def read(self, as_of: int | None = None, **wanted: Any) -> Answer:
        words: list[object] = ["read", self.name, *([] if as_of is None else ["--as-of", as_of])]
        words += ["--diff"] * wanted.get("diff", False)
        if "key" in wanted:
            words += ["--key", wanted["key"][0]]
        if "columns" in wanted:
            words += ["--columns", ",".join(wanted["columns"])]
        return rows_of(self.ask(*words)["rows"])

    def changes(self, from_: int, to: int | None = None) -> Answer:
        return rows_of(self.ask("changes", self.name, "--from", from_, *([] if to is None else ["--to", to]))["rows"])

    def history(self) -> Answer:
        found = self.ask("history", self.name)["rows"]
        return [one["added"] for one in found], [one["retracted"] for one in found]

    def restore(self, to: int, *, dry_run: bool = False) -> Answer:
        return self.ask("restore", self.name, "--to", to, *["--dry-run"] * dry_run)["rows"]

    def describe(self) -> Answer:
        found = self.ask("describe", self.name)
        columns = [*found["schema"]["key"], *found["schema"]["value"]]
        return columns, found["retention"], sorted(found["holds"]), found["since"] == [0]

    def set_retention(self, distance: Any, *, dry_run: bool = False) -> Answer:
        found = self.ask("set-retention", self.name, distance, *["--dry-run"] * dry_run)
        return found["before"] == found["after"]

    def keep_deletes(self) -> Answer:
        self.ask("set-retention", self.name, "--keep-deletes", "seq:7 days")
        return "kept"

    def hold(self, name: str, since: int) -> Answer:
        self.ask("hold", "set", self.name, name, "--since", since)
        return "held"

    def release(self, name: str) -> Answer:
        self.ask("hold", "release", self.name, name)
        return "released"

    def evolve(self, *, dry_run: bool = False) -> Answer:
        return len(self.ask("evolve", self.name, "--add", "x:int64", *["--dry-run"] * dry_run)["added"])

    def rename(self, to: str) -> Answer:
        self.ask("rename", self.name, to)
        self.name = to
        return "renamed"

    def drop(self, *, dry_run: bool = False) -> Answer:
        self.ask("drop", self.name, *(["--dry-run"] if dry_run else ["--yes"]))
        return "dropped"

    def tables(self) -> Answer:
        return self.ask("tables", "--names")["tables"]

    def maintain(self) -> Answer:
        self.ask("maintain", "--all")
        self.ask("maintain", "--only", "collections")
        return "maintained"

    def new_column(self) -> Answer:
        return {one["id"]: one["x"] for one in self.ask("sql", f"select id, x from {self.name} where x > 0")["rows"]}

    def sql(self) -> Answer:
        (found,) = self.ask("sql", f"select count(*) as n, coalesce(sum(seq), 0)::bigint as s from {self.name}")["rows"]
        return [found["n"], found["s"]]

    def close(self) -> None:
        """Nothing is open between two commands."""


def program(door: Any) -> Iterator[tuple[str, Callable[[], Answer]]]:
    """The steps: a name, and what is asked."""
    times: list[int] = []

    def change(*parts: Any, **options: Any) -> Callable[[], Answer]:
        def do() -> Answer:
            answer = door.change(*parts, **options)
            if door.last is not None:
                times.append(door.last)
            time.sleep(0.003)  # so that each has a millisecond of its own
            return answer

        return do

    yield "empty", door.read
    yield "no history", door.history
    yield "append", change("append", [row(1, 1), row(2, 1)])
    yield "append again", change("append", [row(1, 1)])
    yield "append nothing", change("append", [])
    yield "dry append", change("append", [row(3, 1)], dry_run=True)
    yield "wrong column", change("append", [{"id": 1, "seq": 1, "wurd": "w"}])
    yield "wrong type", change("append", [{"id": "x", "seq": 1, "word": "w"}])
    yield "upsert", change("upsert", [row(2, 2, "v"), row(3, 1)])
    yield "upsert again", change("upsert", [row(2, 2, "v"), row(3, 1)])
    yield "dry upsert", change("upsert", [row(9, 1)], dry_run=True)
    yield "two for a key", change("upsert", [row(9, 1), row(9, 2)])
    yield "rows", door.read
    yield "distinct rows", lambda: door.read(diff=True)
    yield "one key", lambda: door.read(key=(2,))
    yield "no such key", lambda: door.read(key=(77,))
    yield "one column", lambda: door.read(columns=["word"])
    yield "no such column", lambda: door.read(columns=["wurd"])
    yield "as of the first", lambda: door.read(times[0])
    yield "as of the last", lambda: door.read(times[-1])
    yield "in the future", lambda: door.read(times[-1] + 3_600_000)
    yield "sql", door.sql
    yield "changes since the first", lambda: door.changes(times[0])
    yield "changes of one time", lambda: door.changes(times[0], times[1])
    yield "changes backwards", lambda: door.changes(times[1], times[0])
    yield "update", change("update", {"id": 1, "seq": 7})
    yield "update of no row", change("update", {"id": 99, "seq": 7})
    yield "dry update", change("update", {"id": 2, "seq": 70}, dry_run=True)
    yield "update of no column", change("update", {"id": 1, "none": 7})
    yield "delete", change("delete", [3, 44])
    yield "delete again", change("delete", [3])
    yield "dry delete", change("delete", [1], dry_run=True)
    yield "rows then", door.read
    yield "apply", change("apply", [row(4, 1), row(1, 8, "a")], [2])
    yield "apply late", change("apply", [row(4, 0, "late"), row(1, 9, "new")], newer="seq")
    yield "apply several", change("apply", [row(5, 1), row(5, 3, "last"), row(5, 2)], newer="seq")
    yield "apply twice", change("apply", [row(4, 5)], [4])
    yield "upsert in part", change("upsert", [{"id": 1, "word": "part"}, {"id": 4, "seq": None}, {"id": 8}])
    yield "apply in part", change("apply", [{"id": 1, "word": None}, {"seq": 2, "id": 4}], [8])
    yield "apply in part late", change("apply", [{"id": 4, "seq": 1}, {"id": 1, "seq": 99}, {"id": 5}], newer="seq")
    yield "apply in part newer", change("apply", [{"id": 4, "seq": 1}, {"word": "n", "id": 1, "seq": 99}], newer="seq")
    yield "several in part", change("apply", [{"id": 4, "word": "x", "seq": 7}, {"id": 4, "seq": 8}], newer="seq")
    yield "deletes under a condition", change("apply", [row(4, 9)], [1], newer="seq")
    yield "rows in part", door.read
    yield "dry apply", change("apply", [row(6, 1)], [1], dry_run=True)
    yield "rows after", door.read
    yield "history", door.history
    yield "dry restore", lambda: door.restore(times[1], dry_run=True)
    yield "restore", lambda: door.restore(times[1])
    yield "restored", door.read
    yield "restore again", lambda: door.restore(times[1])
    yield "restore to the future", lambda: door.restore(times[-1] + 3_600_000)
    yield "as it was", lambda: door.read(times[-1])
    yield "describe", door.describe
    yield "hold", lambda: door.hold("audit", times[2])
    yield "a hold before it", lambda: door.hold("audit", times[0])
    yield "described with a hold", door.describe
    yield "dry retention", lambda: door.set_retention("1 day", dry_run=True)
    yield "retention", lambda: door.set_retention("1 day")
    yield "wrong retention", lambda: door.set_retention("soon")
    yield "release", lambda: door.release("audit")
    yield "release again", lambda: door.release("audit")
    yield "described with retention", door.describe
    yield "maintain", door.maintain
    yield "maintained", door.read
    yield "dry evolve", lambda: door.evolve(dry_run=True)
    yield "columns", lambda: door.describe()[0]
    yield "evolve", door.evolve
    yield "evolve again", door.evolve
    yield "more columns", lambda: door.describe()[0]
    yield "append without it", change("append", [row(30, 1)])
    yield "append with it", change("append", [row(31, 1) | {"x": 5}])
    yield "append misspelt", change("append", [row(32, 1) | {"xx": 5}])
    yield "upsert with it", change("upsert", [row(30, 1) | {"x": 7}])
    yield "update of it", change("update", {"id": 31, "x": 6})
    yield "rows with more columns", door.read
    yield "a filter of it", door.new_column
    yield "keep deletes", door.keep_deletes
    yield "deletes with an order", change("apply", [row(40, 3)], [{"id": 30, "seq": 5}], newer="seq")
    yield "a late one", change("apply", [row(30, 4)], newer="seq")
    yield "as of an earlier time", lambda: door.read(times[1])
    yield "tables", door.tables
    yield "rename", lambda: door.rename("u")
    yield "rows of the renamed", door.read
    yield "dry drop", lambda: door.drop(dry_run=True)
    yield "drop", door.drop
    yield "dropped", door.read
    yield "no tables", door.tables


def transcript(door: Any) -> dict[str, Answer]:
    said: dict[str, Answer] = {}
    for what, ask in program(door):
        try:
            said[what] = ask()
        except (persist.SchemaMismatch, persist.InvalidUsage):
            said[what] = "InvalidUsage"
        except persist.PersistError as error:
            said[what] = type(error).__name__
        except Failed as error:
            said[what] = error.kind.replace("SchemaMismatch", "InvalidUsage")  # what is no row of it is either
    door.close()
    return said


CANNOT: dict[str, dict[str, Answer]] = {
    "shard": {
        "rename": "InvalidUsage", "described with retention": None, "describe": None, "described with a hold": None
    },
    "wal": {
        "keep deletes": "kept", "deletes with an order": (2, 1, 0, 0, 1, 0, False),
        "a late one": (0, 0, 0, 0, 0, 1, True), "rows of the renamed": None,
    },
}  # fmt: skip
"""What a carrier answers otherwise, by design: the error, or None where it is only compared between the doors."""
DOORS = {"Python": Python, "the command": Command}


@pytest.mark.timeout(300)
def test_one_program_has_one_transcript(tmp_path: Path) -> None:
    said: dict[tuple[str, str], dict[str, Answer]] = {}
    carriers = {"collection of 1", *by_day([one for one in CARRIERS if one != "collection of 1"], 5)}
    for carrier, make in ((one, CARRIERS[one]) for one in sorted(carriers)):
        for door, open_ in DOORS.items():
            place = tmp_path / f"{carrier} {door}".replace(" ", "-")
            place.mkdir()
            with persist.open(f"file:{place / 'data'}") as db:
                make(db)
            said[carrier, door] = transcript(open_(place / "data", place))
    expected = said["collection of 1", "Python"]
    assert len(expected) >= 70
    differing = [
        f"{what}: {carrier} by {door} {answer}, not {expected[what]}"
        for (carrier, door), answers in said.items()
        for what, answer in answers.items()
        if what not in CANNOT.get(carrier, {}) and answer != expected[what]
    ]
    assert not differing, "\n".join(differing)
    for carrier in carriers & CANNOT.keys():
        for what, answer in CANNOT[carrier].items():
            one, other = (said[carrier, door][what] for door in DOORS)
            assert one == other == (answer or one), (carrier, what)
