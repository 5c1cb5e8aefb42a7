"""The catalog in SQL: a real Spark loads the jar that is shipped. What each carrier can do is a table in the docs."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import udf

import persist_lib as persist
import persist_lib.spark
from persist_lib.spark.source import CLASS
from tests.carriers import ALL
from tests.circles import by_day
from tests.spark.places import HOME, ThriftServer, environment

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
SCHEMA = persist.Schema({"id": "int64 not null"}, {"state": "string", "cents": "int64"}, times="ms")
PLAIN = persist.Schema({"id": "int64 not null"}, {"v": "int64"})
_numbers = itertools.count()


@pytest.fixture
def lake(spark: SparkSession, client: persist.Client) -> str:
    """A catalog of its own in the one session: Spark keeps a catalog by its name."""
    persist_lib.spark.register(spark)
    name = f"lake{next(_numbers)}"
    for option, value in persist_lib.spark.catalog_conf(client.url, name).items():
        if option != "spark.jars":
            spark.conf.set(option, value)
    with suppress(PySparkException):  # it is there already
        spark.sql(f"ADD JAR '{persist_lib.spark.catalog_jar()}'")
    return name


@pytest.fixture
def sql(spark: SparkSession, lake: str) -> Callable[[str], list[tuple[Any, ...]]]:
    return lambda text: sorted((tuple(row) for row in spark.sql(re.sub(r"\blake\b", lake, text)).collect()), key=str)


Sql = Callable[[str], list[tuple[Any, ...]]]


def rows(*found: tuple[int, str, int]) -> list[dict[str, Any]]:
    return [{"id": id_, "state": state, "cents": cents} for id_, state, cents in found]


# --- what each carrier can do -----------------------------------------------------------------------------------------


class Operation(NamedTuple):
    """A statement on a table with the rows below, and what it answers; or what `then` answers after it."""

    name: str
    statement: str
    answer: Any
    then: str | None = None
    on_timelines: bool = True


START = rows((1, "new", 10), (2, "paid", 20), (3, "new", 30))
STARTED = [(1, "new", 10), (2, "paid", 20), (3, "new", 30)]
READ = "SELECT * FROM lake.t"
MERGE = """MERGE INTO lake.t AS t USING (SELECT * FROM VALUES (1L, 'gone', 0L), (2L, 'sent', 21L), (9L, 'new', 90L)
    AS s(id, state, cents)) s ON t.id = s.id WHEN MATCHED AND s.state = 'gone' THEN DELETE
    WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"""
OPERATIONS = (
    Operation("SELECT", "SELECT id, cents FROM lake.t WHERE state = 'new'", [(1, 10), (3, 30)]),
    Operation("VERSION AS OF", "SELECT count(*) FROM lake.t VERSION AS OF 0", [(0,)]),
    Operation("TIMESTAMP AS OF", "SELECT count(*) FROM lake.t TIMESTAMP AS OF current_timestamp()", [(3,)]),
    Operation("SHOW TABLES", "SHOW TABLES IN lake LIKE 't'", [("", "t3", False)]),
    Operation(
        "DESCRIBE TABLE", "DESCRIBE TABLE lake.t",
        [("cents", "bigint", None), ("id", "bigint", None), ("state", "string", None)],
    ),
    Operation(
        ".changes", "SELECT id, _diff FROM lake.t.changes WHERE _time > TIMESTAMP '2000-01-01'",
        [(1, 1), (2, 1), (3, 1)],
    ),
    Operation(".contents", "SELECT id, _diff FROM lake.t.contents", [(1, 1), (2, 1), (3, 1)]),
    Operation(".history", "SELECT added, retracted FROM lake.t.history WHERE added > 0 LIMIT 1", [(3, 0)]),
    Operation(
        ".batches", "SELECT sum(updates), sum(diff_sum), sum(bytes) > 0 FROM lake.t.batches WHERE updates > 0",
        [(3, 3, True)],
    ),
    Operation("INSERT INTO", "INSERT INTO lake.t VALUES (4, 'new', 40)", [*STARTED, (4, "new", 40)], READ),
    Operation(
        "INSERT INTO … WITH ('upsert' = 'true')", "INSERT INTO lake.t WITH ('upsert' = 'true') VALUES (3, 'x', 1)",
        [*STARTED[:2], (3, "x", 1)], READ,
    ),
    Operation(
        "INSERT OVERWRITE", "INSERT OVERWRITE lake.t SELECT id, state, 0 FROM lake.t WHERE id > 1",
        [(2, "paid", 0), (3, "new", 0)], READ,
    ),
    Operation("TRUNCATE TABLE", "TRUNCATE TABLE lake.t", [], READ),
    Operation(
        "DELETE by a filter", "DELETE FROM lake.t WHERE id = 2 OR state LIKE 'n%' AND cents > 10", STARTED[:1], READ
    ),
    Operation(
        "DELETE by more than that", "DELETE FROM lake.t WHERE cents = (SELECT max(cents) FROM lake.t)", STARTED[:2],
        READ, on_timelines=False,
    ),
    Operation(
        "UPDATE", "UPDATE lake.t SET cents = cents + 1 WHERE state = 'new'",
        [(1, "new", 11), (2, "paid", 20), (3, "new", 31)], READ, on_timelines=False,
    ),
    Operation(
        "MERGE INTO", MERGE, [(2, "sent", 21), (3, "new", 30), (9, "new", 90)], READ, on_timelines=False
    ),
    Operation(
        "ALTER TABLE … ADD COLUMNS", "ALTER TABLE lake.t ADD COLUMNS (note STRING)", [(*row, None) for row in STARTED],
        READ,
    ),
    Operation(
        "ALTER TABLE … RENAME COLUMN", "ALTER TABLE lake.t RENAME COLUMN state TO status", STARTED, READ,
    ),
    Operation(
        "ALTER TABLE … DROP COLUMN", "ALTER TABLE lake.t DROP COLUMN state",
        [(id_, cents) for id_, _, cents in STARTED], READ,
    ),
    Operation(
        "ALTER TABLE … ALTER COLUMN … FIRST, AFTER", "ALTER TABLE lake.t ALTER COLUMN cents FIRST",
        [(id_, cents, state) for id_, state, cents in STARTED], READ,
    ),
    Operation("DROP TABLE", "DROP TABLE lake.t", [], "SHOW TABLES IN lake LIKE 't'"),
)  # fmt: skip
COLUMNS = {"a shard": "shard", "a collection": "collection of 3", "a timeline": "wal"}


@pytest.mark.parametrize("column", COLUMNS)
def test_each_carrier_does_what_the_table_of_the_docs_says(column: str, client: persist.Client, sql: Sql) -> None:
    [carrier] = [one for one in ALL if one.name == COLUMNS[column]]
    assert said_in_docs(column) == {
        one.name: "yes" if one.on_timelines or not carrier.mode else "no" for one in OPERATIONS
    }
    for place in range(len(OPERATIONS)):
        name = f"t{place}"
        carrier.make_table(client, name, SCHEMA)
        client.table(name).append(START)
    if carrier.mode:
        client.maintain()  # until then its shards have nothing of what the WAL has
    for place, one in enumerate(OPERATIONS):
        statement, then = (
            re.sub(r"lake\.t\b|(?<=')t(?=')", rf"\g<0>{place}", text) for text in (one.statement, one.then or READ)
        )
        if one.on_timelines or not carrier.mode:
            found = sql(statement)
            assert (found if one.then is None else sql(then)) == one.answer, one.name
        else:
            with pytest.raises(
                (PySparkException, Py4JJavaError),
                match=r"(?s)is on a timeline.*Nothing was (written\. Use INSERT|changed)",
            ):
                sql(statement)
            assert sql(then) == STARTED


def said_in_docs(column: str) -> dict[str, str]:
    """A column of the table in the docs, by the names of operations."""
    text = (ROOT / "docs" / "spark-sql.md").read_text()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    [start] = [place for place, line in enumerate(table) if line[0] == "statement"]
    found: dict[str, str] = {}
    for line in table[start + 1 :]:
        if len(line) != len(table[start]):
            break
        found[line[0].replace("`", "")] = line[table[start].index(column)]
    return found


# --- one query that uses a table several times ------------------------------------------------------------------------


def test_uses_of_a_table_in_one_query_keep_their_filters_columns_and_times(client: persist.Client, sql: Sql) -> None:
    """Spark would keep what was planned for one of them in a source that they shared, and read it for the others."""
    schema = persist.Schema({"id": "int64 not null"}, {"v": "int64"})
    table, contents = client.table("t", schema), list[dict[int, int]]()
    rows_: dict[int, int] = {}
    for time in range(3):
        rows_ |= {id_: id_ * 7 % 11 + time for id_ in range(time * 4, 12)}
        table.upsert([{"id": id_, "v": v} for id_, v in rows_.items()])
        contents.append(dict(rows_))
    times = [time for (time,) in sql("SELECT _time FROM lake.t.history")]
    versions = [f"TIMESTAMP AS OF '{time}'" for time in sorted(times)]
    tests: dict[str, Callable[[int, int], bool]] = {
        "id < 3": lambda id_, _: id_ < 3, "id >= 9": lambda id_, _: id_ >= 9, "TRUE": lambda *_: True,
        "v = 5 OR v > 9": lambda _, v: v == 5 or v > 9, "v IN (1, 2, 3)": lambda _, v: v in {1, 2, 3},
    }  # fmt: skip
    pairs = itertools.product(range(3), tests)
    uses = [(at, test, column) for (at, test), column in zip(pairs, itertools.cycle(["id", "v"]), strict=False)]
    assert len(versions) == 3

    def relation(at: int, test: str, column: str) -> str:
        return f"(SELECT {column} AS x FROM lake.t {versions[at]} WHERE {test})"

    def expected(at: int, test: str, column: str) -> list[int]:
        return [id_ if column == "id" else v for id_, v in contents[at].items() if tests[test](id_, v)]

    parts = [f"SELECT {place} AS use, x FROM {relation(*use)}" for place, use in enumerate(uses)]
    assert sql(" UNION ALL ".join(parts)) == sorted(
        ((place, x) for place, use in enumerate(uses) for x in expected(*use)), key=str
    )
    scalars = ", ".join(f"(SELECT sum(x) FROM {relation(*use)})" for use in uses[::3])
    assert sql(f"SELECT {scalars}") == [tuple(sum(expected(*use)) or None for use in uses[::3])]
    for left, right in (((0, "id < 3", "id"), (0, "TRUE", "id")), ((2, "id >= 9", "v"), (0, "v = 5 OR v > 9", "v"))):
        joined = [(a, b) for a in expected(*left) for b in expected(*right) if a <= b]
        assert sql(f"SELECT l.x, r.x FROM {relation(*left)} l JOIN {relation(*right)} r ON l.x <= r.x") == sorted(
            joined, key=str
        )


def test_a_dataframe_is_of_one_time_and_its_uses_do_not_mix(
    client: persist.Client, spark: SparkSession, lake: str
) -> None:
    client.table("t", SCHEMA).append(START)
    frame = spark.table(f"{lake}.t")
    assert frame.where("id = 1").count() == 1
    assert frame.count() == 3
    assert frame.where("id < 2").union(frame.where("id > 2")).count() == 2
    client.table("t").append(rows((4, "new", 1)))
    assert frame.count() == 3
    assert spark.table(f"{lake}.t").count() == 4


# --- what is pushed down ----------------------------------------------------------------------------------------------

ODD = [float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1.5, -2.25, None]
KINDS = (
    "id BIGINT NOT NULL, d DOUBLE, f FLOAT, s STRING, t TIMESTAMP, n TIMESTAMP_NTZ, a DATE, c DECIMAL(9,2), y BINARY, "
    "b BOOLEAN"
)
PREDICATES = (
    "d = 0.0", "d > 1.5", "f >= double('NaN')", "d < double('NaN')", "f <=> 1.5", "d <> double('NaN')",
    "d IN (1.5, double('NaN'))", "NOT d IN (1.5, 0.0)", "NOT (d > 1.0)", "d IS NULL OR f = 1.5", "d > 0 AND f > 0",
    "s LIKE 'b%'", "s LIKE '%c'", "s LIKE '%b%'", "NOT s LIKE 'b%'", "s = 'abc' OR s = 'bc' AND id > 3", "s > 'abd'",
    "s LIKE 'b%c'", "t IN (TIMESTAMP '2026-01-01 00:00:01', TIMESTAMP '2026-01-01 00:00:02')",
    "NOT t IN (TIMESTAMP '2026-01-01 00:00:01')", "t > TIMESTAMP '2026-01-01 00:00:03.5'",
    "n = TIMESTAMP_NTZ '2026-01-01 00:00:02'", "a IN (DATE '2026-01-02', DATE '1500-01-01')", "a < DATE '1600-01-01'",
    "c IN (1.25, 2.50)", "c > 1", "y = X'01'", "y IN (X'00', X'02')", "b", "NOT b", "b = false OR b IS NULL",
    "5 > id", "id + 1 > 5", "id IN (1, 2, NULL)", "NOT id IN (1, 2)", "id = 1 OR length(s) = 2",
)  # fmt: skip


def odd_rows(spark: SparkSession) -> DataFrame:
    """Eight rows of each type, with what compares oddly, from Spark itself."""
    number = ", ".join(f"({i}, {'NULL' if d is None else f'double({str(d)!r})'})" for i, d in enumerate(ODD))
    return spark.sql(f"""SELECT bigint(i) AS id, d, float(d) AS f,
        element_at(array('abc', 'bc', 'bcc', '', 'b', 'c', 'abd', NULL), i + 1) AS s,
        TIMESTAMP '2026-01-01' + make_interval(0, 0, 0, 0, 0, 0, i) AS t,
        TIMESTAMP_NTZ '2026-01-01' + make_interval(0, 0, 0, 0, 0, 0, i) AS n,
        CASE WHEN i = 7 THEN DATE '1500-01-01' ELSE date_add(DATE '2026-01-01', i) END AS a,
        decimal(i * 1.25) AS c, unhex('0' || i) AS y, element_at(array(true, false, NULL), i % 3 + 1) AS b
        FROM VALUES {number} AS v(i, d)""").to(spark.createDataFrame([], KINDS).schema)


def test_filters_keep_the_rows_that_spark_keeps(spark: SparkSession, lake: str, sql: Sql) -> None:
    own = odd_rows(spark)
    own.writeTo(f"{lake}.odd").tableProperty("key", "id").create()
    own.createOrReplaceTempView("own")

    tried = by_day(PREDICATES, 3)
    found = sql(" UNION ALL ".join(
        f"SELECT {place} AS use, id FROM lake.odd WHERE {test}" for place, test in enumerate(tried)
    ))  # fmt: skip
    says = sql(f"SELECT id, {', '.join(f'({test})' for test in tried)} FROM own")
    kept = [(place, id_) for id_, *tests in says for place, is_true in enumerate(tests) if is_true]
    assert found == sorted(kept, key=str)


@pytest.mark.parametrize(
    ("test", "left"),
    [("d > 1", 3), ("s LIKE 'b%' OR id = 0", 4),
     ("t IN (TIMESTAMP '2026-01-01 00:00:01', TIMESTAMP '2026-01-01 00:00:02')", 2)],
)  # fmt: skip
def test_what_is_pushed_does_not_reach_spark(test: str, left: int, spark: SparkSession, lake: str) -> None:
    odd_rows(spark).writeTo(f"{lake}.odd").tableProperty("key", "id").create()
    frame = spark.table(f"{lake}.odd").where(test).select("id", "s")
    assert frame.count() == left
    frame.collect()
    scan = scan_of(frame)
    assert scan.metrics().apply("numOutputRows").value() == left
    needed = {name for name in ("id", "s", "d", "f", "t") if name in {"id", "s", *test.replace("(", " ").split()}}
    assert set(scan.schema().fieldNames()) == needed


def scan_of(frame: DataFrame) -> Any:
    """The one scan of a plan that was executed."""
    leaves = frame._jdf.queryExecution().executedPlan().collectLeaves()
    assert leaves.size() == 1
    return leaves.apply(0)


def test_a_use_of_a_table_is_planned_once_however_often_spark_copies_its_plan(
    spark: SparkSession, lake: str, client: persist.Client
) -> None:
    client.table("t", SCHEMA).append(START)
    scans = [scan_of(spark.table(f"{lake}.t").where(f"id > {least}")) for least in (1, 2)]
    one, other = ([scan.scan().toBatch() for _ in range(3)] for scan in scans)
    assert all(batch.equals(one[0]) for batch in one)
    assert not one[0].equals(other[0]), "each use has a plan of its own"


def test_a_limit_is_pushed_down_where_nothing_is_filtered(
    spark: SparkSession, lake: str, client: persist.Client
) -> None:
    client.table("t", PLAIN).append(pa.table({"id": range(100_000), "v": range(100_000)}))
    table = spark.table(f"{lake}.t")
    for frame, is_pushed in ((table.limit(7), True), (table.where("v >= 50").limit(7), False)):
        assert len({row.id for row in frame.collect()}) == 7
        assert ("limit 7" in str(scan_of(frame).scan().description())) == is_pushed
    both = table.limit(3).union(table.limit(5)).join(table, "id")
    assert both.count() == 8, "each use has its own"
    assert table.count() == 100_000


def test_a_join_with_a_small_table_is_a_broadcast(client: persist.Client, spark: SparkSession, lake: str) -> None:
    client.table("large", PLAIN).append(pa.table({"id": range(20_000), "v": range(20_000)}))
    client.table("small", PLAIN).append([{"id": 1, "v": 1}])

    def plan(relation: Callable[[str], DataFrame]) -> str:
        joined = relation("large").join(relation("small"), "id")
        assert joined.count() == 1
        return str(joined._jdf.queryExecution().sparkPlan().toString())

    assert "BroadcastHashJoin" in plan(lambda name: spark.table(f"{lake}.{name}"))
    source = spark.read.format("persist").option("location", client.url)
    assert "SortMergeJoin" in plan(source.load)


# --- times ------------------------------------------------------------------------------------------------------------


def test_a_timestamp_at_or_beyond_upper_is_the_newest_and_a_version_is_exact(client: persist.Client, sql: Sql) -> None:
    table = client.table("t", SCHEMA)
    assert sql("SELECT * FROM lake.t TIMESTAMP AS OF current_timestamp()") == []
    first = table.append(rows((1, "new", 10))).time
    table.append(rows((2, "new", 20)))
    assert len(sql("SELECT * FROM lake.t TIMESTAMP AS OF '2999-01-01'")) == 2
    assert sql("SELECT * FROM lake.t TIMESTAMP AS OF current_timestamp() - INTERVAL 1 DAY") == []
    assert sql(f"SELECT * FROM lake.t VERSION AS OF {first}") == [(1, "new", 10)]
    assert sql("SELECT * FROM lake.t VERSION AS OF '1 day ago'") == []
    with pytest.raises(PySparkException, match="upper has to pass 5138"):
        sql("SELECT * FROM lake.t VERSION AS OF 99999999999999")
    with pytest.raises(PySparkException, match="as_of must be an integer"):
        sql("SELECT * FROM lake.t VERSION AS OF 'some day'")
    joined = f"SELECT n.id FROM lake.t n LEFT ANTI JOIN lake.t VERSION AS OF {first} o ON n.id = o.id"
    assert sql(joined) == [(2,)]


def test_times_that_are_no_clock_have_versions_alone(client: persist.Client, sql: Sql) -> None:
    with client.open_writer("plain", PLAIN) as write:
        write.compare_and_append([{"id": 1, "v": 1, "_time": 0, "_diff": 1}], 0, 1)
    assert sql("SELECT * FROM lake.plain VERSION AS OF 0") == [(1, 1)]
    with pytest.raises(PySparkException, match="plain"):
        sql("SELECT * FROM lake.plain TIMESTAMP AS OF current_timestamp()")


# --- making tables ----------------------------------------------------------------------------------------------------


def test_tables_are_made_with_a_key(client: persist.Client, sql: Sql) -> None:
    sql("CREATE TABLE lake.a (id BIGINT, name STRING, PRIMARY KEY (id)) USING persist")
    sql("CREATE TABLE IF NOT EXISTS lake.a (id BIGINT, name STRING) TBLPROPERTIES ('key' = 'id')")
    sql("CREATE TABLE lake.b (x INT NOT NULL, y INT, z INT) TBLPROPERTIES ('key' = 'x,y', 'shards' = '2')")
    sql("CREATE TABLE lake.sales.c TBLPROPERTIES ('key' = 'id') AS SELECT id, 'x' AS s FROM range(3)")
    found = {name: client.table(name) for name in ("a", "b", "sales/c")}
    assert {name: table.schema.key_names for name, table in found.items()} == {
        "a": ["id"], "b": ["x", "y"], "sales/c": ["id"],
    }  # fmt: skip
    assert [found["a"].schema.unique, found["b"].schema.unique] == [True, False]
    assert [column.nullable for column in found["b"].schema.value] == [True]
    assert {table.schema.times for table in found.values()} == {"ms"}
    assert len(found["b"].describe().shards) == 2
    assert sql("SHOW TABLES IN lake.sales") == [("sales", "c", False)]
    assert sql("SELECT count(*) FROM lake.sales.c") == [(3,)]
    sql("ALTER TABLE lake.sales.c RENAME TO lake.sales.d")
    assert sql("SHOW TABLES IN lake.sales") == [("sales", "d", False)]
    with pytest.raises(PySparkException, match=r"unique .each key has at most one row.*Nothing was written") as caught:
        sql("INSERT INTO lake.a VALUES (1, 'x'), (1, 'y')")
    assert "Traceback" not in str(caught.value)
    with pytest.raises(PySparkException, match="NOT_NULL_ASSERT_VIOLATION"):
        sql("INSERT INTO lake.a VALUES (NULL, 'x')")


def test_columns_are_renamed_widened_and_take_nulls(client: persist.Client, sql: Sql) -> None:
    schema = persist.Schema({"id": "int64 not null"}, {"n": "int32 not null", "x": "float32"}, times="ms")
    client.table("t", schema).append([{"id": 1, "n": 2, "x": 0.5}])
    sql("ALTER TABLE lake.t ALTER COLUMN n TYPE BIGINT")
    sql("ALTER TABLE lake.t ALTER COLUMN n DROP NOT NULL, x TYPE DOUBLE")
    sql("ALTER TABLE lake.t RENAME COLUMN x TO y")
    sql("INSERT INTO lake.t VALUES (2, 5000000000, 0.1), (3, NULL, NULL)")
    assert sql(READ) == [(1, 2, 0.5), (2, 5_000_000_000, 0.1), (3, None, None)]
    assert [str(one) for one in client.table("t").describe().schema.value] == ["n: int64", "y: float64"]
    assert sql("SELECT y FROM lake.t WHERE y > 0.2") == [(0.5,)]


def test_columns_are_put_into_another_order_and_written_by_it(client: persist.Client, sql: Sql) -> None:
    schema = persist.Schema({"id": "int64 not null"}, {"a": "int32", "b": "string", "c": "float64"}, times="ms")
    client.table("t", schema).append([{"id": 1, "a": 2, "b": "x", "c": 0.5}])
    sql("ALTER TABLE lake.t ALTER COLUMN c FIRST, a AFTER b")
    sql("ALTER TABLE lake.t ADD COLUMN d BOOLEAN AFTER c")
    assert [one.name for one in client.table("t").describe().schema.value] == ["c", "d", "b", "a"]
    sql("INSERT INTO lake.t VALUES (2, 1.5, true, 'y', 3)")
    sql("UPDATE lake.t SET b = 'z' WHERE d")
    assert sql(READ) == [(1, 0.5, None, "x", 2), (2, 1.5, True, "z", 3)]
    assert sql("SELECT a, d FROM lake.t WHERE c > 1") == [(3, True)]
    assert client.table("t").read().to_arrow().column_names == ["id", "c", "d", "b", "a"]


REFUSED = {
    "CREATE TABLE lake.n (id BIGINT)": "needs the key",
    "CREATE TABLE lake.n (id BIGINT, x INT) TBLPROPERTIES ('key' = 'x')": "Name them in this order: x, id",
    "CREATE TABLE lake.n (id BIGINT) TBLPROPERTIES ('keys' = 'id')": "Did you mean key?",
    "CREATE TABLE lake.n (id BIGINT) TBLPROPERTIES ('key' = '')": "option key of CREATE TABLE is empty",
    "CREATE TABLE lake.n (id BIGINT) TBLPROPERTIES ('key' = 'no')": "there is no column 'no' for the key",
    "CREATE TABLE lake.n (id BIGINT, PRIMARY KEY (id)) TBLPROPERTIES ('key' = 'id')": "says the key twice",
    "CREATE TABLE lake.n (id BIGINT, UNIQUE (id))": "PRIMARY KEY alone",
    "CREATE TABLE lake.n (id BIGINT) USING orc TBLPROPERTIES ('key' = 'id')": "not USING 'orc'",
    "CREATE TABLE lake.n (id BIGINT) PARTITIONED BY (id) TBLPROPERTIES ('key' = 'id')": "have no partitions",
    "CREATE TABLE lake.n (id VARIANT) TBLPROPERTIES ('key' = 'id')": "to_json",
    "CREATE TABLE lake.n (id BIGINT) COMMENT 'c' TBLPROPERTIES ('key' = 'id')": "has no property 'comment'",
    "CREATE TABLE lake.n AS SELECT 1L AS id": "name the columns that tell its rows apart",
    "CREATE TABLE lake.`-n` (id BIGINT) TBLPROPERTIES ('key' = 'id')": "name must be",
    "SELECT * FROM lake.t WITH ('nosuch' = '1')": "has no option 'nosuch'",
    "SELECT * FROM lake.t WITH ('AS_OF' = '1')": "does not take the option as_of: say it in SQL",
    "SELECT * FROM lake.t WITH ('diff' = 'true')": "does not take the option diff",
    "INSERT INTO lake.t WITH ('table' = 'other') VALUES (1, 'x', 1)": "does not take the option table",
    "SELECT * FROM lake.nosuch": "TABLE_OR_VIEW_NOT_FOUND",
    "SELECT * FROM lake.t.nosuch": "TABLE_OR_VIEW_NOT_FOUND",
    "INSERT INTO lake.t.contents VALUES (1, 'x', 1, 1)": "does not support append",
    "DELETE FROM lake.t.contents": "can be read alone",
    "ALTER TABLE lake.t DROP COLUMN id": "key column",
    "ALTER TABLE lake.t ADD COLUMN x INT DEFAULT 7": "have no default",
    "ALTER TABLE lake.t ALTER COLUMN id AFTER cents": "key column",
    "ALTER TABLE lake.t ALTER COLUMN cents AFTER id": "need no `after`",
    "ALTER TABLE lake.t SET TBLPROPERTIES ('colour' = 'x')": "sets the property retention alone",
    "ALTER TABLE lake.t RENAME TO lake.u": "rename('u')",
    "CREATE OR REPLACE TABLE lake.t AS SELECT 1 AS id": "has other columns, or another key",
    "DROP SCHEMA lake.sales": "first part of names",
}


def test_what_is_refused_is_said_in_a_sentence_and_changes_nothing(client: persist.Client, sql: Sql) -> None:
    client.table("t", SCHEMA).append(START)
    for statement, said in REFUSED.items():
        with pytest.raises((PySparkException, Py4JJavaError)) as caught:
            sql(statement)
        assert said in str(caught.value), statement
    assert client.tables() == ["t"]
    assert sql(READ) == STARTED


def test_replacing_keeps_the_table_and_its_history(client: persist.Client, sql: Sql) -> None:
    sql("CREATE OR REPLACE TABLE lake.t TBLPROPERTIES ('key' = 'id') AS SELECT id FROM range(3)")
    table = client.table("t")
    before = table.describe().upper.time
    assert before is not None
    sql("CREATE OR REPLACE TABLE lake.t AS SELECT id FROM range(2, 5)")
    assert sql(READ) == [(2,), (3,), (4,)]
    assert table.count(before - 1) == 3
    sql("CREATE OR REPLACE TABLE lake.t (id BIGINT)")
    assert sql(READ) == []


def test_a_query_that_fails_leaves_no_table(client: persist.Client, sql: Sql) -> None:
    with pytest.raises(PySparkException, match="DIVIDE_BY_ZERO"):
        sql("CREATE TABLE lake.n TBLPROPERTIES ('key' = 'id') AS SELECT id, 1 / (id - 5) AS x FROM range(10)")
    assert client.tables() == []


def test_dataframes_are_written_by_names_of_tables(spark: SparkSession, lake: str, client: persist.Client) -> None:
    spark.range(5).writeTo(f"{lake}.w").tableProperty("key", "id").create()
    spark.range(5, 8).writeTo(f"{lake}.w").append()
    assert client.table("w").count() == 8
    spark.range(3).write.option("key", "id").saveAsTable(f"{lake}.s")
    spark.range(5, 8).write.mode("append").saveAsTable(f"{lake}.s")
    spark.range(8, 9).write.insertInto(f"{lake}.s")
    assert client.table("s").count() == 7
    spark.range(2).write.mode("overwrite").saveAsTable(f"{lake}.s")
    assert client.table("s").count() == 2


def test_a_stream_reads_a_table_and_its_changes(
    client: persist.Client, spark: SparkSession, lake: str, tmp_path: Path
) -> None:
    client.table("t", SCHEMA).append(START)
    for name, columns in (("t", 3), ("t.changes", 5)):
        frame = spark.readStream.table(f"{lake}.{name}")
        assert len(frame.columns) == columns
        target = str(tmp_path / name)
        frame.writeStream.option("checkpointLocation", f"{target}.at").trigger(availableNow=True).start(
            target, format="parquet"
        ).awaitTermination()
        assert spark.read.parquet(target).count() == 3


def test_a_stream_writes_to_a_table(client: persist.Client, spark: SparkSession, lake: str, tmp_path: Path) -> None:
    client.table("t", SCHEMA).append(START)
    client.table("copy", SCHEMA)
    for _ in range(2):
        stream = spark.readStream.table(f"{lake}.t").writeStream.trigger(availableNow=True)
        stream.option("checkpointLocation", str(tmp_path / "at")).toTable(f"{lake}.copy").awaitTermination()
        assert client.table("copy").count() == 3


def test_rows_written_while_a_statement_replaces_rows_are_not_lost(
    client: persist.Client, spark: SparkSession, lake: str, sql: Sql
) -> None:
    """The source of the MERGE writes to its target, after Spark has looked at that."""
    client.table("t", SCHEMA).append(START)
    url = client.url

    def append(id_: int) -> int:
        with persist.open(url) as other:
            other.table("t").append([{"id": 7, "state": "late", "cents": 70}])
        return id_

    append.__annotations__.clear()  # they are texts, which Spark does not read
    late = udf(append, "bigint")
    spark.range(1, 2, 1, 1).select(late("id").alias("id")).createOrReplaceTempView("late")
    merge = "MERGE INTO lake.t USING late s ON t.id = s.id WHEN MATCHED THEN UPDATE SET cents = 0"
    with pytest.raises(PySparkException, match=r"changed by another writer.*Nothing was written\. Run it again"):
        sql(merge)
    assert {(1, "new", 10), (7, "late", 70)} <= set(sql(READ))


def test_many_rows_are_replaced(client: persist.Client, sql: Sql) -> None:
    """More than the chunks in which they are written."""
    ids = range(50_000)
    client.table("t", PLAIN).append(pa.table({"id": ids, "v": ids}))
    sql("UPDATE lake.t SET v = -v WHERE v % 2 = 1")
    found = client.table("t").read().to_arrow()
    assert Counter(found["v"].to_pylist()) == Counter(-v if v % 2 else v for v in ids)
    assert math.isclose(client.table("t").history(limit=1)["added"].to_pylist()[0], 25_000)


# --- the jar ----------------------------------------------------------------------------------------------------------


def test_the_jar_that_is_shipped_is_what_its_source_gives(tmp_path: Path) -> None:
    made = tmp_path / "made.jar"
    ran = subprocess.run([ROOT / "scripts" / "catalog-jar", made], capture_output=True, text=True, check=False)
    if "no javac of Java 17" in ran.stderr:
        pytest.skip(ran.stderr)
    assert ran.returncode == 0, ran.stderr
    assert made.read_bytes() == Path(persist_lib.spark.catalog_jar()).read_bytes()


def test_sql_without_a_program_finds_the_source(client: persist.Client, tmp_path: Path) -> None:
    """As in `spark-sql` and the Thrift server: what makes the source known is the package `pyspark_persist`."""
    client.table("t", SCHEMA).append(START)
    conf = {
        "spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.catalogImplementation": "in-memory", **persist_lib.spark.catalog_conf(client.url),
    }  # fmt: skip
    words = [word for name, value in conf.items() for word in ("--conf", f"{name}={value}")]
    query = "SELECT sum(cents) FROM lake.t TIMESTAMP AS OF current_timestamp()"
    ran = subprocess.run(
        [HOME / "bin" / "spark-sql", "--master", "local[2]", *words, "-S", "-e", query],
        capture_output=True, text=True, check=False, cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)),
    )  # fmt: skip
    assert ran.stdout.split() == ["60"], ran.stderr[-2000:]


def test_jdbc_clients_have_the_tables(client: persist.Client, tmp_path: Path) -> None:
    """Through Spark's Thrift server: statements that write, read as of a time, and look into a table."""
    client.table("t", SCHEMA).append(START)
    server = ThriftServer(tmp_path, persist_lib.spark.catalog_conf(client.url), PYTHONPATH=str(ROOT))
    try:
        server.wait()
        found = server.ask("SELECT state, sum(cents) FROM lake.t GROUP BY state ORDER BY state")
        assert found == [["new", "40"], ["paid", "20"]]
        made = "CREATE TABLE lake.u (id BIGINT NOT NULL, word STRING) USING persist TBLPROPERTIES ('key' = 'id')"
        first = "INSERT INTO lake.u VALUES (1, 'one'), (2, 'two')"
        server.ask(made, first)
        version = client.table("u").read().as_of
        server.ask(
            "UPDATE lake.u SET word = 'uno' WHERE id = 1",
            "MERGE INTO lake.u u USING (SELECT 3 AS id, 'three' AS word) s ON u.id = s.id "
            "WHEN NOT MATCHED THEN INSERT *",
            "DELETE FROM lake.u WHERE id = 2",
        )
        assert server.ask("SELECT * FROM lake.u ORDER BY id") == [["1", "uno"], ["3", "three"]]
        assert server.ask(f"SELECT word FROM lake.u VERSION AS OF {version} ORDER BY id") == [["one"], ["two"]]
        assert len(server.ask("SELECT _time FROM lake.u.history")) == 4
        assert client.table("u").count() == 2
    finally:
        server.stop()


def test_a_catalog_is_not_called_as_the_source_is(spark: SparkSession, lake: str, client: persist.Client) -> None:
    assert lake
    spark.conf.set("spark.sql.catalog.persist", CLASS)
    spark.conf.set("spark.sql.catalog.persist.location", client.url)
    with pytest.raises(PySparkException, match="cannot be called persist"):
        spark.sql("SHOW TABLES IN persist")
    spark.conf.unset("spark.sql.catalog.persist")
    for name in ("persist", "spark_catalog", "a.b", ""):
        with pytest.raises(persist.errors.InvalidUsage, match="name must be a word"):
            persist_lib.spark.catalog_conf(client.url, name)
