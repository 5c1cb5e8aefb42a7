"""`persist maintain`: the upkeep of all tables, of some, or some of its duties; and what is done shard by shard.

Each prints what was done, why, and what has to wait.
"""

from __future__ import annotations

import getpass
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from persist_lib.arguments import did_you_mean
from persist_lib.cli import duty_outcomes
from persist_lib.cli import shared_options as opt
from persist_lib.cli.duty_outcomes import Outcome
from persist_lib.cli.json_values import error_value, jsonable
from persist_lib.cli.pending_commands import sentences
from persist_lib.cli.planning_options import Planning, Publishing
from persist_lib.cli.rendition_commands import steps_said, steps_table
from persist_lib.cli.root import UPKEEP
from persist_lib.cli.row_reads import table_of
from persist_lib.cli.session import Advance, Session
from persist_lib.cli.shard_commands import damage_notes, damaged_shards, remembered
from persist_lib.core import units
from persist_lib.core.duties import BY_NAME
from persist_lib.errors import InvalidName, InvalidUsage, NotFound, Paused, PersistError
from persist_lib.ids import CATALOG
from persist_lib.runtime.each import Each

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.client import Client
    from persist_lib.pending_area import Absorbed

Doing = Callable[[str, Advance], Outcome]


class Which(NamedTuple):
    """The shards that a command works on."""

    names: opt.Shards = None
    is_all: opt.AllShards = False

    def chosen(self, client: Client) -> list[str]:
        """Those that are named, or all with --all. Raises InvalidUsage for both or neither."""
        if not self.names and not self.is_all:
            raise InvalidUsage("name one or more shards, or use --all")
        return _named(self.names, is_all=self.is_all) or client.shards()


def _named(names: Sequence[str] | None, *, is_all: bool) -> list[str]:
    if names and is_all:
        raise InvalidUsage("give names or --all, not both")
    return list(dict.fromkeys(names or ()))


class Answer:
    """What a command did, thing by thing: printed as it comes for people, at the end as one object for machines."""

    def __init__(self, session: Session, client: Client, duty: str, dry_run: bool) -> None:
        self.session, self.client = session, client
        self.value: dict[str, Any] = {"duty": duty, "dry_run": dry_run}
        self.tried: Each[Any] = Each()
        self.codes: list[int] = []

    def each(self, names: Sequence[str], do: Callable[[str], Any]) -> dict[str, Any]:
        """The answers by name. A failure is printed at once, stops nothing else, and counts for the exit code."""
        found = self.session.each(names, do)
        self.tried.failed |= found.failed
        return found.done

    def shards(self, names: Sequence[str], what: str, dry: str, do: Doing) -> None:
        """Do something for each shard."""

        def one(name: str) -> Outcome:
            with self.session.progress(f"{what} {name}") as advance:
                outcome = do(name, advance)
            self.session.show(f"{name}{dry}: {outcome.summary}", *outcome.details)
            return outcome

        found = self.each(names, one)
        self.value["shards"] = [{"shard": name, **outcome.value} for name, outcome in found.items()]
        self.codes += [outcome.exit_code for outcome in found.values()]
        if not names and not self.tried.failed:
            self.session.show("there are no shards")

    def end(self) -> None:
        """Print what machines get and what it cost, and exit with the gravest code."""
        cost = self.client.metrics().cost
        self.value |= {"failed": {name: error_value(error) for name, error in self.tried.failed.items()}}
        self.session.answer({**self.value, "cost": jsonable(cost)})
        self.session.note(units.spent(cost))
        self.session.exit(self.tried, *self.codes)


class Pausing(NamedTuple):
    """What `persist maintain` pauses, or resumes, in place of upkeep."""

    pause: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN", help="Pause upkeep of tables and shards with such names, or --only these duties."
        ),
    ] = None
    resume: Annotated[str | None, typer.Option(metavar="PATTERN", help="End the pause of this pattern.")] = None
    reason: Annotated[str | None, typer.Option(metavar="TEXT", help="Why it is paused.")] = None
    owner: Annotated[str | None, typer.Option(metavar="TEXT", help="Who pauses it. Default: the user here.")] = None
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="Until then, as '2 days'. Default: until it is resumed.")
    ] = None

    def do(self, session: Session, only: Sequence[str]) -> None:
        """Set a pause, or end one."""
        if self.pause is None or self.resume is not None:
            if self.resume is None or self != Pausing(resume=self.resume) or only:
                raise InvalidUsage("--reason, --owner and --until go with --pause, and --resume goes alone")
            with session.open(read_only=False) as client:
                ended = client.resume(self.resume)
            said = [f"no longer paused: {one.shown}" for one in ended]
            session.answer({"resumed": self.resume, "ended": jsonable(ended)}, *said)
            return
        if not self.reason:
            raise InvalidUsage("--pause needs a --reason, so that others know what to do about it")
        owner = self.owner or getpass.getuser()
        with session.open(read_only=False) as client:
            set_ = client.pause(self.pause, owner=owner, reason=self.reason, only=only, until=self.until)
        session.answer({"paused": jsonable(set_)}, f"{set_.shown}: {set_.says}")


def _duties(_context: typer.Context, incomplete: str) -> list[str]:
    return [name for name in UPKEEP if name.startswith(incomplete)]


class Choosing(NamedTuple):
    """Which duties `persist maintain` does, and that it is for all tables."""

    is_all: Annotated[bool, typer.Option("--all", help="All tables, as without names.")] = False
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DUTY", help=f"Only this one of {', '.join(UPKEEP)}. Repeat it for more.", autocompletion=_duties
        ),
    ] = None
    force: Annotated[bool, typer.Option("--force", help="With --only rollups: write a rollup even if none is due.")] = (
        False
    )

    def duties(self) -> list[str]:
        """The duties that were named, in their order. Raises InvalidUsage."""
        only = self.only or ()
        for name in only:
            if name not in UPKEEP:
                meant = did_you_mean(name, UPKEEP)
                own = ". `persist shard scrub` is a command of its own" if name == "scrub" else ""
                raise InvalidUsage(f"there is no duty {name!r}. {meant}They are {', '.join(UPKEEP)}{own}", only=name)
        if self.force and "rollups" not in only:
            raise InvalidUsage("--force writes a rollup that is not due: it goes with --only rollups")
        return [name for name in UPKEEP if name in only]


def _look_after(
    answer: Answer, wanted: Sequence[str], chosen: Sequence[str], planning: Planning, *, force: bool
) -> None:
    """Do the duties that were chosen for what was named, or plan them."""
    client, dry_run = answer.client, bool(answer.value["dry_run"])
    of_shards = [name for name in chosen if BY_NAME[name].carrier == "shard"]
    carried = answer.each(wanted, lambda name: _shards_of(client, name)) if of_shards or not chosen else {}
    shards = list(dict.fromkeys(shard for each in carried.values() for shard in each)) if wanted else None
    listed: list[str | None] = []
    if "collections" in chosen:
        listed = [*wanted] or [None]
    elif not chosen:
        listed = [name for name, own in carried.items() if own != [name]]
        if not wanted and client.machine(CATALOG).try_fetch() is not None:
            listed = [None]
    if planning.plan is not None:
        looked = (client.shards() if shards is None else shards) if of_shards or not chosen else []
        pending = _pending(client, wanted) if "pending" in chosen else []
        planning.write(answer, looked, of_shards, listed, pending)
        return
    if listed:
        _tend(answer, listed, dry_run=dry_run)
    if "pending" in chosen:
        _absorb(answer, list(wanted), dry_run=dry_run)
    if of_shards or not chosen:
        shards = client.shards() if shards is None else shards
        answer.shards(
            shards, answer.value["duty"], " (dry run)" if dry_run else "",
            lambda name, advance: _done(answer.session, client, name, of_shards, force, dry_run, advance),
        )  # fmt: skip
        answer.value["damaged"] = damaged = damaged_shards(remembered(client, shards))
        for line in damage_notes(damaged):
            answer.session.note(line)
        answer.codes += [3] * bool(damaged)


def _is_instead(
    session: Session, names: Sequence[str] | None, choosing: Choosing, pausing: Pausing, publishing: Publishing, *,
    is_upkeep: bool, dry_run: bool,
) -> bool:  # fmt: skip
    """Pause or publish in place of upkeep, if that was asked for. Raises InvalidUsage where both were."""
    only = choosing.only or ()
    if pausing != Pausing():
        if names or choosing.is_all or dry_run or is_upkeep:
            raise InvalidUsage("--pause and --resume take a pattern, and go without names and other options but --only")
        pausing.do(session, only)
        return True
    if publishing != Publishing():
        if choosing.is_all or only or is_upkeep:
            raise InvalidUsage("--publish and --withdraw take names, and go without other options of upkeep")
        publishing.do(session, names or (), dry_run=dry_run)
        return True
    return False


def maintain(
    session: Session,
    names: opt.AnyTables = None,
    choosing: Choosing = Choosing(),  # noqa: B008 - it cannot be changed
    pausing: Pausing = Pausing(),  # noqa: B008 - it cannot be changed
    planning: Planning = Planning(),  # noqa: B008 - it cannot be changed
    publishing: Publishing = Publishing(),  # noqa: B008 - it cannot be changed
    even_if_paused: opt.EvenIfPaused = False,
    dry_run: opt.DryRun = False,
) -> None:
    """Do the upkeep of all tables, or of those that are named.

    Doing it again finds nothing to do. It works in this process, in bounded memory; for large shards, use Spark (see
    the pipeline). Killed at any point, it leaves a correct shard. Where another process is at it, this one fails with
    Busy; a killed process is in the way for at most a minute.

    Without --only it does `collections` for what the catalog lists, and then all duties of each shard. `pending` is
    only done if it is named. The exit code is 3 where a scrub found damage that is still there.

    With --pause it does nothing, and nor does anything else that looks after this location, Dagster included, until
    --until or --resume: of tables and shards with such names, or --only some duties. What is paused is said.

    A plan is of one version of each shard. --apply claims it by one commit, and refuses a shard (exit code 1) on which
    anything but leases has moved since, or whose plan was carried out before. The other shards are done. Of collections
    a plan has what would be given up: history, renditions, what is left of dropped ones. What makes data readable (as
    `promise` and WALs) is in no plan, and `pending` only with --only pending: exactly which batches would be absorbed.

    With --publish it does only that: the tables that are named become Iceberg or Delta tables as of a time, over their
    own objects, which other engines read. See docs/publish.md.

    \b
    persist maintain --dry-run          what is due, and what has to wait for a reader or a hold
    persist maintain orders payments
    persist maintain --only garbage --only orphans
    persist maintain orders --only compaction --dry-run     the plan, and its price
    persist maintain --plan plan.json   what, why, bytes, requests and price of each step
    persist maintain --apply plan.json  those steps, and no others
    persist maintain --pause 'orders*' --only compaction --reason 'copying the bucket' --until '2 days'
    persist maintain --resume 'orders*'
    persist maintain orders --publish iceberg --dry-run     what it would copy or rewrite
    persist maintain orders --publish delta --follow        now, and at each upkeep
    persist maintain orders --withdraw delta
    persist maintain --json | jq '.shards[] | {shard, before: .before.batches, after: .after.batches}'
    """
    is_upkeep = choosing.force or even_if_paused or planning != Planning()
    if _is_instead(session, names, choosing, pausing, publishing, is_upkeep=is_upkeep, dry_run=dry_run):
        return
    chosen = choosing.duties()
    planning.check(chosen, is_else=choosing.force or dry_run or even_if_paused)
    dry_run = dry_run or planning.plan is not None
    with session.open(read_only=dry_run, maintains=True) as client, passed_by(client, is_asked=even_if_paused):
        answer = Answer(session, client, chosen[0] if len(chosen) == 1 else "maintain", dry_run)
        wanted = _named(names, is_all=choosing.is_all)
        if planning.apply is not None:
            planning.carry_out(answer, wanted)
        else:
            _look_after(answer, wanted, chosen, planning, force=choosing.force)
        answer.end()


maintain.__doc__ = "\n\n".join(
    [
        (maintain.__doc__ or "").rstrip(),
        *(f"    `{duty.name}`: {duty.does}{duty.help.rstrip()}" for duty in UPKEEP.values()),
    ]
)


def passed_by(client: Client, *, is_asked: bool) -> AbstractContextManager[None]:
    """A block that passes pauses by, if that is asked for."""
    return client.even_if_paused() if is_asked else nullcontext()


def _shards_of(client: Client, name: str) -> list[str]:
    """The shards that carry what has this name. A shard that is finished already is one still."""
    try:
        table = table_of(client, name)
    except NotFound:
        with suppress(InvalidName):
            if client.machine(name).try_fetch() is not None:
                return [name]
        raise
    if table.carrier == "shard":
        return [name]
    with client.controller() as controller:
        renditions = controller.describe(name).renditions
    return [table.kept_by(), *(shard for one in renditions for shard in one.shards)]


def _done(
    session: Session, client: Client, name: str, chosen: list[str], force: bool, dry_run: bool, advance: Advance
) -> Outcome:
    """Do all duties of upkeep for a shard, or those that are chosen."""
    try:
        if not chosen:
            done = client.maintain(name, dry_run=dry_run, alone=True)
            return duty_outcomes.maintained(done, client.inspect(name), client.config.rollup_every, dry_run)

        def one(duty: str) -> Outcome:
            try:
                return duty_outcomes.of_duty(client, duty, name, dry_run, advance, force=force)
            except Paused as paused:
                return Outcome(paused.says, {"paused": paused.says})

        if len(chosen) == 1:
            return one(chosen[0])
        tried = Each[Outcome]().add(chosen, one, PersistError)
        tried.check(f"shard {name}: {{}} duties")
        return duty_outcomes.together("what is due now" if dry_run else "done", tried.done)
    except PersistError as error:
        session.show(*duty_outcomes.done_in_part(name, error))
        raise


def _tend(answer: Answer, names: Sequence[str | None], *, dry_run: bool) -> None:
    """Look after collections and timelines; None stands for all of them."""
    with answer.client.controller() as controller:
        found = answer.each(
            [name or "collections" for name in names],
            lambda name: controller.tend(None if None in names else name, dry_run=dry_run),
        )
    for name, done in found.items():
        said = steps_said(done, dry_run=dry_run)
        answer.session.show(steps_table(done, ""), said if done.steps else f"{name}: nothing to do")
    answer.value["steps"] = jsonable([step for done in found.values() for step in done.steps])


def _pending(client: Client, names: Sequence[str]) -> list[str]:
    """The collections that are named, or all with something in their pending area."""
    from persist_lib import pending_area

    return list(names) or list(pending_area.pending_collections(client))


def _absorb(answer: Answer, names: list[str], *, dry_run: bool) -> None:
    """Absorb what writers put into the pending areas of some collections, or of all."""
    from persist_lib import pending_area

    client = answer.client

    def one(name: str) -> Absorbed | None:
        try:
            done = pending_area.absorb(client, name, dry_run=dry_run)
        except Paused as paused:
            answer.session.show(f"{name}: {paused.says}")
            return None
        except NotFound:
            if not names:  # it was deleted since
                return None
            raise
        answer.session.show(*sentences(done, client.inspect(name).state.times, dry_run=dry_run))
        return done

    found = [done for done in answer.each(_pending(client, names), one).values() if done]
    if not found and not answer.tried.failed:
        answer.session.show("nothing is pending")
    answer.value["collections"] = jsonable(found)
    answer.codes += [3 for done in found if done.is_blocked]


def upgrade(
    session: Session,
    which: Which,
    to: Annotated[int | None, typer.Option(metavar="N", help="To this format. Default: the newest.")] = None,
    dry_run: opt.DryRun = False,
) -> None:
    """Write shards in a newer format from now on. There is no way back.

    First upgrade the library on every machine that uses these shards: from then on, an older library refuses them
    before it does anything. A shard that is not upgraded stays as it is.

    \b
    persist shard upgrade --all --dry-run     from which format to which
    persist shard upgrade orders
    """
    with session.open(read_only=dry_run, maintains=True) as client:
        answer = Answer(session, client, "upgrade", dry_run)
        answer.shards(which.chosen(client), "upgrade", " (dry run)" if dry_run else "",
            lambda name, _advance: duty_outcomes.upgraded(
                client.upgrade(name, dry_run=dry_run) if to is None else client.upgrade(name, to, dry_run=dry_run),
                dry_run,
            ))  # fmt: skip
        answer.end()


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
    even_if_paused: opt.EvenIfPaused = False,
) -> None:
    """Read every batch again, and verify digests, counts and fingerprints. `persist verify` also looks at the rest.

    Changes no data. It remembers in the location what it found: batches known to be damaged are read again each time,
    until they are sound or gone. With --new, batches that were found sound are not. Exit code 3 if anything is damaged.

    \b
    persist shard scrub --all
    persist shard scrub --all --new           only what no scrub has found sound yet
    persist shard scrub orders --after 4711
    """
    with session.open(remembers=True, maintains=True) as client, passed_by(client, is_asked=even_if_paused):
        answer = Answer(session, client, "scrub", dry_run=False)
        answer.shards(which.chosen(client), "scrub", "", lambda name, advance: duty_outcomes.scrubbed(
            client.scrub(name, after=after, new_only=new, progress=advance)))  # fmt: skip
        answer.end()
