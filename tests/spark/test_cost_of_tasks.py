"""What Spark's tasks ask of the location is counted as asked by the client that sent them."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

import persist_lib as persist
from jobs.compact import compact_shards, numbers
from jobs.engine import SparkEngine
from jobs.scrub import scrub_shards
from persist_lib.core.cost import S3_LIST
from tests.spark.collections import SMALL, damage_a_part, write

pytestmark = [pytest.mark.spark, pytest.mark.timeout(180)]


def test_a_compaction_costs_what_its_tasks_spent_too(tmp_path: object, spark: SparkSession) -> None:
    with persist.open(f"file:{tmp_path}/data", config=persist.Config(**SMALL), prices=S3_LIST) as client:
        write(client, "s", seed=1)
        size = client.inspect("s").state.size
        before, stored = client.metrics().cost, client.metrics().operations["set"].calls
        [(_, done, _)] = compact_shards(client, ["s"], engine="spark", spark=SparkEngine(client, lambda: spark))
        assert done is not None
        cost = done.cost
        assert cost.puts == sum(applied.parts_out for applied in done.applied) > 1
        assert cost.bytes_written > done.bytes_out
        assert cost.bytes_read >= size, "each range reads what it needs of each part, some chunks twice"
        assert cost.dollars == pytest.approx(cost.priced(S3_LIST).dollars)
        assert client.metrics().cost.puts == before.puts + cost.puts
        assert client.metrics().operations["set"].calls == stored, "all of them by tasks"
        assert numbers(done)["dollars"] == cost.dollars


def test_a_scrub_costs_what_its_tasks_read_also_of_a_damaged_part(
    client: persist.Client, folder: object, spark: SparkSession
) -> None:
    write(client, "s", seed=1)
    parts = sum(len(batch.parts) for batch in client.inspect("s").state.trace)
    [scrub] = [one.done.scrubbed for one in scrub_shards(client, ["s"], lambda: spark, engine="spark") if one.done]
    assert scrub is not None
    assert not scrub.damaged
    assert scrub.cost.gets == parts
    assert scrub.cost.bytes_read > client.inspect("s").state.size
    damage_a_part(folder, "s")  # type: ignore[arg-type]
    [scrub] = [one.done.scrubbed for one in scrub_shards(client, ["s"], lambda: spark, engine="spark") if one.done]
    assert scrub is not None
    assert scrub.damaged
    assert scrub.cost.gets == parts, "what the first one remembered is read by the verification around it"
