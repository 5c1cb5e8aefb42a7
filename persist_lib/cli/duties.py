"""The duties as commands: one shard, several, or all, each with what was done, why, and what had to wait for whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from persist_lib.cli import outcomes
from persist_lib.cli.arguments import AllShards, DryRun, Shards, chosen, each
from persist_lib.cli.outcomes import Outcome
from persist_lib.cli.session import Advance, Session
from persist_lib.cli.units import spent
from persist_lib.cli.values import error_value, jsonable, worst
from persist_lib.errors import PersistError

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.client import Client

Duty = Callable[["Client", str, Advance], Outcome]


def _run(session: Session, what: str, names: list[str] | None, is_all: bool, dry_run: bool, duty: Duty) -> None:
    """Carry a duty out for each shard. A dry run has a client that cannot write."""
    with session.open(read_only=dry_run) as client:

        def one(name: str) -> tuple[str, Outcome]:
            with session.progress(f"{what} {name}") as advance:
                outcome = duty(client, name, advance)
            session.show(
                f"{name}{' (dry run)' if dry_run and what != 'scrub' else ''}: {outcome.summary}", *outcome.details
            )
            return name, outcome

        wanted = chosen(client, names, is_all)
        done, failed = each(session, wanted, one)
        cost = client.metrics().cost
    if not wanted:
        session.show("there are no shards")
    shards: list[dict[str, Any]] = [{"shard": name, **outcome.value} for name, outcome in done]
    failures = {name: error_value(error) for name, error in failed}
    session.answer({"duty": what, "dry_run": dry_run, "shards": shards, "failed": failures, "cost": jsonable(cost)})
    session.note(spent(cost))
    code = max([worst([error for _, error in failed]), *(outcome.exit_code for _, outcome in done)])
    if code:
        raise typer.Exit(code)


def maintain(session: Session, names: Shards = None, is_all: AllShards = False, dry_run: DryRun = False) -> None:
    """Do all duties: expire, retain, compact, roll up, collect, audit.

    Doing it again finds nothing to do. What large shards need belongs to Spark (see the pipeline); this does it here,
    in bounded memory. Killed at any point, it leaves a correct shard.

    \b
    persist maintain --all --dry-run    what is due, and what waits for whom
    persist maintain orders payments
    persist maintain --all --json | jq '.shards[] | {shard, before: .before.batches, after: .after.batches}'
    """

    def one(client: Client, name: str, _advance: Advance) -> Outcome:
        try:
            done = client.maintain(name, dry_run=dry_run)
        except PersistError as error:
            session.show(*outcomes.done_in_part(name, error))
            raise
        return outcomes.maintained(done, client.inspect(name), client.config.rollup_every, dry_run)

    _run(session, "maintain", names, is_all, dry_run, one)


def compact(session: Session, names: Shards = None, is_all: AllShards = False, dry_run: DryRun = False) -> None:
    """Merge batches that are in debt, so that reading stays fast.

    Never changes what anybody reads. The price is that of the requests, at the location's prices (see --prices).
    `persist plan` shows the same as --dry-run.

    \b
    persist compact orders --dry-run
    persist compact --all
    """
    _run(session, "compact", names, is_all, dry_run, lambda client, name, advance: outcomes.compacted(
        client.compact(name, dry_run=dry_run, progress=advance), dry_run))  # fmt: skip


def roll_up(
    session: Session,
    names: Shards = None,
    is_all: AllShards = False,
    force: Annotated[bool, typer.Option("--force", help="Also where none is due.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Copy a shard's state to Blob, if that is due, so that opening it stays fast and garbage can go.

    \b
    persist roll-up --all
    persist roll-up orders --force
    """
    _run(session, "roll-up", names, is_all, dry_run, lambda client, name, _advance: outcomes.rolled_up(
        client.inspect(name), client.roll_up(name, force=force, dry_run=dry_run), client.config.rollup_every,
        force, dry_run))  # fmt: skip


def expire(session: Session, names: Shards = None, is_all: AllShards = False, dry_run: DryRun = False) -> None:
    """Retire readers and writers whose lease has ended.

    They find out at their next call, and register anew. since does not move by this; it moves on with the next reader
    or hold that does.

    \b
    persist expire --all --dry-run      who is overdue, for how long, and what that holds back
    """
    _run(session, "expire", names, is_all, dry_run, lambda client, name, _advance: outcomes.expired(
        client.expire(name, dry_run=dry_run), dry_run))  # fmt: skip


def retain(session: Session, names: Shards = None, is_all: AllShards = False, dry_run: DryRun = False) -> None:
    """Give up the history that the retention policy does not keep, as far as readers and holds allow.

    \b
    persist retention orders 1000       set the policy
    persist retain orders               carry it out
    """
    _run(session, "retain", names, is_all, dry_run, lambda client, name, _advance: outcomes.retained(
        client.retain(name, dry_run=dry_run), client.inspect(name), dry_run))  # fmt: skip


def collect(session: Session, names: Shards = None, is_all: AllShards = False, dry_run: DryRun = False) -> None:
    """Delete garbage that nobody can reach any more, and truncate the log.

    No age is consulted: an object goes when no live reader can still read a state that refers to it. What has to wait
    is listed with the reader, or the missing rollup, that it waits for.

    \b
    persist collect orders --dry-run
    persist collect --all
    """
    _run(session, "collect", names, is_all, dry_run, lambda client, name, advance: outcomes.collected(
        client.inspect(name), client.collect(name, dry_run=dry_run, progress=advance), dry_run))  # fmt: skip


def audit(session: Session, names: Shards = None, is_all: AllShards = False, dry_run: DryRun = False) -> None:
    """Delete orphans: objects that were uploaded, never linked, and whose writer is retired for ever.

    Lists the shard's objects, then reads its state. An object of a live writer is pending: it may be linked yet.

    \b
    persist audit --all --dry-run
    """
    _run(session, "audit", names, is_all, dry_run, lambda client, name, advance: outcomes.audited(
        client.audit_orphans(name, dry_run=dry_run, progress=advance), dry_run))  # fmt: skip


def upgrade(
    session: Session,
    names: Shards = None,
    is_all: AllShards = False,
    to: Annotated[
        int | None, typer.Option(metavar="N", help="To this format. Default: the newest.", show_default=False)
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Write shards in a newer format from now on. There is no way back.

    First upgrade the library on every machine that uses these shards: an older one refuses them from then on, before
    it does anything. A shard that is not upgraded goes on as it is.

    \b
    persist upgrade --all --dry-run     from which format to which
    persist upgrade orders
    """
    _run(session, "upgrade", names, is_all, dry_run, lambda client, name, _advance: outcomes.upgraded(
        client.upgrade(name, dry_run=dry_run) if to is None else client.upgrade(name, to, dry_run=dry_run), dry_run,
    ))  # fmt: skip


def scrub(
    session: Session,
    names: Shards = None,
    is_all: AllShards = False,
    after: Annotated[
        int,
        typer.Option(
            min=0, metavar="SEQNO", help="Only what was written after this seqno; an earlier scrub says which."
        ),
    ] = 0,
) -> None:
    """Read every batch again, and verify digests, counts and fingerprints.

    Changes nothing. Exit code 3 if anything is damaged.

    \b
    persist scrub --all
    persist scrub orders --after 4711
    """
    _run(session, "scrub", names, is_all, True, lambda client, name, advance: outcomes.scrubbed(
        client.scrub(name, after=after, progress=advance)))  # fmt: skip
