"""The same for streams and pending areas: what of them is interrupted, and what must be so afterwards."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import persist_lib as persist
from persist_lib import pending_area, streams
from tests.interrupts.scenes import PROMPT_S, Call, Scene, elsewhere, promptly
from tests.streaming import all_of, update
from tests.worlds import SCHEMA, row

FAILED = (persist.Indeterminate, persist.Fenced, persist.InvalidUsage, persist.NotSent)
"""What a runtime says that does not know any more what is there, or was stopped. The next one finds out."""


def _stream(scene: Scene) -> None:
    scene.begin()
    _open(scene)


def _open(scene: Scene) -> None:
    scene.second = streams.open(scene.client, reentrance_id="console")
    scene.writer, scene.reader = scene.second.create_or_load(f"{scene.shard}-s", SCHEMA)


def _write_and_seal(scene: Scene) -> None:
    scene.writer.write([update(1, 5), update(2, 9)])
    scene.writer.seal(6).result(PROMPT_S)


def _check_stream(scene: Scene) -> None:
    """All of the write or nothing; the runtime continues, or says that it cannot and the next one does."""
    with promptly("what was queued"), suppress(*FAILED):
        scene.second.flush(timeout=PROMPT_S)
    with promptly("the next write"):
        try:
            scene.writer.write([update(3, 50)]).result(PROMPT_S)
        except FAILED:
            with suppress(persist.PersistError):
                scene.second.stop(timeout=PROMPT_S)
            elsewhere(lambda: _open(scene))
            scene.writer.write([update(3, 50)]).result(PROMPT_S)
    written = {(1, "w", 5): 1, (2, "w", 9): 1}
    assert all_of(scene.reader) in ({(3, "w", 50): 1}, {**written, (3, "w", 50): 1})
    assert scene.writer.upper in {persist.at(0), persist.at(6)}
    scene.reader.close()
    with promptly("stop"):
        scene.second.stop(timeout=PROMPT_S)


def _begun(scene: Scene) -> None:
    """A stream that has sealed and unsealed updates, and a listener that has heard none of them."""
    _stream(scene)
    _write_and_seal(scene)
    scene.listen = scene.reader.listen(0, ahead="durable", until=6, timeout=PROMPT_S)


def _hear(scene: Scene) -> None:
    for event in scene.listen:
        scene.heard.append(event)


def _check_heard(scene: Scene) -> None:
    """All that came adds up to what there is, or it was said from where to listen again."""
    try:
        _hear(scene)
    except persist.Determinate as error:
        if error.fields["frontier"] != persist.at(1):
            raise
        with scene.reader.listen(0, ahead="durable", until=6, timeout=PROMPT_S) as again:
            scene.heard = list(again)
    scene.listen.close()
    found = [(type(one).__name__, number) for one in scene.heard for number in _ids(one)]
    assert sorted(found) == [("Unsealed", 2), ("Updates", 1)], scene.heard
    scene.reader.close()
    scene.second.stop(timeout=PROMPT_S)


def _ids(event: Any) -> list[int]:
    return event.table.column("id").to_pylist() if hasattr(event, "table") else []


def _pending(scene: Scene) -> None:
    scene.begin()
    pending_area.create(scene.client, f"{scene.shard}-p", SCHEMA).close()
    scene.writer = pending_area.Writer(scene.location.url, f"{scene.shard}-p", "edge", SCHEMA)


def _put(scene: Scene) -> None:
    scene.writer.put([row(1, time=0), row(2, time=1)], 0, 2, timeout=PROMPT_S)


def _two_put(scene: Scene) -> None:
    _pending(scene)
    _put(scene)
    scene.writer.put([row(3, time=2)], 2, 3)


def _absorb(scene: Scene) -> None:
    pending_area.absorb(scene.client, f"{scene.shard}-p")


def _listen(scene: Scene) -> None:
    with pending_area.acquire_read_handle(scene.client, f"{scene.shard}-p") as read:
        assert read.contents(2, timeout=PROMPT_S).num_rows == 3


def _check_pending(scene: Scene) -> None:
    """The same again changes nothing, and all of it is absorbed once."""
    _put(scene)
    scene.writer.put([row(3, time=2)], 2, 3)
    with promptly("absorb"):
        _absorb(scene)
    with scene.other.open_reader(f"{scene.shard}-p") as read:
        assert read.snapshot(2).to_arrow().column("id").to_pylist() == [1, 2, 3]
    scene.writer.close()


def _reopened(scene: Scene) -> None:
    """Whatever became of the first runtime, the next one takes over at once."""
    if scene.second is not None:
        with suppress(persist.PersistError):
            scene.second.stop(timeout=PROMPT_S)
    if scene.reader is not None:
        scene.reader.close()
    with promptly("open again"):
        elsewhere(lambda: _open(scene))
    _check_stream(scene)


CALLS = {
    "open streams": Call(_open, check=_reopened),
    "write and seal a stream": Call(_write_and_seal, prepare=_stream, check=_check_stream),
    "listen to a stream": Call(_hear, prepare=_begun, check=_check_heard),
    "stop streams": Call(lambda s: s.second.stop(timeout=PROMPT_S), prepare=_stream, check=_reopened),
    "put": Call(_put, prepare=_pending, check=_check_pending),
    "absorb": Call(_absorb, prepare=_two_put, check=_check_pending),
    "read a pending area": Call(_listen, prepare=_two_put, check=_check_pending),
}
