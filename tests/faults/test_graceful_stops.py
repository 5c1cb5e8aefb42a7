"""How a server ends: it is not ready first, those who wait are answered, and it does not take for ever."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import persist_lib as persist
from persist_lib.core import commands as c
from persist_lib.errors import Indeterminate
from persist_lib.format import wire
from persist_lib.ids import SeqNo
from tests.conformance.stores import CONSENSUSES
from tests.faults.proxy import Proxy
from tests.faults.raw_http2 import Connection
from tests.faults.served import Served, until
from tests.servers import postgres_at, postgres_port
from tests.worlds import SCHEMA

CONFIG = persist.Config(format=4, timeout_s=60)


class Site:
    """A server on PostgreSQL, the row of whose shard `s` somebody else holds for as long as `blocker` is open."""

    def __init__(self, folder: Path, consensus: str, *options: str, proxy: Proxy | None = None) -> None:
        self.url, self.schema = f"file:{folder}/location", consensus.partition("persist_schema=")[2].partition("&")[0]
        self.store = persist.open(self.url, consensus, config=CONFIG)
        self.store.open_writer("s", SCHEMA).close()
        at = consensus if proxy is None else postgres_at(proxy.port, persist_schema=self.schema)
        self.server = Served(self.url, at, folder / "log", *options)
        self.blocker = psycopg.connect(consensus.partition("?")[0])
        self.made: list[Connection] = []

    def block(self) -> None:
        self.blocker.execute(f"SELECT 1 FROM {self.schema}.shard_head WHERE key = 's' FOR UPDATE")

    def is_sent(self) -> bool:
        """Whether a row of the server waits in PostgreSQL."""
        told = self.blocker.execute("SELECT count(*) FROM pg_locks WHERE NOT granted").fetchone()
        return told is not None and told[0] > 0

    def waiting(self, number: int = 0, seconds: float = 60) -> Connection:
        """A connection whose command waits for its answer."""
        made = Connection(self.server.port)
        command = c.SetHold(f"h{number}", persist.frontier.MINIMUM, None, b"x")
        commit = wire.Commit(number.to_bytes(16, "big"), False, (("s", SeqNo(0), *wire.encode_command(command)),))
        made.call("commit", wire.encode_call(commit, seconds))
        self.made.append(made)
        return made

    def close(self) -> None:
        for one in self.made:
            one.close()
        self.blocker.close()
        self.server.end()
        self.store.close()


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Any]:
    sites: list[Site] = []

    def make(*options: str, proxy: Proxy | None = None) -> Site:
        sites.append(Site(tmp_path, CONSENSUSES["postgresql"].prepare(tmp_path), *options, proxy=proxy))
        return sites[-1]

    yield make
    for site in sites:
        site.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_those_who_wait_are_answered_and_it_is_not_ready_meanwhile(made: Any, number: signal.Signals) -> None:
    site = made("--drain", "60")
    site.block()
    crowd = [site.waiting(n) for n in range(20)]
    until(lambda: site.server.figure("commands_under_way") == 20)
    assert site.server.get("/readyz")[0] == 200
    site.server.send(number)
    until(lambda: site.server.get("/readyz") == (503, "this server is stopping"))

    def refuses() -> bool:
        try:
            with Connection(site.server.port) as other:
                other.socket.settimeout(10)  # what arrives while the server closes its port may wait for nothing
                other.call("now", wire.encode_call(None, 5))
                other.answer()
        except (OSError, EOFError):
            return True
        return False

    until(refuses)  # it says that it stops, and then takes no new calls
    site.blocker.rollback()
    answers = [wire.decode_reply(one.answer(), list[wire.Answer])[0][0] for one in crowd]
    assert any(answer.is_committed for answer in answers)
    assert all(answer.is_committed or answer.refusal is not None for answer in answers)
    for one in crowd:
        one.close()
    assert site.server.wait() == 0


def test_a_stop_is_bounded_and_what_is_in_doubt_is_answered_as_unknown(made: Any) -> None:
    with Proxy(postgres_port()) as proxy:
        site = made("--drain", "1", proxy=proxy)
        site.block()
        doubted = site.waiting()
        until(site.is_sent)
        proxy.close()  # the row is on its way, and nobody will tell what became of it
        assert site.server.end() == 0
        with pytest.raises(Indeterminate):
            wire.decode_reply(doubted.answer(), list[wire.Answer])
        doubted.close()


def test_a_second_signal_ends_it_at_once(made: Any) -> None:
    site = made("--drain", "600")
    site.block()
    waiting = site.waiting()
    until(lambda: site.server.figure("commands_under_way") == 1)
    site.server.send(signal.SIGTERM)
    until(lambda: site.server.get("/readyz")[0] == 503)
    assert site.server.end(signal.SIGTERM) == 128 + signal.SIGTERM
    with pytest.raises((EOFError, ConnectionResetError)):
        waiting.answer()
    waiting.close()


def test_without_anything_to_do_it_ends_by_itself(made: Any) -> None:
    assert made("--drain", "600").server.end() == 0
