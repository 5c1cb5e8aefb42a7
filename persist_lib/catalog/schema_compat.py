"""Whether rows of one rendition can be given in the columns of another, which only has more or fewer of them."""

from __future__ import annotations

from persist_lib.errors import SchemaChanged
from persist_lib.schema.schema import Schema


def is_additive(one: Schema, other: Schema) -> bool:
    """Whether the two differ at most by value columns at the end that one of them does not have."""
    few, many = sorted((one.value, other.value), key=len)
    same = (one.key, one.codec, one.times) == (other.key, other.codec, other.times)
    return same and many[: len(few)] == few and all(column.nullable for column in many[len(few) :])


def check_additive(collection: str, wanted: Schema, found: Schema, time: int) -> None:
    """Raise SchemaChanged unless rows of `found` can be given in the columns of `wanted`."""
    if not is_additive(wanted, found):
        raise SchemaChanged(
            f"collection {collection!r}: from {wanted.show(time)} on it has the schema {found}, and this reader has "
            f"{wanted}, in which its rows cannot be given. Open a reader in the new schema and read from there, or "
            "listen with replace=True, which takes all old rows out and gives all new ones",
            collection=collection, time=time, actual=found, expected=wanted,
        )  # fmt: skip
