"""The checks: the state in which each duty has to leave a shard, judged for each shard in the run that did the duty.

The state machine refuses a wrong result before it is committed. These checks verify the result again, by other means.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import dagster as dg

from orchestration.duties import Duty
from orchestration.mount import Mount

CHECKS: Mapping[str, tuple[Duty, str]] = {
    "reads_identical": ("compaction", "Snapshots at several times hold the same before and after the compaction."),
    "fingerprint_conserved": ("compaction", "What can be read adds up to all that was ever appended."),
    "rollup_recent": ("rollups", "The newest rollup lags at most twice the configured distance behind."),
    "no_overdue_garbage": ("garbage", "Blob holds no garbage that no live reader can reach."),
    "no_orphan": ("orphans", "No object is left that no state refers to and no writer can link."),
    "parts_undamaged": (
        "scrub",
        "Log, rollups, objects, and every digest, count and fingerprint are what is said of them.",
    ),
    "batch_count_within_bound": ("census", "There are at most 2 log2(updates) + c non-empty batches."),
}


def checks_of(duty: Duty) -> list[str]:
    """The checks that judge what a duty left."""
    return [name for name, (judged, _) in CHECKS.items() if judged == duty]


def check_specs(mount: Mount) -> list[dg.AssetCheckSpec]:
    """All checks, with a verdict for each shard."""
    with warnings.catch_warnings():
        # Partitioned checks are a preview in 1.13. Without them, the verdict on one shard would hide that on another.
        warnings.simplefilter("ignore", dg.PreviewWarning)
        return [
            dg.AssetCheckSpec(name, asset=mount.key(duty), description=says, partitions_def=mount.partitions)
            for name, (duty, says) in CHECKS.items()
        ]
