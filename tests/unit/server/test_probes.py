"""What a server tells of itself: health, readiness and figures, over HTTP and by gRPC's health service."""

from __future__ import annotations

import re
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from persist_lib.errors import InvalidUsage, NotAllowed, NotAuthenticated, UpperMismatch
from persist_lib.format import wire
from persist_lib.server import probes
from persist_lib.server.access import Certificates
from persist_lib.server.probes import CONNECTIONS_MOST
from persist_lib.server.shard_server import ShardServer
from persist_lib.testing.servers import PostgresServer
from tests.unit.server.certificates import Authority
from tests.unit.server.sites import Site, site_of
from tests.worlds import SCHEMA, row

TOKEN = "a-token-0123456789abcdef"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Probed(Site):
    """With servers that tell of themselves over HTTP."""

    def serve(self, listen: str = "127.0.0.1:0", **options: Any) -> ShardServer:
        return super().serve(listen, http="127.0.0.1:0", **options)

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.server.http_port}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def figures(self) -> dict[str, float]:
        lines = [line for line in self.get("/metrics")[1].splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def health(self) -> Any:
        return health_pb2_grpc.HealthStub(grpc.insecure_channel(f"127.0.0.1:{self.server.port}"))


site = site_of(Probed)


def until(what: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not what():
        assert time.monotonic() < ends, "it never came"
        time.sleep(0.02)


def test_a_server_tells_that_it_lives_and_is_ready_without_a_token(site: Probed) -> None:
    tokens = site.folder / "tokens.toml"
    tokens.write_text(f'[clients.a]\ntoken = "{TOKEN}"\nrights = {{ "*" = ["append"] }}')
    site.serve(token_file=tokens)
    assert site.get("/healthz") == (200, "alive\n")
    assert site.get("/readyz?verbose") == (200, "ready\n")
    assert site.get("/shards")[0] == 404
    for service in ("", wire.SERVICE):
        assert site.health().Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status == SERVING
    with pytest.raises(grpc.RpcError) as told:
        site.health().Check(health_pb2.HealthCheckRequest(service="other"), timeout=5)
    assert told.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_server_is_not_ready_while_its_store_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "LOOK_S", 0.1)
    monkeypatch.setattr(probes, "LATE_S", 4.0)
    store = PostgresServer()
    site = Probed(tmp_path, store.url)
    try:
        site.serve()
        watched = site.health().Watch(health_pb2.HealthCheckRequest())
        assert next(watched).status == SERVING
        store.stop(signal.SIGQUIT)
        until(lambda: site.get("/readyz")[0] == 503)
        assert "the store does not answer" in site.get("/readyz")[1]
        assert site.get("/healthz")[0] == 200
        assert any(one.status == NOT_SERVING for one in watched)
        store.start()
        until(lambda: site.get("/readyz")[0] == 200)
        assert any(one.status == SERVING for one in watched)
    finally:
        site.close()
        store.remove()


def test_a_server_that_stops_says_so_before_it_takes_no_more_calls(site: Probed) -> None:
    site.serve()
    watched = site.health().Watch(health_pb2.HealthCheckRequest())
    assert next(watched).status == SERVING
    seen: list[tuple[int, str]] = []
    stop = site.server._funnels.stop

    def stopped() -> None:
        seen.append(site.get("/readyz"))
        stop()

    site.server._funnels.stop = stopped
    site.stop(5)
    assert seen == [(503, "this server is stopping")]
    assert [one.status for one in watched] == [NOT_SERVING], "who watches is told, and does not keep the server"


def test_few_may_wait_for_changes_of_the_health(site: Probed) -> None:
    site.serve()
    watches = [site.health().Watch(health_pb2.HealthCheckRequest()) for _ in range(probes.WATCHES_MOST)]
    assert {next(watch).status for watch in watches} == {SERVING}
    with pytest.raises(grpc.RpcError) as told:
        next(site.health().Watch(health_pb2.HealthCheckRequest()))
    assert told.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    watches.pop().cancel()
    until(lambda: site.server._readiness._watches < probes.WATCHES_MOST)
    assert next(site.health().Watch(health_pb2.HealthCheckRequest())).status == SERVING
    site.client().open_writer("s", SCHEMA).append_now([row(1)])


def test_figures_count_what_was_answered(site: Probed) -> None:
    site.serve()
    with site.client() as client:
        write = client.open_writer("s", SCHEMA)
        assert write.id, "registered"
        before = site.figures()
        for n in range(5):
            write.compare_and_append([row(n, time=n)], n, n + 1)
        other = site.store.open_writer("s", SCHEMA)
        other.compare_and_append([row(9, time=5)], 5, 6)
        with pytest.raises(UpperMismatch):
            write.compare_and_append([row(9, time=5)], 5, 6)
        after = site.figures()

        def more(name: str) -> float:
            return after[name] - before.get(name, 0)

        assert more('persist_server_calls_total{call="commit",outcome="ok"}') == 5
        assert more('persist_server_calls_total{call="commit",outcome="refused"}') >= 1
        assert more('persist_server_refusals_total{refusal="WrongUpper"}') >= 1
        assert more("persist_server_commit_seconds_count") == 5
        assert more("persist_server_row_commands_sum") == 5
        assert more("persist_server_received_bytes_total") > 500
        assert more("persist_server_sent_bytes_total") > 500
        assert after["persist_server_connections"] >= 1
        assert after["persist_server_shards"] == 1
        assert after["persist_server_queued_commands"] == after["persist_server_commands_under_way"] == 0


def test_figures_do_not_grow_with_shards_nor_name_them_unless_asked_to(site: Probed) -> None:
    site.serve()
    with site.client() as client:
        client.open_writer("secret-0", SCHEMA).append_now([row(1)])

        def names() -> set[str]:
            """The server's own. Those of its location are by kinds of operations, some of which a timer begins."""
            return {name for name in site.figures() if not name.startswith("persist_location_call")}

        before = names()
        for n in range(1, 30):
            client.open_writer(f"secret-{n}", SCHEMA).append_now([row(1)])
        assert names() == before
        assert "secret" not in site.get("/metrics")[1]


def test_the_busiest_shards_are_named_where_that_is_asked_for(site: Probed) -> None:
    site.serve(named_shards=3)
    with site.client() as client:
        for n in range(8):
            write = client.open_writer(f"s{n}", SCHEMA)
            assert write.id, "registered"
            for _ in range(20 if n == 5 else 1):
                write.append_now([row(1)])
        found, rows = site.figures(), client.inspect("s5").seqno
    named = set(re.findall(r'persist_server_shard_commit_rows_total{shard="(\w+)"}', " ".join(found)))
    assert len(named) == 3
    assert "s5" in named
    assert found['persist_server_shard_commit_rows_total{shard="s5"}'] == rows >= 22, (
        "it was created, its writer registered, and its lease may have been renewed"
    )


def test_figures_tell_of_strangers_of_files_that_are_wrong_and_when_certificates_expire(site: Probed) -> None:
    tokens, cert, key = (site.folder / name for name in ("tokens.toml", "cert.pem", "key.pem"))
    good = f'[clients.a]\ntoken = "{TOKEN}"\nrights = {{ "s" = ["append"] }}'
    tokens.write_text(good)
    Authority(site.folder / "ca", "ca").issue(cert, key)
    site.serve(token_file=tokens, tls_cert=cert, tls_key=key)
    assert 0.9 * 86_400 < site.figures()["persist_server_certificate_expiry_seconds"] < 1.1 * 86_400
    assert site.figures()["persist_server_token_file_stale"] == 0
    tokens.write_text("[clients.a")
    cert.write_text("no certificate")
    found = site.figures()
    assert found["persist_server_token_file_stale"] == found["persist_server_token_file_failures"] == 1
    assert found["persist_server_certificate_stale"] == found["persist_server_certificate_failures"] == 1
    tokens.write_text(good + "\n")
    assert site.figures()["persist_server_token_file_stale"] == 0
    assert site.figures()["persist_server_token_file_failures"] == 1


def test_calls_without_rights_are_counted_as_denied(site: Probed, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = site.folder / "tokens.toml"
    tokens.write_text(f'[clients.a]\ntoken = "{TOKEN}"\nrights = {{ "s" = ["append"] }}')
    site.serve(token_file=tokens)
    with pytest.raises(NotAuthenticated):
        site.client()
    monkeypatch.setenv("PERSIST_TOKEN", TOKEN)
    with site.client() as client, pytest.raises(NotAllowed):
        client.open_writer("t", SCHEMA)
    found = site.figures()
    assert found['persist_server_calls_total{call="now",outcome="denied"}'] == 2, "the connection, and the call"
    assert sum(value for name, value in found.items() if "denied" in name and "_created" not in name) == 3


def test_the_first_certificate_of_a_chain_to_expire_counts(tmp_path: Path) -> None:
    authority, (cert, key) = Authority(tmp_path, "ca"), (tmp_path / "c.pem", tmp_path / "k.pem")
    authority.issue(cert, key, days=3)
    alone = Certificates(cert, key).not_after()
    cert.write_text(cert.read_text() + authority.ca.read_text())
    assert alone - Certificates(cert, key).not_after() == pytest.approx(2 * 86_400, abs=60)


BAD = [
    b"", b"GET", b"GET /healthz HTTP/1.1\r\n", b"\r\n\r\n", b"POST /healthz HTTP/1.1\r\n\r\n", b"\xff\xfe\r\n\r\n",
    b"GET /" + bytes(100_000) + b"\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /healthz\r\n\r\n",
]  # fmt: skip


@pytest.mark.parametrize("sent", BAD)
def test_who_asks_badly_holds_up_nobody(site: Probed, sent: bytes) -> None:
    site.serve()
    with socket.create_connection(("127.0.0.1", site.server.http_port)) as connection:
        connection.sendall(sent)
        assert site.get("/healthz")[0] == 200
        connection.settimeout(30)
        try:
            while connection.recv(1000):
                pass
        except ConnectionResetError:
            pass


def test_silent_connections_are_ended_and_few(site: Probed) -> None:
    site.serve()
    silent = [socket.create_connection(("127.0.0.1", site.server.http_port)) for _ in range(2 * CONNECTIONS_MOST)]
    until(lambda: site.server._pages._open == CONNECTIONS_MOST)
    for one in silent:
        one.settimeout(30)
        assert one.recv(10) == b""
        one.close()
    assert site.get("/readyz")[0] == 200


@pytest.mark.parametrize("at", ["7601", "127.0.0.1:", "127.0.0.1:x", "nowhere.invalid:0", "127.0.0.1:99999"])
def test_http_is_served_at_an_address(site: Probed, at: str) -> None:
    with pytest.raises(InvalidUsage, match="HTTP"):
        ShardServer(site.store, "127.0.0.1:0", http=at).start()
