"""The orphan audit of many shards at once: it deletes objects that were never linked, once no writer can link them.

    python jobs/audit.py --location file:./data --dry-run
    python jobs/audit.py --location s3://bucket/prefix --consensus postgresql://… --in-flight 32

Listing and deleting only waits for the store. So the audit needs no Spark, and waits for many shards at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial

from jobs import program
from jobs.parallel import Outcome, on_shards
from jobs.signals import Unfinished, end, run
from persist_lib.client import Client
from persist_lib.maintain import Audited


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

    def audit(client: Client, shards: list[str], _tells: program.Tells) -> Iterator[Outcome[Audited]]:
        return on_shards(partial(client.audit_orphans, dry_run=parsed.dry_run), shards, parsed.in_flight)

    def told(tells: program.Tells, shard: str, audited: Audited) -> Exception | None:
        if audited.failed:
            return OSError(f"could not delete {audited}")
        tells.done(shard, numbers(audited))
        return None

    return program.over_shards(parsed, unfinished, "auditing", audit, told)


if __name__ == "__main__":
    end(run(partial(main, sys.argv[1:])))
