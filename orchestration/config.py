"""The configuration of runs, as the launchpad shows it, and what it means to the duties."""

# SUBTLE: no `from __future__ import annotations` here, as Dagster reads the annotations of what it decorates.

import dagster as dg
from pydantic import Field

from orchestration.duties import Options
from orchestration.resources import Persist
from orchestration.settings import IN_FLIGHT

APPLY: str = Field(default="", description="`at once`, or `by a person`: only plan; empty: as the settings say")


class DutyConfig(dg.Config):
    """How the duties of a run are done."""

    engine: str = Field(
        default="auto",
        description="auto: as a rule says, else Spark for what reads more than `spark_above_bytes`; spark; local",
    )
    dry_run: bool = Field(default=False, description="change nothing; observe what would be done")
    in_flight: int | None = Field(default=None, description="shards worked on at once; empty: as the settings say")
    verify_reads: int | None = Field(
        default=None,
        description="at how many times contents are compared around a compaction; empty: as a rule says, else 3",
    )
    even_if_paused: bool = Field(default=False, description="also where upkeep is paused")
    scrub_all: bool = Field(default=False, description="scrub everything, not only what no scrub has found sound yet")


class SweepConfig(DutyConfig):
    """How the duties are done, and for which shards."""

    shards: list[str] = Field(default=[], description="empty: those on which something is due")
    everything: bool = Field(
        default=False, description="visit also shards on which nothing is due, and record also what found nothing to do"
    )
    apply: str = APPLY


class TendConfig(dg.Config):
    """Which collections are tended."""

    collections: list[str] = Field(default=[], description="empty: all, and what is left of dropped ones")
    everything: bool = Field(default=False, description="record also collections on which nothing was due")
    dry_run: bool = Field(default=False, description="change nothing; observe what would be done")
    apply: str = APPLY


class PendingConfig(dg.Config):
    """Which collections are absorbed."""

    collections: list[str] = Field(default=[], description="empty: all where something is due")
    dry_run: bool = Field(default=False, description="change nothing; observe what would be done")
    apply: str = Field(
        default="", description="`by a person`: only plan. Settings never say so: what is pending cannot be read"
    )


def options_of(config: DutyConfig, persist: Persist, *, is_dry: bool) -> Options:
    """Turn a run's configuration into the options of the duties. Raises Failure for a value that cannot be."""
    if config.engine not in ("auto", "spark", "local"):
        raise dg.Failure(f"engine must be auto, spark or local: got {config.engine!r}. Nothing was done")
    for name in ("in_flight", "verify_reads"):
        least = int(name == "in_flight")
        if (given := getattr(config, name)) is not None and given < least:
            raise dg.Failure(f"{name} must be at least {least}: got {getattr(config, name)}. Nothing was done")
    settings = persist.settings
    return Options(
        config.engine, dry_run=is_dry, may_delete=bool(settings.may_delete), verify_reads=config.verify_reads,  # type: ignore[arg-type]
        scrub_all=config.scrub_all, even_if_paused=config.even_if_paused,
        in_flight=config.in_flight or settings.in_flight or IN_FLIGHT,
    )  # fmt: skip
