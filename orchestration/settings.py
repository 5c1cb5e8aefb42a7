"""The settings of the pipeline, and the one place where it reads the environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from jobs.session import SparkSettings
from persist_lib.errors import InvalidUsage


class Settings(BaseModel):
    """Which location the pipeline maintains, and where Spark runs. Fields left out are read from the environment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    location: str | None = None
    """PERSIST_LOCATION, as in `file:./data`."""
    consensus: str | None = None
    """PERSIST_CONSENSUS. If neither is set: the same location as the blobs."""
    config: Mapping[str, Any] = {}
    """PERSIST_CONFIG, a JSON object: fields of `persist.Config`."""
    prices: str | None = None
    """PERSIST_PRICES: `s3`, `free` or JSON. If neither is set: S3's list prices on S3, and free elsewhere."""
    spark: SparkSettings | None = None
    """PERSIST_SPARK_MASTER, PERSIST_SPARK_REMOTE, PERSIST_SPARK_DRIVER_MEMORY."""
    is_running: bool = True
    """Whether schedules and sensors run from the start. The UI can turn them on and off."""


def resolved(settings: Settings, environ: Mapping[str, str] | None = None) -> Settings:
    """Fill in the settings that were left out from the environment. Raises InvalidUsage without a location."""
    environ = os.environ if environ is None else environ
    location = settings.location or environ.get("PERSIST_LOCATION")
    if not location:
        raise InvalidUsage(
            "no location is given. Set PERSIST_LOCATION, as in PERSIST_LOCATION=file:./data, or pass Settings"
        )
    return settings.model_copy(
        update={
            "location": location,
            "consensus": settings.consensus or environ.get("PERSIST_CONSENSUS"),
            "config": dict(settings.config) or json.loads(environ.get("PERSIST_CONFIG") or "{}"),
            "prices": settings.prices or environ.get("PERSIST_PRICES"),
            "spark": settings.spark or SparkSettings.from_environment(environ),
        }
    )
