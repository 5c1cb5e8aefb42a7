"""Leases on the shards of collections: ending those that are over, and naming who keeps history or a shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from persist_lib.client import Client
from persist_lib.core.leases import is_mark
from persist_lib.core.plan.expiry import plan_expiry
from persist_lib.core.state import State
from persist_lib.frontier import Antichain
from persist_lib.maintain.liveness import expire
from persist_lib.storage.describe import Do, Step
from persist_lib.times import Times


def expiry_steps(client: Client, subject: str, shards: Sequence[str]) -> Iterator[tuple[Step, Do]]:
    """The leases that have ended on these shards, and how to retire their ids. Shards that are not there have none."""
    for name in shards:
        version = client.machine(name).try_fetch()
        overdue = [] if version is None or version.state.is_finished() else plan_expiry(version.state, _now(client))
        if overdue:
            what = f"{name}: {', '.join(one.id for one in overdue)}"
            yield Step(subject, "expire", what, "their leases have ended"), partial(expire, client.machine(name))


def holders(state: State, before: Antichain | None = None, *, but: str = "") -> list[str]:
    """Who needs the shard (or its history before a time): readers with their purposes and leases, and holds."""

    def counts(since: Antichain) -> bool:
        return before is None or since < before

    show = Times("ms", lambda: 0).show
    readers = [
        f"{id_} ({f'{reader.purpose}, ' if reader.purpose else ''}until {show(Antichain(reader.lease_until))})"
        for id_, reader in sorted(state.readers.items())
        if counts(reader.since)
    ]
    holds = ((name, hold) for name, hold in sorted(state.holds.items()) if name != but and not is_mark(name, hold))
    return readers + [f"hold {name}" for name, hold in holds if counts(hold.since)]


def _now(client: Client) -> int:
    return client.consensus.now()
