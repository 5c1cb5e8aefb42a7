"""What goes between a shard server and its clients: msgpack of typed values, in an envelope with a version.

The calls are those of a Consensus, and `commit`, which takes commands instead of rows. The values are the very ones
that the log stores, so that a row, a batch or a schema has one encoding. A field, a command or a version that the other
side does not know is refused before anything is done.

A client that follows shards has one stream in each direction for all of them. It says which shards it follows from now
on, and which no longer. The server tells new rows as they come, or the newest seqno alone, where the client lags. An
answer without anything says that the server is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar, get_args

import msgspec

from persist_lib import errors
from persist_lib.arguments import UNREADABLE
from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.state import Outcome
from persist_lib.errors import Corrupt, Indeterminate, InvalidUsage, NewerFormat, PersistError
from persist_lib.ids import SeqNo

VERSION = 1
SERVICE = "persist.v1.Shards"
"""The name of the service. It changes only where an older client could not even be told that it is too old."""
CALLS = (
    "now", "head", "scan", "compare_and_set", "compare_and_set_many", "truncate", "rewind", "list_keys", "heads",
    "commit", "debts", "losing",
)  # fmt: skip
FOLLOW = "follow"
"""The name of the call by which shards are followed."""
MOST_BYTES = 64 << 20
"""The largest message. A row has about `core.groups.BYTES_MOST` at most, and pages of rows are far smaller."""
PAGE_BYTES = 4 << 20
"""About how many bytes of rows a server sends at once."""
COMMANDS = {kind.__name__: kind for kind in get_args(c.Command)}
REFUSALS = {kind.__name__: kind for kind in get_args(r.Refusal)}


class Asked(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A call: the version of its sender, its arguments, and for how long (ms) the caller waits."""

    version: int
    arguments: msgspec.Raw
    timeout_ms: int


class Replied(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The answer to a call: the version of its sender, the store's clock (ms), and the value or the error."""

    version: int
    now: int
    value: msgspec.Raw
    error: tuple[str, str, dict[str, msgspec.Raw]] | None = None


class Commit(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Commands that are to be committed together: for each its shard, a version that was known, name and fields."""

    token: bytes
    is_repeated: bool
    commands: tuple[tuple[str, SeqNo, str, msgspec.Raw], ...]


class Answer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What came of a command: where it was committed, or the name and fields of its refusal; and rows of the log.

    `location.commands.Answered` says the same, and what the last two fields are.
    """

    seqno: SeqNo
    is_committed: bool
    refusal: tuple[str, msgspec.Raw] | None = None
    rows: tuple[tuple[SeqNo, bytes], ...] = ()
    outcome: Outcome | None = None
    due: tuple[str, ...] = ()


class Follow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a client says: the shards that it follows from now on, and those that it does not follow any more."""

    version: int
    begun: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()


class News(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """News of one shard: rows, and the seqno of the newest one that the server knows. The rows may end before it."""

    shard: str
    rows: tuple[tuple[SeqNo, bytes], ...]
    newest: SeqNo


class Pushed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a server says. `ended`: shards that it tells nothing of, as the client has no right on them, or too many.

    Each shard that a client begins to follow is answered, with news or as ended.
    """

    version: int
    news: tuple[News, ...] = ()
    ended: tuple[str, ...] = ()


T = TypeVar("T", Follow, Pushed)
FIELDS = dict[str, msgspec.Raw]
PLAIN = (str, bytes, int, float, bool, type(None))
"""What fields of an error have a stored form."""
NOTHING_DONE = ". Nothing was done"
_encode = msgspec.msgpack.Encoder().encode


def encode_call(arguments: object, timeout_s: float) -> bytes:
    """The bytes of a call."""
    return _encode(Asked(VERSION, msgspec.Raw(_encode(arguments)), max(1, int(timeout_s * 1000))))


def decode_call(data: bytes, kind: Any) -> tuple[Any, float]:
    """The arguments of a call, of type `kind`, and its timeout in seconds. Raises InvalidUsage or NewerFormat."""
    asked: Asked = _decoded(data, Asked, "the call of the other side", NOTHING_DONE)
    if asked.version > VERSION:
        raise _newer("client", asked.version, NOTHING_DONE)
    return _decoded(asked.arguments, kind, "the call of the other side", NOTHING_DONE), asked.timeout_ms / 1000


def encode_reply(value: object, now: int) -> bytes:
    """The bytes of an answer."""
    return _encode(Replied(VERSION, now, msgspec.Raw(_encode(value))))


def encode_error(error: PersistError, now: int) -> bytes:
    """The bytes of an error. Of its fields, those that have a stored form go along."""
    fields = {name: msgspec.Raw(_encode(value)) for name, value in error.fields.items() if isinstance(value, PLAIN)}
    return _encode(Replied(VERSION, now, msgspec.Raw(_encode(None)), (type(error).__name__, error.message, fields)))


def decode_reply(data: bytes, kind: Any) -> tuple[Any, int]:
    """The value of an answer, of type `kind`, and the store's clock. Raises the error that it tells, or Unread."""
    value, now, told = _read(data, kind)
    if told is not None:
        raise told
    return value, now


class Unread(Exception):
    """An answer cannot be read, for the reason `error`: it says nothing about what was done."""

    def __init__(self, error: InvalidUsage | NewerFormat) -> None:
        super().__init__(error.message)
        self.error = error


def _read(data: bytes, kind: Any) -> tuple[Any, int, PersistError | None]:
    try:
        replied: Replied = _decoded(data, Replied, "the answer of the other side")
        if replied.version > VERSION:
            raise _newer("server", replied.version)
        if replied.error is None:
            return _decoded(replied.value, kind, "the answer of the other side"), replied.now, None
        name, message, found = replied.error
        fields = {field: _decoded(value, Any, "the answer of the other side") for field, value in found.items()}
        return None, replied.now, _error(name)(message, **fields)
    except (InvalidUsage, NewerFormat) as error:
        raise Unread(error) from error


def encode_command(command: c.Command) -> tuple[str, msgspec.Raw]:
    """A command as its name and its fields. Raises InvalidUsage for one with values that could never be stored."""
    try:
        return type(command).__name__, msgspec.Raw(_encode(command))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        name = type(command).__name__
        raise InvalidUsage(f"this {name} cannot be sent: {error}. Nothing was done; pass other values") from error


def decode_command(name: str, fields: msgspec.Raw) -> c.Command:
    """The command of that name. Raises NewerFormat for one that is not known, InvalidUsage for other fields."""
    if name not in COMMANDS:
        raise NewerFormat(f"the command {name!r} is not known here: upgrade this server", key=name, found=name)
    found: c.Command = _strict(fields, COMMANDS[name])
    return found


def encode_refusal(refusal: r.Refusal) -> tuple[str, msgspec.Raw]:
    """A refusal as its name and its fields."""
    return type(refusal).__name__, msgspec.Raw(_encode(refusal))


def decode_refusal(name: str, fields: msgspec.Raw) -> r.Refusal:
    """The refusal of that name. Raises NewerFormat for one that is not known."""
    if name not in REFUSALS:
        raise NewerFormat(f"the server's refusal {name!r} is not known here: upgrade persist_lib", key=name, found=name)
    found: r.Refusal = _strict(fields, REFUSALS[name])
    return found


def encode_follow(begun: tuple[str, ...], ended: tuple[str, ...] = ()) -> bytes:
    """The bytes of what a client says that follows shards."""
    return _encode(Follow(VERSION, begun, ended))


def encode_pushed(news: tuple[News, ...], ended: tuple[str, ...] = ()) -> bytes:
    """The bytes of what a server says of them."""
    return _encode(Pushed(VERSION, news, ended))


def decode_follow(data: bytes) -> Follow:
    """What a client said. Raises InvalidUsage or NewerFormat."""
    return _said(data, Follow)


def decode_pushed(data: bytes) -> Pushed:
    """What a server said. Raises InvalidUsage or NewerFormat."""
    return _said(data, Pushed)


def _said(data: bytes, kind: type[T]) -> T:
    found: T = _decoded(data, kind, "what the other side says of shards")
    if found.version > VERSION:
        raise _newer("other side", found.version)
    return found


def rows_that_fit(rows: Sequence[Any], size: Callable[[Any], int]) -> int:
    """How many of the first rows are about a page; at least one, if there is one."""
    total = 0
    for number, row in enumerate(rows):
        total += size(row)
        if number and total > PAGE_BYTES:
            return number
    return len(rows)


def _strict(data: msgspec.Raw, kind: type) -> Any:
    """A value whose fields are all known, although its type, which is never stored, does not refuse others."""
    found = _decoded(data, kind, "the message of the other side")
    if unknown := _decoded(data, FIELDS, "the message of the other side").keys() - set(kind.__struct_fields__):  # type: ignore[attr-defined]
        raise NewerFormat(f"{kind.__name__} has the field {min(unknown)!r} here, which is not known", key=min(unknown))
    return found


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Made once for each type: to make one takes longer than to decode a small message."""
    return msgspec.msgpack.Decoder(kind)


def _decoded(data: bytes | msgspec.Raw, kind: Any, what: str, done: str = "") -> Any:
    try:
        return _decoder(kind).decode(data)
    except UNREADABLE as error:
        raise InvalidUsage(f"{what} cannot be read: {error}{done}") from error


def _newer(who: str, version: int, done: str = "") -> NewerFormat:
    return NewerFormat(
        f"the {who} speaks version {version}, and this side versions up to {VERSION}: upgrade it{done}",
        key=SERVICE, found=version, known=VERSION,
    )  # fmt: skip


def _error(name: str) -> type[PersistError]:
    """The class of an error; of one that is not known here, the one that promises nothing."""
    found = getattr(errors, name, Indeterminate)
    is_known = isinstance(found, type) and issubclass(found, PersistError)
    return Indeterminate if not is_known else Corrupt if found is PersistError else found
