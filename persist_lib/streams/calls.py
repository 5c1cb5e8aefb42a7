"""What a runtime is asked to do: writes, seals and moves of since, alone or several together, as they wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from persist_lib.frontier import Antichain
from persist_lib.relation.appends import Pending

if TYPE_CHECKING:
    from persist_lib.streams.writer import StreamWriter


class Write(msgspec.Struct, frozen=True):
    """One of several calls to be made together: the stream's writer, and the arguments of its `write`."""

    writer: StreamWriter
    updates: object


class Seal(msgspec.Struct, frozen=True):
    """One of several calls to be made together: the stream's writer, and the arguments of its `seal`."""

    writer: StreamWriter
    upper: object


class AllowCompaction(msgspec.Struct, frozen=True):
    """One of several calls to be made together: the stream's writer, and the arguments of its `allow_compaction`."""

    writer: StreamWriter
    since: object


class Op(msgspec.Struct, frozen=True):
    """A checked part of a call: what it does to the stream of this name. One of the three is set."""

    stream: str
    table: pa.Table | None = None
    upper: Antichain | None = None
    since: Antichain | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Call(Pending):
    """One accepted call."""

    ops: tuple[Op, ...] = ()

    @property
    def is_alone(self) -> bool:
        """Whether it shares no commit: it moves both a since and something else."""
        return self.moves_since and self.appends

    def is_followed_by(self, other: Pending) -> bool:
        """Whether one commit may do both.

        A seal and a move of since are two transitions of the same shard, so they are two commits.
        """
        return (
            isinstance(other, Call)
            and not other.is_alone
            and self.appends == other.appends
            and self.deadline.ends <= other.deadline.ends
        )

    def written(self, stream: str) -> list[pa.Table]:
        """What it writes to the stream of this name."""
        return [op.table for op in self.ops if op.stream == stream and op.table is not None]

    @property
    def moves_since(self) -> bool:
        """Whether it moves a since."""
        return any(op.since is not None for op in self.ops)

    @property
    def appends(self) -> bool:
        """Whether it writes or seals."""
        return any(op.since is None for op in self.ops)
