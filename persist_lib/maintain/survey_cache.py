"""The looks at all shards, remembered in Blob: read by any process, written by the one that looked last.

Nothing depends on it. What cannot be read costs one look at each shard, and what cannot be written costs the next
process the same. Two processes that write at the same moment may forget which duties the other one has just done: those
are done once more.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from persist_lib.core.plan.look import Look
from persist_lib.errors import PersistError
from persist_lib.format.survey_cache import MEMORY_FORM, PREFIX, Memory, decode_memory, memory_key, memory_ms
from persist_lib.ids import SeqNo
from persist_lib.location.api import Blob
from persist_lib.location.wrap.deadline import within
from persist_lib.runtime.ambient import Runtime

log = logging.getLogger("persist.survey")
LEAST_CHANGED, LEAST_SHARE = 20, 0.02
LONGEST_MS = 600_000
"""It is written when so many looks have changed, at least this share of them, or when it is older than that."""
PATIENCE_S = 5.0
"""How long a failed request for it is tried again. A survey without it is slow, but right."""
ATTEMPTS = 2


class Known(NamedTuple):
    """What a process knows, and what it last found or wrote in Blob, under which key (empty: nothing was there)."""

    memory: Memory
    stored: Memory = Memory()
    key: str = ""


class Remembered:
    """The memory of a location. `known` is only ever replaced as a whole, so that threads and forks need no lock."""

    def __init__(self, blob: Blob, runtime: Runtime, settings: str, *, read_only: bool) -> None:
        self._blob = blob
        self._runtime = runtime
        self._settings = settings
        self._read_only = read_only
        self._has_told = False
        self.known = Known(Memory(settings))

    def recall(self, settings: str) -> Memory:
        """Return the newest memory, together with what this process knows. One listing, and a GET if it is new.

        Looks of other settings are not used.
        """
        if settings != self._settings:
            self._settings = settings
            self.known = Known(self._usable(self.known.memory))
        try:
            self.known, _ = within(self._runtime.deadline(PATIENCE_S), self._recall)
        except PersistError as error:
            self._tell("read", error)
        return self.known.memory

    def _recall(self) -> tuple[Known, list[str]]:
        keys: list[str] = []
        for _ in range(ATTEMPTS):  # an object that is gone was replaced by a newer one
            keys = [entry.key for entry in self._blob.list(PREFIX) if memory_ms(entry.key) is not None]
            newest = max(keys, default="")
            if not newest:
                return Known(self.known.memory), keys
            if newest == self.known.key:
                break
            if (data := self._blob.get(newest)) is not None:
                found = self._usable(decode_memory(data))
                return Known(merged(self.known.memory, found), found, newest), keys
        return self.known, keys

    def _usable(self, found: Memory | None) -> Memory:
        """The looks of other settings are not used. What was done is the same with any."""
        if found is None or found.settings == self._settings:
            return found or Memory(self._settings)
        looks = {name: Look(SeqNo(0), 0, done=look.done) for name, look in found.looks.items()}
        return Memory(self._settings, looks)

    def keep(self, memory: Memory, now: int, *, has_marks: bool) -> None:
        """Know `memory` from now on, and write it to Blob if that is worth it. `has_marks`: it says what was done."""
        known = self.known = self.known._replace(memory=memory)
        changed = sum(1 for name, look in memory.looks.items() if known.stored.looks.get(name) != look)
        changed += len(known.stored.looks.keys() - memory.looks.keys())
        changed += len(known.stored.failed.keys() ^ memory.failed.keys())
        is_recent = 0 <= now - (memory_ms(known.key) or 0) < LONGEST_MS
        is_little = changed < max(LEAST_CHANGED, LEAST_SHARE * len(memory.looks))
        if self._read_only or not changed or (is_recent and is_little and not has_marks):
            return
        try:
            self.known = within(self._runtime.deadline(PATIENCE_S), lambda: self._write(now))
        except PersistError as error:
            self._tell("write", error)

    def _write(self, now: int) -> Known:
        """Write what is known, and delete the older objects.

        Another process may have written since this one read. What it looked at and did counts as well.
        """
        (memory, _, _), older = self._recall()
        newest = max((memory_ms(key) or 0 for key in older), default=0)
        key = memory_key(max(now, newest + 1), self._runtime.entropy())  # a clock may have been wrong
        self._blob.set(key, MEMORY_FORM.encode(memory))
        if older:
            self._blob.delete_many(older)
        return Known(memory, memory, key)

    def _tell(self, what: str, error: PersistError) -> None:
        if not self._has_told:
            self._has_told = True
            log.info("could not %s the memory of the last survey; the next one looks at all shards: %s", what, error)


def merged(mine: Memory, found: Memory) -> Memory:
    """Of each shard the newer look, with what was done last of each duty. The settings are those of `mine`."""
    looks = dict(found.looks)
    for name, look in mine.looks.items():
        other = looks.get(name)
        looks[name] = look if other is None else _merged(look, other)
    failed = {**found.failed, **mine.failed}
    return Memory(mine.settings, looks, {name: why for name, why in failed.items() if _is_newer(why, looks.get(name))})


def _is_newer(failure: tuple[int, str], look: Look | None) -> bool:
    """Whether a shard failed after it was last looked at."""
    return look is None or failure[0] > look.looked_ms


def _merged(one: Look, other: Look) -> Look:
    newer, older = (one, other) if one.looked_ms >= other.looked_ms else (other, one)
    if newer.done == older.done:
        return newer
    return msgspec.structs.replace(newer, done=latest(newer.done, older.done))


def latest(
    one: Mapping[str, tuple[SeqNo, int]], other: Mapping[str, tuple[SeqNo, int]]
) -> dict[str, tuple[SeqNo, int]]:
    """Of each duty the mark that was set last."""
    return {**one, **{duty: mark for duty, mark in other.items() if duty not in one or mark[1] > one[duty][1]}}
