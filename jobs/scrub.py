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
from functools import partial
from typing import get_args

from jobs import program
from jobs.engine import EngineName, SparkEngine, adder_for
from jobs.parallel import IN_FLIGHT, Outcome, on_shards
from jobs.session import Sessions
from jobs.signals import Unfinished, end, run
from jobs.stop import Stop
from jobs.watch import Watch
from persist_lib.client import Client
from persist_lib.errors import Corrupt
from persist_lib.maintain import Verified


def scrub_shards(
    client: Client,
    shards: Sequence[str],
    sessions: Sessions | None = None,
    *,
    engine: EngineName = "auto",
    in_flight: int = IN_FLIGHT,
    says: Callable[[str], object] | None = None,
    full: bool = True,
) -> Iterator[Outcome[Verified]]:
    """Verify each shard, all of it if `full`, as `on_shards` does it. `sessions` is called only if Spark is needed.

    `says` gets a line when a shard begins, and each half minute for each that continues.
    """
    stop = Stop()
    spark = SparkEngine(client, sessions, stop=stop) if sessions is not None and engine != "local" else None

    watch = Watch(says or (lambda _: None))

    def one(shard: str) -> Verified:
        with watch.doing(shard) as tells:
            return client.verify(shard, full=full, engine=adder_for(client, shard, engine, spark, tells))

    with watch:
        yield from on_shards(one, shards, in_flight, stop)


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

    def scrub(client: Client, shards: list[str], tells: program.Tells) -> Iterator[Outcome[Verified]]:
        return scrub_shards(
            client, shards, program.sessions(parsed), engine=parsed.engine, in_flight=parsed.in_flight,
            says=tells.says, full=not parsed.new,
        )  # fmt: skip

    def told(tells: program.Tells, shard: str, verified: Verified) -> Exception | None:
        if verified.is_damaged:
            return Corrupt("; ".join(one.says for one in verified.findings))
        read = verified.scrubbed
        tells.done(shard, numbers(verified), verified.says if read is None else read.says)
        return None

    return program.over_shards(parsed, unfinished, "scrubbing", scrub, told)


if __name__ == "__main__":
    end(run(partial(main, sys.argv[1:])))
