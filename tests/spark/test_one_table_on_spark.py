"""The program of `test_one_table_everywhere` with Spark as its door: on each carrier the answers are those of Python.

What Spark has no call for (updates, dry runs, holds, drops, …) goes through the library, so that the steps after it
find the same table. A write on Spark answers no counts: what it did is what the next reads find.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as t

import persist_lib as persist
from persist_lib.spark import create_view, register
from tests.carriers import CARRIERS
from tests.circles import by_day
from tests.integration.test_one_table_everywhere import COUNTS, Answer, Failed, Python, rows_of, transcript

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]
DONE = "done"
KINDS = {"id": t.LongType(), "seq": t.LongType(), "gone": t.BooleanType()}


class OnSpark(Python):
    """A table through Spark."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        super().__init__(root, root)
        self.spark, self.steps = spark, 0

    def change(self, verb: str, *parts: Any, dry_run: bool = False, newer: str | None = None) -> Answer:
        keyed = verb in {"apply", "upsert"}  # a frame has all columns, so rows in part do not come by one
        in_part = keyed and any(row.keys() < {"id", "seq", "word"} for row in parts[0])
        if dry_run or newer is not None or verb == "update" or in_part:
            answer = super().change(verb, *parts, dry_run=dry_run, newer=newer)
            return answer if dry_run else DONE
        upserts, deletes = ([], parts[0]) if verb == "delete" else (parts[0], parts[1] if len(parts) > 1 else [])
        gone = [{"id": id_, "seq": None, "word": None, "gone": True} for id_ in deletes]
        rows = [*({**row, "gone": False} if gone else row for row in upserts), *gone]
        before, write = self.newest(), self.frame(rows).write.format("persist").mode("append")
        if verb != "append":
            write = write.option("upsert", "true")
        self.asked(lambda: write.options(**self.place, **({"deletes": "gone"} if gone else {})).save())
        self.last = None if (now := self.newest()) == before else now
        return DONE

    def read(self, as_of: int | None = None, **wanted: Any) -> Answer:
        options = {name: wanted[name] for name in ("diff",) if name in wanted}
        if as_of is not None:
            options["as_of"] = as_of
        if "columns" in wanted:
            options["columns"] = ",".join(wanted["columns"])
        if "key" in wanted:
            options["filter"] = f"id = {wanted['key'][0]}"
        return self.rows(**options)

    def changes(self, from_: int, to: int | None = None) -> Answer:
        return self.rows(**{"from": from_}, **({} if to is None else {"to": to}))

    def sql(self) -> Answer:
        self.asked(lambda: create_view(self.spark, "seen", self.name, location=self.place["location"]))
        (found,) = self.spark.sql("SELECT count(*) AS n, coalesce(sum(seq), 0) AS s FROM seen").collect()
        again = f"SELECT count(*) AS n FROM persist_as_of('{self.name}', location => '{self.place['location']}')"
        assert self.spark.sql(again).collect()[0].n == found.n
        return [found.n, found.s]

    @property
    def place(self) -> dict[str, str]:
        return {"location": self.db.url, "table": self.name}

    def rows(self, **options: Any) -> Answer:
        place = self.place
        self.steps += 1
        read = self.spark.read.format("persist").option("location", place["location"]).options(**options)
        return rows_of(self.asked(lambda: [row.asDict() for row in read.load(place["table"]).collect()]))

    def frame(self, rows: list[dict[str, Any]]) -> DataFrame:
        names = dict.fromkeys(name for row in rows or [{"id": 0, "seq": 0, "word": ""}] for name in row)
        texts = {name for row in rows for name, value in row.items() if isinstance(value, str)}
        kinds = {
            name: t.StringType()
            if name in texts
            else KINDS.get(name, t.StringType() if name == "word" else t.LongType())
            for name in names
        }
        shape = t.StructType([t.StructField(name, kind, name not in {"id", "gone"}) for name, kind in kinds.items()])
        return self.spark.createDataFrame([tuple(row.values()) for row in rows], shape)

    def newest(self) -> int | None:
        found = self.db.table(self.name).history(limit=1)["_time"]
        return int(found[0].value) if len(found) else None

    def asked(self, ask: Any) -> Any:
        try:
            return ask()
        except PySparkException as error:
            kinds = re.findall(r"persist_lib\.errors\.(\w+): ", str(error))
            if not kinds:
                raise
            raise Failed(kinds[-1]) from error


def seen(what: str, answer: Answer) -> Answer:
    """An answer, as far as Spark's is the same: of a change, that it was done.

    What was read on Spark keeps its history for a lease, so that since does not move yet, and a shard is not dropped.
    """
    if what in {"dry retention", "retention"}:
        return None
    if what == "described with retention" and isinstance(answer, tuple):
        return answer[:-1]
    return (
        DONE if isinstance(answer, tuple) and len(answer) == len(COUNTS) + 2 and not what.startswith("dry") else answer
    )


@pytest.mark.parametrize("carrier", by_day(list(CARRIERS), 5))
def test_the_program_on_spark_answers_as_python_does(spark: SparkSession, tmp_path: Path, carrier: str) -> None:
    register(spark)
    roots = [tmp_path / "python", tmp_path / "spark"]
    for root in roots:
        with persist.open(f"file:{root}") as db:
            CARRIERS[carrier](db)
    door = OnSpark(spark, roots[1])
    expected, found = transcript(Python(roots[0], roots[0])), transcript(door)
    assert door.steps > 12
    differing = [
        f"{what}: {found[what]}, not {answer}"
        for what, answer in expected.items()
        if seen(what, found[what]) != seen(what, answer)
    ]
    assert len(expected) >= 60
    if found["drop"] == "StillRead":  # a shard
        differing = [
            line for line in differing if line.split(":")[0] not in {"dry drop", "drop", "dropped", "no tables"}
        ]
    assert not differing, "\n".join(differing)
