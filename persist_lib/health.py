"""What is wrong in a location, by one look at it: shards, tables, sources, streams, pending areas, stores.

    found = health.check(client)
    found.is_sound, found.problems

Each problem says what is wrong, which command helps, and where the manual has more. A look changes nothing. It costs
one request for the newest versions of all shards, one for each shard that moved since the last survey, one listing of
what scrubs found damaged, and a few for each timeline, pending area and source; of a source on which no instance is at
work, the upstream is asked as well. What could not be looked at is a problem itself: no silence is taken for health.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from fnmatch import fnmatchcase
from statistics import median
from typing import Literal, NamedTuple

import msgspec

from persist_lib import pending_area, sources, streams
from persist_lib.arguments import check_type, did_you_mean, parse_integer, parse_seconds
from persist_lib.catalog.describe import Owners
from persist_lib.client import Client
from persist_lib.core.cost import GIB, Cost
from persist_lib.core.duties import BY_NAME
from persist_lib.core.pauses import first_of
from persist_lib.core.plan.look import Look, Signs, overdue
from persist_lib.core.rules import Told
from persist_lib.errors import Damage, InvalidUsage, NotFound, PersistError
from persist_lib.format.paths import MARKS
from persist_lib.frontier import Antichain
from persist_lib.ids import ShardId
from persist_lib.location.wrap.spending import charged
from persist_lib.maintain.scrub_memory import known_damage
from persist_lib.maintain.survey import Survey
from persist_lib.runtime.each import why
from persist_lib.sources.kinds import fetch_owners
from persist_lib.times import PER_SECOND, Times, Unit, show_frontier, show_time

Check = Literal[
    "damage", "unread", "slow", "upkeep", "paused", "leases", "holders", "kept", "garbage", "still", "wal", "writer",
    "pending", "disagree", "instances", "lag", "errors", "held_back",
]  # fmt: skip
PAGES: Mapping[str, str] = {
    "damage": "operations.md#backup-and-restore", "unread": "operations.md#a-shard-that-does-not-open",
    "slow": "operations.md#sizing", "upkeep": "operations.md#the-duties", "leases": "operations.md#first-look",
    "holders": "operations.md#first-look", "garbage": "operations.md#first-look", "still": "operations.md#first-look",
    "wal": "tables.md#appliers", "writer": "streams.md#one-writer", "pending": "pending-area.md#absorption",
    "disagree": "pending-area.md#writers-that-disagree", "kept": "operations.md#first-look",
    "paused": "operations.md#pauses",
}  # fmt: skip
"""Where the manual has more of each check, of all but sources."""
OF_SOURCES = "sources.md#watch"
NAMED = 3
"""Shards that a problem of many names."""
TRIES = 3


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From when on something is wrong.

    `sources` are those of sources. `still` has, by patterns of names (`orders*`), how far the upper of a table may be
    behind the clock: a text, a timedelta or a number of seconds; other tables may be quiet for ever. `overdue_s` is for
    how long a lease may have ended, a WAL's row not be applied, and a pending batch not be absorbed, before upkeep
    counts as missing. `garbage` is how many bytes of a table may wait to be deleted, beyond its own size. `holders` is
    how many live readers, writers and holds a shard may have; `kept` how many bytes one reader or hold may keep
    alone (None: any number); `paused_s` how long upkeep may be paused where the pause
    has no end; `slow_s` how long a small request may take; and `seconds`
    how long the look at shards that moved may take.

    What the location's rules say of `still`, `kept` and `garbage` counts for the names that they are about; of `still`,
    the strictest.
    """

    sources: sources.Limits = sources.Limits()
    still: Mapping[str, object] = {}
    overdue_s: float = 86_400
    garbage: int = GIB
    holders: int = 1000
    kept: int | None = None
    paused_s: float = 7 * 86_400
    slow_s: float = 2.0
    seconds: float = 60.0

    def by(self, said: Mapping[str, Told]) -> Limits:
        """The limits of a name of which rules say this."""
        fields = {name: said[name].value for name in ("kept", "garbage") if name in said}
        return msgspec.structs.replace(self, **fields) if fields else self

    def __post_init__(self) -> None:
        for name in ("overdue_s", "paused_s", "slow_s", "seconds"):
            parse_seconds(getattr(self, name), name)
        parse_integer(self.garbage, "garbage", 0)
        parse_integer(self.holders, "holders", 0)
        if self.kept is not None:
            parse_integer(self.kept, "kept", 0)
        if not isinstance(self.still, Mapping) or not all(isinstance(one, str) for one in self.still):
            raise InvalidUsage(f"still has spans by patterns of names, as {{'orders*': '1 hour'}}: got {self.still!r}")
        for longest in self.still.values():
            _seconds(longest)


class Problem(msgspec.Struct, frozen=True):
    """One thing that is wrong: which check says so, of what, what is wrong, what to do, and the manual's place."""

    check: Check
    about: str
    """What kind of thing: `shard`, `table`, `source`, `stream`, `pending area`, `timeline`, `location` …"""
    name: str
    says: str
    do: str
    page: str
    is_damage: bool = False

    @property
    def key(self) -> str:
        """The same for the same problem in every look, whatever it says: for those who tell only what is new."""
        return f"{self.check}:{self.about}:{self.name}"


class Health(msgspec.Struct, frozen=True):
    """All problems, damage first; what was looked at, by kind; `now` is the store's clock in ms since the epoch."""

    problems: tuple[Problem, ...]
    looked_at: Mapping[str, int]
    now: int
    cost: Cost = Cost()

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    @property
    def is_damaged(self) -> bool:
        """Whether stored data is damaged."""
        return any(problem.is_damage for problem in self.problems)


@charged
def check(client: Client, limits: Limits | None = None, names: Sequence[str] = ()) -> Health:
    """Look at a location, or at the tables and sources that are named, and say what is wrong. Changes nothing.

    Raises NotFound for a name that neither a table nor a source nor a shard has, and what a location raises that does
    not answer at all. Whatever else fails is a problem of the answer.
    """
    limits = check_type(limits or Limits(), Limits, "limits", "health.Limits(overdue_s=3600)")
    look = _Look(client, limits, tuple(names))
    by_key: dict[str, list[Problem]] = {}
    for part in look.parts():
        for problem in part:
            by_key.setdefault(problem.key, []).append(problem)
    found = [_together(problems) for problems in by_key.values()]
    order = {check: rank for rank, check in enumerate(Check.__args__)}  # type: ignore[attr-defined]
    found.sort(key=lambda one: (not one.is_damage, order[one.check], one.about, one.name))
    return Health(tuple(found), look.looked_at, look.now)


def _together(problems: Sequence[Problem]) -> Problem:
    """Of several shards of one table that have the same problem: one problem."""
    first, more = problems[0], len(problems) - NAMED
    says = "; ".join(one.says for one in problems[:NAMED]) + (f"; and {more} more" if more > 0 else "")
    return msgspec.structs.replace(first, says=says, is_damage=any(one.is_damage for one in problems))


class _Place(NamedTuple):
    """Whose a shard is: a kind of thing, its name, and what of it."""

    about: str
    name: str
    shown: str


class _Look:
    """One look under way."""

    def __init__(self, client: Client, limits: Limits, names: Sequence[str]) -> None:
        self._client, self._limits, self._names = client, limits, names
        self._survey: Survey = client.survey(seconds=limits.seconds)
        self.now = self._survey.now
        self.looked_at: dict[str, int] = {"shards": len(self._survey.heads) - self._survey.waiting}
        with client.controller() as controller:
            self._owners = fetch_owners(controller)
        self._places = {shard: _place(self._owners, shard) for shard in self._survey.heads}
        self._check_names()

    def parts(self) -> Iterator[list[Problem]]:
        """The problems of each part. One that cannot be looked at is a problem, and stops none of the others."""
        everything: list[tuple[str, Callable[[], Iterator[Problem]]]] = [
            ("damage that scrubs found", self._damage), ("shards", self._shards), ("sources", self._sources),
            ("pending areas", self._pending), ("tables", self._still),
        ]  # fmt: skip
        if not self._names:
            everything += [
                ("the stores", self._stores), ("upkeep", self._upkeep), ("pauses", self._pauses),
                ("timelines", self._timelines), ("streams", self._streams),
            ]  # fmt: skip
        for what, part in everything:
            found: list[Problem] = []
            try:
                found.extend(part())
            except PersistError as error:
                found.append(self._unread("location", what, "could not be looked at", error, "persist health"))
            yield found

    def _check_names(self) -> None:
        known = {place.name for place in self._places.values()} | set(self._owners.sources.values())
        for name in self._names:
            if name not in known and name not in self._survey.heads:
                raise NotFound(
                    f"there is no table, shard or source {name!r}. {did_you_mean(name, sorted(known))}`persist tables` "
                    "and `persist source show` list all",
                    name=name,
                )  # fmt: skip

    def _wanted(self) -> Iterator[tuple[str, _Place]]:
        """The shards that are looked at, and whose they are."""
        for shard, place in self._places.items():
            if not self._names or shard in self._names or place.name in self._names:
                yield shard, place

    def _problem(
        self, check: Check, about: str, name: str, says: str, do: str, *, damage: bool = False
    ) -> Problem:  # fmt: skip
        page = OF_SOURCES if about == "source" else PAGES.get(check, OF_SOURCES)
        return Problem(check, about, name, says, do, f"docs/{page}", damage)

    def _unread(self, about: str, name: str, what: str, error: PersistError, do: str) -> Problem:
        """The problem that something could not be looked at."""
        return self._problem("unread", about, name, f"{what}: {why(error)}", do, damage=isinstance(error, Damage))

    def _looks(self) -> Iterator[tuple[str, _Place, Look]]:
        """Of each wanted shard that is there and was looked at."""
        for shard, place in self._wanted():
            look = self._survey.looks.get(shard)
            if look is not None and shard not in self._survey.unread and not look.is_tombstone:
                yield shard, place, look

    def _damage(self) -> Iterator[Problem]:
        wanted = dict(self._wanted())
        known = known_damage(self._client.blob, [ShardId(shard) for shard in wanted])
        for shard, memory in known.items():
            place, do = wanted[shard], f"persist shard scrub {shard}"
            if memory.unreadable:
                says = f"{place.shown}what scrubs remember cannot be read: {memory.unreadable}"
                yield self._problem("unread", place.about, place.name, says, do)
            if marks := sorted(memory.damaged.values(), key=lambda mark: mark.id):
                since = show_time(min(mark.since for mark in marks), "ms")
                count = "1 batch is" if len(marks) == 1 else f"{len(marks)} batches are"
                says = f"{place.shown}{count} damaged, known since {since}; the first: {marks[0].says}"
                yield self._problem("damage", place.about, place.name, says, do, damage=True)

    def _shards(self) -> Iterator[Problem]:
        for shard, place in self._wanted():
            if shard not in self._survey.unread:
                continue
            try:
                self._client.inspect(shard)  # what the survey remembers may be over
            except NotFound:
                continue  # it is gone
            except PersistError as error:
                repair, show = f"persist shard repair {shard} --dry-run", f"persist shard show {shard}"
                do = repair if isinstance(error, Damage) else show
                yield self._unread(place.about, place.name, f"{place.shown}its state cannot be read", error, do)
        if self._survey.waiting:
            says = f"{self._survey.waiting} shards moved and were not looked at within {self._limits.seconds:g} s"
            yield self._problem("unread", "location", "shards", says, "persist health --seconds 600")
        for shard, place, look in self._looks():
            for check, says, do in self._of_signs(shard, look.signs, self._limits_of(shard)):
                yield self._problem(check, place.about, place.name, f"{place.shown}{says}", do)

    def _limits_of(self, shard: str) -> Limits:
        return self._limits.by(self._survey.told.get(shard, {}))

    def _of_signs(self, shard: str, signs: Signs, limits: Limits) -> Iterator[tuple[Check, str, str]]:
        most = max(limits.garbage, signs.size)
        if signs.held > most:
            says = f"{signs.held:,} bytes of garbage wait, beside {signs.size:,} of the table: {signs.waits_for}"
            yield "garbage", says, f"persist shard show {shard}"
        if limits.kept is not None and signs.kept > limits.kept:
            says = f"{signs.keeper} alone keeps {signs.kept:,} bytes, of garbage and of batches with history"
            yield "kept", says, f"persist shard show {shard}"
        people = {"writers": signs.writers, "readers": signs.readers, "holds": signs.holds}
        if many := {what: count for what, count in people.items() if count > limits.holders}:
            says = f"it has {', '.join(f'{count:,} {what}' for what, count in many.items())}; is something not closed?"
            yield "holders", says, f"persist shard show {shard}"

    def _still(self) -> Iterator[Problem]:
        patterns = self._limits.still
        is_wanted = bool(patterns) or any(rule.still is not None for rule in self._survey.rules)
        for name in self._client.tables() if is_wanted else ():
            allowed = [(_seconds(longest), "") for pattern, longest in patterns.items() if fnmatchcase(name, pattern)]
            if (said := self._client.rules_of(name).get("still")) is not None:
                allowed.append((_seconds(said.value), f" by {said.source}"))
            if not allowed or (self._names and name not in self._names):
                continue
            do = f"persist history {name} --limit 5"
            try:
                with closing(self._client.table(name)) as table:
                    found = table.describe()
            except PersistError as error:
                yield self._unread("table", name, "it cannot be described", error, do)
                continue
            behind_s, upper = self._behind_s(found.schema.times, found.upper), found.schema.show(found.upper)
            longest_s, by = min(allowed)
            if behind_s > longest_s:
                says = f"its upper stands at {upper}, {behind_s:,.0f} s behind, and {longest_s:,.0f} s are allowed{by}"
                yield self._problem("still", "table", name, says, do)

    def _upkeep(self) -> Iterator[Problem]:
        """Duties that nothing seems to carry out: one problem a duty, however many shards."""
        found_on: dict[str, list[tuple[str, str]]] = {}
        every = self._client.config.rollup_every
        for shard, place, look in self._looks():
            shown = f"{place.name} ({shard})" if place.name != shard else shard
            pauses = self._survey.pauses.get(shard, ())
            late = overdue(look, self.now, self._limits.overdue_s, self._limits_of(shard).garbage, every)
            for duty, says in late.items():
                is_free = first_of(pauses, duty) is None
                found_on.setdefault(duty, []).append((shown if is_free else f"{shown}, where it is paused", says))
        for duty, found in found_on.items():
            named = "; ".join(f"{shown}: {says}" for shown, says in found[:NAMED])
            says = f"{duty} is overdue on {len(found)} of the shards, such as {named}"
            do = f"persist maintain --only {duty}" if BY_NAME[duty].is_upkeep else f"persist shard {duty} --all"
            yield self._problem("leases" if duty == "leases" else "upkeep", "location", duty, says, do)

    def _pauses(self) -> Iterator[Problem]:
        """Pauses without an end that are old, and those of nothing that is there: both may be forgotten."""
        held = {pattern for pauses in self._survey.pauses.values() for one in pauses for pattern in one.patterns}
        for one in self._client.pauses():
            ago_s = (self.now - one.set_ms) / 1000
            is_old, is_vain = one.until_ms is None and ago_s > self._limits.paused_s, held.isdisjoint(one.patterns)
            if is_old or is_vain:
                why = "nothing has such a name" if is_vain else f"that is {ago_s / 86_400:,.1f} days ago"
                do = f"persist maintain --resume '{one.patterns[0]}'"
                yield self._problem("paused", "pause", one.patterns[0], f"{one.shown}: {one.says}; {why}", do)

    def _stores(self) -> Iterator[Problem]:
        client, runtime = self._client, self._client.runtime
        asks: Mapping[str, Callable[[], object]] = {
            "consensus": client.consensus.now, "blob": lambda: client.blob.get(f"{MARKS}-/none"),
        }  # fmt: skip
        for store, ask in asks.items():
            took = []
            for _ in range(TRIES):
                began = runtime.monotonic()
                ask()
                took.append(runtime.monotonic() - began)
            if (usual := median(took)) > self._limits.slow_s:
                says = f"a small request takes {usual:.1f} s, and {self._limits.slow_s:g} s are allowed"
                yield self._problem("slow", "location", store, says, "persist config")
        self.looked_at["stores"] = len(asks)

    def _timelines(self) -> Iterator[Problem]:
        lines = self._owners.contents.timelines.values()
        with self._client.controller() as controller, controller.tables() as tables:
            for line in lines:
                lag = tables.lag(line.name)
                if (waits_s := lag.waits_ms(self.now) / 1000) > self._limits.overdue_s:
                    says = (
                        f"{lag.unapplied:,} bytes of {len(lag.tables)} tables are in the WAL alone, the oldest for "
                        f"{waits_s:,.0f} s"
                    )
                    yield self._problem("wal", "timeline", line.name, says, "persist maintain --only collections")
        self.looked_at["timelines"] = len(lines)

    def _streams(self) -> Iterator[Problem]:
        lock = streams.fetch_lock(self._client)
        if lock is None:
            return
        self.looked_at["streams"] = sum(1 for shard in self._survey.heads if shard.endswith(".unsealed"))
        ended_s = (self.now - lock.lease_until) / 1000
        if lock.instance and ended_s > 0:
            says = f"their writer, {lock.owner or lock.instance}, has not renewed its lock for {ended_s:,.0f} s"
            yield self._problem("writer", "stream", "all", says, "persist streams show")

    def _pending(self) -> Iterator[Problem]:
        count = 0
        for name in pending_area.pending_collections(self._client):
            if self._names and name not in self._names:
                continue
            count += 1
            try:
                yield from self._of_area(name)
            except PersistError as error:
                do = f"persist pending show {name}"
                yield self._unread("pending area", name, "its pending area cannot be looked at", error, do)
        self.looked_at["pending areas"] = count

    def _of_area(self, name: str) -> Iterator[Problem]:
        """What is pending is read only where something is late, or waits for longer than it should."""
        found, state = pending_area.census(self._client, name), self._client.inspect(name).state
        waits_s, do = self._behind_s(state.times, state.upper), f"persist maintain {name} --only pending --dry-run"
        is_overdue = waits_s > self._limits.overdue_s and found.batches > 0
        if not is_overdue and state.times is not None and not any(one.late for one in found.writers):
            return
        done, about = pending_area.absorb(self._client, name, dry_run=True), "pending area"
        for key, says in done.damaged.items():
            said = f"what was put there is damaged: {key}: {says}"
            yield self._problem("damage", about, name, said, f"persist pending show {name}", damage=True)
        for one in done.disagreements:
            sides = " and ".join(", ".join(writers) or "the table" for writers in one.writers)
            says = f"{sides} say something else of {show_time(one.time, state.times)}"
            yield self._problem("disagree", about, name, says, do)
        if is_overdue and not done.disagreements:
            upper, gap = show_frontier(found.upper, state.times), done.gap
            says = f"{found.batches} batches wait there, and it is absorbed up to {upper}, {waits_s:,.0f} s behind"
            says += "" if gap is None else f"; nothing continues from {show_time(gap, state.times)} on"
            yield self._problem("pending", about, name, says, do)

    def _behind_s(self, unit: Unit | None, upper: Antichain) -> float:
        """How far an upper is behind the clock; 0 where it counts something else, or is closed."""
        return 0.0 if unit is None or upper.time is None else self.now / 1000 - upper.time / PER_SECOND[unit]

    def _sources(self) -> Iterator[Problem]:
        with self._client.controller() as controller, closing(controller.sources()) as opened:
            declared = opened.declared.fetch()
            wanted = [name for name in declared if not self._names or name in self._names]
            found = sources.check(opened, self._limits.sources, wanted) if wanted else {}
        self.looked_at["sources"] = len(found)
        for name, alerts in found.items():
            for one in alerts:
                if not one.passed:
                    yield self._problem(one.check, "source", name, one.says, f"persist source show {name}")


def _place(owners: Owners, shard: str) -> _Place:
    """Whose a shard is. One that stands by itself is a table."""
    if not (owner := owners.of(shard)):
        return _Place("table", shard, "")
    kind, name = owners.place_of(shard)
    return _Place(kind, name, f"{owner} ({shard}): ") if kind else _Place("shard", shard, f"{owner}: ")


def _seconds(longest: object) -> float:
    """A span in seconds."""
    if isinstance(longest, (int, float)) and not isinstance(longest, bool):
        return parse_seconds(longest, "still")
    return Times("ms", lambda: 0).distance(longest, "still") / 1000
