"""What processes do in a simulation, and what must hold at each of their steps and at the end.

A story has a method for each role of a process, which runs real client code until the story is over. A process that
crashes is replaced by another one of its role. Each check is counted by the name of what it holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import persist_lib as persist
from persist_lib.errors import ConstraintViolated, Determinate, Indeterminate, LeaseExpired, SinceViolation
from persist_lib.simulate.scheduler import KEPT_LINES, Actor, Faults, Simulation
from persist_lib.testing.checks import check_swept

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
        """Begin a process."""
        self.born[role] += 1
        self.simulation.spawn(f"{role} {self.born[role]}", getattr(self, role))

    def replace(self, actor: Actor) -> None:
        """Begin a process in the place of one that is gone."""
        self.spawn(actor.name.partition(" ")[0])

    def is_over(self) -> bool:
        return self.simulation.steps > self.steps

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
