"""Makes the data source `persist` known to every Spark that finds this package: also to SQL without Python.

Spark looks for packages that are called `pyspark_…` and have a `DefaultSource`. Nothing else is here.
"""

from persist_lib.spark.source import PersistSource as DefaultSource

__all__ = ["DefaultSource"]
