"""docs/operations.md is true: commands run, policies and grants suffice and are needed, and restoring restores."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
import psycopg
import pyarrow as pa
import pytest
from botocore.config import Config as ClientConfig

import persist_lib as persist
from orchestration.checks import CHECKS
from orchestration.definitions import build_definitions
from orchestration.duties import DUTIES
from orchestration.settings import Settings
from persist_lib.config import CacheConfig, Config
from persist_lib.core.commands import Expire
from persist_lib.ids import SeqNo
from persist_lib.location.objects.blob import ObjectsBlob
from persist_lib.location.objects.target import CLOUDS
from persist_lib.location.s3 import objects as s3_objects
from persist_lib.runtime.ambient import Runtime
from persist_lib.testing import contents_of
from persist_lib.testing.servers import CREDENTIALS, PostgresServer, S3Server
from tests.circles import by_day
from tests.commands import forked
from tests.docs.runner import blocks_of
from tests.integration.test_cli import help_of

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "operations.md").read_text()
SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"})
QUIET = Runtime(background=False)


def section(title: str) -> str:
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def blocks(language: str, text: str = TEXT) -> list[str]:
    return [block.code for block in blocks_of(text) if block.language == language]


def first_cells(text: str) -> list[str]:
    """The names in the first column of a table."""
    return re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)


def subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for one in kind.__subclasses__():
        if one.__module__.startswith("persist_lib") and not one.__name__.startswith("_"):  # private: caught as its base
            yield one
            yield from subclasses(one)


def test_every_error_has_a_line_that_says_what_to_do() -> None:
    table = section("What each error means")
    names = first_cells(table)
    assert sorted(names) == sorted({kind.__name__ for kind in subclasses(persist.PersistError)})
    assert all(cell.strip() for line in table.splitlines() if line.startswith("| `") for cell in line.split("|")[1:-1])


def shown(name: str, value: object) -> str:
    """A default as the manual writes it."""
    match value:
        case int() if name.endswith("_bytes"):
            return f"{value >> 20} MiB" if value >= 1 << 20 else f"{value >> 10} KiB"
        case int() if name.endswith("_ms"):
            return f"{value // 60_000} min"
        case float():
            return f"{value:g}"
        case _:
            return "none" if value is None else str(value)


def test_options_of_urls_and_settings_are_those_that_there_are() -> None:
    text = section("Locations and settings")
    for scheme, cloud in CLOUDS.items():
        line = next(line for line in text.splitlines() if line.startswith(f"| `{scheme}://"))
        assert set(re.findall(r"`(\w+)(?:=\w+)?`", line)) >= set(cloud.options)
    found = set(re.findall(r"`(persist_\w+)", text))
    source = "".join(path.read_text() for path in (ROOT / "persist_lib" / "location" / "postgres").glob("*.py"))
    assert found == set(re.findall(r"\bpersist_(?:schema|notify|prepare)\b", source))
    for names, default in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ([^|]+) \|", text, re.MULTILINE):
        for name in re.findall(r"\w+", names):
            assert default.strip() == shown(name, Config.model_fields[name].default), name
    for settings in re.findall(r"`({\"\w+\".*?})`", text):
        found = json.loads(settings)
        (CacheConfig if "path" in found else Config).model_validate(found)


def test_what_to_watch_is_called_as_dagster_shows_it() -> None:
    text = section("What to watch")
    definitions = build_definitions(Settings(location="memory:"))
    assert first_cells(text) == list(CHECKS)
    assert set(DUTIES) <= set(re.findall(r"`(\w+)`", text))
    schedules, sensors = definitions.schedules or (), definitions.sensors or ()
    there = {str(one.name) for one in (*schedules, *sensors)}
    said = set(re.findall(r"`(\w+_schedule|shard_discovery|compaction_debt|source_news|source_watch|alerts)`", text))
    assert said == there


@pytest.fixture
def filled(tmp_path: Path) -> str:
    """A location with two shards, and something to do for every duty."""
    url = f"file:{tmp_path}/data"
    with persist.open(url, config=Config(inline_bytes=0), runtime=QUIET) as client:
        for shard in ("orders", "other"):
            write = client.open_writer(shard, SCHEMA)
            for n in range(5):
                write.compare_and_append([{"id": n, "word": "w", "_time": n}], n, n + 1)
    return url


@pytest.mark.slow
def test_every_command_there_is_in_the_manual_runs(filled: str) -> None:
    environment = {**os.environ, "PERSIST_LOCATION": filled}
    environment.pop("PERSIST_CONSENSUS", None)
    lines = [line.partition("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    inline = re.findall(r"`(persist [a-z][^`]*)`", TEXT)
    commands = [line for line in dict.fromkeys([*lines, *inline]) if line.startswith("persist ")]
    assert len(commands) > 12
    for command in commands:
        words = shlex.split(command)[1:]
        if {"orders", "--all", "list"} & set(words) and "drop" not in words:
            done = subprocess.run(
                [forked(), *words], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, (command, done.stderr)
        else:  # named in passing, or not to be undone
            assert "Usage:" in help_of(*words), command


class Accounts:
    """An S3 server that lets in whoever may: everybody until `enforce`, and then by the policies of the manual."""

    def __init__(self, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server, self._monkeypatch = server, monkeypatch
        self.operations: list[str] = []
        make = s3_objects._make

        def recorded(*arguments: Any) -> Any:
            client = make(*arguments)
            client.meta.events.register("before-call.s3", lambda model, **_: self.operations.append(model.name))
            return client

        monkeypatch.setattr(s3_objects, "_make", recorded)
        self._keys = {name: self._create(name) for name in ("Reader", "Writer", "Maintainer")}
        request = urllib.request.Request(
            f"{server.url}/moto-api/reset-auth", data=b"0", headers={"Content-Type": "text/plain"}, method="POST"
        )
        urllib.request.urlopen(request).close()

    def _create(self, role: str) -> dict[str, str]:
        iam = boto3.client("iam", endpoint_url=self.server.url, region_name="us-east-1")
        iam.create_user(UserName=role)
        document = policy(role, self.server.bucket)
        # SUBTLE: for a bulk deletion S3 asks for the right on each object, and moto on the bucket.
        may_delete = {
            "Effect": "Allow",
            "Action": ["s3:DeleteObject"],
            "Resource": f"arn:aws:s3:::{self.server.bucket}",
        }
        document["Statement"] += [may_delete] if "s3:DeleteObject" in allowed(role) else []
        iam.put_user_policy(UserName=role, PolicyName="manual", PolicyDocument=json.dumps(document))
        key = iam.create_access_key(UserName=role)["AccessKey"]
        return {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}

    @contextmanager
    def acting_as(self, role: str) -> Iterator[set[str]]:
        """Clients that are opened within the block are that role's. Yields the actions that they used, at its end."""
        self.operations.clear()
        used: set[str] = set()
        with pytest.MonkeyPatch.context() as environment:
            for name, value in self._keys[role].items():
                environment.setenv(name, value)
            yield used
        used |= {ACTIONS[operation] for operation in self.operations}


ACTIONS = {
    "GetObject": "s3:GetObject",
    "HeadObject": "s3:GetObject",
    "PutObject": "s3:PutObject",
    "CreateMultipartUpload": "s3:PutObject",
    "UploadPart": "s3:PutObject",
    "CompleteMultipartUpload": "s3:PutObject",
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "DeleteObject": "s3:DeleteObject",
    "DeleteObjects": "s3:DeleteObject",
    "ListObjectsV2": "s3:ListBucket",
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
}
"""Which right an operation needs, as Amazon's service authorization reference has it."""


def policy(role: str, bucket: str) -> dict[str, Any]:
    """The policy of the manual for a role."""
    code = blocks("json", section("Permissions").partition(f"\n{role}")[2])[0]
    found: dict[str, Any] = json.loads(code.replace("BUCKET", bucket).replace("PREFIX", "place"))
    return found


def allowed(role: str) -> set[str]:
    return {action for statement in policy(role, "b")["Statement"] for action in statement["Action"]}


@pytest.fixture
def accounts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accounts]:
    for name, value in (CREDENTIALS | {"INITIAL_NO_AUTH_ACTION_COUNT": "1000000"}).items():
        monkeypatch.setenv(name, value)
    # Pieces for what is still quick to send.
    defaults = ObjectsBlob.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "multipart_above", 50_000)
    with S3Server("bucket") as server:
        yield Accounts(server, monkeypatch)


def large(n: int) -> pa.Table:
    return pa.table({"id": pa.array(range(n), pa.int64()), "word": pa.array([os.urandom(16).hex() for _ in range(n)])})


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["s3", "s3+cas"])
def test_the_policies_suffice_and_nothing_in_them_is_unused(accounts: Accounts, tmp_path: Path, scheme: str) -> None:
    log = None if scheme == "s3+cas" else f"file:{tmp_path}/log"
    place = accounts.server.location("place", scheme), log
    config = Config(inline_bytes=0, rollup_every=4)
    with accounts.acting_as("Maintainer"):
        persist.open(*place, runtime=QUIET).close()
    with accounts.acting_as("Writer") as used, persist.open(*place, config=config, runtime=QUIET) as client:
        write = client.open_writer("orders", SCHEMA)
        for n in range(12):
            write.compare_and_append([{"id": n, "word": "w"}], n, n + 1)
        write.compare_and_append(large(4_000), 12, 13)
        client.blob.set("orders/x/1.parquet", b"1" * 60_000)
        with pytest.raises(persist.Corrupt):
            client.blob.set("orders/x/1.parquet", b"2" * 60_000)
    assert used | {"s3:ListBucket"} == allowed("Writer")
    with accounts.acting_as("Reader") as used:
        for read_only in (True, False) if log else (True,):
            with (
                persist.open(*place, runtime=QUIET, read_only=read_only) as client,
                client.open_reader("orders") as read,
            ):
                assert read.snapshot(12, diff=True).to_arrow().num_rows > 4_000
    assert used | {"s3:ListBucket"} == allowed("Reader")
    with accounts.acting_as("Maintainer") as used, persist.open(*place, config=config, runtime=QUIET) as client:
        abandon_an_upload(client)
        for _ in range(3):
            client.maintain("orders")
        assert client.audit_orphans("orders", dry_run=True).uploads == 0
        assert client.scrub("orders").damaged == ()
    assert used == allowed("Maintainer")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["s3", "s3+cas"])
def test_the_policies_do_not_let_anybody_do_more(accounts: Accounts, tmp_path: Path, scheme: str) -> None:
    log = None if scheme == "s3+cas" else f"file:{tmp_path}/log"
    place = accounts.server.location("place", scheme), log
    refused = pytest.raises(persist.InvalidUsage, match=r"docs/operations\.md")
    with accounts.acting_as("Writer"):
        with refused:
            persist.open(accounts.server.location("another", scheme), log, runtime=QUIET)
        persist.open(*place, runtime=QUIET).close()
        with persist.open(*place, config=Config(inline_bytes=0), runtime=QUIET) as client:
            client.open_writer("orders", SCHEMA).compare_and_append([{"id": 1, "word": "w"}], 0, 1)
            with refused:
                client.blob.delete(next(entry.key for entry in client.blob.list("orders/")))
    with (
        accounts.acting_as("Reader"),
        persist.open(*place, config=Config(inline_bytes=0), runtime=QUIET) as client,
        refused,
    ):
        client.open_writer("orders", SCHEMA).compare_and_append([{"id": 1, "word": "w"}], 1, 2)


def abandon_an_upload(client: persist.Client) -> None:
    """As a writer does that dies in the middle of a large part; its lease is over."""
    with client.open_writer("orders", SCHEMA) as write:
        writer = write.id
    blob: Any = client.location.blob
    while not isinstance(blob, ObjectsBlob):
        blob = blob.inner
    at = {"Bucket": "bucket", "Key": f"place/blob/orders/{writer}/p0123456789abcdef.parquet"}
    blob._objects.clients.get().create_multipart_upload(**at)


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


def as_role(server: PostgresServer, role: str) -> str:
    return server.url.replace("postgres@", f"{role}@")


@pytest.mark.slow
def test_the_grants_suffice_and_each_is_needed(postgres: PostgresServer, tmp_path: Path) -> None:
    blobs, config = f"file:{tmp_path}", Config(inline_bytes=0, rollup_every=4)
    persist.open(blobs, postgres.url, runtime=QUIET).close()
    (grants,) = blocks("sql")
    logins = "".join(f"CREATE ROLE {who} LOGIN IN ROLE persist_{who};" for who in ("reader", "writer", "maintainer"))
    with psycopg.connect(postgres.url, autocommit=True) as sql:
        sql.execute(grants + logins)

    def use(shard: str) -> None:
        with persist.open(blobs, as_role(postgres, "writer"), config=config, runtime=QUIET) as client:
            write = client.open_writer(shard, SCHEMA)
            for n in range(12):
                write.compare_and_append([{"id": n, "word": "w"}], n, n + 1)
            with client.open_reader(shard) as read:
                read.downgrade_since(11)
        with persist.open(blobs, as_role(postgres, "maintainer"), config=config, runtime=QUIET) as client:
            for _ in range(3):
                client.maintain(shard)
        with (
            persist.open(blobs, as_role(postgres, "reader"), read_only=True) as client,
            client.open_reader(shard) as read,
        ):
            assert read.snapshot(11, diff=True).to_arrow().num_rows == 12

    use("orders")
    with (
        persist.open(blobs, as_role(postgres, "reader"), runtime=QUIET) as client,
        pytest.raises(persist.InvalidUsage, match=r"docs/operations\.md"),
    ):
        client.open_reader("orders").fetch_upper()
    with (
        persist.open(blobs, as_role(postgres, "writer"), runtime=QUIET) as client,
        pytest.raises(persist.InvalidUsage, match=r"docs/operations\.md"),
    ):
        client.consensus.truncate("orders", SeqNo(2))
    said = re.findall(r"GRANT (\w[\w, ]*) ON (.+) TO (\w+);", grants)
    each = [(r, t, who) for rights, things, who in said for r in rights.split(", ") for t in things.split(", ")]
    for number, (right, thing, who) in enumerate(by_day(each, 3)):
        kind = "" if "SCHEMA" in thing else "TABLE "
        with psycopg.connect(postgres.url, autocommit=True) as sql:
            sql.execute(f"REVOKE {right} ON {kind}{thing} FROM {who}")
            with pytest.raises(persist.PersistError):
                use(f"without_{number}_{right.lower()}")
            sql.execute(f"GRANT {right} ON {kind}{thing} TO {who}")
    use("again")


@pytest.mark.slow
def test_what_was_lost_since_a_dump_is_restored_step_by_step(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    dump, undelete, config = tmp_path / "persist.dump", tmp_path / "undelete.py", Config(inline_bytes=0)
    undelete.write_text(blocks("python")[0])
    dumping, restoring = (
        next(line for block in blocks("sh") for line in block.splitlines() if line.startswith(name))
        for name in ("pg_dump", "pg_restore")
    )

    def run(command: str, url: str) -> None:
        environment = {**os.environ, "PERSIST_CONSENSUS": url, "PATH": f"{postgres.bin}:{os.environ['PATH']}"}
        subprocess.run(command, shell=True, cwd=tmp_path, env=environment, check=True)

    def persist_command(*words: str) -> subprocess.CompletedProcess[str]:
        command = [forked(), "--location", blobs, "--consensus", restored, *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    with S3Server("bucket") as server:
        blobs, restored = server.location("place"), f"{postgres.url.rpartition('/')[0]}/restored"
        s3 = boto3.client("s3", endpoint_url=server.url, config=ClientConfig(s3={"addressing_style": "path"}))
        s3.put_bucket_versioning(Bucket="bucket", VersioningConfiguration={"Status": "Enabled"})
        with persist.open(blobs, postgres.url, config=config, runtime=QUIET) as client:
            write = client.open_writer("orders", SCHEMA)
            for n in range(6):
                write.compare_and_append([{"id": n, "word": "before"}], n, n + 1)
            taken = datetime.now(UTC).replace(microsecond=0)
            run(dumping, postgres.url)
            assert dump.exists()
            for n in range(6, 9):
                write.compare_and_append([{"id": n, "word": "lost"}], n, n + 1)
            for _ in range(3):
                client.maintain("orders")
        with psycopg.connect(postgres.url, autocommit=True) as sql:
            sql.execute("CREATE DATABASE restored")
        run(restoring, restored)
        first = persist_command("shard", "scrub", "--all")
        assert (first.returncode, "is not there" in first.stdout) == (3, True), first.stdout + first.stderr
        brought = subprocess.run(
            [sys.executable, undelete, "bucket", "place", taken.isoformat()],
            env={**os.environ, "ENDPOINT_URL": server.url}, check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        assert len(brought.splitlines()) >= 6
        second = persist_command("shard", "scrub", "--all")
        assert second.returncode == 0, second.stderr
        with persist.open(blobs, restored, config=config, runtime=QUIET) as client:
            write, read = client.open_shard("orders", SCHEMA)
            assert write.fetch_upper() == persist.at(6)
            assert contents_of(read.snapshot(5, diff=True).to_arrow()) == {(n, "before"): 1 for n in range(6)}
            write.compare_and_append([{"id": 6, "word": "after"}], 6, 7)
        expire_everybody(blobs, restored)
        assert persist_command("maintain", "--only", "orphans").returncode == 0
        with persist.open(blobs, restored, config=config, runtime=QUIET, read_only=True) as client:
            state = client.inspect("orders").state
            referred = {part.key for batch in state.trace for part in batch.parts} | set(state.garbage)
            stored = {entry.key for entry in client.blob.list("orders/")}
            assert {key for key in stored if "/rollup/" not in key} == {f"orders/{key}" for key in referred}
            assert client.open_reader("orders").snapshot(6, diff=True).to_arrow().num_rows == 7


def expire_everybody(blobs: str, consensus: str) -> None:
    """As `persist maintain --only leases` does once the leases of before the restore are over."""
    with persist.open(blobs, consensus, runtime=QUIET) as client:
        client.machine("orders").commit(lambda _state, now: Expire(now + 10**9))
