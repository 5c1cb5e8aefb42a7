"""What scrubs remember of a shard, in its location: which batches were found sound, and which damaged, since when.

Each scrub that found something new writes one object, and then deletes those that it read before. So there is one at
rest. Readers take all that they find together, and damage wins. A scrub that dies between the two steps, and two scrubs
at once, leave several objects, but never lose a mark of damage.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import msgspec

from persist_lib.errors import Corrupt, NewerFormat, PersistError
from persist_lib.format.paths import MARKS, WALKED, has_damage, marks_key, marks_prefix, walked_key
from persist_lib.format.scrub_marks import MARKS_FORM, WALKED_FORM, Mark, Marks, Walked
from persist_lib.ids import SeqNo, ShardId
from persist_lib.location.api import Blob
from persist_lib.shard.commit import Machine

log = logging.getLogger("persist.scrub")
LOOKS = 5
"""How often the objects are listed again when another scrub deleted one of them before it was read."""


class Remembered(msgspec.Struct, frozen=True):
    """All that the scrubs of a shard remember together. An identity is never in both `sound` and `damaged`.

    `keys` are the objects that a new one may replace. `unreadable` says why some could not be read; empty: all were.
    `seqno` is the newest version that any of them has seen.
    """

    sound: frozenset[bytes] = frozenset()
    damaged: Mapping[bytes, Mark] = {}
    seqno: SeqNo = SeqNo(0)
    keys: tuple[str, ...] = ()
    unreadable: str = ""
    walked: tuple[str, ...] = ()
    """The keys of the verdicts on the log, which are read only where they are asked for."""

    def is_exactly(self, marks: Marks) -> bool:
        """Whether one object, or none for no marks, says the same as `marks`."""
        objects = 1 if marks.sound or marks.damaged else 0
        same = self.sound == set(marks.sound) and set(self.damaged.values()) == set(marks.damaged)
        return same and len(self.keys) == objects and not self.unreadable


def recall(blob: Blob, shard: ShardId) -> Remembered:
    """Return what scrubs remember of the shard: one listing, and one object or a few. Raises nothing.

    What cannot be read is named in `unreadable`; then nothing counts as sound.
    """
    try:
        for _ in range(LOOKS):
            listed = [entry.key for entry in blob.list(marks_prefix(shard))]
            if (found := _read(blob, [key for key in listed if has_damage(key) is not None])) is not None:
                return msgspec.structs.replace(found, walked=tuple(key for key in listed if key.endswith(WALKED)))
    except PersistError as error:
        return Remembered(unreadable=error.message)
    return Remembered(unreadable=f"other scrubs replaced it while it was read, {LOOKS} times")


def remember(machine: Machine, marks: Marks, replaces: Sequence[str]) -> tuple[str, ...]:
    """Store `marks`, then delete the objects `replaces`. Returns the keys that hold what is remembered now.

    Without any marks it only deletes. The objects are deleted last. A scrub that dies in between leaves them,
    and the next one reads and replaces them all.
    """
    keys: tuple[str, ...] = ()
    if marks.sound or marks.damaged:
        now, entropy = machine.consensus.now(), machine.runtime.entropy()
        keys = (marks_key(machine.shard, now, entropy, is_damaged=bool(marks.damaged)),)
        machine.blob.set(keys[0], MARKS_FORM.encode(marks))
    return (*keys, *_replaced(machine, replaces))


def recall_walked(blob: Blob, known: Remembered) -> tuple[Walked | None, tuple[str, ...]]:
    """Return the verdict on the log that came furthest, and the objects that a new one may replace. Raises nothing.

    None where no object can be read. What a newer release wrote is left to it.
    """
    found, replaceable = list[Walked](), list[str]()
    for key in known.walked:
        try:
            if (data := blob.get(key)) is not None:
                found.append(WALKED_FORM.decode(data, key))
        except PersistError as error:
            log.info("%s is left out: %s", key, error)
            if not isinstance(error, Corrupt):
                continue
        replaceable.append(key)
    return max(found, key=lambda walked: walked.seqno, default=None), tuple(replaceable)


def remember_walked(machine: Machine, walked: Walked, replaces: Sequence[str]) -> None:
    """Store a verdict on the log, then delete those that it replaces."""
    key = walked_key(machine.shard, machine.consensus.now(), machine.runtime.entropy())
    machine.blob.set(key, WALKED_FORM.encode(walked))
    _replaced(machine, replaces)


def _replaced(machine: Machine, keys: Sequence[str]) -> Sequence[str]:
    """Delete objects that another one replaces. Returns those that could not be."""
    failed: Mapping[str, Exception] = {}
    if keys:
        try:
            failed = machine.blob.delete_many(list(keys))
        except PersistError as error:
            failed = dict.fromkeys(keys, error)
    for key, why in failed.items():
        log.info("shard %s: %s is replaced, and could not be deleted yet: %s", machine.shard, key, why)
    return tuple(failed)


def known_damage(blob: Blob, shards: Sequence[ShardId]) -> dict[ShardId, Remembered]:
    """Return what scrubs remember of each of these shards that was ever scrubbed; of sound ones only the `keys`.

    One listing, of one shard or of all. Only what names damage is read. `unreadable` says where that failed.
    """
    start = marks_prefix(shards[0]) if len(shards) == 1 else MARKS
    keys: dict[str, list[str]] = {}
    for entry in blob.list(start):
        if has_damage(entry.key) is not None:
            keys.setdefault(entry.key[: entry.key.rindex("/") + 1], []).append(entry.key)
    found = {}
    for shard in shards:
        if (marked := keys.get(marks_prefix(shard))) is not None:
            found[shard] = recall(blob, shard) if any(map(has_damage, marked)) else Remembered(keys=tuple(marked))
    return found


def _read(blob: Blob, keys: Sequence[str]) -> Remembered | None:
    """What these objects say together; None if one of them is gone."""
    found: list[Marks] = []
    replaceable, problems = [], []
    for key in keys:
        if (data := blob.get(key)) is None:
            return None
        try:
            found.append(MARKS_FORM.decode(data, key))
        except Corrupt as error:
            problems.append(error.message)
        except NewerFormat as error:  # left for the programs that can read it
            problems.append(error.message)
            continue
        replaceable.append(key)
    damaged = _together(found)
    sound = frozenset(identity for marks in found for identity in marks.sound) - damaged.keys()
    seqno = max((marks.seqno for marks in found), default=SeqNo(0))
    return Remembered(
        frozenset() if problems else sound, damaged, seqno, tuple(replaceable), "; ".join(problems)
    )  # fmt: skip


def _together(found: Sequence[Marks]) -> dict[bytes, Mark]:
    """All marks of damage, by identity: the words of the newest, and the moment of the oldest."""
    damaged: dict[bytes, Mark] = {}
    for marks in sorted(found, key=lambda marks: marks.seqno):
        for mark in marks.damaged:
            before = damaged.get(mark.identity, mark)
            damaged[mark.identity] = msgspec.structs.replace(mark, since=min(mark.since, before.since))
    return damaged
