"""What drivers have in common: errors, keys as sorted bytes, what a log says of itself, and pages of a size."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from persist_lib.errors import Corrupt, Fenced, NewerFormat
from persist_lib.events.api import Buffer, Key
from persist_lib.location.wrap.deadline import within
from persist_lib.location.wrap.retrying import retry
from persist_lib.runtime.ambient import Runtime
from persist_lib.runtime.forks import Stage, enrol

T = TypeVar("T")
FORMAT = 1
PATIENCE_S = 20.0
"""How long a failed request is sent again."""


class Guard:
    """A lock of a module. A forked child gets a new one, as a thread of the parent may hold the old one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        enrol(self, Stage.STORES)

    def after_fork_in_child(self) -> None:
        """Renew the lock."""
        self.lock = threading.Lock()


def sent_again(runtime: Runtime, call: Callable[[], T]) -> T:
    """Make a request, and again for PATIENCE_S while it fails. Only for requests that may be carried out twice."""
    deadline = runtime.deadline(PATIENCE_S)
    return within(deadline, lambda: retry(call, is_idempotent=True, deadline=deadline))


def fenced(where: str, epoch: int, found: int, *, is_certain: bool = True) -> Fenced:
    """The error of a store that looked at the epoch in the transaction that would have written.

    `is_certain`: no earlier attempt can have written.
    """
    outcome = "nothing of this was written" if is_certain else "whether this is in the log, only the log says"
    return Fenced(
        f"another writer took over {where} (epoch {found}, and this one is {epoch}). What was acknowledged is in the "
        f"log, and {outcome}. Open a writer again if this program is to write",
        epoch=epoch, found=found,
    )  # fmt: skip


def encode_meta(runtime: Runtime) -> bytes:
    """What a new log says of itself: its format, and its name, eight random bytes."""
    return json.dumps({"events": FORMAT, "log": runtime.entropy().to_bytes(8, "big").hex()}).encode()


def open_meta(data: bytes, where: str) -> bytes:
    """The name of a log. Raises NewerFormat for one that a newer release made."""
    try:
        found = json.loads(data)
        version, log = found["events"], bytes.fromhex(found["log"])
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt(
            f"{where} is no event log, or damaged: what it says of itself is not as it was written ({error}). Nothing "
            "was changed",
            key=where,
        ) from error
    if not isinstance(version, int) or version > FORMAT:
        raise NewerFormat(
            f"{where} has format {version}, this release knows up to {FORMAT}; nothing was touched. Upgrade "
            "persist-lib",
            found=version, known=FORMAT,
        )  # fmt: skip
    if len(log) != 8:
        raise Corrupt(f"{where} is damaged: the name of the log is {log.hex()!r}", key=where)
    return log


def parse_epoch(data: bytes | None, where: str) -> int:
    """The newest epoch of a log, as its record says; 0 where there is none yet. Raises Corrupt."""
    if data is None:
        return 0
    if not data.isdigit():
        raise Corrupt(f"{where} is damaged: its epoch is {bytes(data[:20])!r}. Restore it from a copy", key=where)
    return int(data)


def encode_key(key: Key) -> bytes:
    """A key as bytes, in the order of ids and fragments within a space."""
    return b"\1%b\0%b%b" % (key.space.encode(), key.id.to_bytes(8, "big"), key.fragment.to_bytes(4, "big"))


def decode_key(space: str, key: bytes) -> tuple[int, int]:
    """The id and the fragment of a key of this space. What follows is left alone."""
    at = len(space) + 2
    return int.from_bytes(key[at : at + 8], "big"), int.from_bytes(key[at + 8 : at + 12], "big")


def key_range(space: str, from_id: int, below: int | None) -> tuple[bytes, bytes]:
    """The keys of a space with ids in `[from_id, below)`: the first one, and the first behind them."""
    name = b"\1%b" % space.encode()
    return encode_key(Key(space, from_id, 0)), name + b"\1" if below is None else encode_key(Key(space, below, 0))


def as_bytes(buffer: Buffer) -> bytes:
    """The same as `bytes`, without a copy if it is a view of the whole of some: for clients that take nothing else."""
    if isinstance(buffer, memoryview) and isinstance(buffer.obj, bytes) and buffer.nbytes == len(buffer.obj):
        return buffer.obj
    return bytes(buffer)


def pages(sizes: Sequence[tuple[int, int]], most: int) -> Iterator[tuple[int, int]]:
    """The first and the last id of each page, of ids and their sizes in order. A page has `most` bytes, or one id."""
    start, total = 0, 0
    for at, (_, size) in enumerate(sizes):
        if at > start and total + size > most:
            yield sizes[start][0], sizes[at - 1][0]
            start, total = at, 0
        total += size
    if sizes:
        yield sizes[start][0], sizes[-1][0]
