"""Every command, and who may send it: the rules of `core.rights` once more, for tests of the core and of a server."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from persist_lib.core import commands as c
from persist_lib.core.state import Batch, Rollup
from persist_lib.frontier import MINIMUM, at
from persist_lib.ids import PartKey, SeqNo, format_reader_id, format_writer_id
from persist_lib.schema.schema import Schema

W, R, W2, R2 = format_writer_id(1), format_reader_id(1), format_writer_id(2), format_reader_id(2)
SCHEMA = Schema(key={"id": "int64"})
BATCH = Batch(0, 1, at(0), at(1), MINIMUM, 0, 0, 0)
KEY = PartKey("w/1")
LAYERS = ("collection", "stream", "writer", "source", "events.writer", "layer.mark", "copy-r2", "source-s01")


def _holds() -> Iterable[tuple[str, c.Command, str]]:
    """The client owns the hold `mine`. `r|m`: one of both; `m`: only that one."""
    holds = {"mine": "r|m", "another's": "m", "retention": "m", **dict.fromkeys(LAYERS, "a|m")}
    for hold, allowed in holds.items():
        hold = hold.replace("'", "")  # noqa: PLW2901
        yield f"set {hold}", c.SetHold(hold, at(0), None, b""), allowed
        yield f"downgrade {hold}", c.DowngradeHold(hold, at(0), None, b""), allowed
        yield f"release {hold}", c.ReleaseHold(hold, b""), allowed


def every_command_with_its_rights() -> list[tuple[str, c.Command, str]]:
    """Each command, by a name for it, with the rights that it takes: `a+m` both, `a|m` one of them."""
    return [
        ("create", c.Create(SCHEMA), "a"),
        ("register to append", c.RegisterWriter(W2, "ingest", 60_000), "a"),
        ("register to maintain", c.RegisterWriter(W2, "maintenance", 60_000), "m"),
        ("register to read", c.RegisterReader(R2, 60_000), "r"),
        ("clone", c.CloneReader(R2, R, 60_000), "r"),
        ("compare and append", c.CompareAndAppend(W, b"a", BATCH, 0), "a"),
        ("append now", c.AppendNow(W, b"b", BATCH, 0, SeqNo(1)), "a"),
        ("append", c.Append(W, b"c", BATCH, 0), "a"),
        ("absorb", c.Absorb(W, b"d", BATCH, (), 0), "a"),
        ("discard", c.DiscardPending(()), "a|m"),
        ("renew a writer", c.Heartbeat((W,), 0), "a|m"),
        ("renew a reader", c.Heartbeat((R,), 0), "r"),
        ("downgrade a reader", c.DowngradeSince(R, at(0), SeqNo(1), 0), "r"),
        *_holds(),
        ("adopt", c.Adopt("c1/1", SeqNo(1)), "m"),
        ("inherit", c.Inherit(b"e", at(0), at(1), at(0), (), ()), "m"),
        ("forget a producer", c.ForgetProducer("p", 1), "m"),
        ("take numbers", c.Reserve("id", 1, 5), "a"),
        ("retention", c.SetRetention(5), "m"),
        ("retention of a layer", c.SetRetention(5, "catalog"), "m"),
        ("expire", c.Expire(0), "m"),
        ("retire a writer", c.Retire(W), "a|m"),
        ("retire a reader", c.Retire(R), "r"),
        ("compact", c.ApplyCompaction(W, ((0, 1),), BATCH), "m"),
        ("keep contents", c.KeepContents(W, BATCH), "m"),
        ("pin", c.PinKeys("delta", (KEY,), None, b""), "m"),
        ("unpin", c.Unpin("delta", b""), "m"),
        ("roll up", c.AddRollup(W, SeqNo(1), Rollup(PartKey("rollup/v1"), 1, b"")), "m"),
        ("forget garbage", c.ForgetGarbage((KEY,)), "m"),
        ("forget ids", c.ForgetRetired((W,)), "m"),
        ("evolve", c.EvolveSchema(0, SCHEMA), "a|m"),
        ("upgrade", c.Upgrade(4), "m"),
        ("finish", c.Finish(), "m"),
    ]


def is_allowed(allowed: str, rights: Iterable[str]) -> bool:
    """Whether these rights are enough."""
    letters = {right[0] for right in rights}
    holds: Callable[[str], bool] = letters.__contains__
    return any(map(holds, allowed.split("|")))
