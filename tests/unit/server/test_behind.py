"""A client that may use the store behind its servers: when it does, when it stops, and what its URL shows."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import cast
from urllib.parse import quote

import pytest

import persist_lib as persist
from persist_lib.errors import Determinate, InvalidUsage, NotAuthenticated, NotFound, redacted
from persist_lib.location import Location
from persist_lib.location.open import _Stores
from persist_lib.location.rpc.consensus import LONGEST_PAUSE_S, FallbackStore, RpcConsensus, canonical
from persist_lib.location.rpc.servers import Servers
from persist_lib.location.scheme import Opening
from persist_lib.runtime.ambient import Runtime
from persist_lib.server.shard_server import ShardServer
from persist_lib.testing import check_world
from tests.unit.server.sites import CONFIG, Site, site_of
from tests.worlds import SCHEMA, row


class Behind(Site):
    """With a server, always at the same port."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.port = self.serve().port

    def again(self) -> None:
        self.serve(f"127.0.0.1:{self.port}")

    @property
    def at(self) -> str:
        return f"persist://127.0.0.1:{self.port}?store={quote(self.url)}"


site = site_of(Behind)


def test_a_client_goes_on_without_servers_and_comes_back_to_them(site: Behind) -> None:
    with persist.open(site.url, site.at, config=CONFIG) as client:
        behind = cast("RpcConsensus", client.location.consensus)._fallback
        assert behind is not None
        write, read = client.open_shard("s", SCHEMA)
        other = client.open_writer("t", SCHEMA)
        for n in range(6):
            if n == 2:
                site.stop()
            if n == 4:
                site.again()
                while behind.is_in_use:
                    behind._next_look = 0.0
            write.compare_and_append([row(n, time=n)], n, n + 1)
            assert behind._is_away == (n in (2, 3))
            both = [persist.Append(other, [row(n, time=n)], n, n + 1)]
            client.compare_and_append_many(both)
            assert client.shards() == ["s", "t"]
        assert read.snapshot(5).to_arrow().num_rows == 6
        client.maintain("s")
    check_world(site.store, "s")
    check_world(site.store, "t")


def test_a_client_opens_without_any_server(site: Behind) -> None:
    site.stop()
    with persist.open(site.url, site.at, config=CONFIG) as client:
        client.open_writer("s", SCHEMA).append_now([row(1)])
    check_world(site.store, "s")


def test_what_a_server_refuses_is_not_tried_on_the_store(site: Behind, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text('[clients.a]\ntoken = "a-token-0123456789abcdef"\nrights = { "*" = ["append"] }')
    server = ShardServer(site.store, "127.0.0.1:0", token_file=tokens)
    port = server.start()
    try:
        with pytest.raises(NotAuthenticated):
            persist.open(site.url, f"persist://127.0.0.1:{port}?store={quote(site.url)}")
    finally:
        server.stop(0)


def test_servers_are_looked_for_less_and_less_often() -> None:
    now, looked = [1000.0], [0]

    class Counted(Servers):
        def is_there(self, seconds: float) -> bool:
            looked[0] += 1
            return super().is_there(seconds)

    runtime = Runtime(monotonic=lambda: now[0])
    stores = _Stores(Opening(runtime=runtime))
    memory = persist.open("memory:looks")
    stores.blob = memory.location.blob
    behind = FallbackStore("memory:looks", stores, Counted(["127.0.0.1:1"], runtime), runtime)
    assert not behind.is_in_use
    behind.leave(Determinate("all are gone"))
    for _ in range(36_000):
        now[0] += 0.1
        assert behind.is_in_use
    behind.close()
    memory.close()
    assert 3600 / LONGEST_PAUSE_S <= looked[0] <= 3600 / LONGEST_PAUSE_S + 6


def test_a_store_that_is_not_there_is_told(site: Behind, tmp_path: Path) -> None:
    site.stop()
    with pytest.raises(NotFound):
        persist.open(site.url, f"persist://127.0.0.1:{site.port}?store=file:{tmp_path}/nowhere", config=CONFIG)


@pytest.mark.parametrize("store", ["", "persist://a:1", "persists://a:1?store=file:x", "levitate:x", "s3://bucket/x"])
def test_what_cannot_be_behind_servers_is_refused(store: str, site: Behind) -> None:
    with pytest.raises(InvalidUsage):
        persist.open(site.url, f"persist://127.0.0.1:{site.port}?store={quote(store, safe='')}")


def test_the_url_means_the_same_in_any_process(site: Behind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with persist.open(site.url, f"persist://127.0.0.1:{site.port}?store=./location", config=CONFIG) as client:
        monkeypatch.chdir("/")
        assert client.consensus_url == f"persist://127.0.0.1:{site.port}?store={quote(site.url, safe='')}"
        site.stop()
        again = pickle.loads(pickle.dumps(client.location))
        assert isinstance(again, Location)
        assert again == client.location
        again.close()


@pytest.mark.parametrize("user", ["u:hunter2%40x@", "u:hunter2@", "u:hun@ter2@"])
@pytest.mark.parametrize("safe", ["", "/", ":/", ":/@?=", ":/@?=%"])
@pytest.mark.parametrize("end", ["", "?password=hunter2", "?sslmode=require"])
def test_a_password_of_the_store_is_never_shown(user: str, safe: str, end: str) -> None:
    url = f"persist://a:7600,b:7600?store={quote(f'postgresql://{user}db:5432/x{end}', safe=safe)}&ca=/x"
    for told in (url, canonical(url), f"in {url!r}, somewhere", f"store={quote(f'postgresql://{user}db', safe='')}"):
        assert "ter2" not in redacted(told), redacted(told)
    with pytest.raises(InvalidUsage) as refused:
        persist.open("memory:", url.replace("a:7600", "a"))
    assert "ter2" not in str(refused.value)
    assert "ter2" not in repr(refused.value.fields)


def test_a_store_without_a_password_is_shown() -> None:
    url = "persist://a:7600?store=postgresql%3A%2F%2Fu%40db%2Fx"
    assert redacted(url) == url
