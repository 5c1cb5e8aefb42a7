"""A password in a URL is shown to nobody: not in messages, logs and representations, nor by `ps`."""

from __future__ import annotations

import logging
import pickle
import time
import traceback
from contextlib import suppress
from pathlib import Path

import pytest

import persist_lib as persist
from persist_lib.errors import InvalidUsage, PersistError, redacted
from persist_lib.location import open_location
from tests.conformance.stores import CONSENSUSES
from tests.worlds import SCHEMA, row

SECRET = "hunter1".replace("1", "2")  # not as it is: a traceback shows the lines of this file


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://u:{}@h:5432/db?x=y", "postgresql://u:***@h:5432/db?x=y"),
        ("postgresql://:{}@h/db", "postgresql://:***@h/db"),
        ("postgresql://u:{}/or@p:art?s@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u:9{} with a space@h/db", "postgresql://u:***@h/db"),
        (
            "postgresql://h/db?user=u&password={}&sslpassword={}",
            "postgresql://h/db?user=u&password=***&sslpassword=***",
        ),
        ("could not reach 'http://u:{}@h:9000': no route", "could not reach 'http://u:***@h:9000': no route"),
        ("host=h password={} user=u", "host=h password=*** user=u"),
    ],
)
def test_a_password_is_hidden_wherever_it_is_in_a_url(text: str, shown: str) -> None:
    assert redacted(text.replace("{}", SECRET)) == shown
    assert redacted(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "file:./data",
        "postgresql://u@h:5432/db?application_name=a@b",
        "s3://bucket/prefix?endpoint=http://127.0.0.1:9000&path_style=true",
        "s3://bucket/a:b@c",
        "postgresql://h1:5432,h2:5432/db?x=me@here",
        "shard orders: the batch starts at {5}, but upper is {6}",
    ],
)
def test_what_holds_no_password_stays_as_it_is(text: str) -> None:
    assert redacted(text) == text


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A URL of the server, with a password that it does not ask for."""
    given = CONSENSUSES["postgresql"].prepare(tmp_path)
    return given.replace("postgres@", f"postgres:{SECRET}@")


def told(error: BaseException) -> str:
    """All that anybody can see of it: message, fields, causes, what is pickled."""
    fields = repr(getattr(error, "fields", ""))
    return "".join(traceback.format_exception(error)) + repr(error) + fields + repr(pickle.dumps(error))


def test_a_location_and_a_client_show_where_they_are_without_the_password(url: str, tmp_path: Path) -> None:
    with open_location(f"file:{tmp_path}/b", url, create=True) as location:
        assert SECRET in location.consensus_url, "who opens it again needs it"
        shown = repr(location)
        assert ":***@127.0.0.1" in shown
        assert f"file:{tmp_path}/b" in shown
        assert SECRET not in shown + repr(location.consensus) + str(location)
    with persist.open(f"file:{tmp_path}/b", url) as client:
        write, read = client.open_shard("s", SCHEMA)
        write.compare_and_append([row(1)], 0, 1)
        snapshot = read.snapshot(0)
        shown = "".join(map(repr, (client, client.location, client.leases, write, read, snapshot, client.inspect("s"))))
        assert SECRET not in shown + repr(snapshot.splits(2))


BROKEN = [
    "postgresql://u:{}%zz@127.0.0.1/db",
    "postgresql://u:{}/x@127.0.0.1/db",
    "postgresql://u:x{}@y@127.0.0.1:no/db",
    "postgresql://u:{}@127.0.0.1/db?what=1",
    "postgresql://u:{}@127.0.0.1/db?persist_schema=A-B",
    "postgresql://u:{}@127.0.0.1:1/db",
    "postgresql://127.0.0.1:1/db?password={}&connect_timeout=2",
    "postgresqll://u:{}@127.0.0.1/db",
    "u:{}@127.0.0.1",
    "s3://bucket/x?endpoint=http://u:{}@127.0.0.1:1&password={}",
]


@pytest.mark.parametrize("broken", BROKEN)
def test_no_error_shows_it(broken: str, tmp_path: Path) -> None:
    given = broken.replace("{}", SECRET)
    with pytest.raises(PersistError) as caught:
        open_location(f"file:{tmp_path}/b", given, create=True)
    assert SECRET not in told(caught.value)


def test_no_error_of_a_server_shows_it(url: str, tmp_path: Path) -> None:
    for given in (url, url.replace("/postgres?", "/no_such_database?")):
        with pytest.raises(PersistError) as caught:
            open_location(f"file:{tmp_path}/b", given, create=False)
        assert SECRET not in told(caught.value)
    with pytest.raises(InvalidUsage) as wrong:
        open_location(url)
    assert SECRET not in told(wrong.value)


def command_lines() -> list[bytes]:
    """What `ps` shows of every process."""
    lines = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            lines.append((entry / "cmdline").read_bytes() if entry.name.isdigit() else b"")
    return lines


@pytest.mark.slow
def test_neither_ps_nor_the_log_shows_it_while_a_process_renews_leases(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with persist.open(f"file:{tmp_path}/b", url, config=persist.Config(lease_ms=1500)) as client:
        write = client.open_writer("s", SCHEMA)
        assert write.id
        first = client.inspect("s").state.writers[write.id].lease_until
        client.leases._wake.set()  # the thread is gone: only the process is left
        deadline = time.monotonic() + 30
        while client.inspect("s").state.writers[write.id].lease_until == first:
            assert time.monotonic() < deadline, "it does not renew"
            time.sleep(0.02)
        assert [line for line in command_lines() if SECRET.encode() in line] == []
        assert any(b"persist_lib.shard.heartbeat" in line for line in command_lines())
    assert SECRET not in caplog.text
