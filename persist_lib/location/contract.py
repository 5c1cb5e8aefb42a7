"""What all stores share: the keys, ranges and limits that they refuse, the errors that they have in common, and clocks.

All stores accept the same keys, so that a location can be moved to another kind of store.

A key is 1 to 1024 bytes of UTF-8: segments separated by `/`, each of 1 to 255 bytes, none starting with `.`, without
control characters. So no key escapes its root (`..`, absolute), none is reserved, and every store can list it.

Only `Consensus.now()` reads the clock of embedded stores, so one machine's leases are judged by one clock.
"""

from __future__ import annotations

import json
import re
import time  # noqa: TID251 - an embedded store has no other clock than its machine's; callers may pass their own
from collections.abc import Callable

from persist_lib.arguments import UNPARSED
from persist_lib.errors import Corrupt, InvalidName, InvalidUsage, NewerFormat, NotFound
from persist_lib.ids import SeqNo
from persist_lib.location.api import Newest, Row
from persist_lib.runtime.ambient import Runtime

LONGEST_KEY = 1024
LONGEST_SEGMENT = 255
# A surrogate cannot be encoded; control characters do not survive the XML of an S3 listing.
SEGMENT = r"(?!\.)[^/\x00-\x1f\x7f\ud800-\udfff]+"
KEY = re.compile(rf"{SEGMENT}(?:/{SEGMENT})*")


def check_key(key: str) -> str:
    """Return `key` if it is a valid key, or raise InvalidName."""
    if isinstance(key, str) and KEY.fullmatch(key) and _is_short(key):
        return key
    raise InvalidName(
        f"a blob's key must be segments of 1 to {LONGEST_SEGMENT} bytes separated by '/', at most {LONGEST_KEY} bytes "
        f"in all, without control characters and none starting with '.': got {key!r}",
        key=key,
    )


def _is_short(key: str) -> bool:
    if len(key) <= LONGEST_SEGMENT // 4:
        return True
    return len(key.encode()) <= LONGEST_KEY and all(len(s.encode()) <= LONGEST_SEGMENT for s in key.split("/"))


def check_prefix(prefix: str) -> str:
    """Return `prefix` if it is empty (everything) or a key followed by `/`, or raise InvalidName."""
    if prefix == "":
        return prefix
    if not isinstance(prefix, str) or not prefix.endswith("/"):
        raise InvalidName(
            f"a prefix to list must end in '/' (or be empty, for everything): got {prefix!r}", prefix=prefix
        )
    check_key(prefix[:-1])
    return prefix


def check_range(key: str, start: int, end: int) -> None:
    """Raise InvalidUsage unless 0 <= start <= end, and InvalidName for an invalid key."""
    check_key(key)
    if not 0 <= start <= end:
        raise InvalidUsage(f"blob {key}: a range must be 0 <= start <= end: got [{start}, {end})", start=start, end=end)


def written_before(key: str, size: int, found: int) -> Corrupt:
    """The error for a write-once key that holds other bytes. Fail-stop: one of the two writers is wrong."""
    return Corrupt(
        f"blob {key} was written before with other bytes ({found} there, {size} now). Keys are written once and never "
        "changed; nothing was written. Use a fresh key",
        key=key, expected=size, actual=found,
    )  # fmt: skip


def passes_newest(key: str, seqno: SeqNo, newest: SeqNo | None) -> InvalidUsage:
    """The error for a truncation that would delete the newest row. No retry could make it right."""
    there = "it has no row" if newest is None else f"its newest row is {newest}"
    return InvalidUsage(
        f"consensus {key!r} cannot be truncated to {seqno}: {there}, and the newest is never deleted. Nothing "
        "was deleted",
        key=key, seqno=seqno, newest=newest,
    )  # fmt: skip


def not_in_log(key: str, seqno: SeqNo) -> InvalidUsage:
    """The error for a rewind to a row that does not exist."""
    return InvalidUsage(
        f"consensus {key!r} cannot go back to {seqno}: it has no such row. Nothing was taken back", key=key, seqno=seqno
    )


def next_seqno(expected: Newest | None) -> SeqNo:
    """Return the seqno of the row after `expected` (None: 1)."""
    return SeqNo(expected.seqno + 1 if expected else 1)


def is_newest(expected: Newest | None, head: Row | None) -> bool:
    """Whether `head`, the newest row, is the expected one (None: no row)."""
    if expected is None or head is None:
        return expected is None and head is None
    return head.seqno == expected.seqno and head.data.startswith(expected.start)


def check_limit(limit: int) -> None:
    """Raise InvalidUsage for a negative limit (SQL would read -1 as no limit at all)."""
    if limit < 0:
        raise InvalidUsage(f"a scan's limit must not be negative: got {limit}", limit=limit)


MARKER = "persist.json"
"""The name of the file, or object, that says that a location is there, and its format."""
FORMAT = 1
MARKER_BODY = b'{"format": %d}\n' % FORMAT


def check_marker(data: bytes, where: str) -> None:
    """Raise Corrupt for a marker that is damaged, and NewerFormat for one that a newer release wrote."""
    try:
        found = json.loads(data)["format"]
    except (*UNPARSED, KeyError, TypeError) as error:
        raise Corrupt(
            f"{where} is not what Persist wrote; restore it ({{\"format\": {FORMAT}}})", key=where,
            expected={"format": FORMAT}, actual=str(error),
        ) from error  # fmt: skip
    check_known(f"{where} says format", found, FORMAT)


def check_known(what: str, found: object, known: int) -> None:
    """Raise NewerFormat for a format that is newer than the newest one known. `what` is the start of the message."""
    if not isinstance(found, int) or found > known:
        raise NewerFormat(
            f"{what} {found}, this release knows up to {known}; nothing was touched. Upgrade persist-lib",
            found=found, known=known,
        )  # fmt: skip


def no_location(url: str, marker: str) -> NotFound:
    """The error for a place without a marker."""
    return NotFound(
        f"there is no location at {url}: {marker} is missing. Check the URL, or open it with create=True", url=url
    )


def foreign_place(url: str, holds: str, choose: str) -> InvalidUsage:
    """The error for a place without a marker that holds something else."""
    return InvalidUsage(f"{url} holds other {holds}, but no {MARKER}: it is no location. Choose {choose}", url=url)


Clock = Callable[[], int]
"""Nanoseconds since the epoch."""

machine_clock: Clock = time.time_ns


def now_ms(clock: Clock) -> int:
    """Milliseconds since the epoch, as `Consensus.now()` answers."""
    return clock() // 1_000_000


class RemoteClock:
    """Another machine's clock: its last known time, plus the time that has passed here since. It is asked only once.

    A step or a pause of the local clock shifts it until the next answer. A lease then ends early or late, nothing else.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._seen: tuple[int, float] | None = None

    @property
    def last(self) -> int:
        """The time in the last answer, in ms since the epoch; 0 if none had one."""
        return self._seen[0] if self._seen else 0

    def observe(self, now: int) -> None:
        """Note that the store's clock was at `now` (ms since the epoch) in an answer that just arrived."""
        self._seen = now, self._runtime.monotonic()

    def now(self, ask: Callable[[], int]) -> int:
        """Return the remote time in ms since the epoch. Calls `ask` for it if no answer was observed yet."""
        if self._seen is None:
            self.observe(ask())
        now, since = self._seen or (0, 0.0)
        return now + int((self._runtime.monotonic() - since) * 1000)
