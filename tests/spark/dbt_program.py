"""Runs a project of dbt in a Spark session with our catalog, in its own process: `program.py PROJECT URL FOLDER`."""

import sys
from typing import Any

project, url, folder = sys.argv[1:]
sys.path.insert(0, folder)

from dbt.cli.main import dbtRunner  # type: ignore[import-not-found] # noqa: E402 - the one in that folder
from pyspark.sql import SparkSession  # noqa: E402

import persist_lib.spark  # noqa: E402

settings: dict[str, Any] = {
    **persist_lib.spark.catalog_conf(url, name="lake"), "spark.sql.defaultCatalog": "lake",
    "spark.sql.catalogImplementation": "in-memory", "spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "1",
}  # fmt: skip
persist_lib.spark.register(SparkSession.builder.master("local[1]").config(map=settings).getOrCreate())
done = dbtRunner().invoke(["run", "--profiles-dir", project, "--project-dir", project])
if not done.success:
    raise SystemExit(f"dbt failed: {done.exception or done.result}")
