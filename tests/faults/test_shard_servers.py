"""Shard servers as processes: killed, paused and started again under load, two of them on one shard.

Nothing that was acknowledged is lost, nothing is there twice, and everybody gets on once a server is back.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

import persist_lib as persist
from persist_lib.errors import Determinate, Indeterminate, LeaseExpired, UpperMismatch
from persist_lib.format.log import GROUP, decode_row
from persist_lib.ids import SeqNo
from persist_lib.testing import check_world, contents_of
from tests.conformance.stores import CONSENSUSES
from tests.worlds import SCHEMA

SHARD = "s"
KILLS = int(os.environ.get("PERSIST_SERVER_KILLS", "3"))
WRITERS = 6
CONFIG = persist.Config(format=4, timeout_s=30)


class Server:
    """A process that serves a location, on the same port each time it is started."""

    def __init__(self, url: str, consensus: str | None) -> None:
        self._url, self._consensus, self.port = url, consensus, 0
        self.process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        where = ["--location", self._url, *(["--consensus", self._consensus] if self._consensus else [])]
        command = [sys.executable, "-m", "persist_lib.cli", *where, "--json", "serve", "--drain", "1"]
        self.process = subprocess.Popen(
            [*command, "--listen", f"127.0.0.1:{self.port}"], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.port = int(json.loads(self.process.stdout.readline())["listening"].rpartition(":")[2])

    def kill(self, how: int = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.send_signal(how)
        self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def pause(self, seconds: float) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.process.send_signal(signal.SIGCONT)


class Site:
    def __init__(self, url: str, consensus: str | None) -> None:
        self.url = url
        self.store = persist.open(url, consensus, config=CONFIG)
        self.store.open_writer(SHARD, SCHEMA).close()
        self.servers = [Server(url, consensus) for _ in range(2)]
        self.acked: list[int] = []
        self.doubted: list[int] = []
        self.ends = threading.Event()

    @property
    def served(self) -> str:
        return "persist://" + ",".join(f"127.0.0.1:{server.port}" for server in self.servers)

    def write(self, number: int) -> None:
        """Append one row after the other; what is in doubt is asked for by its token until it is known."""
        with persist.open(self.url, self.served, config=CONFIG) as client:
            write = client.open_writer(SHARD, SCHEMA)
            for n in range(1_000_000):
                if self.ends.is_set():
                    return
                id_, at = number * 1_000_000 + n, write.upper.time or 0
                token: bytes | None = None
                while True:
                    rows = [{"id": id_, "word": "x", "_time": at}]
                    try:
                        write.compare_and_append(rows, at, at + 1, token=token)
                        self.acked.append(id_)
                        break
                    except UpperMismatch:
                        at, token = write.upper.time or 0, None
                    except Indeterminate as error:
                        token = cast("bytes | None", error.fields.get("token")) or token
                        if token is None:
                            self.doubted.append(id_)
                            break
                    except (Determinate, LeaseExpired):
                        time.sleep(0.05)

    def check(self) -> dict[str, Any]:
        check_world(self.store, SHARD)
        with self.store.open_reader(SHARD) as read:
            told = contents_of(read.snapshot((read.fetch_upper().time or 0) - 1).to_arrow())
        assert set(told.values()) == {1}, "doubled"
        there = {int(data[0]) for data in told}
        assert set(self.acked) <= there, "lost"
        assert there <= {*self.acked, *self.doubted}, "what was refused is there"
        rows = [decode_row(one.data, "row") for one in self.store.consensus.scan(SHARD, SeqNo(0), 100_000)]
        return {"acked": len(self.acked), "rows": len(rows), "groups": sum(one.command == GROUP for one in rows)}


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    url = CONSENSUSES[request.param].prepare(tmp_path)
    made = Site(url, None) if request.param == "sqlite" else Site(f"file:{tmp_path}/blobs", url)
    yield made
    for server in made.servers:
        if server.process is not None and server.process.poll() is None:
            server.kill()
    made.store.close()


def test_servers_are_killed_and_paused_under_load_and_nothing_is_lost_or_doubled(site: Site) -> None:
    drawn = random.Random(os.environ.get("PERSIST_SEED", "7"))
    writers = [threading.Thread(target=site.write, args=(n,)) for n in range(WRITERS)]
    for writer in writers:
        writer.start()
    for _ in range(KILLS):
        time.sleep(drawn.uniform(0.2, 0.8))
        victim = drawn.choice(site.servers)
        if drawn.random() < 0.3:
            victim.pause(drawn.uniform(0.1, 1.5))
        else:
            victim.kill(drawn.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))
            victim.start()
    before = len(site.acked)
    time.sleep(1)
    site.ends.set()
    for writer in writers:
        writer.join(60)
    assert not any(writer.is_alive() for writer in writers), "hung"
    found = site.check()
    print(found)
    assert len(site.acked) > before, "everybody gets on"


def test_a_server_ends_by_itself_on_sigterm_and_answers_what_waits(site: Site) -> None:
    with persist.open(site.url, f"persist://127.0.0.1:{site.servers[0].port}", config=CONFIG) as client:
        write = client.open_writer(SHARD, SCHEMA)
        write.compare_and_append([{"id": 1, "word": "x"}], 0, 1)
        process = site.servers[0].process
        site.servers[0].kill(signal.SIGTERM)
        assert process is not None
        assert process.returncode == 0
        site.servers[0].start()
        write.compare_and_append([{"id": 2, "word": "x", "_time": 1}], 1, 2)
    site.acked = [1, 2]
    site.check()
