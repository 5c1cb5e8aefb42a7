"""What processes do in a simulation, and what must hold at each of their steps and at the end.

A story has a method for each role of a process, which runs real client code until the story is over. A process that
crashes is replaced by another one of its role. Each check is counted by the name of what it holds.

Of an append that was acknowledged everything counts, of one that was refused nothing, and of one whose outcome is not
known all of it or nothing. So each distinct row has a least and a greatest multiplicity, whatever the schema is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Any, Literal, cast

import persist_lib as persist
from persist_lib.errors import ConstraintViolated, Determinate, Indeterminate, LeaseExpired, SinceViolation
from persist_lib.schema.schema import Schema
from persist_lib.simulate.sampling import Sampler
from persist_lib.simulate.scheduler import KEPT_LINES, Actor, Faults, Simulation
from persist_lib.testing.checks import check_swept
from persist_lib.testing.model import Row, Update, updates_of

PASSING = (LeaseExpired, SinceViolation, Determinate, Indeterminate, ConstraintViolated)
"""What a process may meet when the world fails, or another one was first."""
EAGER = persist.Policy(weight=1e9, advance=0.01)
STEPS = 3000
LONGEST_REST = 12
SHORT = {None: 8, "ms": 4_000, "us": 4_000_000}
"""A few times: where they are a clock, four seconds."""
RARE = 128
DUTIES = ("maintain", "compact", "roll_up", "collect", "audit_orphans", "expire")
SMALL: Mapping[str, Any] = {"lease_ms": 10_000, "timeout_s": 20, "part_bytes": 64 * 1024, "task_bytes": 64 * 1024}
"""The settings where the user has none: as small as few rows are, so that all that a shard does happens."""


class NotHeld(AssertionError):
    """What must always hold did not."""


class Story:
    """One simulation, the processes in it, and what was checked."""

    world: type[Simulation] = Simulation
    roles: Mapping[str, int] = {}
    settings: Mapping[str, Any] = SMALL

    def __init__(
        self, seed: int, *, faults: Faults = Faults(), steps: int = STEPS, config: Mapping[str, Any] | None = None,  # noqa: B008 - a tuple
        policy: persist.Policy = EAGER, roles: Mapping[str, int] | None = None, keep_lines: int | None = KEPT_LINES,
    ) -> None:  # fmt: skip
        self.seed, self.steps, self.policy = seed, steps, policy
        self.simulation = self.world(seed, faults, keep_lines)
        self.random = self.simulation.random
        self.roles = self.roles if roles is None else roles
        self.born: Counter[str] = Counter()
        self.held: Counter[str] = Counter()
        """How often each thing that must hold was checked, and held."""
        self.did: Counter[str] = Counter()
        """What processes got done."""
        drawn = {"rollup_every": self.random.choice([4, 16]), "inline_bytes": self.random.choice([0, 700, 16 * 1024])}
        self.config = persist.Config.model_validate({**drawn, **self.settings, **(config or {})})
        self.simulation.longest_pause_s = 3 * self.config.lease_ms / 1000

    def run(self) -> str:
        """Run it, and answer the digest of its history. Raises NotHeld, NotFinished, or what a process failed with."""
        with self.client(0) as client:
            self.begin(client)
        for role, count in self.roles.items():
            for _ in range(count):
                self.spawn(role)
        self.simulation.run(self.steps, self.replace)
        self.held["without faults every process finishes"] += 1
        with self.client(1) as client:
            self.judge(client)
        return self.simulation.history.hexdigest()

    def client(self, seed: int) -> persist.Client:
        """A client that no fault strikes.

        Its rollups are rare: with one after each fourth version, those of upkeep would make the next one due for ever.
        """
        world, config = self.simulation, self.config.model_copy(update={"rollup_every": RARE})
        return persist.open(world.location, config=config, runtime=world.clock.runtime(seed))

    def begin(self, client: persist.Client) -> None:
        """Make what the story is about."""
        raise NotImplementedError

    def judge(self, client: persist.Client) -> None:
        """Check all that must hold once every process has finished."""
        raise NotImplementedError

    def spawn(self, role: str) -> None:
        self.born[role] += 1
        self.simulation.spawn(f"{role} {self.born[role]}", getattr(self, role))

    def replace(self, actor: Actor) -> None:
        """Begin a process in the place of one that is gone."""
        self.spawn(actor.name.partition(" ")[0])

    def is_over(self) -> bool:
        return self.simulation.steps > self.steps

    def repeat(
        self, actor: Actor, step: Callable[[], object], passing: tuple[type[Exception], ...] = PASSING,
        beating: persist.Client | None = None,
    ) -> None:  # fmt: skip
        """Do a step again and again, until the story is over. Between steps, the leases of `beating` are kept up."""
        while not self.is_over():
            with suppress(*passing):
                step()
            if beating is not None:
                beating.heartbeat()
            actor.sleep(actor.random.random())

    def retention(self, given: int | None, times: str | None) -> int | None:
        """How many times of history are kept: as it is given, else a few or all, as the seed draws.

        Without a policy since never moves, and nothing is compacted that a reader could miss.
        """
        return self.random.choice([None, SHORT[times], SHORT[times]]) if given is None else given

    def expect(self, what: str, wrong: object, sentence: Callable[[], str] | str = "") -> None:
        """Count that `what` holds, as nothing is `wrong`. Raises NotHeld otherwise."""
        if wrong:
            said = sentence if isinstance(sentence, str) else sentence()
            some = "; ".join(map(str, wrong[:3])) if isinstance(wrong, list) else ""
            raise NotHeld(": ".join(part for part in (what, said, some) if part))
        self.held[what] += 1

    def upkeep(self, client: persist.Client, shard: str, duty: str) -> None:
        """Do one duty of a shard, by the policy where it goes by one, and count it."""
        options: dict[str, Any] = {"policy": self.policy} if duty in {"maintain", "compact"} else {}
        getattr(client, duty)(shard, **options)
        self.did[duty] += 1

    def come_to_rest(
        self, client: persist.Client, shard: str, before: Callable[[], object] = lambda: None
    ) -> None:  # fmt: skip
        """Let all leases end, and do upkeep until nothing is left to do. Checks that nothing is left over."""
        self.simulation.clock.advance(100 * self.config.lease_ms / 1000)
        client.expire(shard)
        for _ in range(LONGEST_REST):
            seqno = client.inspect(shard).seqno
            before()
            client.maintain(shard)
            if client.inspect(shard).seqno == seqno:
                break
        else:
            raise NotHeld(f"upkeep of {shard} does not come to rest")
        check_swept(client, shard)
        self.held["at rest nothing is left over"] += 1


Outcome = Literal["acknowledged", "refused", "unknown"]


class Entry:
    """One append: its changes by row, and the times `[lower, upper)` that it completed, as far as they are known.

    What several processes append alike is `shared`: it may be there whatever one of them heard.
    """

    def __init__(self, changes: Counter[Row], bounds: tuple[int, int] | None, *, is_shared: bool) -> None:
        self.changes, self.bounds, self.is_shared = changes, bounds, is_shared
        self.outcome: Outcome = "unknown"


class Ledger:
    """The appends of all processes, by their number."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def begin(
        self, updates: Iterable[Update], bounds: tuple[int, int] | None = None, *, is_shared: bool = False
    ) -> Entry:  # fmt: skip
        """Note what is about to be appended. Its outcome is unknown until it is set."""
        changes: Counter[Row] = Counter()
        for data, _, diff in updates:
            changes[data] += diff
        self.entries.append(Entry(changes, bounds, is_shared=is_shared))
        return self.entries[-1]

    @property
    def outcomes(self) -> Counter[str]:
        """How many appends ended how."""
        return Counter(entry.outcome for entry in self.entries if not entry.is_shared)

    def problems(self, contents: Counter[Row], as_of: int | None = None) -> list[str]:
        """What is wrong with contents: with all that was written, or with those as of a time.

        As of a time only appends whose times are all complete by then must be there. Others may be, in part.
        """
        least: Counter[Row] = Counter()
        most: Counter[Row] = Counter()
        for entry in self.entries:
            if entry.outcome == "refused":
                continue
            is_sure = entry.outcome == "acknowledged" and (
                as_of is None or (entry.bounds is not None and entry.bounds[1] <= as_of + 1)
            )
            for row, diff in entry.changes.items():
                least[row] += diff if is_sure else min(0, diff)
                most[row] += diff if is_sure else max(0, diff)
        wrong = []
        for row in least.keys() | contents.keys():
            if not least[row] <= contents[row] <= most[row]:
                between = f"{least[row]} and {most[row]}" if least[row] < most[row] else f"{most[row]}"
                wrong.append(f"{row} is there {contents[row]} times, and not {between}")
        return sorted(wrong)

    def parts(self, contents: Counter[Row]) -> list[str]:
        """Which appends are there in part. Only rows that one append alone is about say so."""
        about: Counter[Row] = Counter(row for entry in self.entries for row in entry.changes)
        wrong = []
        for number, entry in enumerate(self.entries):
            own = [row for row in entry.changes if about[row] == 1 and entry.changes[row]]
            there = [row for row in own if contents[row]]
            if there and len(there) != len(own):
                wrong.append(f"append {number} is there in part: {len(there)} of {len(own)} rows")
        return wrong

    def overlaps(self, contents: Counter[Row]) -> list[str]:
        """Which appends that are there completed the same times."""
        about: Counter[Row] = Counter(row for entry in self.entries for row in entry.changes)
        spans = sorted(
            entry.bounds
            for entry in self.entries
            if entry.bounds is not None and any(about[row] == 1 and contents[row] for row in entry.changes)
        )
        return [f"{left} and {right} overlap" for left, right in pairwise(spans) if left[1] > right[0]]


TRIES = 20


class Recorded(Story):
    """A story about rows of a schema: each append is noted, and each read is checked against what was noted."""

    refused: tuple[type[Exception], ...]
    """The errors after which an append is certainly not there."""

    def __init__(self, seed: int, schema: Schema, **how: Any) -> None:
        super().__init__(seed, **how)
        self.schema, self.sampler, self.ledger = schema, Sampler(schema, seed), Ledger()
        self.known: dict[int, Counter[Row]] = {}
        self.alike: dict[int, Entry] = {}

    def settle(
        self, entry: Entry, act: Callable[[bytes | None], tuple[int, int] | None],
        gives_up: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """Append under a token; where the outcome is unknown do it again by that, until it is known. Note the outcome.

        `act` answers the times that were completed, as far as they are known.
        """
        token = None
        for _ in range(TRIES):
            try:
                bounds = act(token)
            except Indeterminate as error:
                token = cast("bytes | None", error.fields.get("token"))
                if token is None or gives_up():
                    return  # without a token, it was its registration, or an upload, that got no answer
            except self.refused:
                if token is None:  # a token is not known under a new id
                    entry.outcome = "refused"
                raise
            else:
                entry.bounds, entry.outcome = bounds, "acknowledged"
                return

    def write_alike(self, actor: Actor, write: persist.WriteHandle) -> None:
        """Append what others append, too: at each time one row that the time decides. The first one counts."""
        upper = write.fetch_upper().time or 0
        times = [upper, upper + 1]
        rows = self.sampler.table([-1 - time % (1 << 30) for time in times], times)
        for update in updates_of(rows):
            if update[1] not in self.alike:
                self.alike[update[1]] = self.ledger.begin([update], is_shared=True)
        write.append(rows, max(0, upper - actor.random.randrange(3)), upper + 2)

    def learn(self, as_of: int, found: Counter[Row]) -> None:
        """Check contents as of a time against what others read, and what was written."""
        where = f"as of {as_of}"
        self.expect("as of a time all read the same", self.known.setdefault(as_of, found) != found, where)
        self.expect("a read has what was acknowledged by then", self.ledger.problems(found, as_of), where)

    def judge_all(self, found: Counter[Row]) -> None:
        """Check the contents at the end against what was written."""
        self.expect("nothing is lost, doubled or invented", self.ledger.problems(found))
        self.expect("an append is there as a whole, or not at all", self.ledger.parts(found))
