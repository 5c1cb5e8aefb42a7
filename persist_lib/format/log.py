"""How the log's rows and rollups are stored: canonical msgpack in a frame (`format.frame`).

The same value gives the same bytes in any process: struct fields have a fixed order, mapping keys are sorted. Decoding
checks magic, version and checksum before it looks at the body, so damage is `Corrupt` and never a wrong value. A field,
a command or a version that this release does not know is `NewerFormat`, never skipped: skipped, it would be taken for
"nothing changed". `core.formats` says what each version brought.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, get_args

import msgspec
from msgspec import inspect

from persist_lib.arguments import UNREADABLE
from persist_lib.core.commands import STORED_AS, Command
from persist_lib.core.diff import MAPPINGS, StateDiff
from persist_lib.core.formats import (
    FIRST,
    GROUPS,
    NEWEST,
    WRITER_FIELDS,
    least_for_state,
    needed,
    stored_fields,
    stored_part_fields,
)
from persist_lib.core.state import Batch, Part, Rollup, State, Writer
from persist_lib.errors import Corrupt, InvalidUsage, InvariantViolated, NewerFormat, PersistError
from persist_lib.format.frame import body_of, checksum, framed, has_magic, stored_checksum, version_of
from persist_lib.ids import SeqNo
from persist_lib.schema.schema import stored_form


def find_unknown(body: bytes, kind: type) -> str | None:
    """A field of `body` that the struct `kind`, or one within it, does not have; None if there is none.

    Names it for people. Bytes that are no msgpack hold no field.
    """
    try:
        value = msgspec.msgpack.decode(body)
    except UNREADABLE:
        return None
    return _find(value, inspect.type_info(kind))


def _find(value: Any, kind: inspect.Type) -> str | None:
    match kind:
        case inspect.StructType(cls, fields, array_like=is_list) if isinstance(value, list if is_list else dict):
            return _find_in_struct(value, cls.__name__, fields)
        case inspect.UnionType(types):
            found = [_find(value, one) for one in types]
            return next((one for one in found if one), None)
        case inspect.TupleType(types) if isinstance(value, list):
            return _first(_find(item, one) for item, one in zip(value, types, strict=False))
        case inspect.VarTupleType(item) if isinstance(value, list):
            return _first(_find(one, item) for one in value)
        case inspect.DictType(_, item) if isinstance(value, dict):
            return _first(_find(one, item) for one in value.values())
        case _:
            return None


def _find_in_struct(value: Any, name: str, fields: tuple[inspect.Field, ...]) -> str | None:
    if isinstance(value, list):
        if len(value) > len(fields):
            return f"{name} with {len(value)} fields, not {len(fields)}"
        return _first(_find(item, field.type) for item, field in zip(value, fields, strict=False))
    known = {field.encode_name: field.type for field in fields}
    unknown = [key for key in value if key not in known]
    if unknown:
        return f"{name} with the field {unknown[0]!r}"
    return _first(_find(item, known[key]) for key, item in value.items())


def _first(found: Any) -> str | None:
    return next((one for one in found if one), None)


ROW_MAGIC = b"PSTr"
ROLLUP_MAGIC = b"PSTs"
GROUP = "Group"
"""The command of a row that holds several. It is not among `COMMANDS`."""
ALONE = frozenset({"Create", "Upgrade", "Adopt", "Inherit", "KeepContents", "PinKeys", "Unpin"})
"""Commands that are never in a group: they decide in which format the row is written, or came after groups."""
SINGLE_FIELDS = 7
"""How many fields a stored row has, unless it is a group."""
GENESIS = bytes(16)
"""What the first row names as the row before it."""


class Step(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One command of a row: its token, who sent it, and what it changed or, with None, why it was refused.

    `sender` and `refusal` are for people to read.
    """

    token: bytes
    command: str
    sender: str
    diff: StateDiff | None
    refusal: str = ""


class LogRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One transition: which, by whom it can be recognised, what it changed, and what it follows.

    `now` is the store's clock when it was built, for people to read. `rollup` is the newest one linked by then. A row
    of several commands has them in `group`, in the order in which they were applied; its own command is then `GROUP`,
    and its own token and diff are empty.

    Read `steps` or `diffs`, which every row has, and never `diff` alone: a group's would say that nothing
    changed.
    """

    seqno: SeqNo
    token: bytes
    command: str
    now: int
    previous: bytes
    rollup: tuple[SeqNo, Rollup] | None
    diff: StateDiff
    group: tuple[Step, ...] = ()

    @property
    def steps(self) -> tuple[Step, ...]:
        """Its commands, in the order in which they were applied. At least one."""
        return self.group or (Step(self.token, self.command, "", self.diff),)

    @property
    def diffs(self) -> tuple[StateDiff, ...]:
        """What its commands changed, to be applied one after another. At least one."""
        return tuple([step.diff for step in self.group if step.diff is not None]) if self.group else (self.diff,)


class StoredState(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A rollup's contents: the state at a seqno, and the digest of the row that led there."""

    seqno: SeqNo
    digest: bytes
    state: State


COMMANDS = frozenset(command.__name__ for command in get_args(Command) if command not in STORED_AS)
_encoder = msgspec.msgpack.Encoder()
_rows = msgspec.msgpack.Decoder(LogRow)
_states = msgspec.msgpack.Decoder(StoredState)
T = TypeVar("T")


def encode_row(row: LogRow, format_: int | None = None) -> bytes:
    """The bytes of a row of the log, in a format that can say it; by default the oldest.

    Raises InvariantViolated unless the decoder that readers use makes the same row of them: no value that came in
    somewhere, of a wrong type say, ever becomes a row that others cannot read.
    """
    group = tuple([msgspec.structs.replace(step, diff=_stored_diff(step.diff)) for step in row.group])
    fields = (*msgspec.structs.astuple(row)[: SINGLE_FIELDS - 1], _stored_diff(row.diff), *((group,) if group else ()))
    data = framed(ROW_MAGIC, _needed(row, row.steps) if format_ is None else format_, _encoded(fields))
    return _proven(data, decode_row, row)


def decode_row(data: bytes, key: str) -> LogRow:
    """The row that `data` holds; Corrupt or NewerFormat naming `key` otherwise."""
    row: LogRow = _decode(data, key, ROW_MAGIC, _rows)
    steps = row.steps
    for step in steps:
        if step.command not in COMMANDS:
            raise _newer(data, key, f"holds the command {step.command!r}, which this release does not know")
    if (least := _needed(row, steps)) > row_format(data):
        raise Corrupt(f"{key} says what only format {least} can, in format {row_format(data)}", key=key)
    if row.group and (problem := _group_problem(row)) is not None:
        raise Corrupt(f"{key} is a group of commands that no release writes: {problem}", key=key)
    return row


def _needed(row: LogRow, steps: Sequence[Step]) -> int:
    """The oldest format that can store this row, whose `steps` these are."""
    least = GROUPS if row.group else FIRST
    for step in steps:
        least = max(least, needed(step.command, step.diff or StateDiff()))
    return least


def _group_problem(row: LogRow) -> str | None:
    """Why a row with a group of commands means nothing; None if it is sound."""
    if (row.command, row.token, row.diff) != (GROUP, b"", StateDiff()):
        return f"it is a {row.command}, with a token or a change of its own"
    if len(row.group) == 1 or not row.diffs:
        return f"it has {len(row.group)} commands, of which {len(row.diffs)} changed something"
    if any((step.diff is None) is not bool(step.refusal) for step in row.group):
        return "a command both changed something and was refused, or neither"
    if alone := ALONE.intersection(step.command for step in row.group):
        return f"{min(alone)} is never one of several"
    return "a change of the format is never one of several" if any(diff.format for diff in row.diffs) else None


def encode_state(stored: StoredState) -> bytes:
    """The bytes of a rollup, in the format of the state. Raises InvariantViolated as `encode_row` does.

    Mappings keep the order of their history, which no other process shares: sort.
    """
    state = stored.state
    ordered = {name: dict(sorted(getattr(state, name).items())) for name in MAPPINGS}
    canonical = StoredState(stored.seqno, stored.digest, msgspec.structs.replace(state, **ordered))
    written = msgspec.structs.replace(
        canonical.state, schemas=tuple(map(stored_form, state.schemas)), trace=_stored_batches(state.trace),
        contents=_stored_contents(state.contents),
        writers={id_: _stored_writer(writer) for id_, writer in canonical.state.writers.items()},
    )  # fmt: skip
    fields = msgspec.structs.astuple(written)[: stored_fields(state)]
    body = _encoded((canonical.seqno, canonical.digest, fields))
    return _proven(framed(ROLLUP_MAGIC, state.format, body), decode_state, canonical)


def decode_state(data: bytes, key: str) -> StoredState:
    """The state that `data` holds; Corrupt or NewerFormat naming `key` otherwise."""
    stored: StoredState = _decode(data, key, ROLLUP_MAGIC, _states)
    if stored.state.format != row_format(data):
        raise Corrupt(f"{key} holds a state of format {stored.state.format}, in format {row_format(data)}", key=key)
    if (least := least_for_state(stored.state)) > row_format(data):
        raise Corrupt(f"{key} says what only format {least} can, in format {row_format(data)}", key=key)
    return stored


def row_format(data: bytes) -> int:
    """The format that a row or rollup says it has."""
    return version_of(data)


def row_digest(data: bytes) -> bytes:
    """What the next row names as the row before it: the checksum in the header."""
    return stored_checksum(data)


def row_start(digest: bytes, format_: int) -> bytes:
    """What a row with this digest and format starts with."""
    return ROW_MAGIC + bytes((format_,)) + digest


def _stored_diff(diff: StateDiff | None) -> Any:
    """A diff as it is stored: its values without the fields that they do not need.

    SUBTLE: as a mapping, whose size alone says how it begins. msgspec begins what has 16 fields in another way,
    however many of them are left out, so that the bytes of older formats would not stay what they were.
    """
    if diff is None:
        return diff
    if diff.schemas:
        diff = msgspec.structs.replace(diff, schemas=tuple(map(stored_form, diff.schemas)))
    if diff.trace is not None:
        trace = msgspec.structs.replace(diff.trace, added=_stored_batches(diff.trace.added))
        diff = msgspec.structs.replace(diff, trace=trace)
    if diff.contents is not None:
        old, new = diff.contents
        diff = msgspec.structs.replace(diff, contents=(_stored_contents(old), _stored_contents(new)))
    if diff.writers:
        written = tuple((id_, *map(_stored_writer, both)) for id_, *both in diff.writers)
        diff = msgspec.structs.replace(diff, writers=written)
    return {name: value for name in StateDiff.__struct_fields__ if (value := getattr(diff, name)) not in (None, ())}


def _stored_batches(batches: tuple[Batch, ...]) -> tuple[Batch, ...]:
    """Batches as they are stored: parts that count at the times they hold do not say so."""
    replace = msgspec.structs.replace
    return tuple([replace(batch, parts=tuple(map(_stored_part, batch.parts))) for batch in batches])


def _stored_contents(contents: Batch | None) -> Batch | None:
    return None if contents is None else _stored_batches((contents,))[0]


def _stored_part(part: Part) -> object:
    return msgspec.structs.astuple(part)[: stored_part_fields(part)] if isinstance(part, Part) else part


def _stored_writer(writer: Writer | None) -> object:
    if not isinstance(writer, Writer) or writer.staged:
        return writer
    return msgspec.structs.astuple(writer)[: WRITER_FIELDS + bool(writer.owner)]


def _encoded(value: object) -> bytes:
    try:
        return _encoder.encode(value)
    except (
        TypeError,
        ValueError,
        OverflowError,
        RecursionError,
    ) as error:  # of a type, or a size, that is never stored
        raise _unreadable(str(error)) from error


def _proven(data: bytes, decode: Callable[[bytes, str], T], meant: T) -> bytes:
    """`data`, once it was decoded again and is what was meant."""
    try:
        found = decode(data, "what was about to be written")
    except PersistError as error:
        raise _unreadable(error.message) from error
    if found != meant:
        raise _unreadable(f"it would be read as {found!r:.400}, and {meant!r:.400} was meant")
    return data


def _unreadable(why: str) -> InvariantViolated:
    return InvariantViolated(
        f"no reader could make of these bytes what they mean: {why}. Nothing was written; this is a bug in Persist, or "
        "a value of a wrong type that got past its checks: report it",
        broken=[why],
    )


def _decode(data: bytes, key: str, magic: bytes, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    if not has_magic(data, magic):
        raise Corrupt(
            f"{key} is not what Persist wrote there: it starts with {data[:4]!r}, not {magic!r}. Restore it from a "
            f"copy",
            key=key, expected=magic, actual=data[:4],
        )  # fmt: skip
    actual, stored = checksum(data), stored_checksum(data)
    if actual != stored:
        raise Corrupt(
            f"{key} is damaged: its checksum is {actual.hex()}, stored is {stored.hex()}. "
            "Nothing was changed; restore it from a copy",
            key=key, expected=stored, actual=actual,
        )  # fmt: skip
    if (version := version_of(data)) < FIRST:
        raise Corrupt(f"{key} claims to have format {version}, which no release ever wrote", key=key, actual=version)
    if version > NEWEST:
        raise _newer(data, key, f"has format {version}, and this release knows formats up to {NEWEST}")
    try:
        return decoder.decode(body_of(data))
    except (*UNREADABLE, InvalidUsage) as error:
        if (unknown := find_unknown(body_of(data), decoder.type)) is not None:
            raise _newer(data, key, f"holds {unknown}, which this release does not know") from error
        raise Corrupt(f"{key} has a valid checksum but does not decode: {error}", key=key) from error


def _newer(data: bytes, key: str, why: str) -> NewerFormat:
    return NewerFormat(
        f"{key} {why}: a newer release wrote it; upgrade persist_lib on this machine. Nothing was touched",
        key=key, found=data[4], known=NEWEST,
    )  # fmt: skip
