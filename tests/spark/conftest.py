"""One Spark session for all tests of a process: a JVM is slow to start and large."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import persist_lib as persist
from jobs.session import SparkSettings, build_session
from tests.spark.collections import SMALL


@pytest.fixture
def spark() -> SparkSession:
    """The session of this process; a new one where a test of something else has stopped it. Nobody has to end it."""
    return build_session(SparkSettings(master="local[2,4]", driver_memory="512m"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def client(folder: Path) -> Iterator[persist.Client]:
    with persist.open(f"file:{folder}", config=persist.Config(**SMALL)) as opened:
        yield opened
