"""Changes as Debezium writes them: JSON lines with before, after, op and source, with or without their schema.

    {"before": null, "after": {"id": 7, "state": "open"}, "op": "c", "source": {"lsn": 5, "txId": 9}}
    {"schema": {...}, "payload": {"before": ..., "after": ..., "op": "u", ...}}
    null                                                              a tombstone, which says nothing new

Two ways to make updates of changes:

- `by-key`: the last change of each key decides. What the shard has for the key is retracted when the group is
  committed. That is right whatever the database puts into `before`, and for a change that was delivered twice.
- `before`: `u` and `d` retract what `before` says. That needs whole rows there (REPLICA IDENTITY FULL), and each change
  exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pyarrow as pa

from persist_lib.arguments import UNREADABLE
from persist_lib.convert.lines.file_columns import Reading, Refused, Sifted, sift, without_nulls
from persist_lib.convert.lines.json_lines import JsonLines
from persist_lib.errors import InvalidUsage
from persist_lib.schema.schema import DIFF, Schema

PLACE = "_place"
"""The column of a change's place in its chunk."""
DELETES = "_deletes"
"""Whether the change leaves its key without a row."""

_NONE = msgspec.Raw(b"null")


class Source(msgspec.Struct, frozen=True, rename={"tx": "txId"}):
    """Where a change comes from, as far as it names a transaction."""

    tx: int | str | None = None
    gtid: str | None = None
    transaction_id: int | str | None = None


class Transaction(msgspec.Struct, frozen=True):
    """The transaction, if the connector adds it."""

    id: str


class Change(msgspec.Struct, frozen=True):
    """One line. `payload` is set where it is wrapped with its schema."""

    op: str | None = None
    before: msgspec.Raw = _NONE
    after: msgspec.Raw = _NONE
    source: Source = Source()
    transaction: Transaction | None = None
    payload: msgspec.Raw = _NONE

    @property
    def named_transaction(self) -> str | None:
        """The transaction that it belongs to, if that is known."""
        if self.transaction is not None:
            return self.transaction.id
        found = next(
            (one for one in (self.source.tx, self.source.gtid, self.source.transaction_id) if one is not None), None
        )
        return None if found is None else str(found)


_changes = msgspec.json.Decoder(Change | None)


def parse_change(line: bytes) -> Change | None:
    """The change of a line; None for one that changes nothing. Raises Refused, and InvalidUsage for `t`."""
    try:
        line.decode()
        change = _changes.decode(line)
        if change is not None and change.op is None and not _is_null(change.payload):
            change = _changes.decode(change.payload)
    except UnicodeDecodeError as error:
        raise Refused(f"this is not UTF-8: {error.reason}") from error
    except UNREADABLE as error:
        raise Refused(str(error)) from error
    if change is None or change.op == "m":
        return None
    if change.op == "t":
        raise InvalidUsage(
            "a change says that the source's table was emptied (op t). It is not applied by itself, as it would "
            "retract all that the shard "
            "holds. Empty the shard first, or take the line out if it is to stay; nothing of this group was written",
            problem="truncated",
        )
    if change.op not in ("c", "r", "u", "d"):
        raise Refused(
            f"op must be one of c, r, u, d: {change.op!r}" if change.op else "there is no op: this is no change"
        )
    if change.op != "d" and _is_null(change.after):
        raise Refused(f"a change with op {change.op} has no after")
    if change.op == "d" and _is_null(change.before):
        raise Refused("a delete has no before, so it does not say which row is gone. Give the table a replica identity")
    return change


def transaction_of(line: bytes) -> str | None:
    """The transaction of a line, if it has one."""
    try:
        change = parse_change(line)
    except (Refused, InvalidUsage):
        return None
    return None if change is None else change.named_transaction


def _is_null(raw: msgspec.Raw) -> bool:
    return bytes(raw).strip() == b"null"


class ChangeLines:
    """Parses lines of changes to updates (`before`), or to what became of each key (`by-key`)."""

    def __init__(self, settings: Reading, schema: Schema) -> None:
        self._by_key = settings.changes == "by-key"
        self._rows = JsonLines(settings, schema, is_text=True)  # as Debezium has columns of JSON
        self._schema = schema
        self._keys = JsonLines(settings, Schema(key=schema.key), extra="ignore")

    def sift(self, lines: Sequence[bytes]) -> tuple[Sifted, int]:
        """The updates of the good lines, with `_diff`, or with `_place` and `_deletes`; and how many say nothing."""
        bad: dict[int, str] = {}
        added: list[tuple[int, bytes]] = []
        gone: list[tuple[int, bytes]] = []
        silent = 0
        for index, line in enumerate(lines):
            try:
                change = parse_change(line)
            except Refused as refused:
                bad[index] = str(refused)
                continue
            if change is None:
                silent += 1
                continue
            if change.op in ("u", "d") and (change.op == "d" or not self._by_key):
                if _is_null(change.before):
                    bad[index] = "an update has no before; use --changes by-key, or REPLICA IDENTITY FULL in the source"
                    continue
                gone.append((index, _one_line(change.before)))
            if change.op != "d":
                added.append((index, _one_line(change.after)))
        after = self._sift(self._rows, added, self._schema)
        parser, columns = (self._keys, Schema(key=self._schema.key)) if self._by_key else (self._rows, self._schema)
        before = self._sift(parser, gone, columns)
        bad |= after.bad | before.bad
        return (self._of_keys if self._by_key else self._of_rows)(after, before, bad), silent

    def _sift(self, parser: JsonLines, found: list[tuple[int, bytes]], schema: Schema) -> Sifted:
        if not found:
            return Sifted(parser.empty, np.array([], np.int64), {})
        places = np.array([index for index, _ in found], np.int64)
        texts = [text for _, text in found]
        return without_nulls(schema, sift(parser.parse, parser.suspect, texts, parser.empty)).at(places)

    def _of_rows(self, after: Sifted, before: Sifted, bad: dict[int, str]) -> Sifted:
        tables, places = [], []
        for one, diff in ((before, -1), (after, 1)):
            keep = ~np.isin(one.lines, list(bad))
            table = one.table.filter(pa.array(keep))
            tables.append(table.append_column(DIFF, pa.array(np.full(table.num_rows, diff, np.int64))))
            places.append(one.lines[keep])
        return Sifted(pa.concat_tables(tables), np.concatenate(places), dict(sorted(bad.items())))

    def _of_keys(self, after: Sifted, before: Sifted, bad: dict[int, str]) -> Sifted:
        tables, places = [], []
        for one, deletes in ((before, True), (after, False)):
            columns = [
                one.table.column(field.name)
                if field.name in one.table.column_names
                else pa.chunked_array([pa.nulls(one.table.num_rows, field.type)])
                for field in self._schema.data
            ]
            columns.append(pa.chunked_array([pa.array(np.full(one.table.num_rows, deletes))]))
            tables.append(pa.table(columns, names=[*self._schema.names, DELETES]))
            places.append(one.lines)
        return Sifted(pa.concat_tables(tables), np.concatenate(places), bad).in_order()


def _one_line(raw: msgspec.Raw) -> bytes:
    text = bytes(raw)
    return msgspec.json.format(text, indent=-1) if b"\n" in text else text


def last_of_each_key(schema: Schema, table: pa.Table) -> pa.Table:
    """Of changes in their order, the last one of each key, in that order."""
    if table.num_rows < 2:
        return table
    names = schema.key_names
    numbered = table.select(names).append_column(PLACE, pa.array(np.arange(table.num_rows)))
    last = numbered.group_by(names, use_threads=False).aggregate([(PLACE, "max")]).column(f"{PLACE}_max")
    return table.take(last.combine_chunks().sort())
