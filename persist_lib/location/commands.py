"""Commands of shards as values that go over a wire: what a Consensus takes that stands for a shard server.

Such a Consensus has all that any other has, and also applies commands to the newest state by itself. So a change
needs no compare-and-set of its client's, and changes of many clients become one row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.state import Outcome
from persist_lib.ids import SeqNo
from persist_lib.location.api import Blob, Consensus, Row
from persist_lib.runtime.ambient import Runtime


class Proposed(NamedTuple):
    """A command for a shard, and a version of it that its sender knew when it was sent for the first time.

    Its `lease_until` and `now` are durations (ms), counted from the moment at which it is applied: see `undated`.
    """

    shard: str
    command: c.Command
    known: SeqNo


ROLL_UP = "roll up"
FLUSH = "flush"


class Answered(NamedTuple):
    """The answer to a command: it was committed as `seqno`, or `refusal` says why not, by the state at `seqno`.

    Neither: the state at `seqno` accepts it, but it was not committed, as a command of another shard that was to be
    committed together with it was refused. `rows` are those of the log from the version that was known to this one, if
    they were at hand and are few. Of an append at the next time that was committed, `outcome` says which upper it left,
    so that nothing has to be read back. `due`: what its sender has to do now: `ROLL_UP`, `FLUSH`, both or nothing.
    """

    seqno: SeqNo
    refusal: r.Refusal | None = None
    is_committed: bool = False
    rows: tuple[Row, ...] = ()
    outcome: Outcome | None = None
    due: tuple[str, ...] = ()


class Heart(Protocol):
    """What applies commands in this process, as a server does."""

    def commit_commands(
        self, proposed: Sequence[Proposed], token: bytes, timeout_s: float, *, is_repeated: bool
    ) -> list[Answered]:
        """As `TakesCommands` says."""

    def end(self) -> None:
        """Answer what waits, and end."""


MakesHeart = Callable[[Blob, Consensus, Runtime], Heart]
"""Makes it of a store."""


@runtime_checkable
class TakesCommands(Protocol):
    """An optional protocol of a Consensus that applies commands itself."""

    def commit_commands(
        self, proposed: Sequence[Proposed], token: bytes, timeout_s: float, *, is_repeated: bool, heart: MakesHeart
    ) -> list[Answered]:
        """Commit all commands or none, each of another shard, and answer each. Waits at most `timeout_s` seconds.

        Where no server is there, and the store behind them may be used, what `heart` makes of that commits them.
        `is_repeated`: they may have been sent before, with this token and the same values. They are committed at most
        once, however often and to whichever server they are sent, and a refusal then holds for ever. Raises Determinate
        or InvalidUsage if this sending certainly did nothing, which says nothing of earlier ones; and Indeterminate
        with the `token` if that is not known.
        """


def dated(command: c.Command, now: int) -> c.Command:
    """The command as it is applied at `now` (ms of the store's clock): its durations made moments."""
    names = [name for name in ("lease_until", "now") if name in command.__struct_fields__]
    return msgspec.structs.replace(command, **{name: getattr(command, name) + now for name in names})


def undated(command: c.Command, now: int) -> c.Command:
    """The command as it is sent at `now` (ms of the store's clock): its moments made durations from then on."""
    return dated(command, -now)
