"""What `persist maintain` publishes for other engines, or takes back, in place of upkeep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from persist_lib.cli import shared_options as opt
from persist_lib.cli.json_values import jsonable
from persist_lib.cli.row_reads import table_of
from persist_lib.cli.session import Session
from persist_lib.core import units
from persist_lib.errors import InvalidUsage
from persist_lib.times import show_time

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.maintain.publish.steps import Published


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
