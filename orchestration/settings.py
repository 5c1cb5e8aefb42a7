"""The settings of the pipeline, and the one place where it reads the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from jobs.session import SparkSettings
from persist_lib.config import Config
from persist_lib.core.cost import parse_prices
from persist_lib.core.duties import MAINTENANCE_LEASE_MS
from persist_lib.errors import InvalidUsage
from persist_lib.location.open import scheme_of
from persist_lib.settings import config_of

KEEP_RUNS_DAYS = 30.0
IN_FLIGHT = 4
POOL = re.compile(r"\S+")
DEFAULTS: Mapping[str, Any] = {"lease_ms": MAINTENANCE_LEASE_MS}
"""The pipeline's own defaults. Its workers are kept up while they live. One that was killed keeps other workers from
its shard until its lease ends."""


class Data(BaseModel):
    """Which tables and sources are assets. Without any of both there are none."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tables: tuple[str, ...] = ("*",)
    """Names, each an asset, and patterns (`events_*`), each an asset with a partition for each table of such a name. A
    table belongs to the first that fits."""
    sources: tuple[str, ...] = ()
    """Sources, each an asset, upstream of the table of its name."""
    group: str = "data"
    """Their group, after the name of the pipeline if it has one."""
    key_prefix: tuple[str, ...] = ()
    """What the keys of these assets start with, after what all keys of the pipeline do."""


class Settings(BaseModel):
    """Which location the pipeline maintains, and where Spark runs. Fields left out are read from the environment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    location: str | None = None
    """PERSIST_LOCATION, as in `file:./data`."""
    consensus: str | None = None
    """PERSIST_CONSENSUS. If neither is set: the same location as the blobs."""
    config: Mapping[str, Any] = {}
    """PERSIST_CONFIG, a JSON object: fields of `persist.Config`. `lease_ms` is a minute unless it is given."""
    prices: str | None = None
    """PERSIST_PRICES: `s3`, `free` or JSON. If neither is set: S3's list prices on S3, and free elsewhere."""
    spark: SparkSettings | None = None
    """PERSIST_SPARK_MASTER, PERSIST_SPARK_REMOTE, PERSIST_SPARK_DRIVER_MEMORY."""
    alert_url: str | None = None
    """PERSIST_ALERT_URL: where each thing that is wrong is posted as JSON, once, and once more when it is over."""
    heartbeat_url: str | None = None
    """PERSIST_HEARTBEAT_URL: asked each minute that the watcher is well. What it belongs to raises the alarm else."""
    keep_runs_days: float | None = None
    """PERSIST_KEEP_RUNS_DAYS: finished runs of the pipeline go after so many days, with their events; 30 if neither is
    set, and 0 keeps all."""
    data: Data | None = None
    """PERSIST_DATA, a JSON object of the fields of `Data`, or `off`. If neither is set: one asset, all tables."""
    is_running: bool | None = None
    """PERSIST_RUNNING: whether schedules and sensors run from the start. Off if neither is set, and on in `make dev`;
    the UI can turn them on and off."""
    apply: Literal["at once", "by a person"] | None = None
    """PERSIST_APPLY: whether jobs of upkeep act at once, the default, or write a plan down for the job `apply`."""
    in_flight: int | None = None
    """PERSIST_IN_FLIGHT: how many shards a run works on at once, unless its configuration says; 4 if neither is set.
    How many runs there are at once is a limit of Dagster's (`dagster.yaml`)."""
    pool: str | None = None
    """PERSIST_POOL: Dagster's pool of all runs that may compact. Its limit (by the UI, or by `dagster instance
    concurrency set POOL N`) is how many there are at once, over all locations with it. None if neither is set."""
    stagger: int | None = None
    """PERSIST_STAGGER: schedules tick up to so many minutes later, by a number that follows from the location, so that
    those of several do not begin at once. As they are if neither is set."""
    may_delete: bool | None = None
    """PERSIST_MAY_DELETE: whether runs delete objects and cut logs. Off if neither is set, and on in `make dev`."""


def resolved(settings: Settings, environ: Mapping[str, str] | None = None) -> Settings:
    """Fill in the settings that were left out from the environment, and check all of them. Opens nothing.

    Raises InvalidUsage without a location, and for a value that cannot be right.
    """
    filled = check(settings, environ)
    if not filled.location:
        raise InvalidUsage(
            "no location is given. Set PERSIST_LOCATION, as in PERSIST_LOCATION=file:./data, or pass Settings"
        )
    return filled


def _days(given: float | None, text: str | None) -> float:
    try:
        days = float(text) if given is None and text else given
    except ValueError:
        days = -1
    if days is not None and not 0 <= days < 1e5:
        raise InvalidUsage(
            f"keep_runs_days must be a number of days, or 0 for all: got {days if text is None else text!r}"
        )
    return KEEP_RUNS_DAYS if days is None else days


def _data(given: Data | None, text: str | None) -> Data:
    if given is not None or not text:
        return given or Data()
    if text == "off":
        return Data(tables=())
    try:
        return Data.model_validate_json(text)
    except ValidationError as error:
        raise InvalidUsage(
            f"PERSIST_DATA must be 'off' or a JSON object of {', '.join(Data.model_fields)}, as in "
            f'{{"tables": ["orders", "events_*"]}}: {error.errors()[0]["msg"]}'
        ) from error


def _count(given: int | None, name: str, environ: Mapping[str, str], usual: int) -> int:
    """A number of 1 or more."""
    text = environ.get(name, "")
    try:
        found = int(text) if given is None and text else given
    except ValueError:
        found = 0
    if found is not None and found < 1:
        raise InvalidUsage(f"{name} must be a number from 1 on: got {text if given is None else given!r}")
    return usual if found is None else found


def _pool(name: str | None) -> str | None:
    if name is not None and not POOL.fullmatch(name):
        raise InvalidUsage(f"PERSIST_POOL must be a name without spaces, as Dagster's pools have it: got {name!r}")
    return name


SWITCH = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}
APPLY = ("at once", "by a person")


def _switch(given: bool | None, name: str, environ: Mapping[str, str]) -> bool:
    """Whether something is on; off where nothing says so."""
    text = environ.get(name, "").lower()
    if given is None and text and text not in SWITCH:
        raise InvalidUsage(f"{name} must be 1 or 0: got {text!r}")
    return SWITCH.get(text, False) if given is None else given


def _apply(given: str | None, text: str | None) -> str:
    if (found := given or text or APPLY[0]) not in APPLY:
        raise InvalidUsage(f"PERSIST_APPLY must be {APPLY[0]!r} or {APPLY[1]!r}: got {found!r}")
    return found


def check(settings: Settings, environ: Mapping[str, str] | None = None) -> Settings:
    """Fill in what was left out. Raises InvalidUsage for a setting that cannot be right. A location may be missing."""
    environ = os.environ if environ is None else environ
    location = settings.location or environ.get("PERSIST_LOCATION")
    consensus = settings.consensus or environ.get("PERSIST_CONSENSUS")
    prices = settings.prices or environ.get("PERSIST_PRICES")
    config = {**DEFAULTS, **(dict(settings.config) or config_of(environ))}
    for url in (location, consensus):
        if url:
            scheme_of(url)
    if prices:
        parse_prices(prices)
    Config.model_validate(config)
    hooks = {
        name: getattr(settings, name) or environ.get(f"PERSIST_{name.upper()}")
        for name in ("alert_url", "heartbeat_url")
    }
    for name, url in hooks.items():
        if url and not url.startswith(("http://", "https://")):  # it may have a secret, so it is not shown
            raise InvalidUsage(f"{name} must be a URL of http or https: got {len(url)} characters of something else")
    return settings.model_copy(
        update={
            **hooks,
            "data": _data(settings.data, environ.get("PERSIST_DATA")),
            "is_running": _switch(settings.is_running, "PERSIST_RUNNING", environ),
            "may_delete": _switch(settings.may_delete, "PERSIST_MAY_DELETE", environ),
            "in_flight": _count(settings.in_flight, "PERSIST_IN_FLIGHT", environ, IN_FLIGHT),
            "stagger": _count(settings.stagger, "PERSIST_STAGGER", environ, 0),
            "pool": _pool(settings.pool or environ.get("PERSIST_POOL") or None),
            "apply": _apply(settings.apply, environ.get("PERSIST_APPLY")),
            "keep_runs_days": _days(settings.keep_runs_days, environ.get("PERSIST_KEEP_RUNS_DAYS")),
            "location": location, "consensus": consensus, "config": config, "prices": prices,
            "spark": settings.spark or SparkSettings.from_environment(environ),
        }
    )  # fmt: skip
