"""A planted password is in no log, URL, error, plan, page, file or row, and not in Dagster's event log.

Consensus is a PostgreSQL whose URL has the password, and the environment has it, too. Everything that says something is
asked, also where it fails, and all that it says is searched.
"""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import dagster as dg
import psycopg
import pytest

import persist_lib as persist
from orchestration.definitions import build_definitions
from orchestration.settings import Settings
from persist_lib import report
from persist_lib.verify import check
from tests import servers
from tests.commands import invoke
from tests.worlds import SCHEMA

pytestmark = [pytest.mark.dagster, pytest.mark.timeout(300)]
SECRET = "Pa55-wOrd.planted"
COMMANDS = (
    ("config",), ("tables",), ("describe", "orders", "--who"), ("read", "orders"), ("changes", "orders"), ("report",),
    ("health",), ("verify", "--full"), ("maintain", "orders"), ("maintain", "orders", "--dry-run"), ("shard", "list"),
    ("shard", "log", "orders"), ("shard", "show", "orders"), ("simulate", "orders", "--seeds", "1", "--steps", "100"),
    ("history", "orders"), ("read", "nothing"), ("append", "orders", "nowhere.parquet"), ("restore", "orders", "9999"),
)  # fmt: skip


def with_password(url: str) -> str:
    """The URL, with the planted password in place of its own. The server asks for none."""
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user.partition(':')[0] or 'postgres'}:{SECRET}@{host}"))


@pytest.fixture
def place(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """A location with a table, and its Consensus by a URL with the password."""
    monkeypatch.setenv("PGPASSWORD", SECRET)
    schema = f"secrets{abs(hash(request.node.name)) % 10**8}"
    url, consensus = f"file:{tmp_path}/data", with_password(servers.postgres_at(persist_schema=schema))
    with persist.open(url, consensus, create=True) as client:
        client.open_writer("orders", SCHEMA)
        for number in range(3):
            client.table("orders").append([{"id": number, "word": "x"}])
    return url, consensus


def unreachable(consensus: str) -> str:
    """The same URL, where nothing listens."""
    parts = urlsplit(consensus)
    return urlunsplit(parts._replace(netloc=f"{parts.netloc.rpartition('@')[0]}@127.0.0.1:1"))


def mistyped(consensus: str) -> list[str]:
    """URLs that are refused at once: of no store, with an unknown option, and with a port that is not a number."""
    return [f"x{consensus}", f"{consensus}&persist_chema=a", consensus.replace("127.0.0.1:", "127.0.0.1:x")]


@pytest.mark.parametrize("as_json", [(), ("--json",)], ids=["text", "json"])
def test_no_command_shows_it_whether_it_works_or_fails(
    place: tuple[str, str], as_json: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    url, consensus = place
    caplog.set_level(logging.DEBUG)
    for at in (consensus, unreachable(consensus)):
        for words in COMMANDS:
            config = ("--config", '{"timeout_s": 1}')
            done = invoke("--location", url, "--consensus", at, "-vv", *as_json, *config, *words)
            assert SECRET not in done.output, words
            assert done.exit_code in {0, 1, 2}, (words, done.output)
    for wrong in mistyped(consensus):
        done = invoke("--location", url, "--consensus", wrong, "-vv", *as_json, "tables")
        assert SECRET not in done.output
        assert done.exit_code in {1, 2}, done.output
    assert SECRET not in caplog.text


def test_neither_values_nor_errors_nor_what_is_stored_have_it(
    place: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, consensus = place
    caplog.set_level(logging.DEBUG)
    said: list[str] = []
    with persist.open(url, consensus) as client:
        said += [client.url, repr(client), repr(client.table("orders")), repr(client.plan("orders"))]
        said += [str(check(client, full=True)), report.html(report.shown(report.fleet(client)))]
        said += [repr(client.table("orders").read().to_arrow()), repr(client.inspect("orders"))]
        calls: list[Callable[[], Any]] = [
            lambda: client.open_reader("nothing"), lambda: pickle.dumps(client), lambda: client.location,
            lambda: client.table("orders").read(-5),
            lambda: persist.open(url, unreachable(consensus), config=persist.Config(timeout_s=1)),
            lambda: persist.open("file:/nowhere/at/all", consensus),
        ]  # fmt: skip
        for call in calls:
            try:
                said.append(repr(call()))
            except Exception as error:  # noqa: BLE001 - whatever it is, it says something
                said += ["".join(traceback.format_exception(error)), repr(getattr(error, "fields", ""))]
    assert not [text for text in said if SECRET in text]
    assert SECRET not in caplog.text
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert SECRET not in rows_of(consensus)


def rows_of(consensus: str) -> str:
    """All rows that Persist has in PostgreSQL, as text."""
    parts = urlsplit(consensus)
    with psycopg.connect(urlunsplit(parts._replace(query=""))) as connection:
        names = connection.execute(
            "select table_schema, table_name from information_schema.tables where table_schema like 'secrets%'"
        ).fetchall()
        found = [connection.execute(f'select t::text from "{a}"."{b}" t').fetchall() for a, b in names]
    assert found
    return repr(found)


def test_nor_has_the_event_log_of_dagster(place: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
    url, consensus = place
    caplog.set_level(logging.DEBUG)
    said: list[str] = []
    with dg.DagsterInstance.ephemeral() as instance:
        for at in (consensus, unreachable(consensus)):
            settings = Settings(location=url, consensus=at, config={"timeout_s": 1})
            definitions = build_definitions(settings)
            said.append(repr(definitions.get_repository_def().get_top_level_resources()))
            for job in ("maintenance", "census", "scrub"):
                config: dict[str, Any] = {"ops": {f"{job}_of_shards": {"config": {"engine": "local"}}}}
                result = definitions.resolve_job_def(job).execute_in_process(
                    instance=instance, run_config=config, raise_on_error=False
                )
                assert result.success == (at == consensus), job
                said += [repr(entry) for entry in instance.all_logs(result.run_id)]
                said += [repr(instance.get_run_by_id(result.run_id))]
    assert len(said) > 20
    assert not [text[:400] for text in said if SECRET in text]
    assert SECRET not in caplog.text
