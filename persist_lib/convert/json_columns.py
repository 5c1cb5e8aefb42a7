"""Columns of JSON documents: canonical text, which is made where values enter, of each distinct one.

A text in a column of text is the text of a document; a value in a row is the document itself, and a text then one
that is a text. A document that is null alone is null: no program tells them apart in its own values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.arguments import shown
from persist_lib.errors import InvalidUsage
from persist_lib.schema.json_text import NULL, canonical, text_of
from persist_lib.schema.models import is_instance, values_of

FEW = 16
"""For so many values, looking for distinct ones takes longer than making them."""
REFUSED = (TypeError, ValueError, RecursionError)
"""What is raised for what has no canonical text."""


class Text(str):
    """The text of a document, among values that are documents."""

    __slots__ = ()


def document(value: Any) -> str | None:
    """The canonical text of a document in Python, or of its `Text`. Raises what `REFUSED` has."""
    text = canonical(str.__str__(value)) if type(value) is Text else text_of(value)
    return None if text == NULL else text


def near_document(value: Any) -> Any:
    """Mappings as dicts, tuples as lists, and models as what they hold."""
    if is_instance(value):
        return values_of(value)
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, (list, tuple)) else value


def canonical_texts(texts: pa.ChunkedArray, make: Callable[[str], str | None] | None = None) -> pa.ChunkedArray:
    """A column of JSON texts with each text canonical. Raises what `REFUSED` has.

    `make` makes a text canonical, or null; by default a document that is null alone is null.
    """
    return pa.chunked_array([_made(chunk, make or _document) for chunk in texts.chunks], pa.string())


def canonical_column(
    texts: pa.ChunkedArray, name: str, first_row: int = 0, make: Callable[[str], str | None] | None = None
) -> pa.ChunkedArray:
    """The same; raises InvalidUsage that names the column, and the first row that has no JSON text."""
    try:
        return canonical_texts(texts, make)
    except REFUSED:
        for row, text in enumerate(texts.to_pylist(), first_row):
            if text is not None:
                exact_json(make or _document, text, name, row)
        raise


def exact_json(encode: Callable[[Any], Any], value: object, column: str, row: int, what: str = "row") -> Any:
    """What `encode` makes of a JSON value. Raises InvalidUsage, which names the column, and `what` number it is in."""
    try:
        return encode(value)
    except REFUSED as error:
        raise no_json(column, row, value, error, what) from error


def no_json(column: str, row: int, value: object, why: object, what: str = "row") -> InvalidUsage:
    """The error for what is no JSON, or has no canonical text."""
    return InvalidUsage(
        f"column {column!r} holds JSON, and {shown(value)} of {what} {row} has no exact JSON text: {why}",
        problem="json", column=column, row=row, value=value,
    )  # fmt: skip


def _document(text: str) -> str | None:
    made = canonical(text)
    return None if made == NULL else made


def _made(chunk: pa.Array, make: Callable[[str], str | None]) -> pa.Array:
    if len(chunk) <= FEW:
        return pa.array(_all(chunk.to_pylist(), make), pa.string())
    encoded = chunk.dictionary_encode()
    texts = encoded.dictionary.to_pylist()
    made = _all(texts, make)
    return chunk if made == texts else pc.take(pa.array(made, pa.string()), encoded.indices)


def _all(texts: Sequence[str | None], make: Callable[[str], str | None]) -> list[str | None]:
    return [None if text is None else make(text) for text in texts]
