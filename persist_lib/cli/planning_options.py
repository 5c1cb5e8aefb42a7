"""What `persist maintain` does in place of upkeep: writes a plan down and does exactly that, or publishes tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, cast

import typer

from persist_lib.cli import duty_outcomes
from persist_lib.cli import shared_options as opt
from persist_lib.cli.duty_outcomes import Outcome
from persist_lib.cli.json_values import jsonable
from persist_lib.cli.pending_commands import sentences
from persist_lib.cli.rendition_commands import steps_said, steps_table
from persist_lib.cli.row_reads import table_of
from persist_lib.cli.session import Advance, Session
from persist_lib.core import units
from persist_lib.errors import InvalidUsage
from persist_lib.times import show_time

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.cli.duty_commands import Answer
    from persist_lib.core.plan.written import ShardPlan, Step
    from persist_lib.maintain.publish.steps import Published
    from persist_lib.pending_area import Absorbed


class Planning(NamedTuple):
    """What `persist maintain` writes, or carries out, in place of upkeep."""

    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Show what would be done, what it frees and costs, and write it down."),
    ] = None
    apply: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Do exactly what was written down, or nothing where a shard has moved."),
    ] = None

    def check(self, only: Sequence[str], *, is_else: bool) -> None:
        """Raise InvalidUsage for what does not go together. `is_else`: there is something else than names and --all."""
        if self.apply is not None and (self.plan is not None or only or is_else):
            raise InvalidUsage("--apply does what the file says, and goes without other options but names")
        if self.plan is not None and is_else:
            raise InvalidUsage("--plan changes nothing, and goes with names, --all and --only")

    def write(
        self, answer: Answer, shards: Sequence[str], only: Sequence[str], collections: Sequence[str | None],
        pending: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Show the plan of these shards, collections (None: of all) and pending areas, and write it to the file."""
        from persist_lib import pending_area
        from persist_lib.core.plan.written import Plan

        plans: list[ShardPlan] = []
        areas: list[ShardPlan] = []
        steps: list[Step] = []
        if collections:
            with answer.client.controller() as controller:
                found = answer.each(
                    [name or "collections" for name in collections],
                    lambda name: controller.plan(None if None in collections else name),
                )
            steps = [step for each in found.values() for step in each]
            said = units.of(len(steps), "step") if steps else "nothing to give up"
            answer.session.show(f"collections (plan): {said}", *duty_outcomes.of_collections(steps))
            answer.value["collections"] = jsonable(steps)

        def one(name: str, _advance: Advance) -> Outcome:
            plan = answer.client.plan(name, only=only).of(name)
            plans.append(plan)
            return duty_outcomes.planned(plan)

        def absorbed(name: str, _advance: Advance) -> Outcome:
            areas.append(pending_area.plan(answer.client, name))
            return duty_outcomes.planned(areas[-1])

        if only or shards or not (collections or pending):
            answer.shards(shards, "plan", " (plan)", one)
        if pending:
            answer.shards(pending, "plan", " (plan)", absorbed)
        try:
            plan = Plan(tuple(plans)).with_collections(steps).with_pending([one for one in areas if one.steps])
            cast("Path", self.plan).write_text(plan.to_json() + "\n")
        except OSError as error:
            raise InvalidUsage(f"the plan cannot be written to {self.plan}: {error.strerror}") from error
        answer.session.note(f"written to {self.plan}; `persist maintain --apply {self.plan}` does it")

    def carry_out(self, answer: Answer, names: Sequence[str]) -> None:
        """Do what the file says of these shards; without names of all that it has."""
        from persist_lib.core.plan.written import Plan, parse_plan

        client, every = answer.client, answer.client.config.rollup_every
        try:
            plan = parse_plan(cast("Path", self.apply).read_bytes())
        except OSError as error:
            raise InvalidUsage(f"{self.apply} cannot be read: {error.strerror}") from error

        def one(name: str, _advance: Advance) -> Outcome:
            done = client.apply(Plan((plan.of(name),)))[name]
            return duty_outcomes.maintained(done, client.inspect(name), every, dry_run=False)

        plan = plan.only(names)
        if plan.collections:
            with client.controller() as controller:
                found = answer.each(["collections"], lambda _: controller.apply(plan.collections))
            for tended in found.values():
                answer.session.show(steps_table(tended, ""), f"collections: {steps_said(tended, dry_run=False)}")
                answer.value["steps"] = jsonable(tended.steps)
        if plan.pending:
            answer.value["collections"] = jsonable(list(answer.each(*self._absorbing(answer, plan.pending)).values()))
        if plan.shards or not (plan.collections or plan.pending):
            answer.shards([one.shard for one in plan.shards], "apply", "", one)

    def _absorbing(self, answer: Answer, pending: Sequence[ShardPlan]) -> tuple[list[str], Callable[[str], Absorbed]]:
        """The pending areas of a plan, and what absorbs one of them and says so."""
        from persist_lib import pending_area

        plans = {one.shard: one for one in pending}

        def one(name: str) -> Absorbed:
            done = pending_area.apply(answer.client, plans[name])
            answer.session.show(*sentences(done, answer.client.inspect(name).state.times, dry_run=False))
            return done

        return list(plans), one


class Publishing(NamedTuple):
    """Which format is published, or taken back, of which time, and for how long."""

    publish: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="Publish for other engines: iceberg or delta.")
    ] = None
    withdraw: Annotated[str | None, typer.Option(metavar="FORMAT", help="Take that publication back.")] = None
    at: Annotated[str | None, typer.Option(metavar="TIME", help="Publish it as of this time. Default: the newest.")] = (
        None
    )
    keep: Annotated[int | None, typer.Option(min=1, help="Keep so many snapshots of it, the newest. At first: 10.")] = (
        None
    )
    follow: Annotated[
        bool | None, typer.Option("--follow/--no-follow", help="Whether each upkeep publishes it again. At first: no.")
    ] = None

    def do(self, session: Session, names: Sequence[str], *, dry_run: bool) -> None:
        """Publish tables, or take their publications back."""
        if not names or (self.publish is None) is (self.withdraw is None):
            raise InvalidUsage("--publish and --withdraw take a format, one of them is given, and tables are named")
        if self.withdraw is not None and self != Publishing(withdraw=self.withdraw):
            raise InvalidUsage("--at, --keep and --follow go with --publish")
        values, said = [], list[str]()
        with session.open(read_only=dry_run, maintains=True) as client:
            for name in names:
                table = table_of(client, name)
                if self.withdraw is not None:
                    gone = table.withdraw(self.withdraw, dry_run=dry_run)
                    would = "would be " if dry_run else ""
                    said.append(
                        f"{name}: {would}withdrawn as {gone.format}; {units.of(len(gone.keys), 'object')} may go"
                    )
                    values.append(jsonable(gone))
                    continue
                done = table.publish(
                    self.publish or "", opt.parse_time(self.at, "at"), keep=self.keep, follows=self.follow,
                    dry_run=dry_run,
                )  # fmt: skip
                said.append(f"{name}: {_said(done, show_time(done.as_of, table.schema.times), dry_run=dry_run)}")
                values.append(jsonable(done))
        session.answer({"published" if self.publish else "withdrawn": values, "dry_run": dry_run}, *said)


def _said(done: Published, as_of: str, *, dry_run: bool) -> str:
    what = f"{units.of(done.files, 'file')} of {units.of(done.rows, 'row')}, {done.shared} of them as before"
    wrote = [
        f"{units.size(size)} {verb}"
        for size, verb in (
            (done.rewritten, "rewritten as contents"),
            (done.copied, "copied"),
            (done.metadata, "of metadata"),
        )
        if size
    ]
    if not done.is_new:
        return f"published as {done.format} as of {as_of} before, at {done.place}"
    return (
        f"{'would be ' * dry_run}published as {done.format} as of {as_of}, at {done.place}: {what}; {', '.join(wrote)}"
    )
