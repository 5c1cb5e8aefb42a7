"""A stream from a shard into Parquet files, which is killed and started again; with `count`, what the files hold.

python stream_program.py run|now|count LOCATION FOLDER
"""

from __future__ import annotations

import json
import sys

import persist_lib.spark
from jobs.session import SparkSettings, build_session

KEEPING = {"spark.sql.streaming.minBatchesToRetain": "1000000"}
"""The test looks at the first offset, however many there are."""


def main(what: str, location: str, folder: str) -> None:
    """Run until killed, or read what is there now, or print the rows that were delivered."""
    spark = build_session(SparkSettings(master="local[2,4]", driver_memory="512m", conf=KEEPING))
    if what == "count":
        print("ROWS " + json.dumps([list(row) for row in spark.read.parquet(f"{folder}/out").collect()]))
        return
    persist_lib.spark.register(spark)
    # Small batches, so that many are under way when it is killed. What was left over by then is read in larger ones.
    limit = {"max_updates": "200" if what == "run" else "5000"}
    options = {"location": location, "shard": "orders", "changes": "true", "hold": "etl", **limit}
    written = (
        spark.readStream.format("persist").options(**options).load()
        .writeStream.format("parquet").option("path", f"{folder}/out")
        .option("checkpointLocation", f"{folder}/checkpoint")
    )  # fmt: skip
    trigger = written.trigger(availableNow=True) if what == "now" else written.trigger(processingTime="0 seconds")
    trigger.start().awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
