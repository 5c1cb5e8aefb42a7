"""What is simulated: a table as it is in a location or as it was declared, its settings, its policy, its processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from persist_lib.arguments import UNREADABLE, did_you_mean, shown
from persist_lib.client import Client
from persist_lib.core.plan.compaction import Policy
from persist_lib.errors import InvalidUsage
from persist_lib.schema.schema import Column, Schema
from persist_lib.simulate.scheduler import NO_FAULTS, Faults
from persist_lib.simulate.shard_story import ShardStory
from persist_lib.simulate.story import EAGER, STEPS, Story
from persist_lib.simulate.table_story import Layout, TableStory

OWN_STORES = ("cache",)
"""Settings that name places on disks: a simulation has none."""


class Scene(msgspec.Struct, frozen=True):
    """All that a story is made of but its seed."""

    schema: Schema
    layout: Layout = Layout("shard")
    config: Mapping[str, Any] = {}
    """Fields of `persist.Config` that count over those of simulations, which are small: see `story.SMALL`."""
    policy: Policy | None = None
    """By which half of the seeds are compacted, and the others at every chance. None: all at every chance."""
    faults: Faults = Faults()
    steps: int = STEPS
    writers: int = 2
    readers: int = 2
    maintainers: int = 2

    def story(self, seed: int, keep_lines: int | None = 40) -> Story:
        """The story of a seed: of a busy shard, or of a table that something else carries."""
        config = {name: value for name, value in self.config.items() if name not in OWN_STORES}
        policy = EAGER if self.policy is None or seed % 2 else self.policy
        how: dict[str, Any] = {
            "faults": self.faults, "steps": self.steps, "config": config, "policy": policy, "keep_lines": keep_lines,
        }  # fmt: skip
        roles = {"writer": self.writers, "maintainer": self.maintainers}
        if self.layout.kind == "shard":
            roles |= {"placer": min(1, self.writers), "twin": min(2, self.writers), "reader": self.readers}
            return ShardStory(seed, self.schema, self.layout.retention, roles=roles, **how)
        roles |= {"listener": self.readers, "controller": int(self.layout.kind == "collection")}
        return TableStory(seed, self.schema, self.layout, roles=roles, **how)


def scene_of(client: Client, name: str) -> Scene:
    """A table's columns, what carries it, and the policy in force for it. Reads that, and no data. Raises NotFound."""
    with client.table(name) as table:
        found, in_force = table.describe(), client.policy(name=table.kept_by())
    policy = msgspec.structs.replace(in_force, part_bytes=None, merge_bytes=None)  # as the simulation's settings say
    listed, kind = found.collection, found.carrier.partition(" ")[0]
    if listed is None:
        return Scene(plain(found.schema), Layout("shard", retention=found.retention), policy=policy)
    if kind == "timeline":
        with client.controller() as controller, controller.tables() as tables:
            layout = Layout("timeline", tables.timeline_of(name)[1], len(found.shards), None, listed.retention)
    else:
        active = listed.active
        layout = Layout("collection", listed.mode, len(active.shards), active.hash_columns, listed.retention)
    return Scene(plain(found.schema), layout, policy=policy)


def plain(schema: Schema) -> Schema:
    """The schema without its past: as a new table with these columns has it."""
    key, value = (tuple(Column(c.name, c.type, c.nullable) for c in side) for side in (schema.key, schema.value))
    return msgspec.structs.replace(schema, key=key, value=value)


def parse_faults(given: str) -> Faults:
    """Faults as they were typed: `none`, or chances by name as JSON, beside those that are not named. InvalidUsage."""
    if given == "none":
        return NO_FAULTS
    try:
        chances = msgspec.json.decode(given, type=dict[str, float])
    except UNREADABLE as error:
        example = "as in '{\"crash\": 0.01}'"
        raise InvalidUsage(f"faults are `none` or chances by name, {example}: got {shown(given)}: {error}") from error
    for name, chance in chances.items():
        if name not in Faults._fields:
            meant = did_you_mean(name, Faults._fields)
            raise InvalidUsage(f"there is no fault {name!r}. {meant}There are {', '.join(Faults._fields)}", name=name)
        if not 0 <= chance <= 1:
            raise InvalidUsage(f"the chance of {name} is from 0 to 1: got {chance:g}", name=name)
    return Faults()._replace(**chances)
