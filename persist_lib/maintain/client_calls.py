"""The calls of a client that look after shards: each duty, all of them, and plans."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from persist_lib.arguments import check_callable, check_type, parse_flag, parse_integer, shown
from persist_lib.config import Config
from persist_lib.core.cost import Prices
from persist_lib.core.formats import FIRST, NEWEST
from persist_lib.core.plan.compaction import Policy, policy_of
from persist_lib.core.plan.explain import Why, explain, explain_object
from persist_lib.core.plan.keepers import Keeper, keepers_of
from persist_lib.core.plan.written import COLLECTIONS, PLANNED, Plan, parse_plan
from persist_lib.core.rules import ruled
from persist_lib.errors import InvalidUsage, PersistError
from persist_lib.format.paths import blob_key, key_of
from persist_lib.frontier import MAX_TIME
from persist_lib.ids import CATALOG, parse_shard_id
from persist_lib.location.wrap.spending import charged
from persist_lib.maintain.census import Census, known_since, take_census
from persist_lib.maintain.compaction import Compacted, compact
from persist_lib.maintain.duties import Maintained, apply, maintain, planned
from persist_lib.maintain.garbage import (
    Audited,
    Collected,
    Expired,
    Retained,
    audit_orphans,
    collect,
    expire,
    retain,
)
from persist_lib.maintain.merge_tasks import Engine
from persist_lib.maintain.pauses import Pausing
from persist_lib.maintain.repair import Repaired, Upgraded, repair, upgrade
from persist_lib.maintain.scrub import Adder, Scrubbed, scrub
from persist_lib.maintain.verify import Verified, verify
from persist_lib.maintain.worker import Progress, RolledUp, Worker, roll_up
from persist_lib.runtime.each import Each
from persist_lib.shard.commit import Machine
from persist_lib.shard.leases import Leases
from persist_lib.times import TimeLike

if TYPE_CHECKING:
    from persist_lib.maintain.publish.steps import Published, Withdrawn
    from persist_lib.schema.schema import Schema


class Upkeep(Pausing):
    """The calls of a client that look after a shard. Each may be repeated at any time, and none changes its contents.

    The one exception is `repair`, which takes back what cannot be read.
    """

    config: Config
    prices: Prices
    leases: Leases

    machine: Callable[[str], Machine]
    """The machine of the shard with a name."""

    @abstractmethod
    def shards(self) -> list[str]: ...

    @abstractmethod
    def controller(self) -> Any: ...

    @abstractmethod
    def table(self, name: str, schema: Schema | None = None) -> Any: ...

    def policy(self, policy: Policy | None = None, name: str | None = None) -> Policy:
        """The policy by which this client plans upkeep: `policy`, or one made of the client's settings.

        Fields that `policy` leaves open are taken from the settings. Of the shard `name`, the location's rules count
        over the settings.
        """
        if policy is not None:
            check_type(policy, Policy, "policy", "persist.Policy(weight=0.5)")
        found, shard = policy_of(self.config, policy, self.prices), None if name is None else parse_shard_id(name)
        return found if policy is not None or shard is None else ruled(found, self._pauses.told(shard))

    def census(self, name: str, policy: Policy | None = None) -> Census:
        """Return the shard's figures: batches, debt, garbage, leases, rollups and dollars. Changes nothing."""
        return take_census(self.machine(name), self.policy(policy, name))

    def keepers(self, name: str) -> tuple[Keeper, ...]:
        """Return what each reader, hold and missing rollup of a shard keeps, since when, and for whom. Changes nothing.

        Most bytes first. It tells garbage, which goes as soon as its keeper does, from batches of which a compaction
        could then forget changes. Costs a look at the state, and at most the newest 1,000 rows of the log.
        """
        machine = self.machine(name)
        version = machine.fetch()
        return known_since(machine, version.seqno, keepers_of(version.state, version.seqno))

    def explain(self, name: str, *, key: str | None = None) -> list[Why]:
        """Say why each duty would do what it does on a shard now, or nothing; or why an object is still there.

        `key` is that of the object, as in Blob (`orders/w1…/….parquet`), or without the shard's name. Changes nothing.
        The sentences are those of the plans that the duties carry out, with their numbers.
        """
        machine, policy = self.machine(name), self.policy(name=name)
        version = machine.fetch()
        if key is None:
            return explain(version, machine.consensus.now(), policy, self.config.rollup_every)
        own = key_of(machine.shard, check_type(key, str, "key", "'orders/w1…/….parquet'"))
        why = explain_object(version, own)
        if machine.blob.get_range(blob_key(machine.shard, own), 0, 1) is None:
            why = why._replace(says=f"it is not there. Of such an object: {why.says}")
        return [why]

    @charged
    def maintain(
        self,
        name: str,
        *,
        policy: Policy | None = None,
        engine: Engine | None = None,
        dry_run: bool = False,
        alone: bool = False,
    ) -> Maintained:
        """Carry out all duties of upkeep on a shard, in this process, before this call returns.

        When a duty fails, the others are still done, and the gravest failure is raised at the end. That error keeps its
        own type, and has two more fields: `failed` (messages, by duty) and `done` (answers, by duty). With `dry_run`
        nothing is changed, and the answers say what would be done. May be repeated at any time. `alone` is as in
        `compact`.
        """
        policy, dry_run, alone = self.policy(policy, name), parse_flag(dry_run, "dry_run"), parse_flag(alone, "alone")
        _check_calls(engine)
        return maintain(self.machine(name), self.leases, policy=policy, engine=engine, dry_run=dry_run, alone=alone)

    def plan(self, name: str | None = None, *, only: Sequence[str] = (), policy: Policy | None = None) -> Plan:
        """Return what upkeep would do with a shard, for `apply`; None: with each that there is, and with collections.

        `only` names duties; empty: all of `maintain`. Each step says what, why, how many bytes it frees, and what it
        costs; `to_json` writes it all as text. Of collections it has what would be given up (`Controller.plan`).
        Changes nothing.
        """
        wanted = parse_planned(only, (*PLANNED, COLLECTIONS))
        duties = [duty for duty in wanted if duty != COLLECTIONS]
        shards = self.shards() if name is None else [parse_shard_id(name)]
        looked = shards if duties else []
        found = (planned(self.machine(name), self.leases, duties, self.policy(policy, name)).plan for name in looked)
        plan = Plan(tuple(one for one in found if one is not None))
        if name is not None or COLLECTIONS not in wanted or self.machine(CATALOG).try_fetch() is None:
            return plan
        return plan.with_collections(self.controller().plan())

    def apply(
        self, plan: Plan | str | bytes, *, policy: Policy | None = None, engine: Engine | None = None
    ) -> dict[str, Maintained]:
        """Carry out exactly what a plan says, or nothing: shard by shard, and the answers are by shard.

        Where anything but leases has moved since it was made, PlanMoved is raised, and nothing is done; the first
        commit decides that, so that nothing can come in between. What was planned is not done a second time. A shard
        that is refused stops none of the others, and the gravest error is raised at the end. Its fields `failed`
        (messages) and `done` (answers) are by shard. With another `policy` than that of the plan, it is refused. Steps
        of collections come first, as one that is called `collections` (`Controller.apply`). Raises InvalidUsage for a
        text that is no plan, or one of another format.
        """
        plan = parse_plan(plan)
        if plan.pending:
            raise InvalidUsage("the plan has pending areas, which pending_area.apply absorbs. Nothing was done")
        _check_calls(engine)
        self._writable("apply")

        def one(name: str) -> Maintained:
            found = self.policy(policy, name)
            return apply(self.machine(name), self.leases, plan.of(name), policy=found, engine=engine)

        if len(plan.shards) == 1 and not plan.collections:
            return {plan.shards[0].shard: one(plan.shards[0].shard)}
        tried = Each[Any]()
        if plan.collections:
            tried.add([COLLECTIONS], lambda _: self.controller().apply(plan.collections), PersistError)
            tried.done.clear()
        tried.add([each.shard for each in plan.shards], one, PersistError)
        tried.check("apply: {} shards")
        return tried.done

    @charged
    def compact(
        self,
        name: str,
        *,
        policy: Policy | None = None,
        engine: Engine | None = None,
        dry_run: bool = False,
        alone: bool = False,
        progress: Progress | None = None,
    ) -> Compacted:
        """Merge the batches that are in debt, so that reads stay fast. Never changes the shard's contents.

        `engine` runs the merge tasks (None: this process does), and `progress` is called with how many are done and how
        many there are. With `dry_run` nothing is changed, and the answer says what would be merged. With `alone` it
        raises Busy, and changes nothing, while another process compacts the shard or rolls it up.
        """
        policy, dry_run, alone = self.policy(policy, name), parse_flag(dry_run, "dry_run"), parse_flag(alone, "alone")
        _check_calls(engine, progress)
        with Worker(self.machine(name), self.leases, alone=alone) as worker:
            return compact(worker.machine, worker, policy=policy, engine=engine, dry_run=dry_run, progress=progress)

    @charged
    def roll_up(self, name: str, *, force: bool = False, dry_run: bool = False, alone: bool = False) -> RolledUp:
        """Copy the shard's state to Blob, if that is due or `force` is true. This keeps opening the shard fast.

        `alone` is as in `compact`.
        """
        force, dry_run, alone = parse_flag(force, "force"), parse_flag(dry_run, "dry_run"), parse_flag(alone, "alone")
        with Worker(self.machine(name), self.leases, alone=alone) as worker:
            return roll_up(worker.machine, worker, force=force, dry_run=dry_run)

    def expire(self, name: str, *, dry_run: bool = False) -> Expired:
        """Retire the readers and writers whose lease has ended. They learn of it at their next commit."""
        return expire(self.machine(name), dry_run=parse_flag(dry_run, "dry_run"))

    @charged
    def retain(self, name: str, *, dry_run: bool = False) -> Retained:
        """Move the retention hold to where the shard's retention policy, set by `set_retention`, puts it."""
        dry_run, machine = parse_flag(dry_run, "dry_run"), self.machine(name)
        return retain(machine, dry_run=dry_run, by_rule=self.policy(name=name).retention)

    def collect(self, name: str, *, dry_run: bool = False, progress: Progress | None = None) -> Collected:
        """Delete the garbage that no reader can reach any more, and truncate the log."""
        _check_calls(progress=progress)
        return collect(self.machine(name), dry_run=parse_flag(dry_run, "dry_run"), progress=progress)

    def audit_orphans(self, name: str, *, dry_run: bool = False, progress: Progress | None = None) -> Audited:
        """Delete the uploaded objects that no state refers to and that no writer can ever link."""
        _check_calls(progress=progress)
        return audit_orphans(self.machine(name), dry_run=parse_flag(dry_run, "dry_run"), progress=progress)

    def scrub(
        self,
        name: str,
        *,
        after: int = 0,
        new_only: bool = False,
        engine: Adder | None = None,
        progress: Progress | None = None,
    ) -> Scrubbed:
        """Read every batch again, and verify its digests, counts and fingerprint. Changes no data.

        What it found is remembered in the location. Batches known to be damaged are read each time. With `new_only`,
        those that an earlier scrub found sound are not; with `after`, those written at or before that seqno are not.
        Damage does not end the scrub: the answer lists it in `damaged`, and `says` it all in a sentence.
        """
        _check_calls(engine, progress)
        after, new_only = parse_integer(after, "after", 0, MAX_TIME), parse_flag(new_only, "new_only")
        return scrub(self.machine(name), after=after, new_only=new_only, engine=engine, progress=progress)

    def verify(
        self, name: str, *, full: bool = False, engine: Adder | None = None, progress: Progress | None = None
    ) -> Verified:
        """Verify a shard: its log, its rollups, which objects are there, and its batches. Changes no data.

            db.verify("orders").findings

        Reads what was added since all was found sound, which the location remembers, or everything with `full`. What
        is wrong is in `findings`, each with the command that helps, and nothing is raised for it; what was not looked
        at is in `unchecked`. `persist verify` does it for a whole location, with what its catalog promises. `engine`
        reads batches, and `progress` is called with the rows and then the batches that are done and how many there are.
        """
        _check_calls(engine, progress)
        return verify(self.machine(name), full=parse_flag(full, "full"), engine=engine, progress=progress)

    def publish(
        self, name: str, as_: str = "iceberg", at: TimeLike | None = None, *, keep: int | None = None,
        follows: bool | None = None, dry_run: bool = False,
    ) -> Published:  # fmt: skip
        """Publish a table as of a time for other engines, as an Iceberg or a Delta table over its own objects.

            db.publish("orders", as_="iceberg").place      # what other engines open

        As `Table.publish`, whatever carries the table.
        """
        return self.table(name).publish(as_, at, keep=keep, follows=follows, dry_run=dry_run)

    def withdraw(self, name: str, as_: str = "iceberg", *, dry_run: bool = False) -> Withdrawn:
        """Take a publication of a table back, as `Table.withdraw` does."""
        return self.table(name).withdraw(as_, dry_run=dry_run)

    def upgrade(self, name: str, to: int = NEWEST, *, dry_run: bool = False) -> Upgraded:
        """Write the shard's log in format `to` from now on. The default is the newest format that this release knows.

        Call this when every program that uses the shard knows that format. From then on older programs refuse the shard
        with NewerFormat before they do anything. The change cannot be undone. A shard that has the format already, or
        is finished, is left as it is. Raises InvalidUsage for a format that this release does not know, or that is
        older than the shard's.
        """
        to, dry_run = parse_integer(to, "to", FIRST, NEWEST), parse_flag(dry_run, "dry_run")
        if not dry_run:
            self._writable("upgrade")
        return upgrade(self.machine(name), to, dry_run=dry_run)

    def repair(self, name: str, *, dry_run: bool = False) -> Repaired:
        """Mend what needs no guess, and take back all versions from the first that cannot be read. Do a dry run first.

        A rollup that is gone or damaged is written again where the log leads to exactly the bytes that it had: `mended`
        has the proof. Then versions go, if the log is damaged, or holds a row that no reader can decode. Versions
        before the first such one stay as they were; data that was appended from there on is lost. No other client may
        use the shard during that, and clients that have seen a version that is taken back raise HistoryRegressed from
        then on. Changes nothing when every version can be read, and every rollup is what it should be.

        Raises NewerFormat when a newer release wrote the log: upgrade this program instead. Raises Missing when a
        repair would not make the shard readable.
        """
        dry_run = parse_flag(dry_run, "dry_run")
        if not dry_run:
            self._writable("repair")
        return repair(self.machine(name), dry_run=dry_run)


def parse_planned(only: object, known: Sequence[str]) -> tuple[str, ...]:
    """Names of these duties that can be planned, in their order; all of them for none. Raises InvalidUsage."""
    named = (only,) if isinstance(only, str) else only
    if not isinstance(named, (list, tuple)) or (unknown := [one for one in named if one not in known]):
        got = shown(unknown[0] if isinstance(named, (list, tuple)) else only)
        raise InvalidUsage(f"{got} cannot be planned; these duties can: {', '.join(known)}", argument="only")
    return tuple(duty for duty in known if duty in named) or tuple(known)


def _check_calls(engine: object = None, progress: object = None) -> None:
    if engine is not None:
        check_callable(engine, "engine", "merge tasks that answers their results, or None")
    if progress is not None:
        check_callable(progress, "progress", "how many are done and how many there are, or None")
