"""`as of` in SQL is found where it names a table, and nowhere else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist_lib.cli.query import parse_query
from persist_lib.errors import InvalidUsage


@pytest.mark.parametrize(
    ("sql", "rewritten", "found"),
    [
        ("select * from orders", "select * from orders", []),
        ("select * from orders as of 7", 'select * from "orders as of 7" as "orders"', [("orders", "7")]),
        ("FROM Orders AS OF 1_000 WHERE x", 'FROM "Orders as of 1_000" as "Orders" WHERE x', [("Orders", "1_000")]),
        ("from orders as of '1 hour ago' o", 'from "orders as of 1 hour ago" o', [("orders", "1 hour ago")]),
        ("from orders as of 7 as o, x", 'from "orders as of 7" as o, x', [("orders", "7")]),
        ('from orders as of 7 "o"', 'from "orders as of 7" "o"', [("orders", "7")]),
        ('from "a-b" as of 7 join y', 'from "a-b as of 7" as "a-b" join y', [("a-b", "7")]),
        ('from "a.b" as of 7', 'from "a.b as of 7" as "a.b"', [("a.b", "7")]),
        ("from a as of 1 join a as of 2 b using (k) join a as of 1 c",
         'from "a as of 1" as "a" join "a as of 2" b using (k) join "a as of 1" c', [("a", "1"), ("a", "2")]),
        ("from a as of 7)", 'from "a as of 7" as "a")', [("a", "7")]),
        ("from a as of 7;", 'from "a as of 7" as "a";', [("a", "7")]),
        ("from a\n as /* x */ of -- y\n 7", 'from "a as of 7" as "a"', [("a", "7")]),
        ("select 'a as of 7' from b", "select 'a as of 7' from b", []),
        ("select 'it''s a as of 7'", "select 'it''s a as of 7'", []),
        (r"select e'\' a as of 7'", r"select e'\' a as of 7'", []),
        ("select $$ a as of 7 $$, $x$ a as of 7 $x$", "select $$ a as of 7 $$, $x$ a as of 7 $x$", []),
        ("select 1 -- a as of 7", "select 1 -- a as of 7", []),
        ("select /* a as of 7 /* b */ a as of 7 */ 1", "select /* a as of 7 /* b */ a as of 7 */ 1", []),
        ('select "a as of 7"', 'select "a as of 7"', []),
        ("select x as of from t", "select x as of from t", []),
        ("from A as of 7 join a as of 7 b", 'from "A as of 7" as "A" join "a as of 7 (2)" b', [("A", "7"), ("a", "7")]),
        ("", "", []), ("'", "'", []), ("/*", "/*", []), ("from a as of", "from a as of", []),
    ],
)  # fmt: skip
def test_a_table_as_of_a_time_gets_a_name_of_its_own(sql: str, rewritten: str, found: list[tuple[str, str]]) -> None:
    query = parse_query(sql)
    assert query.sql == rewritten
    assert [(each.shard, each.time) for each in query.references] == found


def test_a_name_with_dots_needs_quotes() -> None:
    with pytest.raises(InvalidUsage, match="double quotes"):
        parse_query("from a.b as of 7")


@given(st.text(alphabet="aso f7'\"$-/*;(.\n\\e"))
def test_any_text_is_taken_apart_without_loss(text: str) -> None:
    try:
        query = parse_query(text)
    except InvalidUsage:
        return
    if not query.references:
        assert query.sql == text
