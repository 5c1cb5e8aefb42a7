"""What always holds from one version of a shard to the next, beyond what each state says of itself, as code."""

from __future__ import annotations

from collections.abc import Collection

from persist_lib.core.state import State
from persist_lib.ids import SeqNo

APPENDS = frozenset({"CompareAndAppend", "Append", "Absorb"})
MOVES_UPPER = APPENDS | {"Inherit"}
"""Commands after which upper may be another one: a rendition shard takes over how far a shard was."""
REWRITES = frozenset({"ApplyCompaction", "KeepContents"})
KEEP_SINCE = REWRITES | {"Expire", "Retire", "Heartbeat"}


def history_problems(old: State, new: State, seqno: SeqNo, commands: Collection[str] | None = None) -> list[str]:
    """Say what is wrong with `new` at `seqno` as what follows `old`, a sentence each.

    `commands` are those of the row in between that changed something; None: that is not known.
    """
    since, before = new.seqno_since(seqno), old.seqno_since(SeqNo(seqno - 1))
    found = [] if before <= since else [f"seqno_since went back, from {before} to {since}"]
    if not (old.since <= new.since and old.upper <= new.upper):
        found.append(f"since or upper went back, from {old.since}, {old.upper} to {new.since}, {new.upper}")
    for id_ in old.readers.keys() & new.readers.keys():
        was, is_ = old.readers[id_], new.readers[id_]
        if not (was.since <= is_.since and was.seqno <= is_.seqno):
            found.append(f"{id_} holds what it had given up")
    found += [f"{id_} came back" for id_ in old.retired if id_ in new.writers or id_ in new.readers]
    if not (old.appended_bytes <= new.appended_bytes and old.maintained_bytes <= new.maintained_bytes):
        found.append("the bytes ever written went back")
    return found + _by_commands(old, new, set(commands or ()), is_known=commands is not None)


def _by_commands(old: State, new: State, done: set[str], *, is_known: bool) -> list[str]:
    """What is wrong with what such commands changed."""
    found, named = [], ", ".join(sorted(done))
    if not done & MOVES_UPPER and not new.is_finished() and old.upper != new.upper:
        found.append("upper moved without an append")
    if not done & APPENDS and not new.is_finished() and old.fingerprint != new.fingerprint:
        found.append("the contents changed without an append")
    if not is_known:
        return found
    if not done & APPENDS and old.appended_bytes != new.appended_bytes:
        found.append(f"{named} counts as an append")
    if not done & REWRITES and old.maintained_bytes != new.maintained_bytes:
        found.append(f"{named} counts as a compaction")
    if done <= KEEP_SINCE and old.since != new.since:
        found.append(f"since jumped from {old.since} to {new.since} in {named}")
    return found
