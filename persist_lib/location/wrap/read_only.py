"""A location that only reads. Every operation that would write raises InvalidUsage and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from persist_lib.errors import InvalidUsage
from persist_lib.ids import SeqNo
from persist_lib.location.api import Change, Newest, Upload
from persist_lib.location.wrap.around import AroundBlob, AroundConsensus, Operation

if TYPE_CHECKING:
    from persist_lib.core.plan.look import Debts

T = TypeVar("T")
WRITES = {"set": "store blob", "delete": "delete blob"}


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
