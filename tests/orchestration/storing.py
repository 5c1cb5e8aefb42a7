"""Runs of assets that are stored in shards by the IO manager."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import dagster as dg
import pytest

import persist_lib as persist
from orchestration.io_manager import PersistIOManager
from orchestration.resources import Persist
from tests.spark.collections import SMALL


def resources(folder: Path, times: str = "none") -> dict[str, Any]:
    """Times are integers, so that a test can say them, unless it says what they are."""
    persist = Persist(location=f"file:{folder}", config=SMALL, create=True)
    return {"io_manager": PersistIOManager(persist=persist, times=times)}


class Store(NamedTuple):
    """Where assets are stored, and the instance that runs them."""

    folder: Path
    instance: dg.DagsterInstance

    def run(self, *assets: Any, **options: Any) -> dg.ExecuteInProcessResult:
        return dg.materialize(list(assets), instance=self.instance, resources=resources(self.folder), **options)

    def failure(self, *assets: Any, **options: Any) -> persist.PersistError:
        """The error of a run that must fail."""
        with pytest.raises((dg.DagsterError, persist.PersistError)) as caught:
            self.run(*assets, **options)
        error: BaseException | None = caught.value
        while error is not None and not isinstance(error, persist.PersistError):
            error = error.__cause__
        assert error is not None, caught.value
        return error


def contents(client: persist.Client, name: str, as_of: int | None = None) -> list[dict[str, Any]]:
    """The rows of a shard, each as often as it is there."""
    with client.open_reader(name) as reader:
        return [{k: v for k, v in row.items() if k != "_diff"} for row in reader.snapshot(as_of, diff=True).to_pylist()]
