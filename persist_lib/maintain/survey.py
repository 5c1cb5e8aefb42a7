"""The survey: what is due on all shards of a location, at the cost of those that have changed.

One request answers the newest seqno of every shard. A shard whose seqno is the one that was last looked at is as it
was, so its look is taken from memory (`maintain.remembered`). The state of the others is read, oldest look first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import msgspec

from persist_lib.arguments import check_callable, parse_integer, parse_seconds, shown
from persist_lib.config import Config
from persist_lib.core.cost import Cost
from persist_lib.core.duties import NAMES
from persist_lib.core.pauses import Pause, first_of
from persist_lib.core.plan.compaction import Policy
from persist_lib.core.plan.garbage import plan_garbage
from persist_lib.core.plan.look import BY_MARK, Debts, Look, look_at, settings_of
from persist_lib.core.rules import Rule, Told, ruled, told
from persist_lib.core.state import Version
from persist_lib.errors import Damage, Determinate, Indeterminate, InvalidUsage, PersistError
from persist_lib.format.pause_list import Wishes
from persist_lib.format.survey_cache import Memory
from persist_lib.ids import SeqNo, ShardId, parse_shard_id
from persist_lib.location.api import AnswersDebts, Blob, Consensus
from persist_lib.location.wrap.deadline import within
from persist_lib.location.wrap.spending import charged
from persist_lib.maintain.pauses import Pauses, Wanted
from persist_lib.maintain.survey_cache import Remembered, latest
from persist_lib.maintain.worker import Progress
from persist_lib.runtime.ambient import Deadline, Runtime
from persist_lib.shard.log import fetch_newer, fetch_newest
from persist_lib.shard.machine import Shard

ORPHANS_MS = 7 * 86_400_000
"""Orphans are looked for this often, also on a shard that did not move: an upload leaves no trace in the log."""
LEAST_THREADS = 8
CHUNK = 16
"""Shards that a thread looks at in a row."""
OUTAGE = 8
"""When so many shards in a row cannot be read because the store fails, the rest is not tried."""


class Survey(msgspec.Struct, frozen=True):
    """What is due on all shards, by their newest seqnos. Read-only: nothing in a shard was changed for it.

    `heads` has the newest seqno of every shard. `looks` says what a shard called for when it was last looked at; that
    holds if the look is at the head. `unread` are the shards whose state could not be read, and why. `waiting` is how
    many have moved and were not looked at, for lack of time. `now` is the store's clock in ms since the epoch.
    """

    now: int
    heads: Mapping[str, SeqNo]
    looks: Mapping[str, Look]
    unread: Mapping[str, str]
    waiting: int
    cost: Cost = Cost()
    """The requests that it made to the location."""
    pauses: Mapping[str, tuple[Pause, ...]] = {}
    """The pauses of each shard that has any."""
    rules: tuple[Rule, ...] = ()
    told: Mapping[str, Mapping[str, Told]] = {}
    """What rules say of each shard of which any says something."""

    def due(self, duty: str) -> list[str]:
        """Return the shards on which a duty has work: the one that has waited longest, or has most debt, first.

        Those for which a rule says an order of compaction are in that order, in the places that they have together. A
        shard that could not be read comes last, whatever the duty, which then says why. A shard that waits to be
        looked at is left out, and so is one on which the duty is paused: `paused` has those.
        """
        return [name for name in self._due(duty) if first_of(self.pauses.get(name, ()), duty) is None]

    def paused(self, duty: str) -> dict[str, str]:
        """Return the shards on which a duty has work and is paused, and who paused it, since when and why."""
        found = ((name, first_of(self.pauses.get(name, ()), duty)) for name in self._due(duty) if self.pauses)
        return {name: pause.says for name, pause in found if pause is not None}

    def _due(self, duty: str) -> list[str]:
        _check_duty(duty)
        current = ((name, look) for name, look in self.looks.items() if self._is_current(name, look))
        ranked = [(rank, name) for name, look in current if (rank := self._rank(duty, look)) is not None]
        names = [name for _, name in sorted(ranked)]
        return (self._as_ordered(names) if duty == "compaction" else names) + sorted(self.unread)

    def _as_ordered(self, names: list[str]) -> list[str]:
        """These shards, those of each rule that says an order in that order among themselves."""
        by_rule: dict[Told, list[str]] = {}
        for name in names:
            if (order := self.told.get(name, {}).get("order")) is not None and order.value != "debt":
                by_rule.setdefault(order, []).append(name)
        for order, its in by_rule.items():
            is_newest = order.value == "newest"
            moved = iter(sorted(its, key=lambda name: self.looks[name].looked_ms, reverse=is_newest))
            places = set(its)
            names = [next(moved) if name in places else name for name in names]
        return names

    def _is_current(self, name: str, look: Look) -> bool:
        return look.seqno == self.heads.get(name) and name not in self.unread

    def _rank(self, duty: str, look: Look) -> int | None:
        """The smaller, the sooner; None when the duty has no work."""
        if duty == "leases":
            return look.leases_until if 0 < look.leases_until <= self.now else None
        if duty in BY_MARK:
            seqno, done_ms = look.done.get(duty, (0, 0))
            is_old = duty == "orphans" and not 0 <= self.now - done_ms <= ORPHANS_MS
            return done_ms if seqno != look.seqno or is_old else None
        if duty not in look.due:
            return None
        return -look.debt if duty == "compaction" else look.looked_ms


class Surveyor:
    """Surveys one location for one client, and keeps the looks from one survey to the next.

    Of a shard that has a machine, only what is newer than the version known there is read. `follows`: the machines
    belong to a server, which knows what it commits; a version at the head is not read again. Where Consensus answers
    what is due on all shards, it is asked instead.
    """

    def __init__(
        self,
        blob: Blob,
        reads: Blob,
        consensus: Consensus,
        machine: Callable[[ShardId], Shard | None],
        config: Config,
        runtime: Runtime,
        policy: Policy,
        *,
        read_only: bool,
        follows: bool = False,
        pauses: Pauses | None = None,
    ) -> None:
        self._pauses = pauses
        self._reads, self._consensus, self._machine = reads, consensus, machine
        self._config, self._runtime, self._policy = config, runtime, policy
        self._read_only, self._follows = read_only, follows
        self._settings = settings_of(policy, config.rollup_every)
        self._remembered = Remembered(blob, runtime, self._settings, read_only=read_only)

    @charged
    def survey(
        self,
        done: Mapping[str, Iterable[str]],
        most: int | None,
        seconds: float | None,
        progress: Progress | None,
    ) -> Survey:
        marks = _parse_done(done)
        most = None if most is None else parse_integer(most, "most")
        deadline = None if seconds is None else self._runtime.deadline(parse_seconds(seconds, "seconds"))
        if progress is not None:
            check_callable(progress, "progress", "how many are done and how many there are, or None")
        wishes = Wishes() if self._pauses is None else self._pauses.read()
        settings = self._settings_with(wishes.rules)
        if settings == self._settings and (found := self._ask(marks, most, deadline, progress)) is not None:
            looked = Survey(found.now, found.heads, found.looks, found.unread, found.waiting)
            return self._with_wishes(looked, self._wanted(wishes, found.now))
        heads = self._consensus.heads()
        now = self._consensus.now()
        wanted = self._wanted(wishes, now)
        memory = self._remembered.recall(settings)
        looking = _Looking({name: look for name, look in memory.looks.items() if name in heads}, heads, now)
        looking.failed = {name: why for name, why in memory.failed.items() if name in heads}
        looking.told = wanted.told(list(heads)) if wanted else {}
        names = looking.order(marks, most)
        has_marks = False
        try:
            self._look_at_all(looking, names, deadline, progress)
            has_marks = looking.mark(marks)
        finally:
            self._remembered.keep(looking.memory(memory.settings), now, has_marks=has_marks)
        return self._with_wishes(looking.survey(), wanted)

    def _wanted(self, wishes: Wishes, now: int) -> Wanted | None:
        return None if self._pauses is None else self._pauses.in_force(wishes, now)

    def _settings_with(self, rules: Sequence[Rule]) -> str:
        """The settings, and the rules on which a look depends. A server knows no rules."""
        found = [rule for rule in rules if ruled(self._policy, told([rule])) != self._policy]
        return f"{self._settings} {found!r}" if found else self._settings

    def _with_wishes(self, survey: Survey, wanted: Wanted | None) -> Survey:
        if wanted is None or self._pauses is None:
            return survey
        names = list(survey.heads)
        told_ = {name: said for name, said in wanted.told(names).items() if said}
        pauses = self._pauses.paused(wanted, names)
        return msgspec.structs.replace(survey, pauses=pauses, rules=wanted.rules.wishes, told=told_)

    def _ask(
        self, marks: Mapping[str, Sequence[str]], most: int | None, deadline: Deadline | None, progress: Progress | None
    ) -> Debts | None:
        consensus = self._consensus
        if not (isinstance(consensus, AnswersDebts) and consensus.answers_debts) or (self._read_only and marks):
            return None
        return ask_for_debts(consensus, self._settings, marks, most, deadline, self._runtime, progress)

    def _look_at_all(
        self, looking: _Looking, names: Sequence[str], deadline: Deadline | None, progress: Progress | None
    ) -> None:
        """Look at shards in parallel, until the deadline. Raises the error of a store that fails for every shard."""
        done, chunks = 0, [names[at : at + CHUNK] for at in range(0, len(names), CHUNK)]

        def look_at_some(some: Sequence[str]) -> int:
            for name in some:
                if looking.is_over or (deadline is not None and deadline.has_passed()):
                    break
                self._look_at(looking, name, deadline)
            return len(some)

        if not chunks:
            return
        threads = min(max(LEAST_THREADS, self._config.read_threads), len(chunks))
        with self._runtime.pool(threads, "persist-survey") as pool:
            try:
                for number in pool.map(look_at_some, chunks):
                    done += number
                    if progress is not None:
                        progress(done, len(names))
            finally:
                looking.is_over = True
        if looking.outage is not None:
            raise looking.outage

    def _look_at(self, looking: _Looking, name: str, deadline: Deadline | None) -> None:
        def look() -> Look | None:
            version = self._fetch(parse_shard_id(name), looking.heads[name])
            return None if version is None else self._look(looking, name, version)

        try:
            looking.found(name, look() if deadline is None else within(deadline, look))
        except PersistError as error:
            # When there was no time to try again, a failure of the store says nothing of the shard. It waits.
            if isinstance(error, Damage) or deadline is None or not deadline.has_passed():
                looking.could_not_read(name, error)

    def _fetch(self, shard: ShardId, head: SeqNo) -> Version | None:
        machine = self._machine(shard)
        if machine is None or (known := machine.known) is None:
            return fetch_newest(self._reads, self._consensus, shard)
        if self._follows and known.seqno == head:
            return known
        return fetch_newer(self._reads, self._consensus, shard, known)

    def _look(self, looking: _Looking, name: str, version: Version) -> Look:
        """The look at a version. If the log may begin with rows that can go, its oldest row is read."""
        former = looking.looks.get(name)
        begins = SeqNo(1) if former is None else former.log_begins
        if plan_garbage(version.state, version.seqno).truncate_below > begins:
            oldest = self._consensus.scan(name, SeqNo(0), 1)
            begins = oldest[0].seqno if oldest else begins
        policy = ruled(self._policy, looking.told.get(name, {}))
        look = look_at(version, looking.now, policy, self._config.rollup_every, begins)
        return look if former is None else msgspec.structs.replace(look, done=latest(look.done, former.done))


class _Looking:
    """One survey under way. Several threads add what they find, each for other shards."""

    def __init__(self, looks: dict[str, Look], heads: dict[str, SeqNo], now: int) -> None:
        self.looks = looks
        self.heads = heads
        self.now = now
        self.failed: dict[str, tuple[int, str]] = {}
        self.told: Mapping[str, Mapping[str, Told]] = {}
        self.is_over = False
        self.outage: PersistError | None = None
        self._in_a_row = 0

    def order(self, marks: Mapping[str, Collection[str]], most: int | None) -> list[str]:
        """The shards to look at: those that were just worked on, then those with the oldest look."""
        worked_on = set().union(*marks.values())
        moved = [name for name in self.heads if not self._is_current(name)]
        first = [name for name in moved if name in worked_on]
        first += [name for name in marks.get("garbage", ()) if name in self.heads and self._may_be_truncated(name)]
        rest = sorted((name for name in moved if name not in worked_on), key=self._age)
        return first + (rest if most is None else rest[:most])

    def _age(self, name: str) -> tuple[bool, int, str]:
        """Those that could not be read come last: otherwise many of them would keep the others waiting."""
        look = self.looks.get(name)
        when, _ = self.failed.get(name, (0 if look is None else look.looked_ms, ""))
        return name in self.failed, when, name

    def _is_current(self, name: str) -> bool:
        look = self.looks.get(name)
        # Never `<`. A restored copy may be older than what was looked at.
        return look is not None and look.seqno == self.heads[name] and name not in self.failed

    def _may_be_truncated(self, name: str) -> bool:
        """Whether the look says that garbage is due. Truncation does not move the head, so only another look tells."""
        return self._is_current(name) and "garbage" in self.looks[name].due

    def found(self, name: str, look: Look | None) -> None:
        """Note a look; None: there is no such shard any more."""
        self._in_a_row = 0
        self.failed.pop(name, None)
        if look is None:
            self.heads.pop(name, None)
            self.looks.pop(name, None)
        else:
            self.looks[name], self.heads[name] = look, look.seqno

    def could_not_read(self, name: str, error: PersistError) -> None:
        """Note why a shard could not be read. When that says that the store is down, the survey ends."""
        self.failed[name] = self.now, f"{type(error).__name__}: {error.message}"
        self._in_a_row += isinstance(error, (Determinate, Indeterminate)) and not isinstance(error, Damage)
        if self._in_a_row >= OUTAGE:
            self.outage, self.is_over = error, True

    def mark(self, marks: Mapping[str, Collection[str]]) -> bool:
        """Note what was done on which shards, at the seqno they have now. Returns whether there was any."""
        before = dict(self.looks)
        for duty in BY_MARK:
            for name in marks.get(duty, ()):
                if (look := self.looks.get(name)) is not None and self._is_current(name):
                    done = {**look.done, duty: (look.seqno, self.now)}
                    self.looks[name] = msgspec.structs.replace(look, done=done)
        return any(look is not self.looks.get(name) for name, look in before.items())

    def memory(self, settings: str) -> Memory:
        return Memory(settings, dict(self.looks), dict(self.failed))

    def survey(self) -> Survey:
        waiting = sum(1 for name in self.heads if name not in self.failed and not self._is_current(name))
        looks = {name: look for name, look in self.looks.items() if look.seqno}
        unread = {name: why for name, (_, why) in self.failed.items()}
        return Survey(self.now, self.heads, looks, unread, waiting)


def _parse_done(done: object) -> dict[str, list[str]]:
    if not isinstance(done, Mapping):
        raise InvalidUsage(f"done must be a mapping of duties to shards: got {shown(done)}", argument="done")
    found: dict[str, list[str]] = {}
    for duty, names in done.items():
        _check_duty(duty)
        if not isinstance(names, Iterable) or isinstance(names, (str, bytes, Mapping)):
            raise InvalidUsage(f"done[{duty!r}] must be a list of shards: got {shown(names)}", argument="done")
        found[duty] = [parse_shard_id(name) for name in names]
    return found


def _check_duty(duty: object) -> None:
    if not (isinstance(duty, str) and duty in NAMES):
        raise InvalidUsage(f"there is no duty {shown(duty)}; there are {', '.join(NAMES)}", argument="duty", value=duty)


ROUND_S = 5.0
"""How long one request may take. What is not looked at by then is asked for by the next one."""
GRACE_S = 30.0
"""How much longer than a survey's own time a request is tried, if the server does not answer at once."""


def ask_for_debts(
    answers: AnswersDebts,
    settings: str,
    done: Mapping[str, Sequence[str]],
    most: int | None,
    deadline: Deadline | None,
    runtime: Runtime,
    progress: Callable[[int, int], None] | None,
) -> Debts | None:
    """What is due on all shards, as a survey of its own would find it; None if the server has other settings.

    Asks again for shards that wait to be looked at, until the deadline, or once if `most` is given. Those that move
    again during this are not waited for.
    """
    first: Debts | None = None
    while True:
        seconds = ROUND_S if deadline is None else min(ROUND_S, deadline.remaining_s())
        call = partial(answers.debts, settings, done if first is None else {}, most, seconds)
        if (found := within(runtime.deadline(seconds + GRACE_S), call)) is None:
            return None
        first = first or found
        left = _left(first, found)
        if progress is not None:
            progress(len(found.heads) - left, len(found.heads))
        if not left or most is not None or (deadline is not None and deadline.has_passed()):
            return found


def _left(first: Debts, found: Debts) -> int:
    """How many shards have not been looked at since the first answer."""
    waits = (name for name in found.moved if name in first.moved and name not in found.unread)
    return sum(1 for name in waits if name not in found.looks or found.looks[name].looked_ms < first.now)
