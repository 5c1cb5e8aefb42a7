"""Shard servers as processes, and clients of many kinds that use two of them while they are killed and paused.

Each client remembers what it was told. `Site.check` compares that with what is there: nothing lost, doubled or in the
wrong order.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import persist_lib as persist
from persist_lib.errors import Determinate, Indeterminate, LeaseExpired, PersistError, UpperMismatch
from persist_lib.format.log import GROUP, decode_row
from persist_lib.ids import SeqNo
from persist_lib.testing import check_world, contents_of, updates_of
from tests.counted import count
from tests.worlds import SCHEMA

SHARD, PAIR = "s", ("p", "q")
CONFIG = persist.Config(format=4, timeout_s=30, lease_ms=20_000)
BREATH_S = 0.01
"""Between two calls of a role, so that the others have the interpreter and the cores as well."""


class Server:
    """A process that serves a location, on the same port each time it is started."""

    def __init__(
        self, url: str, consensus: str | None, address: str = "127.0.0.1", *, on: Sequence[str] = (),
        options: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """`on`: the words before a command that runs on another host; `options`: of `persist serve`."""
        self._url, self._consensus, self._address, self.port = url, consensus, address, 0
        self._on, self._options = on, options
        self.process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        where = ["--location", self._url, *(["--consensus", self._consensus] if self._consensus else [])]
        command = [*self._on, sys.executable, "-m", "persist_lib.cli", *where, "--json", "serve", "--drain", "1"]
        command += ["--listen", f"{self._address}:{self.port}", *self._options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(json.loads(self.process.stdout.readline())["listening"].rpartition(":")[2])

    def kill(self, how: int = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.send_signal(how)
        count("kills", kills=1)
        self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def pause(self, seconds: float) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.process.send_signal(signal.SIGCONT)


class Told(NamedTuple):
    """A call that got an answer: when it began and ended, and the upper that it was told."""

    began: float
    ended: float
    upper: int


class Site:
    """A location, two servers for it, and what their clients were told. Each role is a thread's work until `ends`.

    With `served`, the servers are others', and that is their URL.
    """

    def __init__(self, url: str, consensus: str | None, served: str | None = None) -> None:
        self.url = url
        self.store = persist.open(url, consensus, config=CONFIG)
        for shard in (SHARD, *PAIR):
            self.store.open_writer(shard, SCHEMA).close()
        self.reader = self.store.open_reader(SHARD)  # so that history stays as listeners heard it
        self.servers = [] if served else [Server(url, consensus) for _ in range(2)]
        self.served = served or "persist://" + ",".join(f"127.0.0.1:{server.port}" for server in self.servers)
        self.ends = threading.Event()
        self.acked: list[int] = []
        self.doubted: list[int] = []
        self.paired: list[int] = []
        self.appends: list[Told] = []
        self.reads: list[Told] = []
        self.heard: Counter[tuple[Any, int]] = Counter()
        self.frontier = 0
        self.moves = self.passes = self.expired = 0
        self.failures: list[BaseException] = []

    def client(self) -> persist.Client:
        return persist.open(self.url, self.served, config=CONFIG)

    def may_continue(self) -> bool:
        """Whether the test has not ended. A role asks before each of its calls."""
        return not self.ends.wait(BREATH_S)

    def start(self, role: Callable[..., None], *given: int) -> threading.Thread:
        """A thread with a client of its own, which does its role again and again."""

        def run() -> None:
            try:
                if (client := self.patiently(self.client)) is not None:
                    with client:
                        role(client, *given)
            except BaseException as error:  # noqa: BLE001 - told by `check`
                self.failures.append(error)

        thread = threading.Thread(target=run, name=f"{role.__name__} {given}")
        thread.start()
        return thread

    def patiently(self, call: Callable[[], Any]) -> Any:
        """Repeat a call that may be repeated, until it is answered or the test ends."""
        while True:
            try:
                return call()
            except (Determinate, Indeterminate, LeaseExpired):
                if self.ends.is_set():
                    return None
                time.sleep(0.02)

    def write(self, client: persist.Client, number: int) -> None:
        """Append one row after the other; what is in doubt is asked for by its token until it is known."""
        write = client.open_writer(SHARD, SCHEMA)
        for n in range(1_000_000):
            if not self.may_continue():
                return
            self.append(write, number * 1_000_000 + n)

    def append(self, write: persist.WriteHandle, id_: int) -> None:
        at, token, began = write.upper.time or 0, None, time.monotonic()
        while True:
            try:
                write.compare_and_append([{"id": id_, "word": "x", "_time": at}], at, at + 1, token=token)
            except UpperMismatch:
                at, token = write.upper.time or 0, None
            except Indeterminate as error:
                token = cast("bytes | None", error.fields.get("token")) or token
                if token is None:
                    self.doubted.append(id_)
                    return
            except LeaseExpired:
                self.expired += 1
            except Determinate:
                time.sleep(0.05)
            else:
                self.acked.append(id_)
                self.appends.append(Told(began, time.monotonic(), at + 1))
                return

    def pair(self, client: persist.Client, number: int) -> None:
        """The same row to two shards at once, all or nothing."""
        first, second = (client.open_writer(shard, SCHEMA) for shard in PAIR)
        for n in range(1_000_000):
            id_, token = number * 1_000_000 + n, None
            ats: list[int] | None = None
            while True:
                if not self.may_continue() and token is None:
                    return
                try:
                    ats = ats or [write.fetch_upper().time or 0 for write in (first, second)]
                    parts = [
                        persist.Append(write, [{"id": id_, "word": "x", "_time": at}], at, at + 1)
                        for write, at in zip((first, second), ats, strict=True)
                    ]
                    client.compare_and_append_many(parts, token=token)
                except UpperMismatch:
                    ats, token = None, None
                except Indeterminate as error:
                    token = cast("bytes | None", error.fields.get("token")) or token
                except (Determinate, LeaseExpired):
                    time.sleep(0.02)
                else:
                    self.paired.append(id_)
                    break

    def listen(self, client: persist.Client) -> None:
        """Hear each update once, at its time, whatever becomes of the servers and of the listener."""
        read = client.open_reader(SHARD)
        while not self.ends.is_set():
            try:
                with read.listen(max(0, self.frontier - 1)) as listen:
                    self.hear(listen)
            except (Determinate, Indeterminate, LeaseExpired):
                read = self.patiently(lambda: client.open_reader(SHARD)) or read

    def hear(self, listen: persist.Listen) -> None:
        while not self.ends.is_set():
            for event in listen.poll():
                if isinstance(event, persist.Updates):
                    for row, at, diff in updates_of(event.table):
                        self.heard[row, at] += diff
            self.frontier = listen.frontier.time or 0
            time.sleep(0.01)

    def look(self, client: persist.Client) -> None:
        """Read upper: never less than what was acknowledged before."""
        read = client.open_reader(SHARD)
        while self.may_continue():
            began = time.monotonic()
            if (upper := self.patiently(read.fetch_upper)) is not None:
                self.reads.append(Told(began, time.monotonic(), upper.time or 0))

    def hold(self, client: persist.Client) -> None:
        """Move a hold to and fro by its fencing value. A command that were applied twice would move it back."""
        generation, value = 0, None
        while self.may_continue():
            wanted = b"b" if value == b"a" else b"a"
            try:
                since = client.machine(SHARD).fetch().state.since.time or 0
                client.set_hold(SHARD, f"hold-{generation}", since=since, opaque=wanted, expected=value)
                value, self.moves = wanted, self.moves + 1
                found = client.machine(SHARD).fetch().state.holds[f"hold-{generation}"].opaque
                assert found == value, f"it is {found!r} and was moved to {value!r}"
            except Indeterminate:  # it may be done later, for as long as a server may hold it
                generation, value = generation + 1, None
            except Determinate:
                time.sleep(0.02)

    def tend(self, client: persist.Client) -> None:
        """Compaction by a worker and all other upkeep, through the servers and beside them in turn."""
        while self.may_continue():
            try:
                (client if self.passes % 2 else self.store).maintain(SHARD)
                self.passes += 1
            except PersistError:
                time.sleep(0.05)

    def check(self) -> dict[str, Any]:
        """Raise AssertionError if something is lost, doubled or in the wrong order. Returns how much there was."""
        assert self.failures == []
        for shard in (SHARD, *PAIR):
            check_world(self.store, shard)
        there = self.contents(SHARD)
        assert set(there.values()) <= {1}, "doubled"
        ids = {int(data[0]) for data in there}
        assert set(self.acked) <= ids, "lost"
        assert ids <= {*self.acked, *self.doubted}, "what was refused is there"
        self.check_pairs()
        self.check_heard()
        check_order(self.appends, self.reads)
        assert not self.expired, "heartbeats come through, whatever else there is to do"
        rows = [decode_row(one.data, "row") for one in self.store.consensus.scan(SHARD, SeqNo(0), 100_000)]
        counts = {name: len(getattr(self, name)) for name in ("acked", "doubted", "paired", "reads")}
        groups = sum(one.command == GROUP for one in rows)
        return {**counts, "moves": self.moves, "passes": self.passes, "heard": len(self.heard), "groups": groups}

    def contents(self, shard: str) -> Counter[Any]:
        with self.store.open_reader(shard) as read:
            upper = read.fetch_upper().time or 0
            return Counter(contents_of(read.snapshot(upper - 1, diff=True).to_arrow())) if upper else Counter()

    def check_pairs(self) -> None:
        first, second = (self.contents(shard) for shard in PAIR)
        assert first == second, "all or nothing"
        assert set(first.values()) <= {1}, "doubled"
        assert set(self.paired) <= {int(data[0]) for data in first}, "lost"

    def check_heard(self) -> None:
        """What was heard is what is there, as far as the listener has come."""
        expected: Counter[Any] = Counter()
        if self.frontier:
            with self.reader.changes(None, self.frontier - 1) as found:
                for row, at, diff in updates_of(found.to_arrow()):
                    expected[row, at] += diff if at else 0
        heard = {key: n for key, n in self.heard.items() if key[1] < self.frontier}
        assert heard == {key: n for key, n in expected.items() if n}

    def close(self) -> None:
        self.ends.set()
        for server in self.servers:
            if server.process is not None and server.process.poll() is None:
                server.kill()
        self.reader.close()
        self.store.close()


def check_order(appends: list[Told], reads: list[Told]) -> None:
    """Raise AssertionError if answers came in an order in which no single copy of the shard could have given them.

    An append that ended before another one began has the lower upper. A read tells no less than what ended before it
    began.
    """
    assert len({one.upper for one in appends}) == len(appends), "two were told the same upper"
    begun = 0.0
    for one in sorted(appends, key=lambda one: one.upper):
        assert one.ended > begun, f"{one} was answered before one with a lower upper began"
        begun = max(begun, one.began)
    answered, newest = iter(sorted(appends, key=lambda one: one.ended)), 0
    following = next(answered, None)
    for read in sorted(reads, key=lambda read: read.began):
        while following is not None and following.ended < read.began:
            newest, following = max(newest, following.upper), next(answered, None)
        assert read.upper >= newest, f"{read} is older than {newest}, which was acknowledged before"
