"""The duties as commands, for one shard, several, or all. Each prints what was done, why, and what has to wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from persist_lib.cli import duty_outcomes
from persist_lib.cli.duty_outcomes import Outcome
from persist_lib.cli.json_values import error_value, jsonable
from persist_lib.cli.session import Advance, Session
from persist_lib.cli.shard_commands import Which, census
from persist_lib.cli.shared_options import DryRun
from persist_lib.cli.units import spent
from persist_lib.core.duties import BY_NAME, Duty
from persist_lib.errors import PersistError

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.client import Client

Doing = Callable[["Client", str, Advance], Outcome]


def _run(session: Session, what: str, which: Which, dry_run: bool, do: Doing) -> None:
    """Carry a duty out for each shard. A dry run has a client that cannot write."""
    is_look = what in BY_NAME and not BY_NAME[what].is_upkeep
    dry = " (dry run)" if dry_run and not is_look else ""
    with session.open(read_only=dry_run or is_look, remembers=what == "scrub", maintains=True) as client:

        def one(name: str) -> Outcome:
            with session.progress(f"{what} {name}") as advance:
                outcome = do(client, name, advance)
            session.show(f"{name}{dry}: {outcome.summary}", *outcome.details)
            return outcome

        wanted = which.chosen(client)
        found = session.each(wanted, one)
        cost = client.metrics().cost
    if not wanted:
        session.show("there are no shards")
    shards: list[dict[str, Any]] = [{"shard": name, **outcome.value} for name, outcome in found.done.items()]
    failures = {name: error_value(error) for name, error in found.failed.items()}
    session.answer({"duty": what, "dry_run": dry_run, "shards": shards, "failed": failures, "cost": jsonable(cost)})
    session.note(spent(cost))
    session.exit(found, *(outcome.exit_code for outcome in found.done.values()))


def maintain(session: Session, which: Which, dry_run: DryRun = False) -> None:
    """Do all duties of upkeep: leases, retention, compaction, rollups, garbage, orphans.

    Doing it again finds nothing to do. It works in this process, in bounded memory; for large shards, use Spark (see
    the pipeline). Killed at any point, it leaves a correct shard. Where another process is at it, this one fails with
    Busy; a killed process is in the way for at most a minute.

    \b
    persist maintain --all --dry-run    what is due, and what has to wait for a reader or a hold
    persist maintain orders payments
    persist maintain --all --json | jq '.shards[] | {shard, before: .before.batches, after: .after.batches}'
    """

    def one(client: Client, name: str, _advance: Advance) -> Outcome:
        try:
            done = client.maintain(name, dry_run=dry_run, alone=True)
        except PersistError as error:
            session.show(*duty_outcomes.done_in_part(name, error))
            raise
        return duty_outcomes.maintained(done, client.inspect(name), client.config.rollup_every, dry_run)

    _run(session, "maintain", which, dry_run, one)


def command_of(duty: Duty) -> Callable[..., None]:
    """Return the command of a duty: a function in `OWN`, or a general one that takes shards and --dry-run."""
    if duty.name in OWN:
        return documented(OWN[duty.name], duty)

    def run(session: Session, which: Which, dry_run: DryRun = False) -> None:
        _run(session, duty.name, which, dry_run, lambda client, name, advance: duty_outcomes.of_duty(
            client, duty.name, name, dry_run, advance))  # fmt: skip

    def look(session: Session, which: Which) -> None:
        run(session, which, dry_run=True)

    return documented(run if duty.is_upkeep else look, duty)


def documented(run: Callable[..., None], duty: Duty) -> Callable[..., None]:
    """The function with the table's help."""
    run.__name__ = duty.name
    run.__doc__ = f"{duty.does}\n{duty.help}"
    return run


def rollups(
    session: Session,
    which: Which,
    force: Annotated[bool, typer.Option("--force", help="Write a rollup even if none is due.")] = False,
    dry_run: DryRun = False,
) -> None:
    """The duty `rollups`; its help is in the table of duties."""
    _run(session, "rollups", which, dry_run, lambda client, name, _advance: duty_outcomes.rolled_up(
        client.inspect(name), client.roll_up(name, force=force, dry_run=dry_run, alone=True),
        client.config.rollup_every, force, dry_run))  # fmt: skip


def upgrade(
    session: Session,
    which: Which,
    to: Annotated[int | None, typer.Option(metavar="N", help="To this format. Default: the newest.")] = None,
    dry_run: DryRun = False,
) -> None:
    """Write shards in a newer format from now on. There is no way back.

    First upgrade the library on every machine that uses these shards: from then on, an older library refuses them
    before it does anything. A shard that is not upgraded stays as it is.

    \b
    persist upgrade --all --dry-run     from which format to which
    persist upgrade orders
    """
    _run(session, "upgrade", which, dry_run, lambda client, name, _advance: duty_outcomes.upgraded(
        client.upgrade(name, dry_run=dry_run) if to is None else client.upgrade(name, to, dry_run=dry_run), dry_run,
    ))  # fmt: skip


def scrub(
    session: Session,
    which: Which,
    after: Annotated[
        int,
        typer.Option(
            min=0, metavar="SEQNO", help="Only what was written after this seqno; an earlier scrub says which."
        ),
    ] = 0,
    new: Annotated[bool, typer.Option("--new", help="Only what no scrub has found sound yet.")] = False,
) -> None:
    """The duty `scrub`; its help is in the table of duties."""
    _run(session, "scrub", which, False, lambda client, name, advance: duty_outcomes.scrubbed(
        client.scrub(name, after=after, new_only=new, progress=advance)))  # fmt: skip


OWN: dict[str, Callable[..., None]] = {"rollups": rollups, "scrub": scrub, "census": census}
"""The duties whose commands take more than shards and --dry-run."""
