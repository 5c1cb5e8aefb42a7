"""Settings: a dozen numbers with units and reasons.

Components such as stores, clocks and random numbers are arguments, never settings. Nothing here reads the environment.
"""

from __future__ import annotations

from typing import Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    field_validator,
    model_validator,
)

from persist_lib.arguments import LONGEST_S, native, shown
from persist_lib.errors import InvalidUsage

KIB = 1024
MIB = 1024 * KIB


MOST_BYTES = 1 << 62
"""No setting in bytes is larger, so that sums of a few of them still fit into 64 bits."""
ROLLUP_EVERY_OBJECTS, READ_THREADS_REQUESTS = 32, 16


class Settings(BaseModel):
    """Settings whose values are refused with InvalidUsage. Numbers may be numpy's; a bool is no number."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _number(cls, value: object) -> object:
        found = native(value)
        if isinstance(found, (bool, bytes)):
            raise ValueError(f"Input should be no {type(found).__name__}")  # noqa: TRY004 - what pydantic expects
        return found

    @model_validator(mode="wrap")
    @classmethod
    def _refuse(cls, given: object, parse: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return parse(given)
        except ValidationError as error:
            wrong = [
                f"{'.'.join(map(str, one['loc']))}: {one['msg']}, got {shown(one['input'])}" for one in error.errors()
            ]
            raise InvalidUsage(f"{cls.__name__} was refused. {'; '.join(wrong)}", problems=wrong) from error


class CacheConfig(Settings):
    """A cache of the parts and rollups that a client reads, in chunks of up to 8 MiB. Its limits are in bytes."""

    path: str | None = Field(default=None, pattern=r"^[^\x00]+$")
    """A directory on a local disk, which several processes and locations may share. None: in memory only."""
    disk_bytes: int = Field(default=1024 * MIB, ge=0, le=MOST_BYTES)
    """The most that all cache files hold, from all processes and locations. A chunk above half of this is not kept."""
    memory_bytes: int = Field(default=64 * MIB, ge=0, le=MOST_BYTES)
    """The most that each client keeps in memory. A chunk that is found in memory is not read from disk."""


class Config(Settings):
    """Settings of a client. Sizes in bytes, durations as the name says. Values out of bounds are refused."""

    inline_bytes: int = Field(default=16 * KIB, ge=0, le=256 * KIB)
    """A batch at most this large is stored in the state itself: one compare-and-set, no object."""
    part_bytes: int = Field(default=128 * MIB, ge=64 * KIB, le=1024 * MIB)
    """About the size of one object. Larger costs memory per task, smaller costs requests."""
    lease_ms: int = Field(default=15 * 60_000, ge=100, le=400 * 86_400_000)
    """How long a reader or writer lives without a heartbeat. Longer delays collection after a crash."""
    rollup_every: int = Field(default=128, ge=1, le=1 << 32)
    """Transitions between rollups: the most that opening a shard has to replay. Where each row of the log is an object,
    a request to read, the default is 32 (`usual_where`)."""
    timeout_s: float = Field(default=60.0, gt=0, le=LONGEST_S)
    """How long a call may take, in seconds, unless the caller passes another timeout."""
    poll_s: float = Field(default=0.01, gt=0, le=LONGEST_S)
    """Seconds between a listener's first polls for updates. It backs off to twice that when nothing comes."""
    buffer_bytes: int = Field(default=64 * MIB, ge=64 * KIB, le=MOST_BYTES)
    """How many bytes `append_async` accepts while an append is outstanding. It bounds the memory of a writer and the
    size of one commit."""
    merge_bytes: int = Field(default=256 * MIB, ge=1 * MIB, le=MOST_BYTES)
    """Memory for buffered windows of a merge."""
    read_threads: int = Field(default=4, ge=1, le=64)
    """How many objects a reader fetches in parallel. Where each is a request, on S3, GCS and Azure, the default is 16
    (`usual_where`)."""
    compaction_weight: float = Field(default=0.5, gt=0, le=1e12)
    """A batch is in debt below this share of all that is newer. Larger: fewer batches, more rewriting."""
    compaction_advance: float = Field(default=1 / 3, gt=0, le=1e12)
    """A batch is rewritten when since has passed about this share of its updates. Smaller: less history, more work."""
    compaction_ahead: float = Field(default=1 / 16, ge=0, le=1e12)
    """The contents are written beside the history when the updates that do not count any more weigh more than this
    share of the rows. Smaller: faster reads, more rewriting. 0: never, and those that are kept are given up."""
    spark_above_bytes: int = Field(default=64 * MIB, ge=0, le=MOST_BYTES)
    """Compactions that read more than this go to Spark when the engine is `auto`."""
    task_bytes: int = Field(default=128 * MIB, ge=64 * KIB, le=MOST_BYTES)
    """The input of one merge task."""
    format: int | None = Field(default=None, ge=1, le=255)
    """The log format in which shards are created. None: the default of this release. While a fleet is upgraded machine
    by machine, set it to the newest format that the oldest program of the fleet knows."""
    cache: CacheConfig | None = None
    """A cache for what is read. None: snapshots and listeners read from the store each time, and the client keeps up to
    32 MiB of what its writers looked into (small objects), as the next upsert looks into most of it again."""


def usual_where(config: Config, *, reads: bool, rows: bool) -> Config:
    """The same settings, with the defaults of where each read of a Blob, or each row of a log, is a request."""
    usual = {"read_threads": READ_THREADS_REQUESTS if reads else 0, "rollup_every": ROLLUP_EVERY_OBJECTS if rows else 0}
    unless = config.model_fields_set
    return config.model_copy(update={name: value for name, value in usual.items() if value and name not in unless})
