"""Troubles of sources, each planted in one: the command and Dagster say the same of each, and why."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

import dagster as dg
import fastavro
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import persist_lib as persist
from orchestration.definitions import build_definitions
from orchestration.settings import Settings
from orchestration.sources import IDLE
from persist_lib.errors import Gone, InvalidUsage
from persist_lib.sources import (
    Collection,
    Custom,
    Decoding,
    Files,
    Meaning,
    Postgres,
    Progress,
    Sources,
)
from persist_lib.sources.alerts import CHECKS
from persist_lib.sources.decoding import DECODERS
from persist_lib.sources.health import Report
from persist_lib.sources.records import changed
from persist_lib.sources.running import Behind
from tests import servers
from tests.commands import invoke

pytestmark = pytest.mark.dagster
LOCATION = "memory:troubles"
SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"})
LIMITS = {"instances": 0, "behind_s": 3600, "lag_messages": 5, "lag_bytes": 50, "errors_share": 0.5}
ROW = b'{"id": 1, "word": "a"}\n'
LONG = b"".join(b'{"id": %d, "word": "x"}\n' % n for n in range(500))


class Land:
    """Where troubles are planted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.client = persist.open(LOCATION)
        self.controller = self.client.controller()
        self.sources = Sources(self.controller)
        self.server = servers.logical_server()
        self.tables: list[str] = []
        self.sql = psycopg.connect(self.server.url, autocommit=True)

    def place(self, name: str) -> Path:
        found = self.folder / name
        found.mkdir(exist_ok=True)
        return found

    def files(self, name: str, format_: Any = "jsonl", meaning: Meaning | None = None, **options: Any) -> Path:
        """A source on a folder, and that folder."""
        decoding: Any = Decoding(decoder=DECODERS[format_])
        schema = persist.Schema(key={"word": "string not null"}) if format_ == "text" else SCHEMA
        place = self.place(name)
        self.sources.create(
            name, Files(place=str(place), format=format_, **options), schema, decoding=decoding, meaning=meaning
        )
        return place

    def run(self, name: str) -> None:
        """Ingest what is there, and let it fail."""
        with suppress(Exception):
            self.sources.run(name, until_idle=True)

    def said(self, name: str, state: Any, progress: Progress | None = None) -> None:
        """What an instance of a source says of itself."""
        with closing(Report(self.controller, self.sources.find(name).health, "x", "ms")) as report:
            report.say(state, "", progress)

    def table(self, name: str) -> str:
        """A source of a table, and its slot."""
        self.sql.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, word text, other text)".encode())
        self.sources.create(name, Postgres(url=self.server.url, table=f"public.{name}"))
        self.tables.append(name)
        self.run(name)
        return f"persist_{self.sources.find(name).id}"

    def close(self) -> None:
        self.sql.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE NOT active")
        for name in self.tables:
            self.sql.execute(f"DROP PUBLICATION IF EXISTS persist_{self.sources.find(name).id}".encode())
            self.sql.execute(f"DROP TABLE {name}".encode())
        self.sql.close()
        self.controller.close()
        self.client.close()


Plant = Callable[[Land, str], Any]


def written(
    name: str, data: bytes, beside: str = "", good: bytes = b"", *, runs: bool = False, **options: Any
) -> Plant:  # fmt: skip
    """A file that is not read, changed long ago; beside a good one, or after what is good of it was read."""

    def plant(land: Land, source: str) -> None:
        place = land.files(source, **options)
        if beside:
            (place / beside).write_bytes(good)
        path = Path(os.fsdecode(os.fsencode(place) + b"/" + name.encode("latin-1")))
        path.write_bytes(data)
        os.utime(path, (1, 1))
        if beside or runs:
            land.run(source)

    return plant


def made(make: Callable[[Path], Any]) -> Plant:
    def plant(land: Land, source: str) -> None:
        make(land.files(source) / "a.jsonl")

    return plant


def after(change: Callable[[Path], Any] | None, meaning: Meaning | None = None, before: bytes = ROW * 3) -> Plant:
    """A folder that is read, changed, and read again."""

    def plant(land: Land, source: str) -> None:
        place = land.files(source, meaning=meaning)
        (place / "a.jsonl").write_bytes(before)
        land.run(source)
        if change is not None:
            change(place)
            land.run(source)

    return plant


def health(state: str, **measured: Any) -> Plant:
    def plant(land: Land, source: str) -> None:
        land.files(source)
        land.run(source)
        given: dict[str, Any] = {"lag": {}, "behind": {}} | measured
        now = land.client.consensus.now()
        land.said(source, state, Progress(now, 0, 0, given.pop("lag"), 0, True, **given))

    return plant


def state(**fields: Any) -> Plant:
    """A source whose making or dropping was cut off."""

    def plant(land: Land, source: str) -> None:
        land.files(source)
        land.sources.declared.change(
            lambda all_: {source: changed(all_[source], **fields)}, land.client.runtime.deadline(60)
        )  # fmt: skip

    return plant


def custom(function: Callable[[], Any]) -> Plant:
    """A reader of another package, which worked when it was declared."""

    def plant(land: Land, source: str) -> None:
        module = sys.modules.setdefault("troubled_readers", ModuleType("troubled_readers"))
        place = land.place(source)
        setattr(module, source, lambda: Files(place=str(place), format="jsonl").open())
        land.sources.create(source, Custom(factory=f"troubled_readers:{source}"), SCHEMA)
        setattr(module, source, function)

    return plant


def paused(land: Land, source: str) -> None:
    written("a.jsonl.gz", b"x", runs=True)(land, source)
    land.sources.pause(source)


def derived(land: Land, source: str) -> None:
    land.files(f"{source}_input")
    land.run(f"{source}_input")
    land.sources.create(source, Collection(f"{source}_input"), SCHEMA)
    land.run(source)
    land.sources.drop(f"{source}_input")
    land.run(source)


def s3(land: Land, source: str) -> None:
    land.sources.create(source, Files(place="s3://troubles/in/", format="jsonl"), SCHEMA)


def table(*statements: str, runs: bool = True) -> Plant:
    def plant(land: Land, source: str) -> None:
        slot = land.table(source)
        for one in statements:
            land.sql.execute(one.format(slot=slot, t=source).encode())
        if runs:
            land.run(source)

    return plant


def raises(error: BaseException) -> Callable[[], Any]:
    def call() -> Any:
        raise error

    return call


def parquet(rows: int = 1) -> bytes:
    file = BytesIO()
    pq.write_table(pa.table({"id": pa.array(range(rows), pa.int64()), "word": ["a"] * rows}), file)
    return file.getvalue()


def avro() -> bytes:
    file = BytesIO()
    fields = [{"name": "id", "type": "long"}, {"name": "word", "type": "string"}]
    fastavro.writer(file, {"type": "record", "name": "r", "fields": fields}, [{"id": 1, "word": "a"}])
    return file.getvalue()


def fails(rows: pa.Table) -> pa.Table:
    raise ValueError(f"{rows.num_rows} rows are too many")


PACKED = gzip.compress(LONG)
FLIPPED = PACKED[:-5] + bytes([PACKED[-5] ^ 1]) + PACKED[-4:]
ZSTD = bytes(pa.compress(LONG, "zstd", asbytes=True))
FIRST: dict[str, Any] = {"beside": "a.log", "good": b"begin\n" * 9, "format_": "text", "identity": "first line"}
PARQUET: dict[str, Any] = {"format_": "parquet"}
OUT, BACK = "ALTER PUBLICATION {slot} DROP TABLE {t}", "ALTER PUBLICATION {slot} ADD TABLE ONLY {t}"
TROUBLES: Mapping[str, tuple[Plant, str, str]] = {
    "flipped": (written("a.jsonl.gz", FLIPPED, runs=True), "unread", r"1: a\.jsonl\.gz \(it cannot .*: the gzip"),
    "cut_gz": (written("a.jsonl.gz", PACKED[:-9], runs=True), "unread", "the gzip data ends too early"),
    "cut_zst": (written("a.jsonl.zst", ZSTD[:-9], runs=True), "unread", "the zstd data is damaged"),
    "no_gz": (written("a.jsonl.gz", ROW), "unread", "cannot be unpacked from byte 0 on"),
    "torn": (written("a.jsonl", ROW[:-1]), "unread", "from byte 0 on it has no whole line"),
    "bz2": (written("a.jsonl.bz2", b"x"), "unread", r"packed in a way that is not read here \(\.bz2\)"),
    "latin": (written("caf\xe9.jsonl", ROW), "unread", r"caf\\xe9\.jsonl \(its name is not UTF-8"),
    "first": (written("b.log", b"begin\n2\n", **FIRST), "unread", "same line as a.log, and is another file"),
    "no_parquet": (written("a.parquet", parquet()[:-3], **PARQUET), "unread", "no Parquet file, or not whole"),
    "parquet_gz": (written("a.parquet.gz", b"", **PARQUET), "unread", r"packed in a way .* \(\.gz\)"),
    "cut_avro": (
        written("a.avro", avro()[:-3], format_="avro", runs=True), "unread", "has no whole block",
    ),
    "pipe": (made(os.mkfifo), "unread", "it is no plain file"),
    "dangling": (made(lambda path: path.symlink_to("nowhere")), "unread", "it is a link to nothing"),
    "no_folder": (after(shutil.rmtree), "unread", "there is no such folder"),
    "no_listing": (s3, "unread", "the answer to a listing was cut short"),
    "paused": (paused, "unread", r"a\.jsonl\.gz"),
    "making": (state(state="making"), "unread", "is being created"),
    "dropping": (state(state="dropping"), "unread", "is being dropped"),
    "no_function": (custom(raises(InvalidUsage("there is no function x here"))), "unread", "there is no function"),
    "custom_gone": (custom(raises(Gone("the queue forgot", partition="p"))), "unread", "Gone: the queue forgot"),
    "custom_os": (custom(raises(OSError("no such device"))), "unread", "OSError: no such device"),
    "truncated": (after(lambda place: os.truncate(place / "a.jsonl", 30)), "instances", "last one failed: Diverged"),
    "replaced": (after(lambda place: (place / "a.jsonl").write_bytes(LONG)), "instances", "not what was read before"),
    "all_bad": (after(None, before=b"bad\n" * 3 + ROW), "errors", "3 of the last 4 messages were bad"),
    "too_many_bad": (after(None, Meaning(most_errors=0), b"bad\n"), "instances", "most_errors is 0"),
    "transform": (
        after(None, Meaning(transform=f"{__name__}:fails")), "instances", "3 rows are too many",
    ),
    "never_run": (made(lambda path: path.write_bytes(ROW)), "lag", "nothing was ever ingested"),
    "no_input": (derived, "instances", "that it reads was dropped"),
    "messages": (health("running", lag={"a": 9}, behind={"a": Behind(9, None, None)}), "lag", "9 messages are left"),
    "bytes": (health("running", lag={"a": 99}, behind={"a": Behind(None, 99, None)}), "lag", "99 bytes are left"),
    "held_back": (health("stopped", held_back=11 << 30), "held_back", "holds back 11,264 MiB"),
    "left_out": (table(OUT, "INSERT INTO {t} VALUES (1)", BACK), "instances", "last one failed: Gone: .*was changed"),
    "no_slot": (table("SELECT pg_drop_replication_slot('{slot}')", runs=False), "unread", "slot .* is not there"),
    "swapped": (
        table("ALTER TABLE {t} RENAME word TO x", "ALTER TABLE {t} RENAME other TO word"), "instances",
        "is another one than",
    ),
}  # fmt: skip


@pytest.fixture
def land(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Land]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setattr("persist_lib.location.s3.objects.Clients.get", lambda _self: Cut())
    found = Land(tmp_path)
    yield found
    found.close()


class Cut:
    """A client of S3 whose listings are cut short."""

    def list_objects_v2(self, **_: object) -> dict[str, Any]:
        return {}


def by_command() -> dict[str, dict[str, str]]:
    """What the command says is wrong, by source and check; its exit code says that something is."""
    limits = ("--instances=0", "--behind=3600", "--lag-messages=5", "--lag-bytes=50", "--errors-share=0.5")
    done = invoke("health", "--json", *limits, PERSIST_LOCATION=LOCATION)
    assert done.exit_code == 1, done.output
    found: dict[str, dict[str, str]] = {}
    for one in json.loads(done.stdout)["problems"]:
        if one["about"] == "source":
            found.setdefault(one["name"], {})[one["check"]] = one["says"]
    return found


def by_dagster() -> dict[str, tuple[bool, str]]:
    """What Dagster's checks say."""
    definitions = build_definitions(Settings(location=LOCATION))
    checks = dg.AssetSelection.checks(*(dg.AssetCheckKey(dg.AssetKey("sources"), name) for name in CHECKS))
    job = dg.define_asset_job("judge", selection=checks)
    judge = dg.Definitions.merge(definitions, dg.Definitions(jobs=[job])).resolve_job_def("judge")
    with dg.DagsterInstance.ephemeral() as instance:
        done = judge.execute_in_process(instance=instance, run_config={"ops": {"source_checks": {"config": LIMITS}}})
        return {one.check_name: (one.passed, one.description or "") for one in done.get_asset_check_evaluations()}


def test_the_command_and_dagster_say_the_same_of_each_trouble_and_nothing_of_what_is_well(land: Land) -> None:
    for name, (plant, _, _) in TROUBLES.items():
        plant(land, name)
    well = land.files("well")
    (well / "a.jsonl").write_bytes(ROW)
    land.run("well")
    found, seen = by_command(), by_dagster()
    for name, (_, check, says) in TROUBLES.items():
        assert check in found[name], (name, found[name])
        assert re.search(says, found[name][check]), (name, found[name])
    assert "well" not in found
    # Dagster knows of runs, too, so it says more where none is under way.
    idle = {name for name in TROUBLES if f"{name}: {IDLE}" in seen["instances"][1]}
    assert "never_run" in idle
    assert not idle & {"well", "too_many_bad", "transform"}, "why one failed says more"
    for name in idle:
        found[name]["instances"] = IDLE
    for check in CHECKS:
        lines = [f"{name}: {wrong[check]}" for name, wrong in sorted(found.items()) if check in wrong]
        assert seen[check] == (False, "; ".join(lines))
