"""The formats of the log: their numbers, what each of them added, and which one a given change needs.

Rows and rollups carry the number of their format. A program reads every format up to `NEWEST`, and refuses a newer one
before it does anything. A shard's state says which format is written. Only `Upgrade` moves it, when every program of a
fleet knows the next one. To add a format: raise `NEWEST`, and enter here each field and each command that it adds.

    1   the first
    2   the state says its format (`Upgrade`) and remembers the outcomes of its last appends
    3   the state counts the bytes that appends and compactions wrote (rows say no more for that: `apply_diff` counts
        by what they say). A schema may say that its times are a clock, and may have constraints; a part may count at
        a time of its own; a state may remember producers; a writer may have an owner, and may remember which answers
        of tasks were appended under it. Only then are those fields there.
        A shard may have a pending area: `Absorb`, `DiscardPending`, `CloneReader`, and keys of adopted batches
    4   a row may hold several commands (`core.groups`). A seqno is then the state after all of them, and several
        outcomes may have the same seqno. States have the same fields as before
    5   the state says whose member the shard is (`Adopt`, `core.members`)
    6   the state may keep contents ahead of its trace (`KeepContents`). A schema may have nested columns, and decimals
        of more than 38 digits
    7   the state may name objects that something outside refers to (`PinKeys`, `Unpin`), and parts may stand below a
        publication's folder
    8   a schema may have columns that were renamed, widened or dropped, and defaults
    9   a part may say what its updates add up to, and then be of contents that are later than its times
    10  a schema may have columns that writers fill, and uuids
    11  a schema may show its columns in another order than that in which they are stored
    12  a part may say between which values those of its columns lie. A schema may have columns that count up, and the
        state says their next numbers (`Reserve`). A schema may have columns of JSON documents. Contents may be of
        several runs, and a batch that is rewritten alone as of a later since, too

SUBTLE: `CREATED` follows `NEWEST` one release later. A fleet is upgraded machine by machine, and the shards that its
new programs create during the upgrade must be readable for its old ones. Until there is a release, no fleet is older.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from persist_lib.core.diff import StateDiff
from persist_lib.core.state import Batch, Part, State, Writer
from persist_lib.ids import is_pending, is_published
from persist_lib.schema.evolution import evolved, is_prefix
from persist_lib.schema.schema import Schema
from persist_lib.schema.types import JSON, UUID, is_nested
from persist_lib.schema.widening import NUMBER

FIRST = 1
NEWEST = 12
CREATED = NEWEST
"""The format in which shards are created, unless settings say otherwise: nothing is released yet (0.1.0). Shards that
trials before made, in format 3 or later, are moved up by `Upgrade`, and by what needs a format: contents that are kept
ahead, members, pins, columns that evolve."""

OLDEST_MOVED = 3
"""Shards of older formats are not moved up for contents: who has them keeps them on purpose."""

REMEMBERS_OUTCOMES = 2
SCHEMAS_SAY_MORE = PRODUCERS = PARTS_AT_A_TIME = OWNERS = PENDING_AREA = 3
GROUPS, MEMBERS, CONTENTS, PINS, EVOLVED, PART_SUMS, FILLED, REORDERED = 4, 5, 6, 7, 8, 9, 10, 11
WIDE_TYPES = CONTENTS
IDENTITIES = DOCUMENTS = VALUE_BOUNDS = CLUSTERS = 12
"""The formats from which on there is each of these, as the table above says."""

STATE_FIELDS = {1: 14, 2: 16, 3: 18, 4: 18, 5: 20, 6: 21, 7: 22, 8: 22, 9: 22, 10: 22, 11: 22, 12: 23}
"""How many fields a stored state has: later ones are left out, and must have their defaults."""
WITH_PRODUCERS = 19
"""The same of a state of format 3 or newer that remembers producers."""
PART_FIELDS = 11
"""How many fields a stored part has, unless it counts at a time of its own (one more), or says its sums (two more) or
bounds of its values (all)."""
WRITER_FIELDS = 3
"""How many fields a stored writer has, unless it has an owner; one more if it remembers answers of tasks."""
DIFF_FIELDS = {
    "format": 2,
    "outcomes": 2,
    "producers": PRODUCERS,
    "member": MEMBERS,
    "contents": CONTENTS,
    "pins": PINS,
    "identities": IDENTITIES,
}
"""The fields of a diff that came after format 1."""
COMMANDS = {
    "Upgrade": 2, "ForgetProducer": PRODUCERS,
    "Absorb": PENDING_AREA, "DiscardPending": PENDING_AREA, "CloneReader": PENDING_AREA,
    "Adopt": MEMBERS, "Inherit": MEMBERS, "KeepContents": CONTENTS, "PinKeys": PINS, "Unpin": PINS,
    "Reserve": IDENTITIES,
}  # fmt: skip
"""The commands that came after format 1."""


PARTS_SAY = {
    PARTS_AT_A_TIME: "a part that counts at a time of its own",
    PINS: "a part below a publication's folder",
    PART_SUMS: "what a part's updates add up to",
    VALUE_BOUNDS: "bounds of a part's values",
}
"""What a batch has that only this format, or a later one, can store (`least_for_batches`)."""


def least_for(schema: object) -> int:
    """The oldest format that can store this schema. Whatever is no schema is for the encoder to refuse."""
    if not isinstance(schema, Schema):
        return FIRST
    if any(column.fill == NUMBER for column in schema.columns):
        return IDENTITIES
    if any(column.type == JSON for column in schema.columns):
        return DOCUMENTS
    if any(column.rank for column in schema.columns):
        return REORDERED
    if schema.fills or any(column.type == UUID for column in schema.columns):
        return FILLED
    if not schema.all_plain:
        return EVOLVED
    if any(is_nested(column.type) or column.type.startswith("decimal256") for column in schema.columns):
        return WIDE_TYPES
    return SCHEMAS_SAY_MORE if schema.times is not None or schema.constraints else FIRST


def least_to_follow(older: Schema, newer: Schema) -> int:
    """The oldest format in which a shard may have one schema after the other."""
    return max(least_for(newer), FIRST if is_prefix(older, newer) else EVOLVED)


def format_for(format_: int | None, *schemas: Schema) -> int:
    """The format in which shards of these schemas are created: that of the settings, or the oldest that will do."""
    return format_ or max(CREATED, *map(least_for, schemas))


def least_for_batches(batches: Iterable[Batch]) -> int:
    """The oldest format that can store these batches."""
    least = FIRST
    for batch in batches:
        for part in batch.parts:
            if part.at is not None:
                least = max(least, PARTS_AT_A_TIME)
            if part.sums is not None:
                least = max(least, PART_SUMS)
            if part.values:
                least = max(least, VALUE_BOUNDS)
            if part.key and is_published(part.key):
                least = max(least, PINS)
            if part.key and is_pending(part.key):
                least = max(least, PENDING_AREA)
    return least


def as_stored_in(format_: int, batch: Batch) -> Batch:
    """A batch that was built, without the bounds of values that a shard of this format cannot say."""
    # A loop, as each append comes here.
    for part in batch.parts:
        if part.values and format_ < VALUE_BOUNDS:
            parts = tuple(msgspec.structs.replace(one, values=()) for one in batch.parts)
            return msgspec.structs.replace(batch, parts=parts)
    return batch


def stored_part_fields(part: Part) -> int:
    """How many fields of this part are stored: up to the last one that is set."""
    if part.values:
        return PART_FIELDS + 3
    return PART_FIELDS + (2 if part.sums is not None else part.at is not None)


def least_for_writers(writers: Iterable[Writer | None]) -> int:
    """The oldest format that can store these writers."""
    for writer in writers:
        if writer is not None and (writer.owner or writer.staged):
            return OWNERS
    return FIRST


def least_for_state(state: State) -> int:
    """The oldest format that can store what this state says, whichever it is written in."""
    kinds = (since for name, since in DIFF_FIELDS.items() if since > REMEMBERS_OUTCOMES and getattr(state, name))
    says = max(kinds, default=FIRST)
    writers = least_for_writers(state.writers.values())
    evolutions = EVOLVED if evolved(state.schemas) else FIRST
    return max(says, writers, evolutions, least_for_batches(state.stored), *map(least_for, state.schemas))


def stored_fields(state: State) -> int:
    """How many fields of this state are stored: those of its format, and the producers if it has some."""
    return max(STATE_FIELDS[state.format], WITH_PRODUCERS if state.producers else 0)


def needed(command: str, diff: StateDiff) -> int:
    """The oldest format that can store this command and diff."""
    # Loops, as each row that is written or read comes here.
    least = COMMANDS.get(command, FIRST)
    for name, since in DIFF_FIELDS.items():
        if since > least and getattr(diff, name):
            least = since
    if diff.trace is not None:
        least = max(least, least_for_batches(diff.trace.added))
    if diff.contents is not None:
        least = max(least, least_for_batches([one for one in diff.contents if one is not None]))
    if diff.writers:
        least = max(least, least_for_writers([writer for _, *both in diff.writers for writer in both]))
    return max(least, *map(least_for, diff.schemas)) if diff.schemas else least
