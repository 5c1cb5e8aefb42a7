"""A location that only reads. Every operation that would write raises InvalidUsage and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from persist_lib.errors import InvalidUsage
from persist_lib.ids import SeqNo
from persist_lib.location.api import (
    AnswersDebts,
    Blob,
    BlobEntry,
    Change,
    Consensus,
    Newest,
    Page,
    PushesRows,
    Row,
    SendsInPieces,
    Upload,
    WakesWaiters,
)
from persist_lib.location.wrap.around import next_page

if TYPE_CHECKING:
    from persist_lib.core.plan.debts import Debts


def read_only(doing: str) -> InvalidUsage:
    """The error for an operation that would write."""
    return InvalidUsage(f"cannot {doing}: the location was opened with read_only=True. Nothing was written")


class ReadOnlyBlob:
    """The reading half of another Blob."""

    def __init__(self, inner: Blob) -> None:
        self._inner = inner

    def get(self, key: str) -> bytes | None:
        return self._inner.get(key)

    def get_range(self, key: str, start: int, end: int) -> bytes | None:
        return self._inner.get_range(key, start, end)

    def set(self, key: str, data: bytes | memoryview) -> None:  # noqa: ARG002
        """Refused."""
        raise read_only(f"store blob {key!r}")

    def delete(self, key: str) -> bool:
        """Refused."""
        raise read_only(f"delete blob {key!r}")

    def delete_many(self, keys: Sequence[str]) -> dict[str, Exception]:
        """Refused."""
        raise read_only(f"delete {len(keys)} blobs")

    def list(self, prefix: str) -> Iterator[BlobEntry]:
        return self._inner.list(prefix)

    def page(self, prefix: str, after: str) -> Page:
        """A page of a listing; the whole listing, where the wrapped Blob has no pages."""
        return next_page(self._inner, prefix, after)

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Yield unfinished uploads below `prefix`; none if the wrapped Blob does not send in pieces."""
        return self._inner.uploads(prefix) if isinstance(self._inner, SendsInPieces) else iter(())

    def abort_uploads(self, uploads: Sequence[Upload]) -> dict[Upload, Exception]:
        """Refused."""
        raise read_only(f"give up {len(uploads)} uploads")

    def close(self) -> None:
        self._inner.close()


class RefusesWrites:
    """The writing operations of a Consensus. All of them raise InvalidUsage."""

    def compare_and_set(self, key: str, expected: Newest | None, data: bytes) -> bool:  # noqa: ARG002
        """Refused."""
        raise read_only(f"write to {key!r}")

    def compare_and_set_many(self, changes: Mapping[str, Change]) -> bool:
        """Refused."""
        raise read_only(f"write to {list(changes)}")

    def truncate(self, key: str, seqno: SeqNo) -> int:  # noqa: ARG002
        """Refused."""
        raise read_only(f"truncate {key!r}")

    def rewind(self, key: str, seqno: SeqNo, newest: Newest) -> int:  # noqa: ARG002
        """Refused."""
        raise read_only(f"take back rows of {key!r}")


class ReadOnlyConsensus(RefusesWrites):
    """The reading half of another Consensus."""

    def __init__(self, inner: Consensus) -> None:
        self._inner = inner

    def head(self, key: str) -> Row | None:
        return self._inner.head(key)

    def scan(self, key: str, from_seqno: SeqNo, limit: int) -> list[Row]:
        return self._inner.scan(key, from_seqno, limit)

    def list_keys(self) -> Iterator[str]:
        return self._inner.list_keys()

    def heads(self, keys: Sequence[str] | None = None) -> dict[str, SeqNo]:
        return self._inner.heads(keys)

    def wait(self, key: str, seqno: SeqNo, longest_s: float) -> bool:
        return isinstance(self._inner, WakesWaiters) and self._inner.wait(key, seqno, longest_s)

    def pushed(self, key: str, after: SeqNo) -> Sequence[Row] | None:
        return self._inner.pushed(key, after) if isinstance(self._inner, PushesRows) else None

    @property
    def answers_debts(self) -> bool:
        return isinstance(self._inner, AnswersDebts) and self._inner.answers_debts

    def debts(self, settings: str, done: Mapping[str, Sequence[str]], most: int | None, seconds: float) -> Debts | None:
        """Refused where duties are to be noted as done."""
        if done:
            raise read_only("note duties as done")
        return cast("AnswersDebts", self._inner).debts(settings, done, most, seconds)

    def now(self) -> int:
        return self._inner.now()

    def close(self) -> None:
        self._inner.close()
