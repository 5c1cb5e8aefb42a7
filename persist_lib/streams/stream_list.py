"""The list of a location's streams: a shard with a row for each, which only the holder of the writer's lock changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from persist_lib.arguments import UNREADABLE
from persist_lib.client import Client
from persist_lib.core.holds import layer_of
from persist_lib.errors import Corrupt, InvalidName, NewerFormat
from persist_lib.ids import NAME, parse_shard_id
from persist_lib.relation.reader import ReadHandle
from persist_lib.relation.writer import Append, WriteHandle, append_together
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import DIFF, TIME, Schema
from persist_lib.shard.commit import Wanted

SHARD = "streams.list"
SCHEMA = Schema(key={"name": "string not null"}, value={"body": "string not null"})
LAYER = "stream"
"""As which layer (`core.holds`) the shards of streams are written."""
RETENTION = 100
"""How many of its last changes the list keeps."""
UNSEALED = ".unsealed"
LONGEST = 80
"""Letters of a stream's name: its shards have more."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stream: its shards, and whether it was dropped. A shard's name is never used twice."""

    sealed: str
    dropped: bool = False

    @property
    def unsealed(self) -> str:
        """The shard that has what is not sealed yet."""
        return self.sealed + UNSEALED


class Named(msgspec.Struct, frozen=True):
    """A row of the list."""

    name: str
    record: Record


def parse_stream_name(name: object) -> str:
    """Check that `name` can be a stream's: the rule for shards, at most 80 letters, and none of this layer's own."""
    found = parse_shard_id(name)
    if len(found) > LONGEST or found.endswith(UNSEALED) or found.startswith("streams."):
        raise InvalidName(
            f"a stream's name has at most {LONGEST} letters, does not end in {UNSEALED!r} and does not start with "
            f"'streams.': got {name!r}",
            name=name,
        )
    return str(found)


def shard_name(client: Client, name: str) -> str:
    """The sealed shard of a new stream of this name: the name itself, with a number if there was such a shard."""
    number, found = 1, name
    while any(client.machine(shard).try_fetch() is not None for shard in (found, found + UNSEALED)):
        number += 1
        found = f"{name}.{number}"
    return found


def make_list(client: Client) -> None:
    """Make the list if there is none, and keep all others from appending to it. Idempotent."""
    with client.open_writer(SHARD, SCHEMA, layer=LAYER) as write:
        if layer_of(write.machine.state) != LAYER:
            client.set_retention(SHARD, RETENTION, layer=LAYER)


class Catalog:
    """The list of streams as one process sees it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._reader: ReadHandle | None = None
        self._writer: WriteHandle | None = None
        self._known: tuple[int, dict[str, Record]] = (0, {})  # the upper that was read up to, and what was there

    def fetch(self) -> dict[str, Record]:
        """All streams by name, dropped ones too, read from the location; none where there is no list yet."""
        return self._fetch()[0]

    def change(self, to: Mapping[str, Record | None], beside: Sequence[Wanted], deadline: Deadline) -> None:
        """Set records (None: forget them), in one commit with the transitions `beside` of other shards.

        Raises what `beside` raises; then nothing was changed. Repeat the call after any other failure.
        """
        known, upper = self._fetch()
        if self._writer is None:
            self._writer = self._client.open_writer(SHARD, SCHEMA, owner="streams", layer=LAYER)
        gone = [_row(name, known[name], upper, -1) for name in to if name in known]
        new = [_row(name, record, upper, 1) for name, record in to.items() if record is not None]
        append = Append(self._writer, [*gone, *new], upper, upper + 1)
        token = self._client.runtime.token()
        append_together([append], self._client.consensus, self._client.machine, deadline, token, beside)
        after = {name: record for name, record in {**known, **to}.items() if record is not None}
        self._known = upper + 1, after

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _fetch(self) -> tuple[dict[str, Record], int]:
        client = self._client
        if self._reader is None:
            if client.machine(SHARD).try_fetch() is None:
                return {}, 0
            # Without a lease, so that opening it changes nothing.
            urls = (client.url, client.consensus_url)
            self._reader = ReadHandle(client.machine(SHARD), client.leases, SCHEMA, urls, read_only=True)
        upper = self._reader.fetch_upper().time or 0
        if upper != self._known[0]:
            with self._reader.snapshot(upper - 1) as snapshot:
                self._known = upper, {row["name"]: _decoded(row["name"], row["body"]) for row in snapshot.to_pylist()}
        return self._known[1], upper


def _row(name: str, record: Record, time: int, diff: int) -> dict[str, object]:
    return {"name": name, "body": msgspec.json.encode(record).decode(), TIME: time, DIFF: diff}


def _decoded(name: str, body: str) -> Record:
    try:
        record = msgspec.json.decode(body, type=Record)
    except msgspec.ValidationError as error:
        raise NewerFormat(
            f"stream {name!r} is listed in a form that this release does not know ({error}): a newer one wrote it. "
            "Nothing was touched; upgrade this program",
        ) from error
    except UNREADABLE as error:
        raise Corrupt(f"shard {SHARD}: what it says of stream {name!r} is not JSON: {error}", key=SHARD) from error
    if not NAME.fullmatch(record.unsealed):
        raise Corrupt(f"shard {SHARD}: stream {name!r} has a shard {record.sealed!r}, which is not a name", key=SHARD)
    return record
