"""The pipeline on Dagster: shards as partitions, duties as assets, checks, schedules and sensors."""
