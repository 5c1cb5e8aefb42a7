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
share a name. Different assets can, as `x/y` and partition `y` of `x` do: `owners` refuses the second one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from persist_lib.catalog.records import parse_collection_name
from persist_lib.errors import InvalidName, InvalidUsage
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
