"""Schemas of shards. A shard is created with its first schema, and opened with one that it has."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.formats import format_for
from persist_lib.core.state import State
from persist_lib.errors import NameTaken, NotAllowed, SchemaMismatch
from persist_lib.frontier import MINIMUM
from persist_lib.schema.evolution import place_of
from persist_lib.schema.schema import Schema, with_models
from persist_lib.shard.commit import Committed, Machine


def create_if_missing(
    machine: Machine, schema: Schema, format_: int | None, check: Callable[[], None] | None = None
) -> None:
    """Create the shard if there is none, in this format (None: the one in which this release creates shards).

    `check` raises NameTaken if its name is something else's. It is called before the shard is made, and as long as
    nothing has written to it, as something else may be given the name at the same moment. That is there, too, then: so
    who made the shard takes it away, and others only refuse to write to it. Raises MemberOf for a shard that was
    promoted.
    """
    answer: Committed | r.Refusal | None = None
    if machine.try_fetch() is None:
        if check is not None:
            check()
        answer = machine.try_commit(lambda _state, _now: c.Create(schema, format_for(format_, schema)))
        if isinstance(answer, r.Exists):
            machine.fetch()  # another client created it at the same moment
        elif not isinstance(answer, Committed):
            raise machine.refused(answer)
    machine.check_same(machine.state)
    if check is None or machine.state.upper != MINIMUM:
        return
    try:
        check()
    except NameTaken as taken:
        machine.check_same(machine.fetch().state)  # it may be the name of what the shard was promoted to just now
        if isinstance(answer, Committed):
            _take_away(machine, taken)
        raise


def _take_away(machine: Machine, taken: NameTaken) -> None:
    """Finish a shard that this process has just made; not if a program that knows nothing of this has written to it."""

    def build(state: State, _now: int) -> c.Finish:
        if state.upper != MINIMUM:
            raise taken
        return c.Finish()

    with suppress(NotAllowed):
        machine.try_commit(build)


def known_schema(machine: Machine, schema: Schema) -> tuple[int, Schema]:
    """The number of this schema in the shard, and what the shard knows of it: the ids of its columns.

    Raises SchemaMismatch when the shard does not have it.
    """
    schemas = machine.state.schemas
    place = place_of(schema, schemas)
    if place is None:
        schemas = machine.fetch().state.schemas
        place = place_of(schema, schemas)
    if place is None:
        raise SchemaMismatch(
            f"shard {machine.shard} has the schema {schemas[-1]}, and was opened with {schema}. "
            "Open it with its own schema, or add columns with client.evolve_schema",
            shard=machine.shard, actual=schemas[-1], expected=schema,
        )  # fmt: skip
    return place, with_models(schemas[place], schema)


def schema_id(machine: Machine, schema: Schema) -> int:
    """The number that this schema has in the shard. Raises SchemaMismatch when the shard does not have it."""
    return known_schema(machine, schema)[0]
