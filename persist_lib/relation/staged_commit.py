"""The commit of staged writes: put together, checked or compared with the contents, and appended under the stage's id.

An append alone takes the time from the newest state in each attempt. What depends on the contents is found at one
upper, is committed only if upper is still there, and is found again when another writer was first. What is to be
committed together with other shards is prepared, at one upper and one time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import pyarrow as pa

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.outcomes import counted_at
from persist_lib.core.state import Batch, State, Version
from persist_lib.core.sums import Sums
from persist_lib.errors import Indeterminate, LeaseExpired
from persist_lib.frontier import Antichain
from persist_lib.ids import WriterId
from persist_lib.kernel.columns import at_time
from persist_lib.kernel.keyset import Counts
from persist_lib.location.wrap.deadline import within
from persist_lib.location.wrap.spending import Spending
from persist_lib.relation.appends import Appended
from persist_lib.relation.commit import Appending, Kind, Place, Share, commit_shares
from persist_lib.relation.differences import Overwriting, Pair, Source, Upserting, assembled, batch_of, check_all
from persist_lib.relation.lone import LoneWriter
from persist_lib.relation.registration import (
    Lent,
    Registration,
    check_newest,
    check_produced,
    inline_room,
    lease_ended,
    next_time,
    staged_token,
    undoubted,
    whole,
)
from persist_lib.relation.stage import Staged, token_of
from persist_lib.runtime.ambient import Deadline
from persist_lib.shard.batches import Builder, Built, Laid
from persist_lib.shard.commit import Machine

T = TypeVar("T")
Rule = Upserting | Overwriting


class Prepared(NamedTuple):
    """What was staged for one shard, as the batch that it comes to at one upper. Nothing refers to it yet."""

    builder: Builder
    built: Built
    place: Place
    registration: Registration
    counts: Counts
    staged: c.Staged = ()

    def is_empty(self) -> bool:
        return not self.built.batch.parts

    def is_lent(self) -> bool:
        """Whether it is appended under the id of a stage, and not under the handle's own."""
        return isinstance(self.registration, Lent)

    def share(
        self, machine: Machine, token: bytes, deadline: Deadline, producer: tuple[str, int] | None = None
    ) -> Share:  # fmt: skip
        writer = self.registration.register(deadline)
        how = Appending(self.place, c.CompareAndAppend, token, producer, staged=self.staged)
        return Share(machine, self.registration, writer, self.builder, self.built, how)


def discard(prepared: Mapping[str, Prepared]) -> None:
    """Delete what was uploaded, to which no command refers."""
    for one in prepared.values():
        one.builder.discard()


class Commit:
    """One commit of staged writes, until a deadline. Used with the handle's lock held."""

    def __init__(
        self, write: LoneWriter, registration: Registration, uploader: Callable[[], WriterId],
        producer: tuple[str, int] | None, deadline: Deadline, spent: Spending, staged: Sequence[Staged],
    ) -> None:  # fmt: skip
        self._machine = machine = write.machine
        self._leases = write._leases
        self._schema = write.schema
        self._schema_id = write._schema_id
        self._registration = registration
        self._uploader = uploader
        self._producer = producer
        self._deadline = deadline
        self._spent = spent
        self._names = tuple(one.name for one in staged)
        self._token = token_of(one.id for one in staged) if staged else machine.runtime.token()

    def append(self, staged: Sequence[Staged], when: int | None) -> Appended:
        """Append all of it, at `when` or at the next time; where it has times of its own, at these."""
        builder = self._builder()
        built = self._assembled(staged, builder)
        bounds = staged[0].bounds
        self._token = staged_token(self._token, chosen=bounds is None and when is None)
        if bounds is None and when is None and self._machine.places_appends:
            return self._send(builder, built, whole, c.AppendNow)
        return self._send(builder, built, whole if bounds is not None else partial(self._next, when))

    def prepare(
        self, staged: Sequence[Staged], rule: Rule | None, bounds: tuple[Antichain, Antichain], time: int | None,
        *, everything: bool,
    ) -> Prepared:  # fmt: skip
        """What is staged (or what the rule makes of it) as a batch with these bounds, at `time` or at its own times.

        Raises UpperMismatch when upper is not where the bounds begin, as far as this had to look.
        """
        machine, builder, schema = self._machine, self._builder(), self._schema
        if not (staged or everything):
            built = Built(batch_of((), Sums(), bounds).batch)
            return Prepared(builder, built, whole, self._registration, Counts())
        if rule is None and not schema.constraints:
            built = self._assembled(staged, builder)
        else:
            source = self._source(staged, everything=everything)
            names = schema.key_names if rule is None else rule.names
            with source.at(self._writable(), names, self._deadline) as (version, both):
                if (upper := version.state.upper) != bounds[0]:
                    raise machine.refused(r.WrongUpper(bounds[0], upper))
                if rule is None:
                    self._before(partial(check_all, machine, schema, both, time))
                    built = self._assembled(staged, builder)
                else:
                    built = self._changes(builder, rule, both, version.state, 0 if time is None else time)
        place = whole if time is None else partial(_fixed, bounds[0], time)
        counts = Counts() if rule is None else rule.counts
        return Prepared(builder, built, place, self._registration, counts, self._names)

    def rows(self, staged: Sequence[Staged]) -> Iterator[pa.Table]:
        """What is staged, in order, each data once a time, in tables of bounded size."""
        return self._source(staged, everything=False).rows(self._machine.state)

    def _assembled(self, staged: Sequence[Staged], builder: Builder) -> Built:
        machine, state = self._machine, self._machine.state
        build = partial(assembled, staged, builder, self._schema, state.schemas, inline_room(machine, state))
        built: Built = self._before(build)
        return built

    def _changes(self, builder: Builder, rule: Rule, both: Iterator[Pair], state: State, time: int) -> Built:
        """What the rule makes of what is staged and of the contents in a state, written at time 0."""
        machine = self._machine
        check_newest(machine, self._schema, state)
        changes = (at_time(table, 0) for table in rule.over(both, time))
        lay = partial(builder.lay, changes, inline_bytes=inline_room(machine, state))
        laid: Laid = self._before(lay)
        return batch_of(laid.parts, laid.sums, None, laid.table)

    def _source(self, staged: Sequence[Staged], *, everything: bool) -> Source:
        parts = [part for one in staged for part in one.parts]
        machine, leases = self._machine, self._leases
        make = partial(Source, machine, leases, self._schema, parts, self._uploader, everything=everything)
        source: Source = self._before(make)
        return source

    def _next(self, when: int | None, built: Built, state: State) -> Batch:
        """The batch at the time that this state gives it."""
        machine, upper = self._machine, state.upper
        if when is not None and not upper.is_before(when):
            raise machine.refused(r.WrongUpper(Antichain(when), upper))
        time = (
            next_time(self._schema, f"shard {machine.shard}", upper, machine.runtime, machine.consensus.now)
            if when is None
            else when
        )
        return counted_at(built.batch, upper, time)

    def _writable(self) -> Version:
        version = self._before(self._machine.fetch)
        if version.state.is_finished():
            raise self._machine.refused(r.Finished())
        if version.state.upper.is_top():
            raise self._machine.refused(r.WrongUpper(version.state.upper, version.state.upper))
        check_produced(self._machine, self._producer)
        return version

    def _builder(self) -> Builder:
        return Builder(self._machine, self._uploader, self._schema, self._schema_id, self._deadline)

    def _send(self, builder: Builder, built: Built, place: Place, kind: Kind = c.CompareAndAppend) -> Appended:
        machine, registration = self._machine, self._registration
        writer = registration.register(self._deadline)
        how = Appending(place, kind, self._token, self._producer, staged=self._names)
        share = Share(machine, registration, writer, builder, built, how)
        try:
            return commit_shares((share,), self._deadline, how.token, self._spent)[0]
        except LeaseExpired as error:
            raise lease_ended(machine, writer) from error

    def _before(self, step: Callable[[], T]) -> T:
        try:
            return within(self._deadline, step)
        except Indeterminate as error:
            raise undoubted(self._machine.shard, error) from error


def _fixed(lower: Antichain, time: int, built: Built, _state: State) -> Batch:
    return counted_at(built.batch, lower, time)
