"""Opening a runtime, on a location or on a client that is open already; and dropping all streams, for development.

Each step of a wipe can be repeated: one that was killed is finished by the next one. Shards that still have readers are
left, and dropped by a later wipe.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace
from typing import get_args

import msgspec

from persist_lib.arguments import parse_flag, parse_text, shown
from persist_lib.client import Client
from persist_lib.client import open as open_client
from persist_lib.config import Config
from persist_lib.errors import HoldConflict, InvalidUsage, NotFound, ShardFinished, StillRead
from persist_lib.ids import SeqNo
from persist_lib.location import Location
from persist_lib.location.open import Place, open_location
from persist_lib.location.wrap.around import AroundConsensus
from persist_lib.runtime.ambient import Runtime
from persist_lib.runtime.forks import Stage, enrol
from persist_lib.runtime.threads import Resource
from persist_lib.schema.schema import Schema
from persist_lib.streams.committer import Committer
from persist_lib.streams.lock import ENCODING, HOLD, WriterLock, fence, fetch_lock
from persist_lib.streams.stream_list import Catalog, Record, make_list, parse_stream_name
from persist_lib.streams.stream_reader import StreamReader
from persist_lib.streams.stream_runtime import Mode, Shared, Streams, check_columns, take_over
from persist_lib.streams.stream_writer import StreamWriter

DROPPED = "-"
"""What the name of a dropped stream begins with in the list. So a new stream can have its name at once."""
RETENTION_HOLD = "retention"


class Wiped(msgspec.Struct, frozen=True):
    """The sealed shards that a wipe dropped, and those that are `left` because they still have readers."""

    dropped: tuple[str, ...]
    left: tuple[str, ...]


def wipe(client: Client, catalog: Catalog, lock: WriterLock) -> Wiped:
    """Drop all streams. The lock must be taken. Raises Fenced, at any step, when another runtime took it since."""
    records = catalog.fetch()
    deadline = client.runtime.deadline(client.config.timeout_s)
    gone = {DROPPED + one.sealed: msgspec.structs.replace(one, dropped=True) for one in records.values()}
    to: dict[str, Record | None] = {name: None for name, record in records.items() if not record.dropped}
    catalog.change(to | gone, [lock.row()], deadline)
    finished = {name for name, record in gone.items() if _finished(client, record, lock)}
    # Only now nothing is of an older encoding. What is left because it is still read is a shard as any other.
    deadline = client.runtime.deadline(client.config.timeout_s)
    catalog.change(dict.fromkeys(finished), [lock.row(wiped=True)], deadline)
    dropped, left = ({gone[name].sealed for name in names} for names in (finished, gone.keys() - finished))
    return Wiped(tuple(sorted(dropped)), tuple(sorted(left)))


def wipe_all(client: Client, *, reentrance_id: str = "") -> Wiped:
    """Drop all streams of a client's location, whatever their encoding. For development: nothing brings them back.

    Raises Locked when a runtime writes them, unless it has this reentrance id: then that is fenced off. NewerFormat
    when a newer release wrote them, and NotFound where there were never any streams. Repeat it after any other failure,
    and for what is `left`.
    """
    if fetch_lock(client) is None:
        raise NotFound(f"there are no streams in {client.url}, so there is nothing to drop", url=client.url)
    lock, catalog = WriterLock(client, parse_text(reentrance_id, "reentrance_id", 200), "wipe"), Catalog(client)
    lock.take(wipes=True)
    try:
        return wipe(client, catalog, lock)
    finally:
        catalog.close()
        lock.release()


def _finished(client: Client, record: Record, lock: WriterLock) -> bool:
    """Whether both shards of a stream are finished for good."""
    with suppress(ShardFinished):
        fence(client, record, lock)
    done = [_finish(client, name, hold) for name, hold in ((record.sealed, HOLD), (record.unsealed, ""))]
    return all(done)


def _finish(client: Client, name: str, hold: str) -> bool:
    state = client.machine(name).fetch().state
    if state.is_finished():
        return True
    if state.readers or state.holds.keys() - {hold, RETENTION_HOLD}:
        return False
    for one in state.holds:
        with suppress(HoldConflict):
            client.release_hold(name, one)
    try:
        client.finish(name)
    except StillRead:  # a reader was opened at this moment
        return False
    except ShardFinished:
        pass
    return True


LONGEST = 200


def open(  # noqa: A001 - `streams.open` is what users write
    url: Place | Location | Client,
    consensus: Place | None = None,
    *,
    mode: Mode = "full",
    reentrance_id: str = "",
    owner: str = "",
    independent: bool = False,
    wipe_older: bool = False,
    config: Config | None = None,
    runtime: Runtime | None = None,
) -> Streams:
    """Open the streams of a location, to write them or (`mode="read"`) only to read.

    `url` and `consensus` are as in `persist.open`; `url` may also be a client, which is then not closed with the
    runtime. A location has one writer. A runtime that writes takes the writer's lock and keeps all predecessors out. If
    another one holds the lock, it raises Locked, unless that one has the same `reentrance_id` (a text of at most 200
    letters): then this one takes over at once, and the other commits nothing more, however long it was paused. So give
    a program that is restarted by a supervisor an id of its own, and never the same to two programs. `owner` is a text
    for people.

    A runtime that only reads changes nothing in the location, not even a lease; others may give up history that it
    reads. It is woken where the store sends notifications; with `independent` it does not listen to them, and only
    looks. It raises NotFound where there is no location.

    `wipe_older` drops all streams if they were written in an older encoding than this release's; for development.

    Raises InvalidUsage where Consensus has no transactions over several shards (S3 alone).
    """
    if mode not in get_args(Mode):
        raise InvalidUsage(f"mode is one of {get_args(Mode)}: got {shown(mode)}", mode=mode)
    reentrance = parse_text(reentrance_id, "reentrance_id", LONGEST)
    owner, wipes = parse_text(owner, "owner", LONGEST), parse_flag(wipe_older, "wipe_older")
    writes = mode == "full"
    if parse_flag(independent, "independent") and writes:
        raise InvalidUsage("independent is for runtimes that only read: mode='read'")
    if writes and wipes and isinstance(url, Client) and url.read_only:
        raise InvalidUsage("this client only reads, so nothing can be wiped with it")
    owns_client = not isinstance(url, Client)
    client = url if isinstance(url, Client) else _client(url, consensus, config, runtime, writes, independent)
    try:
        return Streams(_shared(client, owns_client, reentrance, owner, writes=writes, wipes=wipes))
    except BaseException:
        if owns_client:
            client.close()
        raise


def _client(
    url: Place | Location, consensus: Place | None, config: Config | None, runtime: Runtime | None, writes: bool,
    independent: bool,
) -> Client:  # fmt: skip
    if independent:
        location = url if isinstance(url, Location) else open_location(url, consensus, read_only=True)
        url, consensus = replace(location, consensus=_Unwoken(location.consensus)), None
    return open_client(url, consensus, config=config, runtime=runtime, read_only=not writes, create=writes)


def _shared(client: Client, owns_client: bool, reentrance: str, owner: str, *, writes: bool, wipes: bool) -> Shared:
    if not writes:
        return Shared(client, owns_client=owns_client, committer=None, owner=owner)
    if client.read_only:
        raise InvalidUsage(
            "streams are written through a client that may write; this one was opened with read_only=True"
        )
    client.consensus.compare_and_set_many({})  # raises InvalidUsage where there are no transactions
    make_list(client)
    lock = WriterLock(client, reentrance, owner)
    before = lock.take(wipes=wipes)
    try:
        catalog = Catalog(client)
        if before.epoch and before.encoding < ENCODING:
            wipe(client, catalog, lock)
        take_over(client, catalog, lock)
        shared = Shared(client, owns_client=owns_client, committer=Committer(client, lock), owner=owner)
    except BaseException:
        lock.release()
        raise
    return shared


class ClientStreams(Resource):
    """The streams of a client that is open already: what `client.stream` opens. Closed with the client.

    It has one runtime: that which writes, from the first stream on that is opened to be written until it is stopped.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._runtime: Streams | None = None
        self._reentrance = ""
        self._opening = threading.Lock()
        enrol(self, Stage.HANDLES)

    def after_fork_in_child(self) -> None:
        """The parent may have been opening a stream. Its runtime, if there is one, refuses to write in this process."""
        self._opening = threading.Lock()

    def open(
        self, name: str, schema: Schema | None, reentrance_id: str, owner: str
    ) -> StreamReader | tuple[StreamWriter, StreamReader]:
        """See `Client.stream`."""
        reentrance, owner = parse_text(reentrance_id, "reentrance_id", LONGEST), parse_text(owner, "owner", LONGEST)
        name, schema = parse_stream_name(name), None if schema is None else check_columns(schema)
        if schema is None and (reentrance or owner):
            raise InvalidUsage("reentrance_id and owner are of the program that writes: give the stream's schema, too")
        mode: Mode = "read" if schema is None else "full"
        with self._opening:
            runtime = self._runtime
            if runtime is None or runtime.is_stopped() or (runtime.mode, mode) == ("read", "full"):
                runtime = self._runtime = open(self._client, mode=mode, reentrance_id=reentrance, owner=owner)
                self._reentrance = reentrance
            elif reentrance not in ("", self._reentrance):
                raise InvalidUsage(
                    f"this client writes the streams of {self._client.url} with the reentrance id "
                    f"{self._reentrance!r}: got {reentrance!r}. Leave it out, or open another client"
                )
        return runtime.load(name) if schema is None else runtime.create_or_load(name, schema)

    def close(self) -> None:
        """Finish what was accepted, and let go of the writer's lock."""
        if self._runtime is not None:
            self._runtime.close()


class _Unwoken(AroundConsensus):
    """A Consensus that wakes no process that waits."""

    def wait(self, key: str, seqno: SeqNo, longest_s: float) -> bool:  # noqa: ARG002
        return False
