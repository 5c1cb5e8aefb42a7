"""Over TLS, with an authority of one's own: S3 and PostgreSQL, and what is said when the server is not trusted.

The PostgreSQL of the tests is built without TLS, so a front of the tests ends it; the client's part is the real one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import persist_lib as persist
from persist_lib.errors import Indeterminate, InvalidUsage
from persist_lib.testing import check_world, contents_of
from tests import servers
from tests.tls import Authority, Front
from tests.worlds import SCHEMA, row

servers.use_test_credentials()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def ours(directory: Path) -> Authority:
    return Authority(directory, "ours")


@pytest.fixture(scope="module")
def theirs(directory: Path) -> Authority:
    return Authority(directory, "theirs")


@pytest.fixture(scope="module")
def s3(ours: Authority) -> Iterator[Front]:
    with Front(servers.s3_server().port, ours.certificate("localhost")) as front:
        yield front


@pytest.fixture(scope="module")
def postgres(ours: Authority) -> Iterator[Front]:
    with Front(servers.postgres_port(), ours.certificate("127.0.0.1"), is_postgres=True) as front:
        yield front


def s3_url(front: Front, ca: Path | None, host: str = "localhost") -> str:
    trusted = f"&ca={ca}" if ca else ""
    return f"s3://{servers.BUCKET}/{os.urandom(8).hex()}?endpoint=https://{host}:{front.port}&path_style=true{trusted}"


def postgres_url(front: Front, ca: Path, mode: str = "verify-full") -> str:
    return servers.postgres_at(
        front.port, persist_schema=f"t{os.urandom(8).hex()}", sslmode=mode, sslrootcert=str(ca), gssencmode="disable"
    )


def test_both_servers_are_used_over_tls_that_is_verified(s3: Front, postgres: Front, ours: Authority) -> None:
    before = s3.secured, postgres.secured
    with persist.open(
        s3_url(s3, ours.bundle), postgres_url(postgres, ours.bundle), config=persist.Config(inline_bytes=0)
    ) as client:
        write, read = client.open_shard("s", SCHEMA)
        for n in range(4):
            write.compare_and_append([row(n, time=n)], n, n + 1)
        assert contents_of(read.snapshot(3, diff=True).to_arrow()) == {(n, "w"): 1 for n in range(4)}
        client.maintain("s")
        check_world(client, "s")
    assert s3.secured > before[0]
    assert postgres.secured > before[1]


@pytest.mark.parametrize("trusts", ["another authority", "what the system trusts", "another host"])
def test_an_s3_server_that_is_not_trusted_is_refused_at_once_with_what_to_do(
    s3: Front, ours: Authority, theirs: Authority, trusts: str
) -> None:
    ca = {"another authority": theirs.bundle, "another host": ours.bundle}.get(trusts)
    started = time.monotonic()
    with pytest.raises(InvalidUsage, match=r"\?ca=") as refused:
        persist.open(s3_url(s3, ca, "127.0.0.1" if trusts == "another host" else "localhost"), "memory:")
    assert time.monotonic() - started < 30
    assert "certificate" in str(refused.value)


def test_a_bundle_that_is_not_there_is_refused_before_anything_is_sent(s3: Front, tmp_path: Path) -> None:
    with pytest.raises(InvalidUsage, match="there is no file"):
        persist.open(s3_url(s3, tmp_path / "missing.pem"), "memory:")


def test_a_postgresql_that_is_not_trusted_is_refused_at_once_with_what_to_do(
    postgres: Front, ours: Authority, theirs: Authority, tmp_path: Path
) -> None:
    wrong = {
        "another authority": postgres_url(postgres, theirs.bundle),
        "no such bundle": postgres_url(postgres, tmp_path / "missing.pem"),
        "another host": postgres_url(postgres, ours.bundle).replace("@127.0.0.1", "@localhost"),
    }
    for what, url in wrong.items():
        started = time.monotonic()
        with pytest.raises(InvalidUsage, match="sslrootcert") as refused:
            persist.open(f"file:{tmp_path}/{what.replace(' ', '-')}", url)
        assert time.monotonic() - started < 30, what
        assert "certificate" in str(refused.value)


def test_a_server_without_tls_is_refused_when_tls_is_required(ours: Authority, tmp_path: Path) -> None:
    url = servers.postgres_at(None, sslmode="verify-full", sslrootcert=str(ours.bundle), gssencmode="disable")
    with pytest.raises(InvalidUsage, match="sslmode"):
        persist.open(f"file:{tmp_path}/x", url)


def test_a_running_client_says_so_when_the_certificate_is_exchanged(
    ours: Authority, theirs: Authority, tmp_path: Path
) -> None:
    """Not only at opening: each new connection is verified."""
    with (
        Front(servers.postgres_port(), ours.certificate("127.0.0.1"), is_postgres=True) as front,
        persist.open(f"file:{tmp_path}/x", postgres_url(front, ours.bundle)) as client,
    ):
        write = client.open_writer("s", SCHEMA)
        write.compare_and_append([row(1)], 0, 1)
        front._context.load_cert_chain(*theirs.certificate("127.0.0.1"))
        for end in front._ends:
            end.close()
        # What was under way when the connection ended is in doubt.
        with pytest.raises((InvalidUsage, Indeterminate), match="sslrootcert"):
            write.compare_and_append([row(2, time=1)], 1, 2, timeout=20)
        front._context.load_cert_chain(*ours.certificate("127.0.0.1"))
        write.compare_and_append([row(2, time=1)], 1, 2)
