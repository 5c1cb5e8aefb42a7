"""What tests of push have in common: servers of one location, clients that follow, and what these ask for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Queue
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.location.rpc import push_stream
from persist_lib.location.rpc import subscriptions as told
from persist_lib.location.rpc.subscriptions import Followed, Subscriptions
from tests.worlds import row


def eventually(holds: Callable[[], bool], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.005)


def without_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No scans because nothing came for a while: what a test counts does not depend on how fast the machine is."""
    monkeypatch.setattr(told, "CHECK_S", 1e9)
    monkeypatch.setattr(push_stream, "LOST_S", 1e9)


def subscriptions(client: persist.Client) -> Subscriptions:
    found: Subscriptions = client.location.consensus._subscriptions  # type: ignore[attr-defined]
    return found


def followed_by(client: persist.Client, shard: str) -> Followed | None:
    return subscriptions(client)._followed.get(shard)


def is_told(client: persist.Client, shard: str = "s") -> bool:
    """Whether a client is told of a shard, and has scanned it since."""
    one = followed_by(client, shard)
    return one is not None and one.is_live and one.is_sure


def follows_at(client: persist.Client, shard: str = "s") -> str:
    """The address of the server that tells a client of a shard; empty for none."""
    at = subscriptions(client)._at.get(shard)
    return at._server.address if at is not None and is_told(client, shard) else ""


def asked(client: persist.Client) -> dict[str, int]:
    """The requests of a client that read Consensus, by kind."""
    counts = client.metrics().operations
    return {kind: counts[kind].calls for kind in ("head", "scan", "heads", "list_keys") if kind in counts}


class Listener:
    """Listens to a shard in a thread of its own: `ids` of what came, in order; `failure` if it ended with one."""

    def __init__(self, client: persist.Client, shard: str = "s", as_of: int = 0, until: object = persist.TOP) -> None:
        self.ids: list[int] = []
        self.came: Queue[int] = Queue()
        self.failure: BaseException | None = None
        self._client, self._shard, self._as_of, self._until = client, shard, as_of, until
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            read = self._client.open_reader(self._shard)
            for event in read.listen(self._as_of, until=self._until):
                if isinstance(event, persist.Updates):
                    for id_ in event.table.column("id").to_pylist():
                        self.ids.append(id_)
                        self.came.put(id_)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            self.failure = error

    def wait_for(self, id_: int) -> None:
        while self.came.get(timeout=30) != id_:
            pass


class Writer:
    """Appends one row after the other: of id n at time n."""

    def __init__(self, client: persist.Client, schema: persist.Schema, shard: str = "s") -> None:
        self.handle = client.open_writer(shard, schema)
        self.next = self.handle.fetch_upper().time or 0

    def append(self, **values: Any) -> int:
        n, self.next = self.next, self.next + 1
        self.handle.compare_and_append([{**row(n, time=n), **values}], n, n + 1)
        return n
