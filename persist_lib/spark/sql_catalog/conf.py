"""Spark's settings for the catalog. They have to be there before the JVM is: a running session takes `ADD JAR`."""

from __future__ import annotations

from pathlib import Path

from persist_lib.arguments import check_type, shown
from persist_lib.errors import InvalidUsage
from persist_lib.spark.source import NAME

CLASS = "io.persist.spark.PersistCatalog"
JAR = Path(__file__).with_name("persist-catalog.jar")


def conf(location: str | None, name: str, options: dict[str, str]) -> dict[str, str]:
    """See `persist_lib.spark.catalog_conf`."""
    check_type(name, str, "name", '"lake"')
    if not name.isidentifier() or name.lower() in {NAME, "spark_catalog"}:
        raise InvalidUsage(
            f"name must be a word of letters, digits and _ that is neither {NAME} (the data source: Spark would take "
            f"{NAME}.orders for a path) nor spark_catalog: got {shown(name)}",
            argument="name", value=name,
        )  # fmt: skip
    prefix = f"spark.sql.catalog.{name}"
    given = options if location is None else {"location": location, **options}
    return {prefix: CLASS, **{f"{prefix}.{option}": value for option, value in given.items()}, "spark.jars": str(JAR)}
