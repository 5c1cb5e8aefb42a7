"""Which asset a shard belongs to: an immutable record beside the shards, so that two assets never write to one shard.

The record is the object `-assets/<shard>.json` of Blob; no shard's name starts with `-`. It is set before the first
append. A shard without a record (one that an earlier release wrote, or an ingestion job) belongs to the first asset
that writes to it, and may be read by any.
"""

from __future__ import annotations

import msgspec

from orchestration.io.names import TABLE, Place, place_of
from persist_lib.client import Client
from persist_lib.errors import Corrupt, InvalidUsage


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
    if place.former is not None and not _is_there(client, place.table) and _is_unclaimed(client, place.former):
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


def _is_unclaimed(client: Client, shard: str) -> bool:
    return _is_there(client, shard) and owner_of(client, shard) is None


def _is_there(client: Client, shard: str) -> bool:
    return client.consensus.head(shard) is not None
