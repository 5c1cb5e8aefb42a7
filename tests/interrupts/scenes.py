"""What is interrupted, and what must be so afterwards."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar, cast

import pandas as pd  # Arrow imports it at the first append that sorts, and an import is no place for an interrupt
import pytest

import persist_lib as persist
from persist_lib.errors import PersistError
from persist_lib.ids import SeqNo
from persist_lib.location import open_location
from persist_lib.location.sqlite.consensus import SqliteConsensus
from persist_lib.runtime.ambient import Runtime
from persist_lib.runtime.threads import ASIDE
from persist_lib.testing import contents_of
from tests.worlds import SCHEMA, row

T = TypeVar("T")
PROMPT_S = 3.0
"""What nothing that is not wedged ever takes here."""
TOKEN = bytes(range(16))
CONFIG = persist.Config(timeout_s=PROMPT_S)
WARM = pd.DataFrame
_names = itertools.count()


class Scene:
    """A client, and a shard of its own with one append at time 0. `reader` is another client's, of no threads."""

    def __init__(self, url: str, config: persist.Config = CONFIG, **options: Any) -> None:
        self.before = threads()
        self.location = open_location(url, create=True)
        self.shard = f"s{next(_names)}"
        self.client = persist.open(self.location.url, config=config)
        self.other = persist.open(self.location.url, runtime=Runtime(background=False), config=CONFIG)
        self.write = self.client.open_writer(self.shard, SCHEMA, **options)
        self.future: Future[Any] | None = None
        self.listen: Any = None
        self.reader: Any = None
        self.writer: Any = None
        self.second: Any = None
        self.heard: list[Any] = []

    def begin(self) -> Scene:
        self.write.compare_and_append([row(0)], 0, 1)
        return self

    def close(self) -> None:
        self.other.close()
        self.location.close()


def threads() -> set[int]:
    """Every thread of this process, also those that `threading` does not know."""
    spare = {thread.ident for thread in threading.enumerate() if thread.name == ASIDE}
    return set(sys._current_frames()) - spare


def elsewhere(call: Callable[[], T]) -> T:
    """`call` in a thread that has nothing to do with what was interrupted. Raises TimeoutError when it hangs."""
    done: Future[T] = Future()

    def carry_out() -> None:
        try:
            done.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised here
            done.set_exception(error)

    threading.Thread(target=carry_out, daemon=True).start()
    return done.result(PROMPT_S)


@contextmanager
def promptly(what: str, seconds: float = PROMPT_S) -> Iterator[None]:
    started = time.monotonic()
    yield
    took_s = time.monotonic() - started
    assert took_s < seconds * 0.9, f"{what} took {took_s:.1f} s"


class Call(NamedTuple):
    """`act` is interrupted after `prepare`. `appends` the token's append, or nothing that has one."""

    act: Callable[[Scene], object]
    prepare: Callable[[Scene], object] = lambda scene: scene.begin()
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed
    config: persist.Config = CONFIG
    check: Callable[[Scene], object] = lambda _: None
    tolerates: tuple[type[Exception], ...] = ()
    is_closing: bool = False


def check_usable(scene: Scene, call: Call) -> None:
    """Nothing is held, nothing hangs, what was interrupted is there at most once, and the handle continues."""
    client, write, shard = scene.client, scene.write, scene.shard
    check_free(client.machine(shard).turn, "the machine's turn")
    check_free(write._lock, "the handle's lock")
    if isinstance(client.location.consensus, SqliteConsensus):
        check_database(client.location.consensus)
    if write._registration.is_closed or (write._outbox is not None and write._outbox._is_closed):
        with pytest.raises(persist.LeaseExpired, match="closed"):
            write.append_async([row(1, time=1)], 1, 2)
        return
    with promptly("flush"), suppress(*call.tolerates):
        write.flush(timeout=PROMPT_S)
    with promptly("the same call again"):
        upper = write.fetch_upper()
        if persist.at(1) <= upper <= persist.at(2):
            with suppress(persist.UpperMismatch, *call.tolerates):
                write.compare_and_append([row(1, time=1)], 1, 2, token=TOKEN, timeout=PROMPT_S)
    upper = write.fetch_upper()
    if upper.time is None:
        return
    at = upper.time
    with promptly("the next compare_and_append"):
        write.compare_and_append([row(at, time=at)], at, at + 1, timeout=PROMPT_S)
    with promptly("the next append_async"):
        future = write.append_async([row(at + 1, time=at + 1)], at + 1, at + 2, timeout=PROMPT_S)
        if scene.write._batching:
            write.flush(timeout=PROMPT_S)
        assert future.result(PROMPT_S).upper == persist.at(at + 2)
    with promptly("the next flush"):
        write.flush(timeout=PROMPT_S)
    found = elsewhere(lambda: write.append([row(at + 2, time=at + 2)], at + 2, at + 3, timeout=2))
    assert found.upper == persist.at(at + 3)
    with scene.other.open_reader(shard) as read:
        contents = contents_of(read.snapshot(at + 2, diff=True).to_arrow())
    assert set(contents.values()) == {1}, f"something is there twice: {contents}"
    assert {0, at, at + 1, at + 2} <= {key[0] for key in contents}, f"something is missing: {contents}"


def check_free(lock: Any, what: str) -> None:
    """Another thread can have it."""

    def take() -> bool:
        if not lock.acquire(timeout=1):
            return False
        lock.release()
        return True

    assert elsewhere(take), f"{what} is taken"


def check_database(consensus: SqliteConsensus) -> None:
    """SQLite's turn is free, for this process and for others, and no session counts as lent."""
    check_free(consensus.turn, "SQLite's turn")
    other = SqliteConsensus(consensus.path, busy_s=0.0)
    for _ in range(50):  # the heartbeat may be writing
        with suppress(PersistError):
            if other.compare_and_set(f"x{next(_names)}", None, b"x"):
                break
        time.sleep(0.01)
    else:
        raise AssertionError("a transaction was left open")
    other.close()
    eventually(lambda: not consensus.connections.is_lent(), "a session counts as lent")


def check_closed(scene: Scene, call: Call) -> None:
    """The client closes, leaves no thread, and retires whatever it registered."""
    with promptly("close"), suppress(*call.tolerates):  # what was accepted and not written is told, once
        scene.client.close()
    scene.client.close()
    gc.collect()
    eventually(lambda: threads() <= scene.before, f"threads are left: {threading.enumerate()}")
    state = scene.other.inspect(scene.shard).state
    assert not state.writers, f"left registered: {state.writers}"
    assert not state.readers, f"left registered: {state.readers}"


def eventually(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PROMPT_S
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.002)


def _async(scene: Scene) -> None:
    scene.future = scene.write.append_async([row(1, time=1)], 1, 2, token=TOKEN)
    scene.future.result(PROMPT_S)


def _two_async(scene: Scene) -> None:
    scene.write.append_async([row(1, time=1)], 1, 2)
    scene.write.append_async([row(2, time=2)], 2, 3)
    scene.write.flush()


def _full(scene: Scene) -> None:
    """Appends that have to wait for room."""
    for n in range(1, 4):
        scene.write.append_async([row(n, "x" * 70_000, n)], n, n + 1)
    scene.write.flush()


def _accepted(scene: Scene) -> None:
    scene.begin()
    scene.write.append_async([row(1, time=1)], 1, 2)


def _two_shards(scene: Scene) -> None:
    scene.begin()
    scene.second = scene.client.open_writer(f"{scene.shard}-b", SCHEMA)


def _many(scene: Scene) -> None:
    second = scene.second
    scene.client.compare_and_append_many(
        [persist.Append(scene.write, [row(1, time=1)], 1, 2), persist.Append(second, [row(1)], 0, 1)], token=TOKEN
    )


def _check_many(scene: Scene) -> None:
    second = scene.second
    uppers = scene.write.fetch_upper(), second.fetch_upper()
    assert uppers in {(persist.at(1), persist.at(0)), (persist.at(2), persist.at(1))}, "all or nothing"
    check_free(second._lock, "the second handle's lock")
    check_free(second.machine.turn, "the second machine's turn")
    _many(scene)
    assert second.fetch_upper() == persist.at(1)
    second.compare_and_append([row(1, time=1)], 1, 2)


def _with_garbage(scene: Scene) -> None:
    scene.begin()
    for n in range(1, 5):
        scene.write.compare_and_append([row(n, "x" * 100, n)], n, n + 1)
    scene.client.compact(scene.shard, policy=persist.Policy(weight=1e9))
    scene.client.roll_up(scene.shard, force=True)


def _snapshot(scene: Scene) -> None:
    with scene.client.open_reader(scene.shard) as read:
        assert read.snapshot(0, diff=True).to_arrow().num_rows == 1


def _listening(scene: Scene) -> None:
    scene.begin()
    for n in range(1, 4):
        scene.write.compare_and_append([row(n, time=n)], n, n + 1)
    scene.reader = scene.client.open_reader(scene.shard)
    scene.listen = scene.reader.listen(as_of=0, until=4)


def _hear(scene: Scene) -> None:
    for event in scene.listen:
        scene.heard.append(event)


def _check_heard(scene: Scene) -> None:
    """Each update once, or an error that says where to listen again."""
    first = None
    try:
        _hear(scene)
    except persist.Determinate as error:
        first = cast("persist.Antichain", error.fields["frontier"]).time
    heard = _times(scene)
    if first is not None:
        with scene.reader.listen(as_of=first - 1, until=4) as again:
            scene.heard = list(again)
        heard = [n for n in heard if n < first] + _times(scene)
    assert heard == [1, 2, 3], scene.heard
    scene.listen.close()


def _times(scene: Scene) -> list[int]:
    return [n for event in scene.heard if hasattr(event, "table") for n in event.table.column("_time").to_pylist()]


def _poll(scene: Scene) -> None:
    scene.heard = scene.listen.poll()


PARTS = persist.Config(timeout_s=PROMPT_S, inline_bytes=0, part_bytes=64 * 1024)


def _set_and_get(scene: Scene) -> None:
    scene.client.blob.set("x/y", b"z" * 100_000)
    assert scene.client.blob.get("x/y") == b"z" * 100_000


def _change_rows(scene: Scene) -> None:
    """Every kind of change that Consensus has, without a library around it."""
    consensus, key = scene.location.consensus, f"{scene.shard}-rows"
    consensus.compare_and_set(key, None, b"1")
    consensus.compare_and_set_many({f"{key}-a": (None, b"1"), f"{key}-b": (None, b"1")})
    head = consensus.head(key)
    assert head is not None
    consensus.compare_and_set(key, head.newest, b"2")
    consensus.truncate(key, SeqNo(2))
    assert [row.data for row in consensus.scan(key, SeqNo(0), 9)] == [b"2"]


def _check_rows(scene: Scene) -> None:
    keys = {key for key in scene.location.consensus.list_keys() if key.startswith(f"{scene.shard}-rows-")}
    assert len(keys) in {0, 2}, "all or nothing"
    if isinstance(scene.location.consensus, SqliteConsensus):
        check_database(scene.location.consensus)


def _upsert(scene: Scene) -> None:
    scene.write.upsert([{"id": 0, "word": "new"}, {"id": 1, "word": "new"}])


def _check_upsert(scene: Scene) -> None:
    """It was done wholly or not at all, and can be done again."""
    _upsert(scene)
    with scene.other.open_reader(scene.shard) as read:
        assert contents_of(read.snapshot(keys=[0, 1], diff=True).to_arrow()) == {(0, "new"): 1, (1, "new"): 1}


UNIQUE = persist.Schema(SCHEMA.key, SCHEMA.value, unique=True)


def _with_constraints(scene: Scene) -> None:
    scene.begin()
    scene.second = scene.client.open_writer(f"{scene.shard}-u", UNIQUE)


def _constrained(scene: Scene) -> None:
    try:
        scene.second.append_now([{"id": 1, "word": "w"}])
    except persist.ConstraintViolated:  # it was done already
        with scene.other.open_reader(f"{scene.shard}-u") as read:
            assert contents_of(read.snapshot(keys=[1], diff=True).to_arrow()) == {(1, "w"): 1}


CALLS = {
    "blobs": Call(_set_and_get, check=_set_and_get),
    "rows": Call(_change_rows, check=_check_rows),
    "compare_and_append": Call(lambda s: s.write.compare_and_append([row(1, time=1)], 1, 2, token=TOKEN)),
    "append": Call(lambda s: s.write.append([row(1, time=1)], 1, 2, token=TOKEN)),
    "append of an object": Call(
        lambda s: s.write.compare_and_append([row(1, time=1)], 1, 2, token=TOKEN), config=PARTS
    ),
    "append_async": Call(_async, tolerates=(persist.UpperMismatch, persist.NotSent)),
    "two append_async": Call(_two_async),
    "append_async held back": Call(_two_async, options={"batching": persist.Batching(bytes=10**6, age_s=0.02)}),
    "append_async without room": Call(
        _full, config=persist.Config(timeout_s=PROMPT_S, buffer_bytes=64 * 1024, inline_bytes=0)
    ),
    "flush": Call(lambda s: s.write.flush(), prepare=_accepted),
    "close a writer": Call(lambda s: s.write.close(), prepare=_accepted),
    "upsert": Call(_upsert, check=_check_upsert, config=PARTS),
    "append_now": Call(lambda s: s.write.append_now([{"id": 1, "word": "w"}])),
    "append to a shard with constraints": Call(_constrained, prepare=_with_constraints, check=_constrained),
    "snapshot of keys": Call(
        lambda s: s.client.open_reader(s.shard).snapshot(keys=[0, 1], diff=True).to_arrow(), config=PARTS
    ),
    "advance_upper": Call(lambda s: s.write.advance_upper(2)),
    "finish": Call(lambda s: s.write.finish()),
    "open_shard": Call(lambda s: s.client.open_shard(f"{s.shard}-new", SCHEMA)),
    "registration": Call(lambda s: s.begin(), prepare=lambda _: None),
    "compare_and_append_many": Call(_many, prepare=_two_shards, check=_check_many),
    "snapshot": Call(_snapshot),
    "listen": Call(_hear, prepare=_listening, check=_check_heard),
    "poll": Call(_poll, prepare=_listening, check=_check_heard),
    "heartbeat": Call(lambda s: s.client.heartbeat()),
    "set_hold": Call(lambda s: s.client.set_hold(s.shard, "h", 0)),
    "collect": Call(lambda s: s.client.collect(s.shard), prepare=_with_garbage),
    "maintain": Call(lambda s: s.client.maintain(s.shard), prepare=_with_garbage),
    "close a client": Call(
        lambda s: s.client.close(), prepare=_accepted, is_closing=True, tolerates=(persist.InvalidUsage,)
    ),
}
