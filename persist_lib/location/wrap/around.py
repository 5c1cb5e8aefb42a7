"""Wrappers of Blob and Consensus that do something around every operation: retry it, count it, fail it, refuse it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar, cast

from persist_lib.errors import InvalidUsage
from persist_lib.ids import SeqNo
from persist_lib.location.api import (
    AnswersDebts,
    Blob,
    BlobEntry,
    Change,
    Consensus,
    HearsOfRows,
    KnowsClients,
    ListsPages,
    Newest,
    Overwrites,
    Page,
    PointsOthers,
    PushesRows,
    Row,
    SendsInPieces,
    StaysInPlace,
    Upload,
    WakesWaiters,
)

if TYPE_CHECKING:
    from persist_lib.core.plan.look import Debts
    from persist_lib.location.commands import Answered, MakesHeart, Proposed, TakesCommands

T = TypeVar("T")
S = TypeVar("S", bound=Blob | Consensus)


class Operation(NamedTuple):
    """One call: the method's name, the key (or prefix; the first of several), and the bytes it sends."""

    kind: str
    key: str
    size: int = 0


class Around(Generic[S]):
    """The base of wrappers that do something around every operation of the `inner` store."""

    def __init__(self, inner: S) -> None:
        self.inner = inner

    def close(self) -> None:
        self.inner.close()

    def around(self, operation: Operation, call: Callable[[], T]) -> T:  # noqa: ARG002 - for those that override it
        """Return the result of `operation`. A wrapper may run `call` once, several times or not at all."""
        return call()


class AroundBlob(Around[Blob]):
    """A Blob whose operations all go through `around`. A listing is one operation, which runs to its end at once."""

    def get(self, key: str) -> bytes | None:
        return self.around(Operation("get", key), lambda: self.inner.get(key))

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        return self.around(Operation("get_range", key), lambda: self.inner.get_range(key, start, end))

    def set(self, key: str, data: bytes | memoryview) -> None:
        return self.around(Operation("set", key, memoryview(data).nbytes), lambda: self.inner.set(key, data))

    def delete(self, key: str) -> bool:
        return self.around(Operation("delete", key), lambda: self.inner.delete(key))

    def delete_many(self, keys: Sequence[str]) -> dict[str, Exception]:
        return self.around(Operation("delete_many", next(iter(keys), "")), lambda: self.inner.delete_many(keys))

    def list(self, prefix: str) -> Iterator[BlobEntry]:
        return iter(self.around(Operation("list", prefix), lambda: [*self.inner.list(prefix)]))

    def page(self, prefix: str, after: str) -> Page:
        """A page of a listing, as one operation; the whole listing, where the wrapped Blob has no pages."""
        return self.around(Operation("list", prefix), lambda: next_page(self.inner, prefix, after))

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Yield unfinished uploads below `prefix`; none if the wrapped Blob does not send in pieces."""
        if (inner := sends_in_pieces(self.inner)) is None:
            return iter(())
        return iter(self.around(Operation("uploads", prefix), lambda: [*inner.uploads(prefix)]))

    def abort_uploads(self, uploads: Sequence[Upload]) -> dict[Upload, Exception]:
        if (inner := sends_in_pieces(self.inner)) is None or not uploads:
            return {}
        return self.around(Operation("abort_uploads", uploads[0].key), lambda: inner.abort_uploads(uploads))

    @property
    def address(self) -> str:
        """As `PointsOthers.address`. Only where `points_others` says so. No request."""
        return cast("PointsOthers", self.inner).address

    def point(self, key: str, data: bytes, follows: bytes | None) -> bool:
        """As `PointsOthers.point`. Only where `points_others` says so."""
        inner = cast("PointsOthers", self.inner)
        return self.around(Operation("point", key, len(data)), lambda: inner.point(key, data, follows))


def next_page(blob: Blob, prefix: str, after: str) -> Page:
    """The next objects below `prefix` with keys greater than `after`: all of them, where the store has no pages."""
    if isinstance(blob, ListsPages):
        return blob.page(prefix, after)
    return Page(sorted(entry for entry in blob.list(prefix) if entry.key > after), is_last=True)


def listed(blob: Blob, prefix: str) -> Iterator[BlobEntry]:
    """Every object below `prefix`. Where the store lists in pages, only one page is in memory at a time."""
    after = ""
    while True:
        page = next_page(blob, prefix, after)
        yield from page.entries
        if page.is_last or not page.entries:
            return
        after = page.entries[-1].key


def _innermost(blob: Blob) -> Blob:
    while isinstance(blob, AroundBlob):
        blob = blob.inner
    return blob


def sends_in_pieces(blob: Blob) -> SendsInPieces | None:
    """Return `blob` if the innermost store sends in pieces, else None: then there is no operation to count."""
    return blob if isinstance(_innermost(blob), SendsInPieces) and isinstance(blob, SendsInPieces) else None


def points_others(blob: Blob) -> PointsOthers | None:
    """Return `blob` if other programs can read what is in the innermost store, else None."""
    return blob if isinstance(_innermost(blob), PointsOthers) and isinstance(blob, PointsOthers) else None


def takes_commands(consensus: Consensus) -> TakesCommands | None:
    """Return `consensus` if the innermost store applies commands itself, else None."""
    from persist_lib.location.commands import TakesCommands  # noqa: PLC0415 - commands load Arrow, and listings do not

    inside, passes_on = consensus, AroundConsensus.commit_commands
    while isinstance(inside, AroundConsensus) and type(inside).commit_commands is passes_on:
        inside = inside.inner
    return consensus if isinstance(inside, TakesCommands) and isinstance(consensus, TakesCommands) else None


class AroundConsensus(Around[Consensus]):
    """A Consensus whose operations all go through `around`, except `now`, which is no request."""

    def head(self, key: str) -> Row | None:
        return self.around(Operation("head", key), lambda: self.inner.head(key))

    def scan(self, key: str, from_seqno: SeqNo, limit: int) -> list[Row]:
        return self.around(Operation("scan", key), lambda: self.inner.scan(key, from_seqno, limit))

    def compare_and_set(self, key: str, expected: Newest | None, data: bytes) -> bool:
        operation = Operation("compare_and_set", key, len(data))
        return self.around(operation, lambda: self.inner.compare_and_set(key, expected, data))

    def compare_and_set_many(self, changes: Mapping[str, Change]) -> bool:
        if not changes:
            return self.inner.compare_and_set_many(changes)
        size = sum(len(data) for _, data in changes.values())
        operation = Operation("compare_and_set_many", next(iter(changes), ""), size)
        return self.around(operation, lambda: self.inner.compare_and_set_many(changes))

    def commit_commands(
        self, proposed: Sequence[Proposed], token: bytes, timeout_s: float, *, is_repeated: bool, heart: MakesHeart
    ) -> list[Answered]:
        """Commit commands as `TakesCommands.commit_commands` does. Only where `takes_commands` says so."""
        from persist_lib.core.groups import size_of  # noqa: PLC0415 - it loads Arrow, which who only lists does without

        inner = cast("TakesCommands", self.inner)
        return self.around(
            Operation("commit_commands", proposed[0].shard, sum(size_of(one.command) for one in proposed)),
            lambda: inner.commit_commands(proposed, token, timeout_s, is_repeated=is_repeated, heart=heart),
        )

    def truncate(self, key: str, seqno: SeqNo) -> int:
        return self.around(Operation("truncate", key), lambda: self.inner.truncate(key, seqno))

    def rewind(self, key: str, seqno: SeqNo, newest: Newest) -> int:
        return self.around(Operation("rewind", key), lambda: self.inner.rewind(key, seqno, newest))

    def list_keys(self) -> Iterator[str]:
        return iter(self.around(Operation("list_keys", ""), lambda: [*self.inner.list_keys()]))

    def heads(self, keys: Sequence[str] | None = None) -> dict[str, SeqNo]:
        return self.around(Operation("heads", ""), lambda: self.inner.heads(keys))

    def wait(self, key: str, seqno: SeqNo, longest_s: float) -> bool:
        """Wait as `WakesWaiters.wait` does. It is no request, so it does not go through `around`."""
        return isinstance(self.inner, WakesWaiters) and self.inner.wait(key, seqno, longest_s)

    def pushed(self, key: str, after: SeqNo) -> Sequence[Row] | None:
        return self.inner.pushed(key, after) if isinstance(self.inner, PushesRows) else None

    def heard(self, longest_s: float) -> Mapping[str, SeqNo] | None:
        return self.inner.heard(longest_s) if isinstance(self.inner, HearsOfRows) else None

    @property
    def answers_debts(self) -> bool:
        return isinstance(self.inner, AnswersDebts) and self.inner.answers_debts

    def debts(self, settings: str, done: Mapping[str, Sequence[str]], most: int | None, seconds: float) -> Debts | None:
        """Answer as `AnswersDebts.debts` does. Only where `answers_debts` says so."""
        inner = cast("AnswersDebts", self.inner)
        return self.around(Operation("debts", ""), lambda: inner.debts(settings, done, most, seconds))

    def losing(self, table: str, timeline: str | None) -> list[str]:
        """Answer as `KnowsClients.losing` does; where there are no clients of its own, none, without a request."""
        if not isinstance(inner := self.inner, KnowsClients):
            return []
        return self.around(Operation("losing", ""), lambda: inner.losing(table, timeline))

    def check_in_place(self) -> None:
        """Check as `StaysInPlace.check_in_place` does; do nothing if the wrapped store has no files. No request."""
        if isinstance(self.inner, StaysInPlace):
            self.inner.check_in_place()

    def overwrite(self) -> str:
        """Do as `Overwrites.overwrite` does; nothing if the wrapped store has no files. No request."""
        return self.inner.overwrite() if isinstance(self.inner, Overwrites) else ""

    def now(self) -> int:
        return self.inner.now()


WRITES = {"set": "store blob", "delete": "delete blob", "point": "move"}


def read_only(doing: str) -> InvalidUsage:
    """The error for an operation that would write."""
    return InvalidUsage(f"cannot {doing}: the location was opened with read_only=True. Nothing was written")


class ReadOnlyBlob(AroundBlob):
    """The reading half of another Blob."""

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        if (doing := WRITES.get(operation.kind)) is not None:
            raise read_only(f"{doing} {operation.key!r}")
        return call()

    def delete_many(self, keys: Sequence[str]) -> dict[str, Exception]:
        raise read_only(f"delete {len(keys)} blobs")

    def abort_uploads(self, uploads: Sequence[Upload]) -> dict[Upload, Exception]:
        raise read_only(f"give up {len(uploads)} uploads")


class RefusesWrites:
    """The writing operations of a Consensus. All of them raise InvalidUsage."""

    def compare_and_set(self, key: str, expected: Newest | None, data: bytes) -> bool:  # noqa: ARG002
        raise read_only(f"write to {key!r}")

    def compare_and_set_many(self, changes: Mapping[str, Change]) -> bool:
        raise read_only(f"write to {list(changes)}")

    def truncate(self, key: str, seqno: SeqNo) -> int:  # noqa: ARG002
        raise read_only(f"truncate {key!r}")

    def rewind(self, key: str, seqno: SeqNo, newest: Newest) -> int:  # noqa: ARG002
        raise read_only(f"take back rows of {key!r}")


class ReadOnlyConsensus(RefusesWrites, AroundConsensus):
    """The reading half of another Consensus."""

    commit_commands = None  # type: ignore[assignment]  # so that it is no `TakesCommands`, whatever it wraps

    def debts(self, settings: str, done: Mapping[str, Sequence[str]], most: int | None, seconds: float) -> Debts | None:
        """Refused where duties are to be noted as done."""
        if done:
            raise read_only("note duties as done")
        return super().debts(settings, done, most, seconds)
