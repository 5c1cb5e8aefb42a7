"""Filters: which rows of a shard a caller wants, as a pyarrow expression, and which row groups can hold them.

A filter is first used early and roughly: row groups whose statistics say that they hold no such row are not read, and
rows are dropped as they are decoded. The contents are filtered once more at the end, exactly. So statistics and early
filtering only save work; they never decide.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from persist_lib.arguments import shown
from persist_lib.errors import InvalidUsage
from persist_lib.kernel.columns import plain_table
from persist_lib.schema.empty import empty_table
from persist_lib.schema.schema import DIFF, TIME

_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_EXAMPLE = 'pyarrow.compute.field("cents") > 100'
_OWN_TYPE = (
    'Compare a column with a value of its own type, as in field("price") > Decimal("5.00") or == date(2026, 1, 31)'
)
_ANY = pa.table({"": pa.nulls(1, pa.int8())})  # no list, for which pyarrow would import pandas


class Where:
    """A filter on columns of a shard: the rows for which `expression` is true, not false and not null.

    `names` are the columns that it looks at. The expression evaluates to a boolean on these columns.
    """

    __slots__ = ("expression", "names")

    def __init__(self, expression: pc.Expression, names: Sequence[str]) -> None:
        self.expression = expression
        self.names = tuple(names)

    @classmethod
    def of(cls, columns: pa.Schema, given: object) -> Where | None:
        """The filter that a caller passed; None for none. Raises InvalidUsage unless it is one on these columns."""
        if given is None:
            return None
        if not isinstance(given, pc.Expression):
            raise InvalidUsage(
                f"filter must be a pyarrow expression, as in {_EXAMPLE}: got {shown(given)}", argument="filter"
            )
        error = _refusal(given, columns)
        if error is not None:
            raise _no_filter(given, columns, error)
        if "FieldPath(" in _QUOTED.sub("", _written(given)):
            raise InvalidUsage(
                f"the filter {_text(given)} refers to a column by its place; refer to it by its name, as in {_EXAMPLE}",
                argument="filter", columns=columns.names,
            )  # fmt: skip
        return cls(given, _names(given, columns))

    def both(self, other: Where | None) -> Where:
        if other is None:
            return self
        return Where(self.expression & other.expression, tuple(dict.fromkeys((*self.names, *other.names))))

    def kept(self, table: pa.Table) -> pa.Table:
        """The rows that it keeps, in the order they are in. Raises InvalidUsage if it cannot be evaluated on a row."""
        if not table.num_rows:
            return table
        try:
            mask = self._mask(table)
        except pa.ArrowException as error:
            raise InvalidUsage(
                f"the filter {_text(self.expression)} cannot be evaluated on the rows of the shard: {error}",
                argument="filter",
            ) from error
        if mask is None:
            return table.slice(0, 0)
        return table.filter(mask)

    def roughly(self, table: pa.Table) -> pa.Table:
        """The same for updates of which some may be gone from the contents: all of them if it fails on one of them."""
        try:
            return self.kept(table)
        except InvalidUsage:
            return table

    def groups(self, metadata: pq.FileMetaData, columns: pa.Schema, stored: pa.Schema) -> frozenset[int]:
        """The row groups that can hold such rows by their statistics; all of them if there are no statistics.

        `columns` are the reader's, `stored` those of the file. Where a type is not stored as it is, nothing is told.
        """
        import pyarrow.dataset as ds  # noqa: PLC0415 - it takes a while, and few reads have a filter

        everything = frozenset(range(metadata.num_row_groups))
        if self._may_compare_nan() or any(
            name in stored.names and stored.field(name).type != columns.field(name).type for name in self.names
        ):
            return everything
        footer = io.BytesIO()
        metadata.write_metadata_file(footer)
        fragment = ds.ParquetFileFormat().make_fragment(pa.BufferReader(footer.getvalue()))
        try:
            return frozenset(group.id for group in fragment.subset(filter=self.expression, schema=columns).row_groups)
        except (pa.ArrowException, TypeError, ValueError):  # what cannot be told from statistics rules nothing out
            return everything

    def holding(self, conditions: Sequence[pc.Expression | None], columns: pa.Schema) -> list[int]:
        """Which places may have a row that it keeps, given what all rows of each are known to meet (None: nothing).

        `columns` are the reader's.
        """
        import pyarrow.dataset as ds  # noqa: PLC0415 - as above
        from pyarrow.fs import LocalFileSystem  # noqa: PLC0415

        if self._may_compare_nan():
            return list(range(len(conditions)))
        kind, nowhere = ds.ParquetFileFormat(), LocalFileSystem()
        told = [
            kind.make_fragment(str(place), nowhere, condition)
            for place, condition in enumerate(conditions)
            if condition is not None
        ]
        untold = [place for place, condition in enumerate(conditions) if condition is None]
        try:
            found = ds.FileSystemDataset(told, columns, kind, nowhere).get_fragments(filter=self.expression)
            return sorted([*untold, *(int(fragment.path) for fragment in found)])
        except (pa.ArrowException, TypeError, ValueError):  # what cannot be told rules nothing out
            return list(range(len(conditions)))

    def _may_compare_nan(self) -> bool:
        """Whether a literal may be NaN, by which Arrow rules out too much: it takes `~(x <= NaN)` for `x > NaN`."""
        written = _written(self.expression)
        return not written or re.search(r"\bnan\b", written) is not None

    def _mask(self, table: pa.Table) -> pa.ChunkedArray | None:
        """Which rows to keep; None for no row."""
        rows = plain_table(table.select(list(self.names))) if self.names else _ANY
        found = evaluated(rows, {"mask": self.expression}).column(0)
        if self.names:
            return found
        return pa.chunked_array([pa.repeat(found[0], table.num_rows)]) if found[0].as_py() else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Where) and self.expression.equals(other.expression)

    def __hash__(self) -> int:
        return hash(self.names)

    def __repr__(self) -> str:
        return f"Where({_text(self.expression)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Where, (self.expression, self.names)


def statistics_columns(columns: pa.Schema) -> list[str]:
    """The columns of which new parts keep statistics: all data but floats, whose NaN and -0.0 statistics leave out, and
    nested ones.
    """
    kinds = {f.name: f.type for f in columns if f.name not in (TIME, DIFF)}
    return [name for name, kind in kinds.items() if not (pa.types.is_floating(kind) or pa.types.is_nested(kind))]


def evaluated(table: pa.Table, expressions: Mapping[str, pc.Expression]) -> pa.Table:
    """What each expression gives for the rows of a table."""
    # It imports pandas, which takes longer than many a command.
    from pyarrow.acero import Declaration, ProjectNodeOptions, TableSourceNodeOptions  # noqa: PLC0415

    steps = [
        Declaration("table_source", TableSourceNodeOptions(table)),
        Declaration("project", ProjectNodeOptions(list(expressions.values()), list(expressions))),
    ]
    # On one thread, so that the answers are in the order of the rows.
    return Declaration.from_sequence(steps).to_table(use_threads=False)


def _refusal(expression: pc.Expression, columns: pa.Schema) -> str | None:
    """Why the expression is no filter on these columns; None if it is one."""
    empty = empty_table(columns) if columns.names else _ANY
    try:
        kind = evaluated(empty, {"mask": expression}).column(0).type
    except (pa.ArrowException, TypeError, ValueError) as error:
        return str(error)
    return None if pa.types.is_boolean(kind) else f"it is a {kind}, not true or false"


def _names(expression: pc.Expression, columns: pa.Schema) -> list[str]:
    """The columns that it looks at: those without which it cannot be evaluated."""
    text = _written(expression)
    mentioned = pa.schema([field for field in columns if field.name in text])
    if _refusal(expression, mentioned) is not None:  # a name may be written in another way
        mentioned = columns
    others = {name: mentioned.remove(at) for at, name in enumerate(mentioned.names)}
    return [name for name, rest in others.items() if _refusal(expression, rest) is not None]


def _no_filter(expression: pc.Expression, columns: pa.Schema, error: str) -> InvalidUsage:
    reason = error.splitlines()[0].partition(" in ")[0] if "FieldRef" in error else error
    hint = ""
    if f"Name({DIFF})" in error or f"Name({TIME})" in error:
        hint = f". {DIFF} and {TIME} are no columns of the data: read with diff=True, and filter what comes out by them"
    elif "no kernel matching input types" in error or "Precision is not great enough" in error:
        hint = f". {_OWN_TYPE}"
    typed = ", ".join(f"{field.name} ({field.type})" for field in columns)
    return InvalidUsage(
        f"the filter {_text(expression)} is none on the columns {typed}: {reason}{hint}",
        argument="filter", columns=columns.names,
    )  # fmt: skip


def _text(expression: pc.Expression) -> str:
    return shown(_written(expression) or "with a long text").strip("'\"")


def _written(expression: pc.Expression) -> str:
    """How Arrow writes an expression; empty where it cannot, as it cuts long texts within a character."""
    try:
        return str(expression)
    except UnicodeDecodeError:
        return ""
