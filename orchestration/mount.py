"""How one pipeline is mounted: its names in Dagster. Two pipelines in one code location have different names.

The docstring of `orchestration.definitions` shows it: `name="eu"` makes jobs eu_compaction …, and assets eu/census ….
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import dagster as dg

from orchestration.settings import Settings
from persist_lib.arguments import shown
from persist_lib.errors import InvalidUsage

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
GROUP = "maintenance"


@dataclass(frozen=True)
class Mount:
    """The names of one mounted pipeline. `name` is the start of each of them; it is empty for the only one.

    Its schedules tick `later` minutes after what the duties say, and runs that may compact are in Dagster's `pool`.
    """

    name: str = ""
    key_prefix: tuple[str, ...] = ()
    group: str = GROUP
    later: int = 0
    pool: str | None = None

    def named(self, what: str) -> str:
        """The name of a job, a schedule, a sensor, an op or a resource."""
        return f"{self.name}_{what}" if self.name else what

    def key(self, duty: str) -> dg.AssetKey:
        """The asset of a duty."""
        return dg.AssetKey([*self.key_prefix, duty])

    def duty_of(self, key: dg.AssetKey) -> str:
        """The duty of an asset: the last part of its key."""
        return key.path[-1]

    def cron(self, schedule: str) -> str:
        """The cron string of a schedule here, whose minute is a number or `*/n`: those each n minutes stay so."""
        minute, hour, *days, weekday = schedule.split()
        if minute.startswith("*"):
            step = int(minute.partition("/")[2] or 1)
            return f"{self.later % step}-59/{step} {hour} {' '.join(days)} {weekday}" if self.later % step else schedule
        total = int(minute) + self.later
        if hour != "*":
            total += 60 * int(hour)
            hour = str(total // 60 % 24)
        if weekday != "*":
            weekday = str((int(weekday) + total // 1440) % 7)
        return f"{total % 60} {hour} {' '.join(days)} {weekday}"

    def pool_for(self, duties: Collection[str]) -> str | None:
        """The pool of an op that does these duties; None: its runs are not counted."""
        return self.pool if "compaction" in duties else None

    @property
    def persist(self) -> str:
        """The key of the resource that opens the location."""
        return self.named("persist")

    @property
    def spark(self) -> str:
        """The key of the resource that starts Spark."""
        return self.named("spark")

    @property
    def io(self) -> str:
        """The key of the IO manager."""
        return self.named("persist_io")

    @property
    def partitions(self) -> dg.DynamicPartitionsDefinition:
        """The shards of the location as partitions. Dagster keeps them by this name, for all code locations."""
        return dg.DynamicPartitionsDefinition(name=self.named("persist_shards"))


def parse_mount(name: object = "", key_prefix: object = None, group: object = None) -> Mount:
    """Check the names of a mounted pipeline.

    Without `key_prefix`, the keys of assets start with `name`. Without `group`, the assets are in the group `name`, or
    in `maintenance` if there is no name. Raises InvalidUsage for a name that Dagster would refuse.
    """
    if not isinstance(name, str) or (name and not NAME.fullmatch(name)):
        raise InvalidUsage(
            f"name must be letters, digits and '_', as in build_definitions(name='eu'): got {shown(name)}"
        )
    prefix = [name] * bool(name) if key_prefix is None else key_prefix
    if isinstance(prefix, str):
        prefix = [prefix]
    if not isinstance(prefix, Sequence) or not all(isinstance(one, str) and NAME.fullmatch(one) for one in prefix):
        raise InvalidUsage(
            f"key_prefix must be a list of names, as in key_prefix=['lake', 'eu']: got {shown(key_prefix)}"
        )
    group = (name or GROUP) if group is None else group
    if not isinstance(group, str) or not NAME.fullmatch(group):
        raise InvalidUsage(f"group must be letters, digits and '_', as in group='storage': got {shown(group)}")
    return Mount(name, tuple(prefix), group)


def placed(mount: Mount, settings: Settings) -> Mount:
    """The same, where its settings put its schedules and runs.

    Of one location it is always the same minutes later, and of several other ones, so that they do not begin at once.
    """
    digest = int.from_bytes(blake2b((settings.location or "").encode(), digest_size=8).digest(), "big")
    return replace(mount, pool=settings.pool, later=digest % settings.stagger if settings.stagger else 0)
