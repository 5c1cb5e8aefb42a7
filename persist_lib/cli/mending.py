"""`persist source mend`: what was decoded wrongly is decoded anew, compared, and handed over to."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import typer

from persist_lib.cli.arguments import Collection
from persist_lib.cli.session import Session
from persist_lib.cli.sources import Pairs, pairs_of, sourcing
from persist_lib.cli.values import jsonable
from persist_lib.errors import InvalidUsage


def mend(
    session: Session,
    name: Collection,
    envelope: Annotated[
        Literal["none", "upsert", "debezium"] | None, typer.Option(help="What a row means.", show_default=False)
    ] = None,
    deletes: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="With upsert: true where a row goes.", show_default=False)
    ] = None,
    include: Annotated[
        Pairs, typer.Option(metavar="COLUMN=WHAT", help="As for create. Repeatable.", show_default=False)
    ] = None,
    column: Annotated[
        Pairs, typer.Option(metavar="COLUMN=NAME", help="As for create. Repeatable.", show_default=False)
    ] = None,
    transform: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="A corrected function.", show_default=False)
    ] = None,
    extra: Annotated[
        Literal["refuse", "ignore"] | None, typer.Option(help="Fields without a column.", show_default=False)
    ] = None,
    hand_over: Annotated[
        bool, typer.Option("--hand-over", help="Make what was decoded anew the collections, from now on.")
    ] = False,
    give_up: Annotated[bool, typer.Option("--give-up", help="Drop what was decoded anew.")] = False,
    timeout: Annotated[float, typer.Option(min=0.001, metavar="SECONDS", help="How long to try.")] = 600.0,
) -> None:
    """Decode a source's messages in another way, from NAME/raw, and say what would change. Nobody reads that yet.

    What is not given stays as it is; given options take the place of those of its kind. Instances may run on. Judge
    what it says, then hand over, or give it up. Reads as of earlier times stay what they were.

    \b
    persist source mend orders --column cents=amount
    persist source mend orders --hand-over
    """
    from persist_lib.cli.renditions import comparison_shown
    from persist_lib.storage.sources.pipeline import ERRORS

    given = (envelope, deletes, include, column, transform, extra)
    if (hand_over or give_up) and any(one is not None for one in given):
        raise InvalidUsage("--hand-over and --give-up are about what was decoded before: give no other options with it")
    if hand_over and give_up:
        raise InvalidUsage("say --hand-over or --give-up")
    with sourcing(session) as sources:
        if give_up:
            sources.give_up(name, timeout=timeout)
            session.answer({"source": name}, f"{name}: what was decoded anew is dropped")
            return
        if hand_over:
            at = sources.hand_over(name, timeout=timeout)
            shown = sources.find(name).columns.show(at)
            session.answer({"source": name, "at": at}, f"{name} is decoded anew from {shown} on")
            return
        record = sources.find(name)
        fields: dict[str, Any] = {"envelope": envelope, "deletes": deletes, "transform": transform}
        fields |= {"include": None if include is None else pairs_of(include, "--include")}
        fields = {field: value for field, value in fields.items() if value is not None}
        meaning = msgspec.structs.replace(record.meaning, **fields) if fields else None
        fields = {"columns": None if column is None else pairs_of(column, "--column"), "extra": extra}
        fields = {field: value for field, value in fields.items() if value is not None}
        decoding = msgspec.structs.replace(record.decoding, **fields) if fields else None
        found = sources.mend(name, decoding=decoding, meaning=meaning, timeout=timeout)
        described = sources.show(name)
    said: list[Any] = []
    for role, judged, schema in (("output", found.output, described.schema), ("errors", found.errors, ERRORS)):
        said.append(described.collections[role])
        if judged is None:
            said.append("it has other keys, or nothing yet, so it is not compared")
        else:
            said += comparison_shown(judged, schema)
    value = {"source": name, "renditions": found.renditions, "time": found.time, "output": jsonable(found.output),
             "errors": jsonable(found.errors)}  # fmt: skip
    session.answer(value, *said, f"judge this, then: persist source mend {name} --hand-over, or --give-up")
