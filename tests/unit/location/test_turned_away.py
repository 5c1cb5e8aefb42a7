"""A server that lets nobody in with these credentials: wrong usage, told at once, and never in the place of a doubt."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import boto3
import psycopg
import pytest

import persist_lib as persist
from persist_lib.core import commands as c
from persist_lib.errors import Determinate, Indeterminate, InvalidUsage
from persist_lib.location.postgres.consensus import connection_failed
from persist_lib.location.wrap.around import AroundConsensus, Operation, T
from persist_lib.testing.servers import CREDENTIALS, PostgresServer, S3Server
from tests.unit.core.core_shard import Store, always

LONG_S = 60.0
SCHEMA = persist.Schema(key={"id": "int64"})
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
        write = client.open_writer("s", SCHEMA)
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
        assert write.compare_and_append([{"id": 2}], 1, 2).upper == persist.at(2), "and goes on once it is right again"


@pytest.mark.slow
def test_a_server_that_is_down_is_no_wrong_usage_whoever_else_turned_us_away(server: PostgresServer) -> None:
    hosts = f"127.0.0.1:1,127.0.0.1:{server.port}"
    with pytest.raises(Determinate, match="Connection refused"):
        persist.open("memory:", f"postgresql://app:wrong@{hosts}/postgres?connect_timeout=2")
    hosts = f"127.0.0.1:{server.port},127.0.0.1:{server.port}"
    with pytest.raises(InvalidUsage, match="Multiple connection attempts failed"):
        persist.open("memory:", f"postgresql://app:wrong@{hosts}/postgres?connect_timeout=2")


TURNED_AWAY = 'connection failed: FATAL:  password authentication failed for user "x"'


def several(*outcomes: tuple[str, str]) -> str:
    """What psycopg says of several attempts."""
    lines = [f"- host: {host!r}, port: '1', hostaddr: '127.0.0.1': {said}" for host, said in outcomes]
    return "\n".join([outcomes[-1][1], "Multiple connection attempts failed. All failures were:", *lines])


@pytest.mark.parametrize(("said", "kind"), [
    (TURNED_AWAY, InvalidUsage),
    ('connection failed: FATAL:  database "x" does not exist', InvalidUsage),
    ("connection failed: FATAL:  no such database: x", InvalidUsage),
    ("connection failed: FATAL:  the database system is starting up", Determinate),
    ("connection failed: FATAL:  sorry, too many clients already", Determinate),
    ("connection failed: Connection refused", Determinate),
    (several(("a", "Connection refused"), ("a", TURNED_AWAY)), InvalidUsage),
    (several(("a", "Connection refused"), ("b", TURNED_AWAY)), Determinate),
    (several(("a", TURNED_AWAY), ("b", TURNED_AWAY)), InvalidUsage),
])  # fmt: skip
def test_what_a_connection_that_was_not_made_means(said: str, kind: type[Exception]) -> None:
    assert type(connection_failed(psycopg.OperationalError(said), "a database")) is kind


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
