r"""Event logs in object stores: `s3:URL`, as in `s3:s3\://bucket/ledger`, or `gs:`, `az:`.

The options are those of a location's URL.

One object at a time is written, on a condition: that it is not there, or that it is as it was read.

    epoch/<epoch>                     the claim of a writer
    events/<id>/<fragment>            the records
    <space>/<id>/<fragment>           snapshots and marks
    hint                              an event that is part of the log, from which the end is looked for

A record belongs to the log if the one before it does, and it follows that one. There are no transactions, so a claim
alone keeps no writer out: a predecessor's record can still arrive. SUBTLE: after the claim a writer therefore occupies
the place behind the last event with a fence. If it finds the predecessor's event there instead, that one is part of the
log, and it continues with the next place. Once the fence stands, the predecessor can write no event that follows the
last one, so it acknowledges nothing more: what still arrives from it behind the fence follows an event that never came.
The writer replaces its own fence by its first event, and what others left behind it, only if it is still as it was
read, and only if its epoch is lower. So a writer that was itself fenced in the meantime replaces nothing.
`tests/unit/events/test_fence_model.py` looks at all interleavings of this, and at what goes wrong without each rule.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, wait
from functools import partial
from itertools import islice
from typing import NamedTuple

from persist_lib.arguments import UNPARSED
from persist_lib.errors import Corrupt, Determinate, Fenced, Indeterminate, InvalidUsage, Missing, NotFound
from persist_lib.events.api import EVENTS, Held, Key, Kind, Opening, Put
from persist_lib.events.record import (
    EVENT,
    FENCE,
    LONGEST_HEAD,
    NOTHING,
    Label,
    check_follows,
    damaged,
    decode_head,
    encode_head,
    name_of,
)
from persist_lib.events.stores.shared import Objects, encode_meta, fenced, open_meta
from persist_lib.location.api import Object
from persist_lib.location.objects.store import CloudObjects, create_marker, objects_at
from persist_lib.location.objects.target import CLOUDS
from persist_lib.runtime.ambient import Runtime

MARKER = "events.json"
LIMIT = 64 << 20
THREADS = 16
HINT_EVERY = 64
AHEAD = 32
"""How many events are read ahead."""
BEYOND = 16
"""How many records behind the end are looked at, whether something is missing."""
PAGE = 1000
"""How many names are listed at a time."""
HINT = "hint"
CLAIMS = "epoch"


class Tail(NamedTuple):
    """The last event of the log, its digest and epoch."""

    last: int = 0
    digest: bytes = NOTHING
    epoch: int = 0


class ObjectRecords:
    """See `api.RecordStore`."""

    def __init__(self, objects: Objects, log: bytes, runtime: Runtime) -> None:
        self.limit: int | None = LIMIT
        self.log = log
        self._objects, self._where, self._runtime = objects, objects.where, runtime
        self._pool: Executor = runtime.pool(THREADS, "persist-events")
        self._tail: Tail | None = None
        self._epoch = 0
        self._versions: dict[str, str] = {}
        """Of what is there and is to be replaced: this writer's own fence."""
        self._put_last = self._hinted = 0
        self._put_digest = NOTHING

    def claim(self, owner: str) -> int:
        claims = self._objects.names(f"{CLAIMS}/")
        epoch = max((int(name.rpartition("/")[2]) for name in claims), default=0) + 1
        body = json.dumps({"owner": owner, "claim": f"{self._runtime.entropy():016x}"}).encode()
        while not self._objects.put(name := f"{CLAIMS}/{epoch:010d}", body, None):
            if (found := self._objects.get(name)) is not None and found[0] == body:
                break  # by our own request, whose answer was lost
            epoch += 1
        self._epoch = epoch
        tail = self._walk()
        if tail.epoch > epoch:
            raise self._fenced(tail.epoch)
        self._tail = self._fence(tail)
        return epoch

    def _fence(self, tail: Tail) -> Tail:
        """Occupy the place behind the last event, and return that event: there may be more than were seen before."""
        while True:
            key = Key(EVENTS, tail.last + 1, 0)
            fence = encode_head(key, 1, FENCE, self.log, self._epoch, tail.digest, b"")
            found = self._occupy(key, fence, tail)
            if found is None:
                return tail
            tail = Tail(key.id, found.digest, found.epoch)

    def _occupy(self, key: Key, fence: bytes, tail: Tail) -> Label | None:
        """Put the fence there, or return the event that was there first."""
        name, version = _name(key), None
        while True:
            if self._objects.put(name, fence, version):
                break
            found = self._objects.get(name)
            if found is None:
                version = None
                continue
            data, version = found
            if data == fence:
                break
            label = self._label(key, data)
            if label.epoch > self._epoch:
                raise self._fenced(label.epoch)
            if self._is_next(tail, label):
                return label
        there = self._objects.get(name)
        if there is None or there[0] != fence:
            raise self._fenced(self._newest_epoch())
        self._versions[name] = there[1]
        return None

    def _is_next(self, tail: Tail, label: Label) -> bool:
        """Whether a record at the place behind the last event is an event that follows it."""
        if label.kind != EVENT or label.epoch < tail.epoch:
            return False
        check_follows(label, tail.digest, tail.epoch, f"event {label.id} of {self._where}")
        return True

    def _label(self, key: Key, data: bytes) -> Label:
        what = name_of(key, self._where)
        label, _ = decode_head(memoryview(data), what)
        if label.log != self.log or label.id != key.id or label.fragment != key.fragment:
            raise damaged(what, f"it is of log {label.log.hex()}, id {label.id}, fragment {label.fragment}")
        return label

    def _fenced(self, found: int) -> Fenced:
        return fenced(self._where, self._epoch, found, is_certain=False)

    def _newest_epoch(self) -> int:
        after = f"{CLAIMS}/{self._epoch:010d}"
        newer = self._objects.names(f"{CLAIMS}/", after)
        return max((int(name.rpartition("/")[2]) for name in newer), default=self._epoch)

    def last(self) -> int:
        if self._epoch == 0:
            self._tail = self._walk()
        return 0 if self._tail is None else self._tail.last

    def _walk(self) -> Tail:
        """Find the last event, from one that is known to be part of the log."""
        tail = self._tail or self._read_hint()
        while True:
            names = list(islice(self._events_after(tail.last), AHEAD))
            ids = [id_ for at, id_ in enumerate(names) if id_ == tail.last + 1 + at]
            found = self._pool.map(self._head, [Key(EVENTS, id_, 0) for id_ in ids])
            for id_, label in zip(ids, found, strict=True):
                if label is not None and label.epoch > (self._epoch or label.epoch):
                    # A slow writer that continued behind a newer one's events would take its place from it.
                    raise self._fenced(label.epoch)
                if label is None or not self._is_next(tail, label):
                    self._check_beyond(tail, tail.epoch if label is None else max(tail.epoch, label.epoch), id_)
                    return tail
                tail = Tail(id_, label.digest, label.epoch)
            if len(ids) < AHEAD:
                if len(ids) < len(names):
                    self._check_beyond(tail, tail.epoch, tail.last + 1)
                return tail

    def _head(self, key: Key) -> Label | None:
        found = self._objects.get(_name(key), LONGEST_HEAD)
        return None if found is None else self._label(key, found[0])

    def _events_after(self, id_: int) -> Iterator[int]:
        """The ids of which fragment 0 is there, ascending."""
        after = f"{EVENTS}/{id_:020d}/~"
        while names := self._objects.names(f"{EVENTS}/", after, PAGE):
            yield from (int(name.split("/")[1]) for name in names if name.endswith(f"/{0:010d}"))
            if len(names) < PAGE:
                return
            after = names[-1]

    def _check_beyond(self, tail: Tail, epoch: int, place: int) -> None:
        """Raise Missing if a later writer wrote behind a place that has no event: it had found one there."""
        for id_ in islice(self._events_after(place), BEYOND):
            label = self._head(Key(EVENTS, id_, 0))
            if label is not None and label.epoch > epoch:
                raise Missing(
                    f"event {tail.last + 1} of {self._where} is missing: there is no event behind {tail.last}, and "
                    f"event {id_} was written later. Nothing was changed; restore it from a copy",
                    key=f"{tail.last + 1}:0",
                )

    def _read_hint(self) -> Tail:
        found = self._objects.get(HINT)
        if found is None:
            return Tail()
        try:
            hint = json.loads(found[0])
            tail = Tail(int(hint["last"]), bytes.fromhex(hint["digest"]), int(hint["epoch"]))
        except (*UNPARSED, KeyError, TypeError) as error:
            raise Corrupt(f"{HINT} of {self._where} is damaged: {error}. It may be deleted", key=HINT) from error
        label = self._head(Key(EVENTS, tail.last, 0))
        if label is None:
            raise Missing(
                f"event {tail.last} of {self._where} is missing, and it was there when {HINT} was written. Nothing was "
                "changed; restore it from a copy",
                key=f"{tail.last}:0",
            )
        if (label.digest, label.epoch) != (tail.digest, tail.epoch):
            raise damaged(f"event {tail.last} of {self._where}", "it is another one than was there before")
        return tail

    def discard(self, epoch: int, last: int) -> None:
        """Nothing: the fence, and then the event in its place, say that what lies beyond is of no account."""
        if epoch != self._epoch or self._tail is None or last != self._tail.last:
            raise self._fenced(self._newest_epoch())
        self._hinted = self._put_last = last
        self._put_digest = self._tail.digest

    def put(self, epoch: int, puts: Sequence[Put]) -> None:
        if epoch != self._epoch:
            raise self._fenced(self._newest_epoch())
        events = [put for put in puts if put.key.space == EVENTS]
        notes = [put for put in puts if put.key.space != EVENTS]
        self._put_all(events)
        if events:
            self._put_last, self._put_digest = events[-1].key.id, events[-1].head[-16:]
            if self._put_last >= self._hinted + HINT_EVERY:
                self._write_hint()
        if notes and (newer := self._newest_epoch()) != self._epoch:
            raise self._fenced(newer)
        self._put_all(notes)

    def _write_hint(self) -> None:
        hint = {"last": self._put_last, "digest": self._put_digest.hex(), "epoch": self._epoch}
        self._objects.overwrite(HINT, json.dumps(hint).encode())
        self._hinted = self._put_last

    def _put_all(self, every: Sequence[Put]) -> None:
        """Put them side by side, fragment 0 last. All have ended when this returns, or raises the error of one."""
        for puts in ([put for put in every if put.key.fragment], [put for put in every if not put.key.fragment]):
            if len(puts) == 1:
                self._settle(puts[0])
                continue
            done = [self._pool.submit(self._settle, put) for put in puts]
            wait(done)
            errors = [error for future in done if (error := future.exception()) is not None]
            for error in sorted(errors, key=lambda error: not isinstance(error, Fenced)):
                raise error

    def _settle(self, put: Put) -> None:
        name, data = _name(put.key), b"".join((put.head, put.body))
        version = self._versions.pop(name, None)
        while not self._objects.put(name, data, version):
            found = self._objects.get(name)
            version = None if found is None else found[1]
            if found is not None and self._is_there(put.key, found[0], data):
                return

    def _is_there(self, key: Key, found: bytes, data: bytes) -> bool:
        """Whether what is there is what was to be put; False if it may be replaced."""
        if found == data:  # by our own request, whose answer was lost
            return True
        label = self._label(key, found)
        if label.epoch > self._epoch:
            raise self._fenced(label.epoch)
        if label.epoch == self._epoch and label.kind == EVENT and key.space == EVENTS:
            raise damaged(name_of(key, self._where), "this writer wrote it, and other bytes are there")
        return False

    def get(self, key: Key) -> Held | None:
        if (found := self._objects.get(_name(key))) is None:
            return None
        record = memoryview(found[0])
        may_be_fence = key.space == EVENTS and not key.fragment and len(record) <= LONGEST_HEAD
        if may_be_fence and decode_head(record, name_of(key, self._where))[0].kind == FENCE:
            return None
        return Held(key, record)

    def scan(self, from_id: int, through: int) -> Iterator[Held]:
        for start in range(from_id, through + 1, AHEAD):
            keys = [Key(EVENTS, id_, 0) for id_ in range(start, min(start + AHEAD, through + 1))]
            for held in self._pool.map(self.get, keys):
                if held is not None:
                    label, _ = decode_head(held.record, name_of(held.key, self._where))
                    yield held
                    yield from self._others(label)

    def _others(self, first: Label) -> Iterator[Held]:
        for start in range(1, first.fragments, AHEAD):
            end = min(start + AHEAD, first.fragments)
            keys = [Key(EVENTS, first.id, fragment) for fragment in range(start, end)]
            yield from (held for held in self._pool.map(self.get, keys) if held is not None)

    def ids(self, space: str) -> list[int]:
        names = self._objects.names(f"{space}/")
        return [int(name.split("/")[1]) for name in names if name.endswith(f"/{0:010d}")]

    def remove(self, epoch: int, space: str, below: int) -> None:
        if epoch != self._epoch:
            raise self._fenced(self._newest_epoch())
        names = self._objects.names(f"{space}/")
        old = [name for name in names if int(name.split("/")[1]) < below]
        # Fragment 0 first: what is left without it counts as discarded.
        for part in ([n for n in old if n.endswith(f"/{0:010d}")], [n for n in old if not n.endswith(f"/{0:010d}")]):
            if part:
                self._objects.delete(part)

    def close(self) -> None:
        try:
            if self._put_last > self._hinted:
                self._write_hint()
        except (Determinate, Indeterminate):
            pass  # it only saves requests
        finally:
            self._pool.shutdown()
            self._objects.close()


def _name(key: Key) -> str:
    return f"{key.space}/{key.id:020d}/{key.fragment:010d}"


def open_log(scheme: str, options: Sequence[str], opening: Opening) -> ObjectRecords:
    """Open a log: `s3:URL`, or of another cloud."""
    if len(options) != 1 or not options[0].startswith(f"{scheme}://"):
        raise InvalidUsage(
            rf"a store of events on {CLOUDS[scheme].name} is {scheme}:URL, with \: for each colon in the URL, as in "
            rf"{scheme}:{scheme}\://{CLOUDS[scheme].bucket}/ledger"
        )
    objects = objects_at(options[0])
    try:
        found = objects.get(MARKER, f"read {MARKER!r}")
        if found is None:
            if not opening.create:
                raise NotFound(f"there is no event log at {objects.where}. Check the URL; a writer makes one")
            found = _create(objects, opening)
        meta = open_meta(found.data, objects.where)
        return ObjectRecords(Objects(objects, opening.runtime), meta, opening.runtime)
    except BaseException:
        objects.close()
        raise


def _create(objects: CloudObjects, opening: Opening) -> Object:
    """Make the marker. Another writer may have made it before."""
    there, _ = objects.page("", "list ''", page=1)
    if there and there[0].name != MARKER:
        raise InvalidUsage(
            f"{objects.where} holds other objects ({there[0].name}), and no event log. Choose another prefix"
        )
    create_marker(objects, MARKER, encode_meta(opening.runtime), objects.where, replaces=True)
    found = objects.get(MARKER, f"read {MARKER!r}")
    if found is None:
        raise NotFound(f"{MARKER} of {objects.where} was deleted while the event log was made")
    return found


KINDS = {scheme: Kind(partial(open_log, scheme)) for scheme in CLOUDS}
