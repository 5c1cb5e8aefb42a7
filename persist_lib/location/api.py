"""What a location must do: `Blob` keeps bytes by key, `Consensus` keeps versions by compare-and-set.

Implementations raise only `Determinate` (it certainly did not happen), `Indeterminate` (it may have) and `Damage`.
Whatever they do not understand is `Indeterminate`. They do not retry: `location.retrying` does, where it is safe.
All of them may be used from several threads, and, memory aside, from several processes and after a fork.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from persist_lib.ids import SeqNo


class BlobEntry(NamedTuple):
    """One listed object: its key and its size in bytes."""

    key: str
    size: int


class Upload(NamedTuple):
    """An object that is being stored, or was when its sender died: its key, and the store's name for the attempt.

    `size` are the bytes that are kept of it, where the store tells; `is_dead` says that its sender is known to be gone.
    """

    key: str
    id: str
    size: int = 0
    is_dead: bool = False


START_BYTES = 32
"""How much of a row's beginning a Consensus compares, at most."""


class Newest(NamedTuple):
    """The row that is to be the newest one: its seqno, and what its data starts with (at most `START_BYTES`).

    SUBTLE: a seqno alone names no row. After an older copy was restored, the log comes back to the same seqno with
    other rows. `start` must hold what tells them apart, say a checksum; empty, it fits any.
    """

    seqno: SeqNo
    start: bytes = b""


class Row(NamedTuple):
    """One version of one key of Consensus."""

    seqno: SeqNo
    data: bytes

    @property
    def newest(self) -> Newest:
        """How a compare-and-set names this row as the one it follows."""
        return Newest(self.seqno, self.data[:START_BYTES])


Change = tuple[Newest | None, bytes]
"""One of several rows to append at once: what it follows, and its data."""


@runtime_checkable
class Blob(Protocol):
    """Immutable bytes by key. Keys are `/`-separated paths. Linearizable: what was set is seen by every later get."""

    def get(self, key: str) -> bytes | None:
        """The whole object, or None when there is none."""
        ...

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        """Bytes `[start, end)` of the object, cut at its end; None when there is no object."""
        ...

    def set(self, key: str, data: bytes | memoryview) -> None:
        """Store durably before returning. Keys are written once; a retry of the very same bytes succeeds."""
        ...

    def delete(self, key: str) -> bool:
        """Delete; answers whether there was one. A missing object is no error."""
        ...

    def delete_many(self, keys: Sequence[str]) -> dict[str, Exception]:
        """Delete all of them; answers what could not be deleted, and why."""
        ...

    def list(self, prefix: str) -> Iterator[BlobEntry]:
        """Every object whose key starts with `prefix` (which ends in `/`), in pages, in no promised order."""
        ...

    def close(self) -> None:
        """Release connections and files. Idempotent."""
        ...


@runtime_checkable
class SendsInPieces(Protocol):
    """What a Blob has beside when what it stores takes several steps, of which something stays when the sender dies.

    On S3 these are the pieces of large objects, in a directory the temporary files.
    """

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Those below `prefix` that are neither finished nor given up."""
        ...

    def abort_uploads(self, uploads: Sequence[Upload]) -> dict[Upload, Exception]:
        """Give them up; answers what could not be given up, and why. One that is finished by now is left alone."""
        ...


@runtime_checkable
class Consensus(Protocol):
    """A log of rows per key, seqnos contiguous, extended only by compare-and-set."""

    def head(self, key: str) -> Row | None:
        """The newest row, possibly stale; None when the key was never set."""
        ...

    def scan(self, key: str, from_seqno: SeqNo, limit: int) -> list[Row]:
        """At most `limit` rows with seqno >= from_seqno, ascending. Linearizable."""
        ...

    def compare_and_set(self, key: str, expected: Newest | None, data: bytes) -> bool:
        """Append `data` at expected + 1 if `expected` is the newest row (None: never set, and then at 1).

        False means that another row is there: the caller lost, and nothing changed.
        """
        ...

    def compare_and_set_many(self, changes: Mapping[str, Change]) -> bool:
        """All of them or none, atomically. Raises InvalidUsage where the store has no transactions.

        Nothing at all is True, or that InvalidUsage, without a request: so one can ask beforehand.
        """
        ...

    def truncate(self, key: str, seqno: SeqNo) -> int:
        """Delete the rows below `seqno`; answers how many. Never passes the newest row (InvalidUsage)."""
        ...

    def rewind(self, key: str, seqno: SeqNo, newest: Newest) -> int:
        """Take back the rows beyond `seqno`, if `newest` is the newest row; answers how many, 0 if it is not.

        Only to repair a log whose newest rows nobody can read. Whoever has seen them is refused from then on, as after
        a restored copy. With `seqno` 0 nothing is left of the key. InvalidUsage where `seqno` itself is not there.
        """
        ...

    def list_keys(self) -> Iterator[str]:
        """Every key that was ever set."""
        ...

    def now(self) -> int:
        """The store's clock in ms since the epoch, without a round trip of its own."""
        ...

    def close(self) -> None:
        """Release connections and files. Idempotent."""
        ...


@runtime_checkable
class WakesWaiters(Protocol):
    """What a Consensus may have beside: it tells those who wait of news. It may fail to, so never rely on it."""

    def wait(self, key: str, seqno: SeqNo, longest_s: float) -> bool:
        """Wait for a row beyond `seqno`, at most `longest_s`. Answers False at once when nobody would tell now.

        True says nothing of what there is: look.
        """
        ...


@runtime_checkable
class StaysInPlace(Protocol):
    """What a Blob or Consensus may have beside, when what it has open could be replaced behind its back: files."""

    def check_in_place(self) -> None:
        """Raise HistoryRegressed unless what is open is still what its path leads to. No request, and cheap."""
        ...
