"""How one pipeline is mounted: its names in Dagster. Two pipelines in one code location have different names.

The docstring of `orchestration.definitions` shows it: `name="eu"` makes jobs eu_compaction …, and assets eu/census ….
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import dagster as dg

from persist_lib.arguments import shown
from persist_lib.errors import InvalidUsage

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
GROUP = "maintenance"


@dataclass(frozen=True)
class Mount:
    """The names of one mounted pipeline. `name` is the start of each of them; it is empty for the only one."""

    name: str = ""
    key_prefix: tuple[str, ...] = ()
    group: str = GROUP

    def named(self, what: str) -> str:
        """The name of a job, a schedule, a sensor, an op or a resource."""
        return f"{self.name}_{what}" if self.name else what

    def key(self, duty: str) -> dg.AssetKey:
        """The asset of a duty."""
        return dg.AssetKey([*self.key_prefix, duty])

    def duty_of(self, key: dg.AssetKey) -> str:
        """The duty of an asset: the last part of its key."""
        return key.path[-1]

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
