"""What a source reader is: the small protocol by which outside data comes in.

A source has partitions. Each is a log of messages, whose addresses are integers that never go back. A reader gives the
same messages to every process, or says that they are gone. Other messages than before are `Diverged`.

    MESSAGES    address: uint64     where the message is; several may share one address, and then belong together
                value: binary       its bytes; or a struct, of messages that are rows already. Null: it says "deleted"
                key: binary         (optional) the bytes of its key
                header: string      (optional) what else its decoder needs, such as a CSV file's first line
                headers: string     (optional) what came beside, as JSON
                partition: string   (optional) which of several outputs it is for, and what its errors name
    timestamp: ms, UTC  (optional) when it was written, as its writer says
    problem: string     (optional) why the reader could not give it whole. Null: it did
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol, TypeVar

import pyarrow as pa

ADDRESS = pa.field("address", pa.uint64(), nullable=False)
VALUE = pa.field("value", pa.binary())
MOST_ADDRESS = (1 << 63) - 1
HOLD = "source"
"""The durable hold that a source has on each of its shards, at t - 1."""


class Mark(NamedTuple):
    """A place in a partition: the first address that is not covered.

    `check` is what the reader knows of what is before it, as text, so that it can tell later whether that is the same
    still. It is empty where a reader has nothing to tell; such a mark is not checked.
    """

    address: int
    check: str = ""


START = Mark(0)


class Lag(NamedTuple):
    """How far a partition is behind: about how many messages and bytes are left, as far as that is known.

    `read_ms` is when the newest message that was read was written, in milliseconds since 1970.
    """

    messages: int | None = None
    bytes: int | None = None
    read_ms: int | None = None


class Unread(NamedTuple):
    """Why something that is there is not read. `changed_ms`: it may only be unfinished, and was last changed then."""

    why: str
    changed_ms: int | None = None


UNFINISHED_MS = 60_000
"""For how long after its last change something may be unfinished: a file that is being written, say."""


class SourceReader(Protocol):
    """Reads one source. It is used by one thread at a time; any number of processes have one each.

    The calls raise Gone and Diverged as they say, and Determinate for what may be otherwise soon. It may also have

        lags(marks: Mapping[str, Mark]) -> Mapping[str, Lag]
            how far partitions are behind these marks, those with something left, as far as it knows;
        unread() -> Mapping[str, Unread]
            what there was at the last look and is not read, by name;
        held_back() -> tuple[int, str]
            how many bytes its upstream keeps for it and cannot let go of, and a warning if these are too many, else "";
        growth() -> Growth | None
            columns that came since the source was made, where it takes such;
        learn(bound: Mapping[str, Mark]) -> None
            what is bound by now: called before any of it is read.
    """

    def high_watermarks(self, bound: Mapping[str, Mark], most_bytes: int) -> Mapping[str, Mark]:
        """Return how far partitions can be read now: those that go beyond what is bound, and which it did not know.

        `bound` has the marks up to which each known partition is bound already; one that is not in it is new. The
        answer is at most about `most_bytes` of messages beyond, all partitions together, but always at least one
        address beyond if there is any. Messages up to an answered mark never change, and none is added before it.
        """

    def read(self, partition: str, start: Mark, end: Mark) -> Iterator[pa.Table]:
        """Yield the messages with addresses in `[start, end)`, in order, in tables of bounded size.

        Raises Gone if some are not there any more, and Diverged if the source has something else than what `start` and
        `end` tell of. It does so before the generator ends, at the latest.
        """

    def estimate(self, partition: str, start: int, end: int) -> int:
        """Return about how many bytes the messages with addresses in `[start, end)` have. It sends no request."""

    def lag(self, marks: Mapping[str, Mark]) -> Mapping[str, int]:
        """Return about how many addresses there are beyond these marks, by partition, as far as it knows."""

    def tell(self, marks: Mapping[str, Mark]) -> None:
        """Tell the source that what is before these marks is durable, and will never be asked for again. Idempotent."""

    def close(self) -> None:
        """Release what it has open. Idempotent."""


class Patience:
    """Counts how often in a row nothing came of what is said to be there: more than `most` times is too often."""

    def __init__(self, most: int) -> None:
        self.most, self.quiet = most, 0

    def is_over(self, *, has_come: bool) -> bool:
        """Take note of one more wait, and whether something came."""
        self.quiet = 0 if has_come else self.quiet + 1
        return self.quiet > self.most


T = TypeVar("T")


def said(reader: SourceReader, method: str, otherwise: T, *args: object) -> T:
    """What a reader says that not every reader does."""
    call = getattr(reader, method, None)
    found: T = otherwise if call is None else call(*args)
    return found


def settled(unread: Mapping[str, Unread], now: int) -> dict[str, str]:
    """What is not read, with why, but for what may still become whole."""
    return {
        name: one.why
        for name, one in sorted(unread.items())
        if one.changed_ms is None or one.changed_ms + UNFINISHED_MS <= now
    }
