"""`as of` in SQL: which tables of a query are to be read as of which time, and the query without that.

    select * from orders as of 7 o join "late-orders" as of 7 using (order_id)

DuckDB has no such clause. So each `name as of time` becomes the name of a table of its own, with the shard's name as
its alias if the query gives none. Only the tokens of a query matter: what is in strings and comments stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from persist_lib.errors import InvalidUsage

_TOKEN = re.compile(
    r"""
    (?P<space>\s+|--[^\n]*)
  | (?P<comment>/\*)
  | (?P<text>[eE]'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*')
  | (?P<dollars>\$(?P<tag>(?:[^\W\d]\w*)?)\$.*?\$(?P=tag)\$)
  | (?P<quoted>"(?:[^"]|"")*")
  | (?P<number>\d[\w.]*)
  | (?P<word>[^\W\d]\w*)
  | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_COMMENT = re.compile(r"/\*|\*/")
# What may follow a table in a query without being its alias.
_AFTER_TABLE = frozenset({
    "where", "group", "having", "window", "qualify", "order", "limit", "offset", "fetch", "union", "intersect",
    "except", "join", "inner", "left", "right", "full", "outer", "cross", "natural", "asof", "positional", "semi",
    "anti", "on", "using", "tablesample", "pivot", "unpivot", "for", "sample", "at",
})  # fmt: skip


class Reference(NamedTuple):
    """A shard as of a time, as a query names it. `table` is what the rewritten query calls it."""

    shard: str
    time: str
    table: str


class Query(NamedTuple):
    """A query that DuckDB understands, and the tables in it that are shards as of a time."""

    sql: str
    references: tuple[Reference, ...]


class _Token(NamedTuple):
    kind: str
    text: str
    start: int
    end: int

    def is_word(self, word: str) -> bool:
        return self.kind == "word" and self.text.lower() == word

    def is_name(self) -> bool:
        return self.kind in ("word", "quoted")

    def value(self) -> str:
        """The name or text without its quotes."""
        quote = {"quoted": '"', "text": "'"}.get(self.kind)
        return self.text if quote is None else self.text[1:-1].replace(quote * 2, quote)


def parse_query(sql: str) -> Query:
    """Find what is `as of` a time. Raises InvalidUsage where a name before it has dots and no quotes."""
    tokens = list(_tokens(sql))
    found: dict[tuple[str, str], Reference] = {}
    pieces, done = [], 0
    for index in range(len(tokens) - 3):
        name, as_, of, time = tokens[index : index + 4]
        if not (name.is_name() and as_.is_word("as") and of.is_word("of") and time.kind in ("number", "text")):
            continue
        if time.text[0] in "eE":
            continue
        if index and tokens[index - 1].text == ".":
            raise InvalidUsage(
                f"{tokens[index - 2].text if index > 1 else ''}.{name.text} as of {time.text}: put the whole name of a "
                'shard with dots in double quotes, as in "a.b"',
                query=sql,
            )
        key = (name.value(), time.value())
        reference = found.setdefault(key, Reference(*key, _fresh(f"{key[0]} as of {key[1]}", found.values())))
        alias = "" if _has_alias(tokens[index + 4 : index + 6]) else f" as {_quoted(key[0])}"
        pieces += [sql[done : name.start], _quoted(reference.table), alias]
        done = time.end
    return Query("".join((*pieces, sql[done:])), tuple(found.values()))


def _has_alias(following: Sequence[_Token]) -> bool:
    if not following:
        return False
    first = following[0]
    if first.is_word("as"):
        return True
    return first.kind == "quoted" or (first.kind == "word" and first.text.lower() not in _AFTER_TABLE)


def _fresh(name: str, taken: Iterable[Reference]) -> str:
    """The name, or one like it that is not taken: DuckDB does not tell upper and lower case apart."""
    folded = {reference.table.casefold() for reference in taken}
    found, number = name, 1
    while found.casefold() in folded:
        number += 1
        found = f"{name} ({number})"
    return found


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _tokens(sql: str) -> Iterator[_Token]:
    """The tokens that are not spaces or comments. Comments nest."""
    at = 0
    while at < len(sql):
        match = _TOKEN.match(sql, at)
        if match is None or match.lastgroup is None:  # cannot be: `other` matches anything
            return
        kind = "dollars" if match["dollars"] else match.lastgroup
        if kind == "comment":
            at = _end_of_comment(sql, match.end())
            continue
        at = match.end()
        if kind != "space":
            yield _Token(kind, match[0], match.start(), match.end())


def _end_of_comment(sql: str, at: int) -> int:
    depth = 1
    for match in _COMMENT.finditer(sql, at):
        depth += 1 if match[0] == "/*" else -1
        if depth == 0:
            return match.end()
    return len(sql)
