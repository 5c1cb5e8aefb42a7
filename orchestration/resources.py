"""The resources of runs: the location as a client, and Spark as a session that starts when it is first needed."""

# SUBTLE: no `from __future__ import annotations` here, as Dagster reads the annotations of what it decorates.

import os
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import dagster as dg
from dagster_pyspark import LazyPySparkResource
from pydantic import Field, PrivateAttr

import persist_lib as persist
from jobs.session import SparkSettings, build_session
from orchestration.settings import Settings, resolved
from persist_lib.core.cost import parse_prices
from persist_lib.telemetry import configure, flush, span

P = ParamSpec("P")
T = TypeVar("T")


def traced(call: Callable[P, Iterator[T]]) -> Callable[P, Iterator[T]]:
    """Decorate the generator of an op: what it does is in a span of the run, where the process is observed."""

    @wraps(call)
    def run(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        context: Any = args[0]
        configure(os.environ)
        with span("run", context.run.job_name, run_id=context.run.run_id):
            yield from call(*args, **kwargs)

    return run


class Persist(dg.ConfigurableResource):  # type: ignore[type-arg]
    """A client of the location, open for the length of a run or of a sensor's tick."""

    location: str = Field(default="", description="empty: PERSIST_LOCATION")
    consensus: str = Field(default="", description="empty: PERSIST_CONSENSUS, or the same place as the blobs")
    config: dict[str, Any] = Field(default={}, description="fields of `persist.Config`; empty: PERSIST_CONFIG")
    prices: str = Field(default="", description="`s3`, `free` or JSON; empty: PERSIST_PRICES")
    create: bool = Field(
        default=False, description="make the location if there is none; otherwise a typing error fails at once"
    )

    apply: str = Field(default="", description="`at once` or `by a person`; empty: PERSIST_APPLY, or at once")
    may_delete: str = Field(default="", description="1 or 0: whether runs delete; empty: PERSIST_MAY_DELETE, or 0")
    in_flight: int = Field(default=0, ge=0, description="shards a run works on at once; 0: PERSIST_IN_FLIGHT, or 4")

    _client: persist.Client | None = PrivateAttr(default=None)

    @property
    def settings(self) -> Settings:
        """All settings, those that are left out from the environment. Raises InvalidUsage."""
        environ = {**os.environ, **({"PERSIST_MAY_DELETE": self.may_delete} if self.may_delete else {})}
        given = Settings(
            location=self.location or None, consensus=self.consensus or None, config=self.config,
            prices=self.prices or None, apply=self.apply or None, in_flight=self.in_flight or None,
        )  # fmt: skip
        return resolved(given, environ)

    @property
    def client(self) -> persist.Client:
        """The client, opened on first use. Raises NotFound if there is no location, unless `create`."""
        if self._client is None:
            settings = self.settings
            configure(os.environ)
            self._client = persist.open(
                settings.location or "", settings.consensus, config=persist.Config.model_validate(settings.config),
                prices=parse_prices(settings.prices) if settings.prices else None, create=self.create,
            )  # fmt: skip
        return self._client

    def table(self, name: str, schema: persist.Schema | None = None) -> persist.Table:
        """The table of this name, made with `schema` if it is not there. Closed with the client, at the end of a run.

        Raises NotFound for one that is not there, without a schema.
        """
        return self.client.table(name, schema)

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:  # noqa: ARG002 - Dagster passes it by name
        """Close the client: its ids retire now, not when their leases end."""
        client, self._client = self._client, None
        if client is not None:
            client.close()
        flush()  # a step's process may end without its exit functions


class Spark(LazyPySparkResource):
    """The Spark session of this process. `spark.master` or `spark.remote` in `spark_config` say where Spark runs.

    The session outlives the run: a later run in this process finds it warm.
    """

    spark_config: dict[str, Any] = Field(
        default={},
        description="Spark's own names; empty: PERSIST_SPARK_MASTER or PERSIST_SPARK_REMOTE, else this machine",
    )

    def _init_session(self) -> None:
        if self._spark_session is None:
            self._spark_session = build_session(spark_settings(self.spark_config))


SPARK_NAMES = {"master": "spark.master", "remote": "spark.remote", "driver_memory": "spark.driver.memory"}


def spark_settings(conf: dict[str, Any]) -> SparkSettings:
    """The settings for a flat mapping of Spark's names."""
    if not conf:
        return SparkSettings.from_environment()
    known = {field: str(conf[key]) for field, key in SPARK_NAMES.items() if key in conf}
    rest = {key: str(value) for key, value in conf.items() if key not in SPARK_NAMES.values()}
    return SparkSettings.model_validate({**known, "conf": rest})


def spark_config(settings: SparkSettings) -> dict[str, str]:
    """The inverse of `spark_settings`: the settings in Spark's names, as the resource takes them."""
    values = {"master": settings.master, "remote": settings.remote, "driver_memory": settings.driver_memory}
    return {**{SPARK_NAMES[field]: value for field, value in values.items() if value}, **settings.conf}
