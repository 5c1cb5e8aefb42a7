"""The duties that keep a shard small, cheap and clean. Each carries out a pure plan of the core.

`compact` merges batches, `roll_up` copies the state to Blob, `expire` retires overdue ids, `retain` moves the retention
hold, `collect` deletes garbage and truncates the log, `audit_orphans` deletes what was never linked, `verify` walks the
log, looks for the objects and re-reads them (`scrub`), `take_census` counts. `maintain` does all of them in the order
that frees the most.

Every duty is idempotent. Duties may run on any machine, at any time, and several at once: each result is one state
transition, and correctness rests on that alone. Duties that delete or rewrite take `dry_run`: they then change nothing
and return what they would do.
"""

from persist_lib.maintain.census import Census, census_of, take_census
from persist_lib.maintain.compaction import Compacted, compact
from persist_lib.maintain.duties import Maintained, maintain
from persist_lib.maintain.garbage import Audited, Collected, Expired, Retained, audit_orphans, collect, expire, retain
from persist_lib.maintain.merge_tasks import Engine, local_engine
from persist_lib.maintain.repair import Repaired, Upgraded, repair, upgrade
from persist_lib.maintain.scrub import Adder, Scrubbed, scrub
from persist_lib.maintain.scrub_memory import known_damage
from persist_lib.maintain.survey import Survey, Surveyor
from persist_lib.maintain.verify import Verified, verify
from persist_lib.maintain.worker import RolledUp, Worker, roll_up

__all__ = [
    "Adder", "Audited", "Census", "Collected", "Compacted", "Engine", "Expired", "Maintained", "Repaired",
    "Retained", "RolledUp", "Scrubbed", "Survey", "Surveyor", "Upgraded", "Verified", "Worker", "audit_orphans",
    "census_of", "collect", "compact", "expire", "known_damage", "local_engine", "maintain", "repair", "retain",
    "roll_up", "scrub", "take_census", "upgrade", "verify",
]  # fmt: skip
