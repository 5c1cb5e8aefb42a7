"""A server that lets nobody in with these credentials: wrong usage, told at once, and never in the place of a doubt.

A password in a URL is shown to nobody: not in messages, logs and representations, nor by `ps`.
"""

from __future__ import annotations

import json
import logging
import pickle
import socket
import struct
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import boto3
import psycopg
import pytest

import persist_lib as persist
from persist_lib.core import commands as c
from persist_lib.errors import Determinate, Indeterminate, InvalidUsage, PersistError, redacted
from persist_lib.location import open_location
from persist_lib.location.postgres.consensus import PostgresConsensus
from persist_lib.location.wrap.around import AroundConsensus, Operation, T
from persist_lib.testing.servers import CREDENTIALS, PostgresServer, S3Server
from tests.conformance.stores import CONSENSUSES
from tests.loopback import Loopback
from tests.tls import Authority
from tests.unit.core.core_shard import Store, always
from tests.worlds import SCHEMA, row

LONG_S = 60.0
IDS = persist.Schema(key={"id": "int64"})
HBA = """
host all postgres 127.0.0.1/32 trust
host all app,nologin 127.0.0.1/32 scram-sha-256
host all missing 127.0.0.1/32 trust
host all rejected 127.0.0.1/32 reject
"""


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server that asks for passwords."""
    with PostgresServer() as server:
        with psycopg.connect(server.url, autocommit=True) as admin:
            admin.execute("CREATE ROLE app LOGIN SUPERUSER PASSWORD 'right'")
            admin.execute("CREATE ROLE visitor LOGIN PASSWORD 'right'")
            admin.execute("CREATE ROLE nologin NOLOGIN PASSWORD 'right'")
            admin.execute("CREATE DATABASE closed")
            admin.execute("REVOKE CONNECT ON DATABASE closed FROM PUBLIC")
        (server.data / "pg_hba.conf").write_text(HBA + "host all visitor 127.0.0.1/32 scram-sha-256\n")
        reload(server)
        yield server


def reload(server: PostgresServer) -> None:
    with psycopg.connect(server.url, autocommit=True) as admin:
        admin.execute("SELECT pg_reload_conf()")
    time.sleep(0.3)


def url_of(server: PostgresServer, who: str = "app:right", database: str = "postgres") -> str:
    return f"postgresql://{who}@127.0.0.1:{server.port}/{database}"


@contextmanager
def at_once() -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < LONG_S / 3, "it was tried again until the timeout"


@pytest.mark.slow
@pytest.mark.parametrize(("who", "database"), [
    ("app:wrong", "postgres"), ("app", "postgres"), ("missing", "postgres"), ("stranger", "postgres"),
    ("rejected", "postgres"), ("nologin:right", "postgres"), ("app:right", "nowhere"), ("visitor:right", "closed"),
])  # fmt: skip
def test_opening_with_what_the_server_does_not_let_in_is_wrong_usage(
    server: PostgresServer, who: str, database: str
) -> None:
    with at_once(), pytest.raises(InvalidUsage, match="user, password and database in the URL") as caught:
        persist.open("memory:", url_of(server, who, database))
    assert ":wrong" not in caught.value.message
    assert ":right" not in caught.value.message


@pytest.mark.slow
def test_a_password_that_is_changed_under_a_client_is_told_at_once(server: PostgresServer) -> None:
    config = persist.Config(timeout_s=LONG_S)
    with persist.open("memory:", url_of(server) + "?persist_schema=changed", config=config) as client:
        write = client.open_writer("s", IDS)
        write.compare_and_append([{"id": 1}], 0, 1)
        with psycopg.connect(server.url, autocommit=True) as admin:
            admin.execute("ALTER ROLE app PASSWORD 'other'")
            admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'app'")
        try:
            for call in (write.fetch_upper, lambda: write.compare_and_append([{"id": 2}], 1, 2), client.shards):
                with at_once(), pytest.raises(InvalidUsage, match="password authentication failed"):
                    call()
        finally:
            with psycopg.connect(server.url, autocommit=True) as admin:
                admin.execute("ALTER ROLE app PASSWORD 'right'")
        assert write.compare_and_append([{"id": 2}], 1, 2).upper == persist.at(2), "and continues once it is right"


@pytest.mark.slow
def test_a_server_that_is_down_is_no_wrong_usage_whoever_else_turned_us_away(server: PostgresServer) -> None:
    hosts = f"127.0.0.1:1,127.0.0.1:{server.port}"
    with pytest.raises(Determinate, match="Connection refused"):
        persist.open("memory:", f"postgresql://app:wrong@{hosts}/postgres?connect_timeout=2")
    hosts = f"127.0.0.1:{server.port},127.0.0.1:{server.port}"
    with pytest.raises(InvalidUsage, match="Multiple connection attempts failed"):
        persist.open("memory:", f"postgresql://app:wrong@{hosts}/postgres?connect_timeout=2")


ENGLISH = 'password authentication failed for user "x": no certificate'
GERMAN = "Passwort-Authentifizierung für Benutzer »x« fehlgeschlagen"
Place = str | tuple[str, str] | None


class Speaker(Loopback):
    """A server that answers each login with one error, by its SQLSTATE and text; without any, it hangs up.

    `tls` is what it says to who asks for TLS. It cannot continue after "S".
    """

    def __init__(self, error: Place, tls: bytes = b"N") -> None:
        self._error, self._tls, self.logins = error, tls, 0
        super().__init__()

    def connected(self, client: socket.socket) -> None:
        with suppress(struct.error), client:
            self._answer(client)

    def _answer(self, client: socket.socket) -> None:
        while (size := struct.unpack(">I", client.recv(4, socket.MSG_WAITALL))[0]) == 8:  # asks for TLS, or for GSS
            client.recv(4)
            client.sendall(self._tls)
            if self._tls == b"S":
                return
        client.recv(size - 4, socket.MSG_WAITALL)
        self.logins += 1
        if isinstance(self._error, tuple):
            code, text = self._error
            told = b"".join(f"{field}\0".encode() for field in ("SFATAL", f"C{code}", f"M{text}")) + b"\0"
            client.sendall(b"E" + struct.pack(">I", len(told) + 4) + told)


def fails(said: Sequence[Place], *, host: str = "127.0.0.1", mode: str = "prefer", tls: bytes = b"N") -> PersistError:
    """How a login fails where each host says that; "down" is one that is not there."""
    with ExitStack() as stack:
        speakers = [None if error == "down" else stack.enter_context(closing(Speaker(error, tls))) for error in said]
        hosts = ",".join(f"{host}:{speaker.port if speaker else 1}" for speaker in speakers)
        with pytest.raises(PersistError) as caught:
            PostgresConsensus(f"postgresql://x:y@{hosts}/x?sslmode={mode}&connect_timeout=2")
    return caught.value


@pytest.mark.parametrize(("said", "kind"), [
    ([("28P01", GERMAN)], InvalidUsage),
    ([("28000", GERMAN)], InvalidUsage),
    ([("3D000", "Datenbank »x« existiert nicht")], InvalidUsage),
    ([("42501", "keine Berechtigung für Datenbank »x«")], InvalidUsage),
    ([("57P03", ENGLISH)], Determinate),
    ([("53300", ENGLISH)], Determinate),
    ([("57P03", 'C "28P01"')], Determinate),
    ([None], Determinate),
    (["down"], Determinate),
    (["down", ("28P01", GERMAN)], Determinate),
    ([("28P01", GERMAN), "down"], Determinate),
    ([("28P01", GERMAN), ("28000", GERMAN)], InvalidUsage),
    ([("28P01", GERMAN), ("57P03", GERMAN)], Determinate),
])  # fmt: skip
def test_what_a_connection_that_was_not_made_means(said: Sequence[Place], kind: type[PersistError]) -> None:
    """By its code: the words are the server's, in its own language."""
    error = fails(said)
    assert type(error) is kind, error
    assert kind is Determinate or "Check user, password and database" in error.message


def test_a_server_that_may_let_us_in_later_is_not_asked_twice_at_each_attempt() -> None:
    with closing(Speaker(("57P03", GERMAN))) as speaker:
        for logins in (2, 3, 4):
            with pytest.raises(Determinate):
                PostgresConsensus(f"postgresql://x:y@127.0.0.1:{speaker.port}/x")
            assert speaker.logins == logins


def test_one_address_of_a_host_speaks_for_all() -> None:
    assert type(fails([("28P01", GERMAN)], host="localhost")) is InvalidUsage, "it has others, where nothing listens"


@pytest.mark.parametrize(("mode", "tls", "kind"), [
    ("require", b"N", InvalidUsage), ("verify-full", b"N", InvalidUsage),
    ("require", b"S", Determinate), ("prefer", b"S", Determinate),
])  # fmt: skip
def test_a_server_without_tls_is_no_server_whose_tls_broke_off(mode: str, tls: bytes, kind: type[PersistError]) -> None:
    error = fails([("57P03", ENGLISH)], mode=mode, tls=tls)
    assert type(error) is kind, error
    assert kind is Determinate or "Check sslmode" in error.message


class _Rotated(AroundConsensus):
    """A compare-and-set whose answer is lost; after it nobody is let in until `lets_in`."""

    happens = True
    lets_in = True

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        if not self.lets_in:
            raise InvalidUsage("password authentication failed")
        if operation.kind != "compare_and_set":
            return call()
        self.lets_in = False
        if self.happens:
            call()
        raise Indeterminate("the connection broke")


@pytest.mark.parametrize(("damage", "kind"), [
    (None, Determinate), ("certificate", InvalidUsage), ("key", InvalidUsage), ("no key", InvalidUsage),
    ("a key of another one", InvalidUsage), ("a key that all may read", InvalidUsage),
])  # fmt: skip
def test_a_certificate_of_the_client_s_own_that_is_damaged_is_told_at_once(
    tmp_path: Path, damage: str | None, kind: type[PersistError]
) -> None:
    authority = Authority(tmp_path, "authority")
    own, key = authority.certificate("client")
    if damage in ("certificate", "key"):
        (own if damage == "certificate" else key).write_text("-----BEGIN CERTIFICATE-----\nbroken\n")
    elif damage == "no key":
        key.unlink()
    elif damage == "a key of another one":
        key.write_bytes(authority.certificate("other")[1].read_bytes())
    key.chmod(0o644 if damage == "a key that all may read" else 0o600) if key.exists() else None
    with closing(Speaker(None, b"S")) as speaker, pytest.raises(PersistError) as caught:
        PostgresConsensus(f"postgresql://x@127.0.0.1:{speaker.port}/x?sslmode=require&sslcert={own}&sslkey={key}")
    assert type(caught.value) is kind, caught.value
    assert kind is Determinate or "Check sslcert and sslkey" in caught.value.message


@pytest.mark.parametrize("happens", [True, False])
def test_who_is_turned_away_while_in_doubt_is_told_of_the_doubt(*, happens: bool) -> None:
    store = Store()
    store.created()
    consensus = _Rotated(store.consensus)
    consensus.happens = happens
    machine = store.machine(consensus=consensus)
    machine.fetch()
    with pytest.raises(Indeterminate, match=r"not known whether.*password authentication failed") as caught:
        machine.commit(always(c.SetRetention(7)), token=b"t")
    assert caught.value.fields["token"] == b"t"
    assert (store.machine().fetch().state.retention == 7) is happens
    with pytest.raises(InvalidUsage, match="password"):
        machine.fetch()  # nothing was in doubt here


ACTIONS = 4
"""What moto lets anybody do: make the bucket, a user, its rights and its key."""


@pytest.fixture(scope="module")
def account() -> Iterator[tuple[S3Server, dict[str, str]]]:
    """An S3 server that looks at credentials, and those of somebody who may do everything."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (CREDENTIALS | {"INITIAL_NO_AUTH_ACTION_COUNT": str(ACTIONS)}).items():
            patch.setenv(name, value)
        with S3Server("bucket") as server:
            iam = boto3.client("iam", endpoint_url=server.url, region_name="us-east-1")
            iam.create_user(UserName="app")
            allowed = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
            iam.put_user_policy(UserName="app", PolicyName="all", PolicyDocument=json.dumps(allowed))
            key = iam.create_access_key(UserName="app")["AccessKey"]
            yield server, {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["s3", "s3+cas"])
def test_wrong_credentials_of_s3_are_wrong_usage(
    account: tuple[S3Server, dict[str, str]], monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    server, right = account
    place = (server.location(scheme.replace("+", "-"), scheme), None if scheme == "s3+cas" else "memory:")
    for name, value in right.items():
        monkeypatch.setenv(name, value)
    persist.open(*place).close()
    for wrong in right:
        with monkeypatch.context() as patch:
            patch.setenv(wrong, "wrong" * 4)
            with at_once(), pytest.raises(InvalidUsage, match="Check the credentials"):
                persist.open(*place)


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
