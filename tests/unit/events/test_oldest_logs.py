"""Logs that the first version wrote, as files: later releases read them, continue them, and write the same bytes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from persist_lib.events import open_store
from persist_lib.events.api import EVENTS
from persist_lib.events.log import cut
from persist_lib.events.record import NOTHING
from persist_lib.events.stores.segments import HEADER_BYTES, encode_frame, encode_header

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "events_v1"
PAYLOADS = [b"event %d of the first version " % id_ * (1 if id_ % 2 else 5) for id_ in range(1, 5)]
"""Two writers wrote two of them each. Every second one is in fragments."""


@pytest.mark.parametrize("kind", ["disk", "sqlt"])
def test_a_log_of_the_first_version_is_read_and_goes_on(kind: str, tmp_path: Path) -> None:
    if kind == "disk":
        shutil.copytree(GOLDEN / kind, tmp_path / kind)
    else:
        shutil.copy(GOLDEN / kind, tmp_path / kind)
    store = open_store(f"{kind}:{tmp_path / kind}:limit=100")
    with store.reader() as reader:
        assert [bytes(event.payload) for event in reader.replay()] == PAYLOADS
        assert reader.newest_snapshot() == (4, b"state after 4")
        assert reader.newest_snapshot(3) == (2, b"state after 2")
        assert reader.read_mark("released") == b'{"through":4}'
    with store.writer() as writer:
        assert (writer.last, writer.epoch) == (4, 3)
        writer.write(4, PAYLOADS[3]).result(60)
        writer.write(5, b"new").result(60)
    with store.reader() as reader:
        assert [bytes(event.payload) for event in reader.replay()] == [*PAYLOADS, b"new"]


def test_this_release_writes_the_bytes_of_the_first_version() -> None:
    """Otherwise a new version of the format is due, which older releases refuse."""
    log, previous = bytes.fromhex(json.loads((GOLDEN / "disk" / "format.json").read_bytes())["log"]), NOTHING
    for epoch, first in ((1, 1), (2, 3)):
        found = (GOLDEN / "disk" / "events" / f"{epoch:010d}-{first:020d}").read_bytes()
        expected = encode_header(log, epoch, first)
        assert len(expected) == HEADER_BYTES
        for batch, id_ in enumerate((first, first + 1)):
            payload = PAYLOADS[id_ - 1]
            puts, previous = cut(
                EVENTS, id_, payload, log=log, epoch=epoch, previous=previous, limit=100
            )  # fmt: skip
            for put in puts:
                expected += encode_frame(put, batch, is_last=put is puts[-1]) + put.head + bytes(put.body)
        assert found == expected
