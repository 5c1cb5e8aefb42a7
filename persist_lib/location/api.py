"""What a location must do: `Blob` keeps bytes by key, `Consensus` keeps versions by compare-and-set.

`ObjectStore` is what Persist needs of an object store: locations, event logs and file sources are built on it alone.

For failures of the world, implementations raise only `Determinate` (the operation certainly did not happen),
`Indeterminate` (it may have happened) and `Damage`. An error that they do not understand is `Indeterminate`. They do
not retry: `location.wrap.deadline` does, where it is safe. Several threads may use an implementation at once. All
except the memory ones may also be used from several processes and after a fork.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from persist_lib.ids import SeqNo

if TYPE_CHECKING:
    from persist_lib.core.plan.look import Debts


class BlobEntry(NamedTuple):
    """One listed object: its key and its size in bytes."""

    key: str
    size: int


class Upload(NamedTuple):
    """An unfinished upload of an object: its key, and the store's name for the attempt. Its sender may have died.

    `size` is the number of bytes that are kept of it, if the store knows. `is_dead`: its sender is known to be gone.
    """

    key: str
    id: str
    size: int = 0
    is_dead: bool = False


START_BYTES = 32
"""The most bytes at the start of a row that a Consensus compares."""


class Newest(NamedTuple):
    """The row that is to be the newest one: its seqno, and what its data starts with (at most `START_BYTES`).

    SUBTLE: a seqno alone does not identify a row. After a restore of an older copy, the log reaches the same seqno with
    other rows. `start` must hold what tells them apart, such as a checksum; an empty `start` matches any row.
    """

    seqno: SeqNo
    start: bytes = b""


class Row(NamedTuple):
    """One version of one key of Consensus."""

    seqno: SeqNo
    data: bytes

    @property
    def newest(self) -> Newest:
        """The `Newest` that a compare-and-set expects if it is to follow this row."""
        return Newest(self.seqno, self.data[:START_BYTES])


Change = tuple[Newest | None, bytes]
"""A row to append to a key: the row that it must follow (None: the key was never set), and its data."""


@runtime_checkable
class Blob(Protocol):
    """Immutable bytes by key. Keys are `/`-separated paths. Linearizable: every later get sees what was set."""

    def get(self, key: str) -> bytes | None:
        """Return the whole object, or None when there is none."""

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        """Return bytes `[start, end)` of the object, cut at its end, or None when there is no object."""

    def set(self, key: str, data: bytes | memoryview) -> None:
        """Store `data` under `key`, durably on return. A key is written once; setting the same bytes again succeeds.

        Raises Corrupt when the key holds other bytes.
        """

    def delete(self, key: str) -> bool:
        """Delete an object. Returns whether there was one; a missing object is no error, so a retry is safe."""

    def delete_many(self, keys: Sequence[str]) -> dict[str, Exception]:
        """Delete several objects. Returns an error for each key that could not be deleted. A retry is safe."""

    def list(self, prefix: str) -> Iterator[BlobEntry]:
        """Yield every object whose key starts with `prefix` (empty, or ends in `/`), in pages, in no promised order."""

    def close(self) -> None:
        """Release connections and files. Idempotent."""


class Puts(Protocol):
    """The part of a Blob that a program needs which only puts objects. Each Blob is one."""

    def set(self, key: str, data: bytes | memoryview) -> None:
        """Store `data` under `key`, durably on return, as `Blob.set` does.

        It may count a key that is there as stored without a look at its bytes. So the key has to say what they
        are, as one with a digest does, and readers of the object have to check it.
        """

    def close(self) -> None:
        """Release connections and files. Idempotent."""


@runtime_checkable
class SendsInPieces(Protocol):
    """An optional protocol of a Blob that stores an object in several steps, and so leaves pieces when a sender dies.

    On S3 they are the pieces of large objects, and in a directory they are the temporary files.
    """

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Yield the uploads below `prefix` that are neither finished nor given up."""

    def abort_uploads(self, uploads: Sequence[Upload]) -> dict[Upload, Exception]:
        """Give up uploads. Returns an error for each that could not be given up. Finished ones are left alone."""


@runtime_checkable
class PointsOthers(Protocol):
    """An optional protocol of a Blob whose objects programs that do not know Persist can read, by their addresses."""

    @property
    def address(self) -> str:
        """What the address of each object begins with, before its key: a folder's path, or a URL. It ends in `/`."""

    def point(self, key: str, data: bytes, follows: bytes | None) -> bool:
        """Make a small object `data` if it is `follows` now (None: if it is missing). Returns whether it did.

        This is the one kind of object that is ever replaced. No program reads half of one. Durable on return; true also
        if it was `data` already, so a retry is safe where no two callers have the same `data`.
        """


class Page(NamedTuple):
    """A page of a listing, in the order of keys, and whether another one follows."""

    entries: list[BlobEntry]
    is_last: bool


@runtime_checkable
class ListsPages(Protocol):
    """An optional protocol of a Blob that lists in the order of keys, and can begin behind any of them."""

    def page(self, prefix: str, after: str) -> Page:
        """Return the next objects below `prefix` whose keys are greater than `after`: one request."""


@runtime_checkable
class Consensus(Protocol):
    """A log of rows per key, seqnos contiguous, extended only by compare-and-set."""

    def head(self, key: str) -> Row | None:
        """Return the newest row, which may be stale, or None when the key was never set."""

    def scan(self, key: str, from_seqno: SeqNo, limit: int) -> list[Row]:
        """Return at most `limit` rows with seqno >= from_seqno, ascending. Linearizable."""

    def compare_and_set(self, key: str, expected: Newest | None, data: bytes) -> bool:
        """Append `data` at the seqno after `expected` if `expected` is the newest row. Returns whether it did.

        None expects a key that was never set, and appends at 1. False means that the newest row is another one: the
        caller lost, and nothing changed. After Indeterminate, a retry may return False for a row of its own.
        """

    def compare_and_set_many(self, changes: Mapping[str, Change]) -> bool:
        """Append one row to each key of `changes`, all or none, atomically. Returns whether it did.

        Raises InvalidUsage if the store has no transactions. Without any changes it returns True, or raises that
        InvalidUsage, without a request: so a caller can find out beforehand.
        """

    def truncate(self, key: str, seqno: SeqNo) -> int:
        """Delete the rows below `seqno`. Returns how many. Raises InvalidUsage if the newest row is below `seqno`."""

    def rewind(self, key: str, seqno: SeqNo, newest: Newest) -> int:
        """Delete the rows above `seqno` if `newest` is the newest row. Returns how many, and 0 if it is not.

        This is only for the repair of a log whose newest rows cannot be read. A client that has seen the deleted rows
        is refused from then on, as after a restored copy. With `seqno` 0 nothing is left of the key. Raises
        InvalidUsage if there is no row at `seqno`.
        """

    def list_keys(self) -> Iterator[str]:
        """Yield every key that was ever set."""

    def heads(self, keys: Sequence[str] | None = None) -> dict[str, SeqNo]:
        """Return the seqno of the newest row of these keys that were ever set (None: of all), in one request.

        That is one query. On S3 it is one listing with its pages; where keys are given, at most the first page of it
        and a listing for each key. So the cost of `keys` does not depend on how many others there are.

        For each key it is linearizable, as `scan` is: a row that was there before the call is counted. Rows that are
        appended during the call may be. The keys are not all looked at in the same moment.
        """

    def now(self) -> int:
        """Return the time of the store's clock, in ms since the epoch, without a round trip of its own."""

    def close(self) -> None:
        """Release connections and files. Idempotent."""


@runtime_checkable
class WakesWaiters(Protocol):
    """An optional protocol of a Consensus that wakes waiting readers. A wake-up can get lost, so never rely on it."""

    def wait(self, key: str, seqno: SeqNo, longest_s: float) -> bool:
        """Wait up to `longest_s` seconds for a row above `seqno`. Returns False at once if no wake-up could arrive now.

        True does not mean that there is such a row: the caller has to look.
        """


@runtime_checkable
class PushesRows(Protocol):
    """An optional protocol of a Consensus that is sent new rows, so that who follows a key need not ask for them."""

    def pushed(self, key: str, after: SeqNo) -> Sequence[Row] | None:
        """Return the rows that came after `after`, without a request; None if only a scan can tell.

        They follow `after` without a gap. Nothing says that there are no newer ones: a row may be on its way, or lost.
        So now and then the answer is None even if nothing came, and a caller that scans then misses nothing for long.
        """


@runtime_checkable
class HearsOfRows(Protocol):
    """An optional protocol of a Consensus that hears of new rows of all keys, by any writer."""

    def heard(self, longest_s: float) -> Mapping[str, SeqNo] | None:
        """Wait up to `longest_s` seconds for news since the last call, and return the newest seqnos of their keys.

        Returns None at once if nothing can be heard now. News can get lost. For one thread at a time.
        """


@runtime_checkable
class AnswersDebts(Protocol):
    """An optional protocol of a Consensus that knows what all shards call for, as a shard server does."""

    @property
    def answers_debts(self) -> bool:
        """Whether it does."""

    def debts(self, settings: str, done: Mapping[str, Sequence[str]], most: int | None, seconds: float) -> Debts | None:
        """Return what is due on all shards that this client sees, by looks with these settings.

        The heads are linearizable, as those of `heads`. `done`: duties that were just done, and on which shards. Looks
        at shards that have moved for `seconds`, and at no more than `most`; the others wait. None: it has other
        settings.
        """


@runtime_checkable
class KnowsClients(Protocol):
    """An optional protocol of a Consensus that gives clients rights, as a shard server does."""

    def losing(self, table: str, timeline: str | None) -> list[str]:
        """Return the clients who would lose rights if a table were promoted, and joined this timeline if it says so."""


@runtime_checkable
class StaysInPlace(Protocol):
    """An optional protocol of a Blob or Consensus on files, which could be replaced while it has them open."""

    def check_in_place(self) -> None:
        """Raise HistoryRegressed unless the paths still lead to the open files. Cheap, and counted as no request."""


@runtime_checkable
class Overwrites(Protocol):
    """An optional protocol of a Consensus whose files may have rows in them that were truncated."""

    def overwrite(self) -> str:
        """Leave nothing of truncated rows in the files. Answers why something may be left; empty for nothing."""


class Object(NamedTuple):
    """The bytes of an object, or of a range of them, and its version. Two versions of an object are never equal."""

    data: bytes
    version: str


class Found(NamedTuple):
    """What a store says of an object without its bytes."""

    size: int
    metadata: Mapping[str, str]


class Entry(NamedTuple):
    """One listed object."""

    name: str
    size: int
    version: str


class Stored(NamedTuple):
    """An object that was stored, by the version that it has now: empty if the store does not say."""

    version: str


class ObjectStore(Protocol):
    """Objects by name, below one prefix: linearizable, durable and visible on return, listed in the order of names.

    An implementation does not retry. It raises `Determinate` (it certainly did not happen), `Indeterminate` (it may
    have happened), and `InvalidUsage` or `NotFound` where trying again cannot help. `doing` says in messages what was
    attempted, as in "read blob 'k'".

    Several threads may use one at a time, and a forked child may use it as well.
    """

    where: str
    """The place of the objects, for messages: without options or secrets."""

    def get(
        self, name: str, doing: str, start: int = 0, end: int | None = None, version: str | None = None
    ) -> Object | None:
        """Return an object, or bytes `[start, end)` of it, cut at its end.

        Returns None if there is none, or none of this `version`. The bytes have arrived whole.
        """

    def find(self, name: str, doing: str) -> Found | None:
        """Return what the store says of an object, or None if there is none."""

    def put(
        self, name: str, data: bytes | memoryview, doing: str, replaces: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Stored | None:  # fmt: skip
        """Store an object if there is none, or if it `replaces` this version. Returns None if it did not.

        After Indeterminate, a retry may return None for an object of its own.
        """

    def overwrite(self, name: str, data: bytes, doing: str) -> None:
        """Store an object, whether there is one or not."""

    def entries(self, prefix: str, doing: str, after: str = "", page: int | None = None) -> Iterator[Entry]:
        """Yield the objects whose names start with `prefix` and are greater than `after`: `page` for each request."""

    def page(self, prefix: str, doing: str, after: str = "", page: int | None = None) -> tuple[list[Entry], bool]:
        """Return the first of them, and whether these are all: one request."""

    def folders(self, prefix: str, doing: str, page: int | None = None) -> Iterator[str]:
        """Yield each different text up to the next `/` that follows `prefix` in the names."""

    def delete(self, names: Sequence[str], page: int | None = None) -> dict[str, Exception]:
        """Delete objects, `page` for each request. Returns an error for each that may still be there."""

    def close(self) -> None:
        """Release connections. Idempotent."""
