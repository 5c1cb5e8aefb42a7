"""Whether all of a location is what it is said to be: each shard, and what its records promise of shards.

    found = verify.check(client)
    found.is_sound, found.findings

A shard is verified by `client.verify`, which says what is read. `persist_lib.promises` has what is checked of records.
What is wrong is an answer, not an error, and what was not looked at is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from persist_lib.arguments import did_you_mean, parse_flag
from persist_lib.client import Client
from persist_lib.core.cost import Cost
from persist_lib.core.units import of, size
from persist_lib.errors import Damage, NotFound, PersistError
from persist_lib.format.paths import folder_of
from persist_lib.ids import PUBLISHED
from persist_lib.location.wrap.spending import charged
from persist_lib.maintain.log_walk import Finding
from persist_lib.maintain.verify import Verified, not_checked
from persist_lib.maintain.worker import Progress
from persist_lib.promises import Promises
from persist_lib.runtime.each import Each
from persist_lib.sources.kinds import owners_of

Verify = Callable[[str], Verified]
"""Verifies one shard."""


class Report(msgspec.Struct, frozen=True):
    """What was found: of each shard, and of the records; what of it could not be verified, and what was looked at."""

    shards: Mapping[str, Verified]
    broken: tuple[Finding, ...]
    """Promises of records that do not hold."""
    failed: Mapping[str, str]
    """Why shards could not be verified: a store did not answer, or the duty is paused there."""
    looked_at: Mapping[str, int]
    """How many records of each kind."""
    unchecked: tuple[str, ...]
    """What was not looked at, and why."""
    cost: Cost = Cost()

    @property
    def findings(self) -> tuple[tuple[str, Finding], ...]:
        """All of them, damage first, each with the shard; that is empty for promises of records."""
        found = [(shard, one) for shard, verified in self.shards.items() for one in verified.findings]
        found += [("", one) for one in self.broken]
        return tuple(sorted(found, key=lambda pair: not pair[1].is_damage))

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong, and all that was asked for was verified."""
        return not (self.findings or self.failed)

    @property
    def is_damaged(self) -> bool:
        """Whether stored data is damaged or missing, or a promise does not hold."""
        return any(one.is_damage for _, one in self.findings)

    @property
    def says(self) -> str:
        """What was looked at, in one sentence."""
        every = self.shards.values()
        batches = sum(0 if one.scrubbed is None else one.scrubbed.batches for one in every)
        parts = [of(len(self.shards), "shard"), f"{of(sum(one.rows for one in every), 'row')} of logs"]
        parts += [of(sum(one.rollups for one in every), "rollup"), of(sum(one.objects for one in every), "object")]
        parts[-1] += f" ({size(sum(one.size for one in every))})"
        parts += [of(batches, "batch"), *(of(count, what) for what, count in self.looked_at.items() if count)]
        return f"checked {', '.join(parts)}"

    @property
    def not_checked(self) -> tuple[str, ...]:
        """What was not looked at, and why."""
        told = (f"{shard}: {why}" for shard, verified in self.shards.items() for why in verified.unchecked)
        return (*not_checked(self.shards.values()), *self.unchecked, *told)


@charged
def check(
    client: Client, names: Sequence[str] = (), *, full: bool = False, verify: Verify | None = None,
    progress: Progress | None = None,
) -> Report:  # fmt: skip
    """Verify a location, or the tables and shards that are named: what was added since, or everything with `full`.

    `verify` is how to verify one shard, in place of `client.verify`; `progress` is called with the shards that are done
    and how many there are. Changes no data. Raises NotFound for a name that neither a table nor a shard has. What
    cannot be verified is in the answer, and stops nothing else.
    """
    full = parse_flag(full, "full")
    prefixes = _prefixes(client) if full and not names else {}
    shards = client.shards()
    wanted = _wanted(client, shards, names) if names else shards
    one: Verify = verify or (lambda shard: client.verify(shard, full=full))
    tried, broken = Each[Verified](), [*_of_no_shard(prefixes, shards)]
    for done, shard in enumerate(wanted, 1):
        tried.add([shard], one, PersistError)
        if progress is not None:
            progress(done, len(wanted))
    for shard, error in tried.failed.items():
        if isinstance(error, Damage):
            broken.append(Finding("log", shard, "", error.message, f"persist shard show {shard}"))
    promises, named = Promises(client, shards), {*names, *wanted}
    broken += [one.finding for one in promises.broken() if not names or named & {one.name, one.finding.about}]
    left = [] if full or names else ["objects of no shard, which --full looks for"]
    failed = {shard: str(error) for shard, error in tried.failed.items() if not isinstance(error, Damage)}
    unchecked = (*promises.unchecked, *left)
    return Report(tried.done, tuple(broken), failed, dict(promises.looked_at), unchecked)


def _wanted(client: Client, shards: Sequence[str], names: Sequence[str]) -> list[str]:
    """The shards that are named, or that what is named is made of. Raises NotFound."""
    owners = owners_of(client)
    by_name: dict[str, list[str]] = {}
    for shard in shards:
        for name in {shard, owners.name_of(shard)}:
            by_name.setdefault(name, []).append(shard)
    for name in names:
        if name not in by_name:
            raise NotFound(
                f"there is no table or shard {name!r}. {did_you_mean(name, sorted(by_name))}`persist tables` lists all",
                name=name,
            )
    return sorted({shard for name in names for shard in by_name[name]})


def _prefixes(client: Client) -> dict[str, tuple[int, int]]:
    """How many objects there are below each prefix that is a shard's, and their bytes: a listing of everything."""
    found: dict[str, tuple[int, int]] = {}
    for entry in client.blob.list(""):
        name, slash, rest = entry.key.partition("/")
        if name == PUBLISHED:
            name, slash, rest = rest.partition("/")
        if slash and not name.startswith("-"):
            count, bytes_ = found.get(name, (0, 0))
            found[name] = count + 1, bytes_ + entry.size
    return found


def _of_no_shard(prefixes: Mapping[str, tuple[int, int]], shards: Sequence[str]) -> Iterator[Finding]:
    """The log of a shard is there before its first object, so it is in a list that is read after them.

    Publications of a collection are below its id.
    """
    for name in sorted(prefixes.keys() - {*shards, *map(folder_of, shards)}):
        count, bytes_ = prefixes[name]
        found = f"{of(count, 'object')}, {size(bytes_)}, and Consensus has no shard of this name"
        yield Finding("stray", f"{name}/", "", found, "persist config", is_damage=False)
