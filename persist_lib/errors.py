"""Every exception Persist raises on purpose. docs/errors.md says what to do about each.

    PersistError
    ├── InvalidUsage       the call or a setting is wrong; raised at once, it did nothing
    ├── Refused            the shard answered no; nothing was written
    ├── Determinate        the world failed, and the call did certainly not happen
    ├── Indeterminate      the world failed, and the call may have happened
    ├── Damage             stop: stored data is not what was written
    └── NotFound, DiffOverflow, NotSent, NotReleased

Unknown failures of a store count as `Indeterminate`. Every message says what was asked, what is so, and what to do.
None holds a password: `redacted` keeps them out of what people read.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

# Greedy up to the last `@`, as a password may hold one, or a slash or a space, where it is not encoded as it should be.
# After a host that no `@` follows, digits are a port.
USERINFO = re.compile(r"(://[^\s:/@'\"]*):(?!\d+(?:[/?,'\"\s]|$)).*@", re.DOTALL)
OPTION = re.compile(r"((?:password|passphrase|secret|token)\w*=)[^&\s'\"]+", re.IGNORECASE)
STORE = re.compile(r"(\bstore=[a-z0-9+.]*)([^\s'\"]*)", re.IGNORECASE)
"""A URL within a URL, which may be quoted."""
HIDDEN = "***"


def redacted(text: str) -> str:
    """A URL, or a text with URLs in it, without passwords. Rather too little of it is left than too much."""
    if "://" in text:
        text = USERINFO.sub(rf"\1:{HIDDEN}@", text)
    return OPTION.sub(rf"\1{HIDDEN}", STORE.sub(_store, text)) if "=" in text else text


def _store(found: re.Match[str]) -> str:
    plain = unquote(unquote(found[2]))
    # One within one within one is no store's URL. It is left out whole, as there may be any number of them.
    if plain == found[2] or (not STORE.search(plain) and plain == redacted(plain)):
        return found[0]
    return f"{found[1]}:{HIDDEN}"


class PersistError(Exception):
    """Base of all of them. Fields are keyword arguments and stay readable as attributes. Passwords are left out."""

    def __init__(self, message: str, **fields: object) -> None:
        # Here, and not wherever a message is made: many quote a URL, or what some library had to say about it.
        self.message = redacted(message)
        super().__init__(self.message)
        self.fields = {name: redacted(value) if isinstance(value, str) else value for name, value in fields.items()}

    def __getattr__(self, name: str) -> Any:  # so that `mismatch.actual.time` type-checks in a user's program
        # Only called for names not found otherwise; `fields` may be missing while unpickling.
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(name)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.fields)


def _rebuild(kind: type[PersistError], message: str, fields: dict[str, object]) -> PersistError:
    return kind(message, **fields)


class InvalidUsage(PersistError):
    """The arguments are wrong, or what a store was opened with (a password, say). Trying again does not help."""


class SchemaMismatch(InvalidUsage):
    """The shard holds another schema, or the proposed one is not an additive change of it."""


class InvalidName(InvalidUsage):
    """A shard, hold or column name that cannot be used as one."""


class NotAuthenticated(InvalidUsage):
    """A shard server serves known clients only: no token was sent, or one that it does not know. It did nothing."""


class NotAllowed(InvalidUsage):
    """The client's token does not give the right to do this. The server did nothing. Fields: client, shard, needs."""


class Refused(PersistError):
    """The shard's state machine said no. Nothing was written."""


class UpperMismatch(Refused):
    """The shard's upper is not where the append starts; `[]`: it is closed. Fields: expected, actual (frontiers)."""


class AlreadyProduced(Refused):
    """The producer has appended this sequence number, or a higher one, so this call wrote nothing. Go on with the next.

    Fields: shard, producer, sequence (the one asked for), last (the producer's last), seqno and upper (where that one
    was committed, and the upper that it left). It is an error and no answer, as this call's updates may be others than
    those that were written then, and only the last number's seqno is known.
    """


class AlreadyWritten(Refused):
    """An event log has an event of this id with other bytes. It stays as it is. Field: id."""


class SinceViolation(Refused):
    """History before `since` has been given up. Fields: as_of, since."""


class LeaseExpired(Refused):
    """This id is retired for ever. Field: id.

    A write handle that is not closed registers again by itself at its next call. A reader has to be opened again, as
    history that it held may be gone.
    """


class ConstraintViolated(Refused):
    """A constraint of the shard's schema would not hold at some time of the append, so nothing of it was written.

    Fields: shard, constraint (`unique` or `non_negative`), time (the first at which it would not hold), count (of the
    keys or rows that break it then), rows (the first few of them, as dicts of columns with `_diff`, their multiplicity
    at that time).
    """


class Unpublishable(InvalidUsage):
    """A table that a format of other engines cannot say, or not as asked. Nothing was published.

    Fields: table, columns (those whose types the format does not have), as_ (the format).
    """


class HoldConflict(Refused):
    """The hold's fencing value is another one. Fields: name, expected, actual (None: there is no such hold)."""


class GivesUpHistory(Refused):
    """Setting or moving a hold would give up history that is kept now. Nothing was changed.

    Fields: hold, asked, since (of the shard), newest (the latest since with which anything can be read; frontiers).
    `client.downgrade_hold` gives history up, and has a dry run. It does not go beyond `newest` either.
    """


class OfLayer(Refused):
    """The shard belongs to a layer (collections, streams, sources, event logs), which alone appends to it.

    Nothing was written. Field: layer.
    """


class MemberOf(OfLayer):
    """The shard is a member of a collection, and takes this from that alone. Nothing was done.

    Fields: layer, collection (its id).
    """


class Locked(Refused):
    """The streams of the location have a writer already. Nothing was changed.

    Fields: epoch, owner (a text for people), lease_until (ms of the store's clock).
    """


class Fenced(Refused):
    """Another runtime took over the streams of the location, or another writer an event log. This one writes no more.

    Fields: epoch (its own), found (the newest by now), owner (who has it, a text for people; of streams only).
    """


class NameTaken(Refused):
    """There is a collection of that name already. Field: collection."""


class HandoverRefused(Refused):
    """The rendition cannot be handed over to, or given up, as asked; nothing was changed. Field: collection."""


class WriteConflict(Refused):
    """Another transaction changed what this one changes, and was first. Run it again. Fields: table, keys (a few)."""


class DeletesForgotten(Refused):
    """Rows to upsert may be older than deletes of their keys that a table kept for a time and has forgotten.

    Nothing was written. Fields: table, column (by which changes are ordered), floor (the greatest of the deletes that
    are forgotten: rows beyond it are certainly not older), count (of the rows), keys (a few of them).
    """


class SchemaChanged(Refused):
    """A collection was handed over to a rendition whose rows cannot be given in the reader's columns.

    Fields: collection, time (from which on), actual and expected (schemas). Or the table of a source has other columns
    than were declared; field: where (from which message on).
    """


class Gone(Refused):
    """A source does not have messages any more that are still needed. Fields: partition, address."""


class Diverged(Refused):
    """A source's messages, or the rows that are made of them, are others than those that were committed before.

    Fields: partition and address, where the source gives something else; collection, time and rows (a few),
    and shard where it is one alone, where what was made of it differs. Of a pending area: a reader was given other
    updates than were absorbed, or than another writer has. Fields: collection, time, and keys of the batches.
    """


class CompactionRefused(Refused):
    """A compaction's output does not stand for its inputs, or these were replaced in the meantime. Field: reason."""


class Busy(Refused):
    """Another process is at maintenance work on this shard, and the caller asked to be alone. Nothing was changed.

    Fields: worker (its id), lease_until (ms of the store's clock), shard. It is done when its id is retired, and it is
    gone when its lease has ended.
    """


class Paused(Refused):
    """A duty is paused here, so it did not begin. Nothing was changed.

    Fields: shard (or a table), duty, owner (who paused it), until (ms of the store's clock, or None), says (all of it).
    """


class PlanMoved(Refused):
    """A shard is not as it was when a plan was made of it, or the plan was carried out before. Nothing was changed.

    Fields: shard, made (the seqno that it was made at), now (the shard's), why (what moved).
    """


class ShardFinished(Refused):
    """The shard is a tombstone. It can neither be read nor written, and never comes back."""


class StillRead(Refused):
    """A live reader or a hold still needs the shard. Field: by."""


class NotFound(PersistError):
    """There is no such location, shard or table. Of a table that was renamed, the field `renamed` is its name now."""


class DiffOverflow(PersistError):
    """An exact sum of diffs does not fit in a signed 64-bit integer."""


class NotSent(PersistError):
    """An append that this handle accepted earlier failed. Nothing of this one was written. Field: earlier (why)."""


class NotReleased(PersistError):
    """The event is in the log, and the loop stopped before all its effects were released. The next start releases them.

    Do not submit the event again. Fields: event_id, and number if it is known which effect could not be released. The
    cause is what `step` or `release` raised, if it was this event.
    """


class Determinate(PersistError):
    """A store failed, and the operation certainly did not happen."""


class TimedOut(Determinate):
    """The caller's timeout ran out before the thing waited for came about. Field: timeout_s."""


class NotComplete(TimedOut):
    """The contents as of a time at or beyond upper were asked for: a write there may still come, and change them.

    Older contents are never given in their place, unless they are asked for. Fields: as_of, upper (from which time on
    nothing is complete), timeout_s (for how long the call has waited for it).
    """


class ClockAhead(Determinate):
    """A clock is far ahead of another one, or the times that it once gave are. Nothing was written.

    What is written at such a time would put off all that follows. Fields: found and clock (ms since 1970).
    """


class DiskFull(Determinate):
    """There is no room for what was to be written, so it was not. It is not tried again. Fields: path, free (bytes)."""


class BufferFull(Determinate):
    """A writer has accepted as much as it may before it is written. Fields: size, waiting, most (bytes)."""


class Overloaded(Determinate):
    """A shard server has as much work waiting as it takes, or is stopping. It did nothing.

    Another server, or the store itself, may serve the call, and this one after a while. Fields: shard, waiting, most.
    """


class Indeterminate(PersistError):
    """A store failed, and the operation may or may not have happened."""


class Damage(PersistError):
    """Stored data is not what was written. Nothing more is done with it."""


class Corrupt(Damage):
    """Bytes do not match their digest or do not decode. Fields: key, expected, actual."""


class Missing(Damage):
    """An object that a live state refers to is not there. Field: key."""


class NewerFormat(Damage):
    """Written by a newer release of Persist; upgrade before touching it. Fields: found, known."""


class HistoryRegressed(Damage):
    """The log is older than what this client has already seen, or its files were replaced. Fields: seen, head, path."""


class InvariantViolated(Damage):
    """A state breaks its own invariants. Field: broken (one sentence each)."""
