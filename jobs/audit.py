"""The orphan audit of many shards at once: it deletes objects that were never linked, once no writer can link them.

    python jobs/audit.py --location file:./data --dry-run
    python jobs/audit.py --location s3://bucket/prefix --consensus postgresql://… --in-flight 32

Listing and deleting only waits for the store. So the audit needs no Spark, and waits for many shards at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from jobs import program
from jobs.parallel import IN_FLIGHT, in_parallel
from jobs.signals import Unfinished, end, run
from jobs.stop import Stop
from persist_lib.client import Client
from persist_lib.location.wrap.deadline import Stopped
from persist_lib.maintain import Audited


@dataclass(frozen=True, slots=True)
class AuditOutcome:
    """The result for one shard: the audit, or the error."""

    shard: str
    audited: Audited | None
    error: Exception | None = None


def audit_shards(
    client: Client,
    shards: Sequence[str],
    *,
    dry_run: bool = False,
    in_flight: int = IN_FLIGHT,
    stop: Stop | None = None,
) -> Iterator[AuditOutcome]:
    """Audit each shard, `in_flight` at once. Yields an outcome for each as it is done.

    An error of a shard is in its outcome, and does not stop the others. With `dry_run` nothing is deleted. If `stop` is
    set, or the caller stops early, this ends within seconds (see `in_parallel`).
    """

    def one(shard: str) -> AuditOutcome:
        try:
            return AuditOutcome(shard, client.audit_orphans(shard, dry_run=dry_run))
        except Stopped:
            raise
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one shard must not stop the others
            return AuditOutcome(shard, None, error)

    yield from in_parallel(one, shards, in_flight, stop)


def numbers(audited: Audited) -> dict[str, float]:
    """What an audit found, in figures."""
    return {
        "orphans": len(audited.orphans), "bytes": audited.size, "referred": audited.live, "pending": audited.pending,
        "swept": len(audited.swept), "failed": len(audited.failed), "uploads": audited.uploads,
        "upload_bytes": audited.uploads_size,
        **program.spent(audited.cost),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None, unfinished: Unfinished | None = None) -> int:
    """Run the program; returns its exit status."""
    parser = program.arguments(__doc__)
    parser.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    parsed = parser.parse_args(argv)
    failed: dict[str, Exception] = {}
    unfinished = unfinished or Unfinished()
    with program.telling() as tells, program.opened(parsed) as (client, shards):
        unfinished.begin(shards)
        tells.begin(len(shards), "auditing")
        for outcome in audit_shards(client, shards, dry_run=parsed.dry_run, in_flight=parsed.in_flight):
            unfinished.done(outcome.shard)
            if outcome.audited is None or outcome.audited.failed:
                failed[outcome.shard] = error = outcome.error or OSError(f"could not delete {outcome.audited}")
                tells.failed(outcome.shard, error)
            else:
                tells.done(outcome.shard, numbers(outcome.audited))
    return program.exit_status(failed)


if __name__ == "__main__":
    end(run(partial(main, sys.argv[1:])))
