"""Many shards verified: logs, rollups and objects, and every part read again in parallel, its sums recomputed.

    python jobs/scrub.py --location file:./data
    spark-submit jobs/scrub.py --location s3://bucket/prefix --consensus postgresql://… --shard orders --engine spark

Logs are walked here, and batches of small shards are read here; larger ones by Spark, with a task for each 64 MiB. The
library judges what was read, and remembers it in the location; no data is changed. With `--new`, only what was added
since is read. The program reads all shards; then, if any has damage, it names them and exits with status 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import get_args

from jobs import program
from jobs.engine import EngineName, SparkEngine, adder_for
from jobs.parallel import IN_FLIGHT, in_parallel
from jobs.session import Sessions, build_session
from jobs.signals import Unfinished, end, run
from jobs.stop import Stop
from jobs.watch import Watch
from persist_lib.client import Client
from persist_lib.errors import Corrupt
from persist_lib.location.wrap.deadline import Stopped
from persist_lib.maintain import Scrubbed, Verified


@dataclass(frozen=True, slots=True)
class ScrubOutcome:
    """The result for one shard, or the error."""

    shard: str
    verified: Verified | None
    error: Exception | None = None

    @property
    def scrubbed(self) -> Scrubbed | None:
        """What was read of its batches; None if its newest state could not be read."""
        return None if self.verified is None else self.verified.scrubbed


def scrub_shards(
    client: Client,
    shards: Sequence[str],
    sessions: Sessions | None = None,
    *,
    engine: EngineName = "auto",
    in_flight: int = IN_FLIGHT,
    stop: Stop | None = None,
    says: Callable[[str], object] | None = None,
    full: bool = True,
) -> Iterator[ScrubOutcome]:
    """Verify each shard, `in_flight` at once; all of it if `full`. Yields an outcome for each as it is done.

    An error of a shard is in its outcome, and does not stop the others. `sessions` is called only if Spark is needed.
    If `stop` is set, or the caller stops early, this ends within seconds (see `in_parallel`). `says` gets a line when a
    shard begins, and each half minute for each that continues.
    """
    stop = stop or Stop()
    spark = SparkEngine(client, sessions, stop=stop) if sessions is not None and engine != "local" else None

    watch = Watch(says or (lambda _: None))

    def one(shard: str) -> ScrubOutcome:
        try:
            with watch.doing(shard) as tells:
                adder = adder_for(client, shard, engine, spark, tells)
                return ScrubOutcome(shard, client.verify(shard, full=full, engine=adder))
        except Stopped:
            raise
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one shard must not stop the others
            return ScrubOutcome(shard, None, error)

    with watch:
        yield from in_parallel(one, shards, in_flight, stop)


def numbers(verified: Verified) -> dict[str, float]:
    """What was read, in figures."""
    read = verified.scrubbed
    batches = {} if read is None else {"batches": read.batches, "updates": read.updates, "bytes": read.size}
    return {"rows": verified.rows, "objects": verified.objects, **batches, **program.spent(verified.cost)}


def main(argv: Sequence[str] | None = None, unfinished: Unfinished | None = None) -> int:
    """Run the program; returns its exit status."""
    parser = program.arguments(__doc__)
    parser.add_argument("--engine", choices=get_args(EngineName), default="auto")
    parser.add_argument("--new", action="store_true", help="only what was added since all was found sound")
    parsed = parser.parse_args(argv)
    failed: dict[str, Exception] = {}
    unfinished = unfinished or Unfinished()
    with program.telling() as tells, program.opened(parsed) as (client, shards):
        unfinished.begin(shards)
        tells.begin(len(shards), "scrubbing")
        sessions = partial(build_session, program.spark_settings(parsed))
        for outcome in scrub_shards(
            client, shards, sessions, engine=parsed.engine, in_flight=parsed.in_flight, says=tells.says,
            full=not parsed.new,
        ):  # fmt: skip
            unfinished.done(outcome.shard)
            found = outcome.verified
            if found is None or found.is_damaged:
                wrong = "; ".join(one.says for one in found.findings) if found else "no outcome"
                failed[outcome.shard] = error = outcome.error or Corrupt(wrong)
                tells.failed(outcome.shard, error)
            else:
                read = found.scrubbed
                tells.done(outcome.shard, numbers(found), found.says if read is None else read.says)
    return program.exit_status(failed)


if __name__ == "__main__":
    end(run(partial(main, sys.argv[1:])))
