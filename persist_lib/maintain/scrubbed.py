"""What a scrub found, in figures and in one honest sentence."""

from __future__ import annotations

import datetime as dt

import msgspec

from persist_lib.core.cost import Cost

BatchId = tuple[int, int]


class Scrubbed(msgspec.Struct, frozen=True):
    """What a scrub read, and every damage it found: batch id and what is wrong.

    `batches`, `updates` and `size` are those that were read; `newest` is the seqno of the state that named them.
    """

    batches: int
    updates: int
    size: int
    damaged: tuple[tuple[BatchId, str], ...]
    newest: int
    cost: Cost = Cost()
    """The requests that it made to the location."""
    left: int = 0
    """The batches that were not read, as an earlier scrub found them sound."""
    skipped: int = 0
    """The batches that were not read, as they were written no later than `after`."""
    known: tuple[BatchId, ...] = ()
    """Those of `damaged` that an earlier scrub had marked already."""
    since: tuple[int, ...] = ()
    """For each of `damaged`: when a scrub first found it, in ms of the store's clock."""
    mended: tuple[BatchId, ...] = ()
    """The batches that an earlier scrub found damaged, and that this one read and found sound."""
    gone: tuple[BatchId, ...] = ()
    """The batches that an earlier scrub found damaged, and that are not in the shard any more."""
    remembered: bool = True
    """Whether the location holds what was found."""
    why_not: str = ""
    """Why it does not."""

    @property
    def says(self) -> str:
        """All of it in one sentence, which claims only what was read."""
        parts = [self._damage() if self.damaged else self._soundness()]
        parts += [f"batch {id_} was damaged and is mended" for id_ in self.mended]
        parts += [f"batch {id_} was damaged and is not in the shard any more" for id_ in self.gone]
        if not self.remembered:
            parts.append(f"this is not remembered: {self.why_not}")
        return "; ".join(parts)

    def _damage(self) -> str:
        told = []
        for (id_, what), since in zip(self.damaged, self.since, strict=True):
            told.append(f"batch {id_}: {what}" + (f" (known since {_moment(since)})" if id_ in self.known else ""))
        return "; ".join(told)

    def _soundness(self) -> str:
        earlier = f"{self.left} were found right by earlier scrubs"
        if self.batches:
            text = f"{_batches(self.batches)} read: every digest and every sum is right"
        elif self.left:
            text = "nothing new: no batch was read"
        elif self.skipped:
            return f"nothing was read: {_batches(self.skipped)} of before were not asked for"
        else:
            return "nothing was read: the shard is empty"
        text += f"; {earlier}" if self.left else ""
        return text + (f"; {_batches(self.skipped)} of before were not read" if self.skipped else "")


def _batches(count: int) -> str:
    return "1 batch" if count == 1 else f"{count} batches"


def _moment(ms: int) -> str:
    return f"{dt.datetime.fromtimestamp(ms / 1000, dt.UTC):%Y-%m-%d %H:%M} UTC"
