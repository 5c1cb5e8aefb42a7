"""The scrub of many shards: every part read again in parallel, its digest verified, its sums recomputed.

    python jobs/scrub.py --location file:./data
    spark-submit jobs/scrub.py --location s3://bucket/prefix --consensus postgresql://… --shard orders --engine spark

Small shards are read in this process, larger ones by Spark, with a task for each 64 MiB. The library judges what was
read. The program changes nothing. It reads all shards; then, if any has damage, it names them and exits with status 1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import get_args

from jobs import program
from jobs.engine import EngineName, SparkEngine, adder_for
from jobs.parallel import IN_FLIGHT, in_parallel
from jobs.session import Sessions, build_session
from persist_lib.client import Client
from persist_lib.errors import Corrupt
from persist_lib.maintain import Scrubbed


@dataclass(frozen=True, slots=True)
class ScrubOutcome:
    """The result for one shard: the scrub, or the error."""

    shard: str
    scrubbed: Scrubbed | None
    error: Exception | None = None


def scrub_shards(
    client: Client,
    shards: Sequence[str],
    sessions: Sessions | None = None,
    *,
    engine: EngineName = "auto",
    in_flight: int = IN_FLIGHT,
) -> Iterator[ScrubOutcome]:
    """Scrub each shard, `in_flight` at once. Yields an outcome for each as it is done.

    An error of a shard is in its outcome, and does not stop the others. `sessions` is called only if Spark is needed.
    """
    spark = SparkEngine(client, sessions) if sessions is not None and engine != "local" else None

    def one(shard: str) -> ScrubOutcome:
        try:
            return ScrubOutcome(shard, client.scrub(shard, engine=adder_for(client, shard, engine, spark)))
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one shard must not stop the others
            return ScrubOutcome(shard, None, error)

    yield from in_parallel(one, shards, in_flight, spark.cancel if spark else None)


def numbers(scrubbed: Scrubbed) -> dict[str, float]:
    """What a scrub read, in figures."""
    return {
        "batches": scrubbed.batches,
        "updates": scrubbed.updates,
        "bytes": scrubbed.size,
        **program.spent(scrubbed.cost),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    parser = program.arguments(__doc__)
    parser.add_argument("--engine", choices=get_args(EngineName), default="auto")
    parsed = parser.parse_args(argv)
    failed = []
    with program.telling() as tells, program.opened(parsed) as (client, shards):
        tells.begin(len(shards), "scrubbing")
        sessions = partial(build_session, program.spark_settings(parsed))
        for outcome in scrub_shards(client, shards, sessions, engine=parsed.engine, in_flight=parsed.in_flight):
            found = outcome.scrubbed
            if found is None or found.damaged:
                failed.append(outcome.shard)
                says = "; ".join(f"batch {id_}: {why}" for id_, why in found.damaged) if found else "no outcome"
                tells.failed(outcome.shard, outcome.error or Corrupt(says))
            else:
                tells.done(outcome.shard, numbers(found))
    return program.exit_status(failed)


if __name__ == "__main__":
    sys.exit(main())
