"""The table of an asset or of one of its partitions: a readable name, the same for ever.

    customers                     customers
    raw/customers                 raw.customers
    customers, 2026-11-22         customers.2026-11-22
    customers, 2026-11-22-04:00   customers.2026-11-22-04_-3a00
    customers, a|b                customers.a_-7cb
    raw/eu.customers              raw.eu_-2ecustomers

Components and partition are joined by `.`. A byte (of UTF-8) that a shard's name cannot hold is `_-` and two hex
digits; so are the `_` of a literal `_-`, a `.` inside a component of the asset's key, and a `-` at the very start. What
is longer than 100 letters is cut, and ends in `_-z` and a digest of the whole. So two partitions of an asset never
share a name. Different assets can, as `x/y` and partition `y` of `x` do: the second one is refused.

Which asset a shard belongs to is an immutable record beside the shards, so that two assets never write to one shard:
the object `-assets/<shard>.json` of Blob; no shard's name starts with `-`. It is set before the first append. A shard
without a record (one that an earlier release wrote, or an ingestion job) belongs to the first asset that writes to it,
and may be read by any.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from persist_lib.catalog.records import parse_collection_name
from persist_lib.client import Client
from persist_lib.errors import Corrupt, InvalidName, InvalidUsage
from persist_lib.ids import NAME

TABLE, FORMER = "persist/table", "persist/shard"
"""The metadata that names the table, and what it was called in earlier releases."""
LONGEST = 100
DIGEST_LETTERS = 24
"""Hex digits, that is 96 bits."""
_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")


class Place(NamedTuple):
    """An asset, or one of its partitions, and its table. `former` is the name that an earlier release gave it."""

    asset: tuple[str, ...]
    partition: str | None
    table: str
    former: str | None = None

    def __str__(self) -> str:
        asset = f"asset {'/'.join(self.asset)}"
        return asset if self.partition is None else f"partition {self.partition!r} of {asset}"


def place_of(asset: Sequence[str], partition: str | None, metadata: Mapping[str, object]) -> Place:
    """Where an asset or partition is stored. The metadata `persist/table` replaces the part that names the asset."""
    path = tuple(asset)
    base = ".".join(escaped(component, dots=True) for component in path)
    if FORMER in metadata:
        raise InvalidUsage(f"asset {'/'.join(path)}: the metadata {FORMER} is {TABLE} now", asset=path)
    if (given := metadata.get(TABLE)) is not None:
        base = _given(given, path)
    name = base if partition is None else f"{base}.{escaped(str(partition))}"
    if given is None or partition is not None:  # a whole name that is given stays as it is
        name = shortened(f"_-2d{name[1:]}" if name.startswith("-") else name)
    former = ".".join([*path, *([] if partition is None else [str(partition)])])
    has_moved = given is None and former != name and NAME.fullmatch(former) is not None
    return Place(
        path, None if partition is None else str(partition), parse_collection_name(name), former if has_moved else None
    )


def escaped(text: str, *, dots: bool = False) -> str:
    """The text in letters that a shard's name may have. Different texts stay different, and plain ones as they are."""
    data = text.encode("utf-8", "surrogatepass")
    found = []
    for index, byte in enumerate(data):
        is_marker = data[index : index + 2] == b"_-"
        if byte not in _PLAIN or is_marker or (dots and byte == ord(".")):
            found.append(f"_-{byte:02x}")
        else:
            found.append(chr(byte))
    return "".join(found)


def shortened(name: str) -> str:
    """The name, or its start and a digest of all of it. A name that is not shortened never has `_-z` in it."""
    if len(name) <= LONGEST:
        return name
    end = f"_-z{hashlib.sha256(name.encode()).hexdigest()[:DIGEST_LETTERS]}"
    return name[: LONGEST - len(end)] + end


def _given(name: object, asset: tuple[str, ...]) -> str:
    try:
        return parse_collection_name(name)
    except InvalidName as error:
        raise InvalidUsage(f"{TABLE} of asset {'/'.join(asset)}: {error.message}", asset=asset) from error


class NameTaken(InvalidUsage):
    """The shard belongs to another asset. Fields: shard, owner."""


class Owner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The asset, and its partition if it has any, that a shard belongs to."""

    asset: tuple[str, ...]
    partition: str | None
    version: int = 1


def claim(client: Client, place: Place) -> None:
    """Make the shard this asset's, for ever. Raises NameTaken if it is another's; a repeated call changes nothing."""
    if check_owner(client, place) is not None:
        return
    if (
        place.former is not None
        and not _is_there(client, place.table)
        and _is_there(client, place.former)
        and owner_of(client, place.former) is None
    ):
        base = ".".join(place.asset)
        kept = place_of(place.asset, place.partition, {TABLE: base}).table == place.former
        way = f"give the asset the metadata {{{TABLE!r}: {base!r}}}" if kept else "rename the partition"
        raise NameTaken(
            f"{place} was in shard {place.former} with earlier releases, and would now start again in {place.table}. "
            f"Nothing was written. To continue, {way}",
            table=place.former, owner=None,
        )  # fmt: skip
    try:
        client.blob.set(_key(place.table), msgspec.json.encode(Owner(place.asset, place.partition)))
    except Corrupt:  # another asset was first, at the same moment
        check_owner(client, place)
        raise


def check_owner(client: Client, place: Place) -> Owner | None:
    """Return the shard's owner, None if that was never recorded. Raises NameTaken if it is another asset."""
    owner = owner_of(client, place.table)
    if owner is not None and (owner.asset, owner.partition) != (place.asset, place.partition):
        theirs = Place(owner.asset, owner.partition, place.table)
        raise NameTaken(
            f"{place} has the table name {place.table}, and that table belongs to {theirs}. Nothing was read or "
            f"written. Give one of the two assets a name of its own with the metadata {{{TABLE!r}: …}}",
            table=place.table, owner=str(theirs),
        )  # fmt: skip
    return owner


def owner_of(client: Client, shard: str) -> Owner | None:
    """Whose shard this is; None if that was never recorded."""
    found = client.blob.get(_key(shard))
    return None if found is None else msgspec.json.decode(found, type=Owner)


def _key(shard: str) -> str:
    return f"-assets/{shard}.json"


def _is_there(client: Client, shard: str) -> bool:
    return client.consensus.head(shard) is not None
