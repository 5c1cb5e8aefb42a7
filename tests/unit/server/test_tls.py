"""A server over TLS: whom it lets in, certificates that are replaced while it runs, and where it listens."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

import persist_lib as persist
from persist_lib.errors import Determinate, InvalidUsage, NotAuthenticated
from persist_lib.format import wire
from persist_lib.location.rpc.consensus import open_consensus
from persist_lib.location.scheme import Opening
from persist_lib.server.access import Certificates
from persist_lib.server.shard_server import ShardServer
from persist_lib.testing import contents_of
from tests.circles import by_day
from tests.unit.server.certificates import Authority
from tests.unit.server.sites import Site, site_of
from tests.worlds import SCHEMA, row

CONFIG = persist.Config(format=4, timeout_s=3)
TOKEN = "a-token-0123456789abcdef"


class Secured(Site):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, config=CONFIG)
        self.cert, self.key, self.tokens = folder / "cert.pem", folder / "key.pem", folder / "tokens.toml"
        self.authority = Authority(folder / "one", "one")
        self.authority.issue(self.cert, self.key)
        self.tokens.write_text(f'[clients.a]\ntoken = "{TOKEN}"\nrights = {{ "*" = ["append", "read"] }}')

    def serve(self, listen: str = "127.0.0.1:0", **options: Any) -> ShardServer:
        return super().serve(listen, **{"tls_cert": self.cert, "tls_key": self.key, **options})

    def at(self, ca: Path | None, options: str = "", scheme: str = "persists") -> str:
        return f"{scheme}://127.0.0.1:{self.server.port}?{f'ca={ca}' if ca else ''}{options}"

    def reach(self, url: str) -> None:
        open_consensus(url, Opening()).close()


site = site_of(Secured)


def test_the_library_works_over_tls_on_every_interface_with_a_token(
    site: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.serve("0.0.0.0:0", token_file=site.tokens)
    with pytest.raises(NotAuthenticated):
        site.reach(site.at(site.authority.ca))
    monkeypatch.setenv("PERSIST_TOKEN", TOKEN)
    with persist.open(site.url, consensus=site.at(site.authority.ca), config=CONFIG) as client:
        write, read = client.open_shard("s", SCHEMA)
        write.compare_and_append([row(1)], 0, 1)
        assert read.snapshot(0, diff=True).to_arrow().num_rows == 1
        write.close()
        read.close()


def test_a_client_does_not_talk_to_a_server_that_it_cannot_be_sure_of(site: Secured, tmp_path: Path) -> None:
    site.serve()
    other = Authority(tmp_path / "two", "two")
    for url in (site.at(other.ca), site.at(None), site.at(None, scheme="persist")):
        with pytest.raises(Determinate, match="cannot be reached"):
            site.reach(url)
    site.reach(site.at(site.authority.ca))
    site.authority.issue(site.cert, site.key, host="10.1.2.3")
    with pytest.raises(Determinate, match="cannot be reached"):
        site.reach(site.at(site.authority.ca))


def test_where_clients_need_a_certificate_the_others_are_not_let_in(site: Secured, tmp_path: Path) -> None:
    clients = Authority(tmp_path / "clients", "clients")
    site.serve(tls_client_ca=clients.ca)
    cert, key = tmp_path / "c.pem", tmp_path / "k.pem"
    options = f"&cert={cert}&key={key}"
    site.authority.issue(cert, key)
    for told in ("", options):
        with pytest.raises(Determinate, match="cannot be reached"):
            site.reach(site.at(site.authority.ca, told))
    clients.issue(cert, key)
    site.reach(site.at(site.authority.ca, options))


def test_replaced_certificates_count_for_new_connections_and_old_ones_go_on(site: Secured, tmp_path: Path) -> None:
    site.serve()
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(site.authority.ca.read_bytes())
    old = open_consensus(site.at(trusted), Opening())
    other = Authority(tmp_path / "two", "two")
    other.issue(site.cert, site.key)
    assert old.heads() == {}
    site.reach(site.at(other.ca))
    with pytest.raises(Determinate):
        site.reach(site.at(site.authority.ca))
    trusted.with_suffix(".new").write_bytes(other.ca.read_bytes())
    trusted.with_suffix(".new").replace(trusted)
    for server in old._servers._servers:
        server.shun()  # as when its connection is lost: it is made again, with the authority of now
    assert old.heads() == {}
    old.close()
    assert old.heads() == {}, "after the end of its connections as well, and never without TLS"
    old.close()


def test_a_certificate_without_its_key_is_not_taken_while_the_server_runs(
    site: Secured, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site.serve()
    other = Authority(tmp_path / "two", "two")
    with caplog.at_level(logging.WARNING, logger="persist"):
        other.issue(site.cert, tmp_path / "elsewhere.pem")
        site.reach(site.at(site.authority.ca))
    assert "stays in force" in caplog.text
    (tmp_path / "elsewhere.pem").replace(site.key)
    site.reach(site.at(other.ca))


def test_grpc_gets_certificates_only_where_they_have_changed(site: Secured, monkeypatch: pytest.MonkeyPatch) -> None:
    """With each configuration that it gets it frees what connections beside may be about to use."""
    given: list[Any] = []
    slept: list[float] = []
    monkeypatch.setattr(grpc, "dynamic_ssl_server_credentials", lambda *these, **_: given.extend(these))
    Certificates(site.cert, site.key).credentials(slept.append)
    first, fetch = given
    assert (fetch(), slept) == (None, [])
    site.authority.issue(site.cert, site.key)
    second = fetch()
    assert isinstance(second, grpc.ServerCertificateConfiguration)
    assert second is not first
    assert slept, "so that those that have asked begin by what they were told"
    assert fetch() is None


@pytest.mark.parametrize("missing", ["token_file", "tls"])
@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "example.org:7600"])
def test_it_listens_elsewhere_than_on_loopback_only_with_both(site: Secured, missing: str, listen: str) -> None:
    options: dict[str, Any] = {"token_file": site.tokens, "tls_cert": site.cert, "tls_key": site.key}
    for name in [name for name in options if name.startswith(missing)]:
        del options[name]
    with pytest.raises(InvalidUsage, match="without both tokens and TLS"):
        ShardServer(site.store, listen, **options).start()


@pytest.mark.parametrize(
    "given",
    [
        {"tls_cert": "cert"},
        {"tls_key": "key"},
        {"tls_client_ca": "cert"},
        {"tls_cert": "key", "tls_key": "cert"},
        {"tls_cert": "tokens", "tls_key": "key"},
        {"tls_cert": "cert", "tls_key": "none"},
        {"tls_cert": "cert", "tls_key": "key", "tls_client_ca": "tokens"},
    ],
)
def test_files_that_are_wrong_are_refused_at_the_start(site: Secured, given: dict[str, str]) -> None:
    paths = {"cert": site.cert, "key": site.key, "tokens": site.tokens, "none": site.folder / "none"}
    options: Any = {name: paths[path] for name, path in given.items()}
    with pytest.raises(InvalidUsage, match="TLS"):
        ShardServer(site.store, "127.0.0.1:0", **options)


def test_options_of_tls_that_are_wrong_are_refused(site: Secured) -> None:
    site.serve()
    for url, says in [
        (site.at(site.authority.ca, scheme="persist"), "persists://"),
        (site.at(None, f"cert={site.cert}"), "go together"),
        (site.at(site.folder / "none"), "cannot be read"),
    ]:
        with pytest.raises(InvalidUsage, match=says):
            site.reach(url)


def test_what_speaks_no_tls_is_not_served(site: Secured) -> None:
    site.serve()
    with grpc.insecure_channel(f"127.0.0.1:{site.server.port}") as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary(f"/{wire.SERVICE}/now")(b"", timeout=2)
    site.reach(site.at(site.authority.ca))


def test_certificates_and_tokens_are_replaced_under_load_and_no_call_fails(
    site: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.serve(token_file=site.tokens)
    monkeypatch.setenv("PERSIST_TOKEN", TOKEN)
    site.store.open_writer("s", SCHEMA).close()
    ends, written = threading.Event(), [0, 0, 0, 0]

    def write(number: int) -> None:
        while not ends.is_set():  # a connection for each, as only those get what is new
            with persist.open(site.url, consensus=site.at(site.authority.ca), config=CONFIG) as client:
                client.open_writer("s", SCHEMA).append_now([row(number)])
                written[number] += 1

    def more(count: int) -> None:
        target = sum(written) + count
        while sum(written) < target:
            assert not any(one.done() for one in writers), [one.exception(0) for one in writers if one.done()]
            time.sleep(0.01)

    with ThreadPoolExecutor(4) as pool:
        writers = [pool.submit(write, number) for number in range(4)]
        try:
            for turn in by_day(range(10), 3):
                site.authority.issue(site.cert, site.key)
                rights = f'[clients.a]\ntoken = "{TOKEN}"\nrights = {{ "*" = ["append", "read"] }}'
                site.tokens.with_suffix(".new").write_text(f"{rights}\n# {turn}")
                site.tokens.with_suffix(".new").replace(site.tokens)
                more(4)
        finally:
            ends.set()
        for one in writers:
            one.result(60)
    with site.store.open_reader("s") as read:
        assert sum(
            contents_of(read.snapshot((read.fetch_upper().time or 0) - 1, diff=True).to_arrow()).values()
        ) == sum(written)
