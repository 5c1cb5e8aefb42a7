"""A client whose servers are gone continues against the store: also with commands that a paused server may hold.

Each time, a command is sent to a server that is a process of its own, and the client loses its connections. What the
server does with the command afterwards, and what the client was told, must agree.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import pytest

import persist_lib as persist
from persist_lib.errors import Indeterminate
from persist_lib.format.log import decode_row
from persist_lib.format.wire import encode_call
from persist_lib.ids import SeqNo
from persist_lib.location.rpc import servers
from persist_lib.testing import check_world, contents_of
from tests.faults.relay import Relay
from tests.faults.shard_servers import Server
from tests.worlds import SCHEMA

T = TypeVar("T")
SHARD, HOLD = "s", "h"
CONFIG = persist.Config(format=4, timeout_s=15)


class Place:
    """A server, a client by way of a relay that may use the store as well, and a client of the store."""

    def __init__(self, folder: Path) -> None:
        self.url = f"file:{folder}/location"
        self.store = persist.open(self.url, config=CONFIG)
        self.other = self.store.open_writer(SHARD, SCHEMA)
        self.store.set_hold(SHARD, HOLD, 0, opaque=b"a", expected=None)
        self.server = Server(self.url, None)
        self.relay = Relay(self.server.port)
        at = f"persist://127.0.0.1:{self.relay.port}?store={quote(self.url, safe='')}"
        # Nothing in the background: a call of its own may be over when the server continues, unanswered.
        self.client = persist.open(self.url, consensus=at, config=CONFIG, runtime=persist.Runtime(background=False))
        self.write = self.client.open_writer(SHARD, SCHEMA)
        self.pool = ThreadPoolExecutor(1)

    def pause(self) -> None:
        assert self.server.process is not None
        self.server.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let the server continue, and wait until it has answered the call that it has."""
        assert self.server.process is not None
        answered = self.relay.answered
        self.server.process.send_signal(signal.SIGCONT)
        self.relay.wait("answered", answered + 1)

    def sent(self, call: Callable[[], T]) -> Future[T]:
        """Begin a call, which is with the server when this returns."""
        asked = self.relay.asked
        begun = self.pool.submit(call)
        self.relay.wait("asked", asked + 1)
        self.relay.loses_what_is_said = True
        return begun

    def steps(self, command: str) -> int:
        """How many commands of a kind the log holds that were committed."""
        rows = [decode_row(row.data, "row") for row in self.store.consensus.scan(SHARD, SeqNo(0), 10_000)]
        return sum(step.command == command and step.diff is not None for row in rows for step in row.steps)

    def fence(self) -> bytes:
        machine = self.store.machine(SHARD)
        machine.try_fetch()
        return machine.state.holds[HOLD].opaque

    def move(self, expected: bytes, opaque: bytes, client: persist.Client | None = None) -> None:
        (client or self.store).set_hold(SHARD, HOLD, 0, opaque=opaque, expected=expected)

    def close(self) -> None:
        if self.server.process is not None:
            self.server.process.send_signal(signal.SIGCONT)
        self.client.close()
        self.server.kill()
        self.relay.close()
        self.pool.shutdown()
        self.store.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.close()


def test_an_append_that_a_paused_server_holds_is_committed_once_by_the_client_itself(place: Place) -> None:
    place.pause()
    rows = [{"id": 1, "word": "x"}]
    begun = place.sent(lambda: place.write.compare_and_append(rows, 0, 1))
    place.relay.leave_clients()
    begun.result(30)
    place.go_on()
    assert place.steps("CompareAndAppend") == 1
    with place.store.open_reader(SHARD) as read:
        assert list(contents_of(read.snapshot(0, diff=True).to_arrow()).values()) == [1]
    place.write.compare_and_append([{"id": 2, "word": "x", "_time": 1}], 1, 2)
    check_world(place.store, SHARD)


def test_an_append_at_the_next_time_that_a_paused_server_holds_is_put_at_one_time_only(place: Place) -> None:
    """Both choose a time by themselves. What the server chooses, once it goes on, is later than all that came since."""
    place.write.append_now([{"id": 1, "word": "x"}])
    place.pause()
    begun = place.sent(lambda: place.write.append_now([{"id": 2, "word": "x"}]))
    place.relay.leave_clients()
    assert begun.result(30).upper.time == 2
    place.other.append_now([{"id": 3, "word": "x"}])
    place.go_on()
    assert place.steps("CompareAndAppend") == 3
    with place.store.open_reader(SHARD) as read:
        assert contents_of(read.snapshot(2, diff=True).to_arrow()) == {(n, "x"): 1 for n in (1, 2, 3)}
    assert place.write.append_now([{"id": 4, "word": "x"}]).upper.time == 4
    check_world(place.store, SHARD)


def test_a_hold_that_a_paused_server_is_to_move_is_moved_once(place: Place) -> None:
    place.pause()
    moved = place.steps("SetHold")
    begun = place.sent(lambda: place.move(b"a", b"b", place.client))
    place.relay.leave_clients()
    begun.result(30)
    assert place.fence() == b"b"
    place.move(b"b", b"a")
    place.go_on()
    assert place.fence() == b"a", "the paused server moved it a second time"
    assert place.steps("SetHold") == moved + 2


def test_a_hold_that_a_server_has_moved_is_not_moved_again_by_the_client_itself(place: Place) -> None:
    moved = place.steps("SetHold")
    place.relay.holds_answers, answered = True, place.relay.answered
    begun = place.sent(lambda: place.move(b"a", b"b", place.client))
    place.relay.wait("answered", answered + 1)
    place.move(b"b", b"a")
    place.relay.leave_clients()
    begun.result(30)
    assert place.fence() == b"a"
    assert place.steps("SetHold") == moved + 2


def test_not_committed_is_not_said_while_a_paused_server_may_still_commit(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    # SUBTLE: a call whose time is over is not carried out, and its time begins when the server reads it. So a server
    # that is slow after its pause may only be so for as long as the client gives it.
    monkeypatch.setattr(servers, "encode_call", lambda arguments, _seconds: encode_call(arguments, 600.0))
    for name in ("GRACE_S", "SHARE_S", "SHARE_LEAST_S"):
        monkeypatch.setattr(servers, name, 600.0)
    config = CONFIG.model_copy(update={"timeout_s": 3.0})
    at = place.client.consensus_url
    with persist.open(place.url, consensus=at, config=config, runtime=persist.Runtime(background=False)) as client:
        client.machine(SHARD).fetch()
        place.pause()
        begun = place.sent(lambda: place.move(b"a", b"b", client))
        place.move(b"a", b"c")
        place.relay.leave_clients()
        with pytest.raises(Indeterminate):
            begun.result(30)
        place.move(b"c", b"a")
        place.go_on()
        assert place.fence() == b"b", "as the client was told: it was in doubt"
