"""Real clients and real servers' funnels under simulated schedules and faults: PERSIST_SIM_SEEDS, or PERSIST_SIM_SEED.

Two servers commit the shard, and are paused and killed at any operation. Requests to them are lost, arrive late, or are
executed without an answer; a client then asks the other one. Maintainers use the store itself, beside the servers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.errors import Determinate, Indeterminate, SinceViolation
from persist_lib.format.log import decode_row
from persist_lib.location import Location, open_location
from persist_lib.location.api import Newest
from persist_lib.location.commands import Answered, MakesHeart, Proposed
from persist_lib.location.stack import wrap
from persist_lib.location.wrap.around import Operation
from persist_lib.runtime.ambient import Runtime
from persist_lib.shard.funnels import Funnels, ask
from persist_lib.simulate import Actor, Faults, ShardStory, SimulatedBlob, SimulatedConsensus, Simulation
from persist_lib.simulate.shard_story import SHARD
from tests.simulation.stories import play, seeds
from tests.worlds import SCHEMA

SERVERS = 2
FAULTS = Faults(pause=0.0015, crash=0.0015)
"""A server that is paused holds up everybody, so that it is paused less often than the clients of the other story."""
PATIENCE_S = 2.0
"""How long a client waits for a server before it asks the other one."""


class Served(SimulatedConsensus):
    """A Consensus whose commands go to one of the servers, over a network that the scheduler decides."""

    def commit_commands(
        self, proposed: Sequence[Proposed], token: bytes, timeout_s: float, *, is_repeated: bool, heart: MakesHeart
    ) -> list[Answered]:
        actor = self.actor
        world = actor.world
        assert isinstance(actor, ServedActor)
        assert isinstance(world, ServedSimulation)
        server = actor.random.choice(world.servers)
        until = world.clock.runtime().deadline(min(timeout_s, PATIENCE_S))
        runtime = Runtime(monotonic=world.clock.monotonic, background=False)
        deadline = runtime.deadline(timeout_s)
        operation = Operation("commit_commands", proposed[0].shard)
        requests = world.around(
            actor, operation, lambda: ask(server, proposed, token, actor.name, deadline, is_repeated=is_repeated)
        )
        for request in requests:
            request.answer.add_done_callback(lambda _: actor.rouse())
        for keeper in world.keepers:
            keeper.rouse()
        while not all(request.answer.done() for request in requests):
            actor.doze(until.left_s())
            if until.has_passed() and not all(request.answer.done() for request in requests):
                for request in requests:
                    request.is_dropped = actor.random.random() < 0.5  # the server may notice that it is gone
                raise Indeterminate("simulated: the server does not answer")
        if actor.random.random() < world.faults.unknown:
            raise Indeterminate("simulated: the server's answer was lost")
        return [request.answer.result(0) for request in requests]


class Serving(SimulatedConsensus):
    """The Consensus of a server, which counts the commands of the rows that it wins."""

    def compare_and_set(self, key: str, expected: Newest | None, data: bytes) -> bool:
        won = super().compare_and_set(key, expected, data)
        world = self.actor.world
        assert isinstance(world, ServedSimulation)
        if won:
            world.shared[len(decode_row(data, key).steps)] += 1
        return won


class ServedActor(Actor):
    """A client of the servers, or one of the servers."""

    dozes_until = -1.0

    def doze(self, seconds: float) -> None:
        """Sleep until `rouse`, but no longer than so many seconds. To look again and again would use up the steps."""
        self.dozes_until = self.world.clock.monotonic() + seconds
        self.sleep(seconds)

    def rouse(self) -> None:
        """Wake it, if it dozes; not if the scheduler has paused it."""
        if self.wakes_at == self.dozes_until:
            self.wakes_at = 0.0

    def client(self, config: persist.Config) -> persist.Client:
        if self.name.startswith("maintainer"):
            return super().client(config)
        return persist.open(self.place(Served), config=config, runtime=self.runtime())

    def place(self, kind: type[SimulatedConsensus]) -> Location:
        location = open_location(self.world.url, clock=self.world.clock, runtime=self.runtime())
        return replace(location, blob=SimulatedBlob(location.blob, self), consensus=kind(location.consensus, self))


class ServedSimulation(Simulation):
    """A simulation with servers."""

    def __init__(self, *how: Any) -> None:
        super().__init__(*how)
        self.servers: list[Funnels] = []
        self.keepers: list[ServedActor] = []
        self.shared: Counter[int] = Counter()

    def spawn(self, name: str, run: Any) -> Actor:
        self.actors.append(ServedActor(name, run, self))
        return self.actors[-1]


class ServedStory(ShardStory):
    """The story of a busy shard, told through servers."""

    world = ServedSimulation
    roles: Mapping[str, int] = {**ShardStory.roles, "toggler": 2, "placer": 3}

    def __init__(self, seed: int) -> None:
        super().__init__(seed, SCHEMA, faults=FAULTS)
        assert isinstance(self.simulation, ServedSimulation)
        self.served = self.simulation

    def begin(self, client: persist.Client) -> None:
        client.machine(SHARD).config = persist.Config(format=self.random.choice([3, 4, 4]))
        super().begin(client)
        for number in range(SERVERS):
            self.served.servers.append(self.funnels(self.spawn_server(number)))

    def spawn_server(self, number: int) -> ServedActor:
        self.born["server"] += 1
        name = f"server {self.born['server']}"
        actor = self.simulation.spawn(name, lambda actor: self.server(actor, number))
        assert isinstance(actor, ServedActor)
        keepers = self.served.keepers
        keepers[number:] = [actor, *keepers[number + 1 :]]
        return actor

    def funnels(self, actor: ServedActor) -> Funnels:
        stack = wrap(actor.place(Serving), self.config, actor.runtime())
        return Funnels(stack.blob, stack.consensus, self.config, actor.runtime())

    def spawn(self, role: str) -> None:
        if role == "server":  # it crashed: another one comes in its place, which knows nothing
            number = next(number for number, keeper in enumerate(self.served.keepers) if keeper.is_done)
            self.served.servers[number] = self.funnels(self.spawn_server(number))
        else:
            super().spawn(role)

    def server(self, actor: Actor, number: int) -> None:
        assert isinstance(actor, ServedActor)
        mine: Funnels | None = None
        while not all(other.is_done for other in self.simulation.actors if not other.name.startswith("server")):
            mine = mine or self.served.servers[number]
            if mine is not self.served.servers[number]:
                return
            if not mine.work():
                actor.doze(0.5)

    def toggler(self, actor: Actor) -> None:
        """Move a hold of its own to and fro. A command that was applied twice would move it when nobody asked."""
        name, value = actor.name.replace(" ", "-"), None
        with actor.client(self.config) as client:
            while not self.is_over():
                wanted = b"b" if value == b"a" else b"a"
                try:
                    since = client.machine(SHARD).fetch().state.since.time or 0
                    client.set_hold(SHARD, name, since=since, opaque=wanted, expected=value)
                    value = wanted
                    self.did["toggle"] += 1
                    actor.sleep(actor.random.choice([0.01, 1, 5]))
                    hold = client.machine(SHARD).fetch().state.holds[name]
                    assert hold.opaque == value, f"{name} moved when nobody asked"
                except Indeterminate:
                    self.spawn("toggler")  # what it asked may be done or not, for as long as a server may hold it
                    return
                except (SinceViolation, Determinate):
                    actor.sleep(0.1)


@pytest.mark.parametrize("seed", seeds()[:4] if len(seeds()) == 12 else seeds())
def test_through_servers_nothing_is_lost_doubled_or_left_either(seed: int) -> None:
    story = play(ServedStory(seed))
    print(f"{story.served.shared} rows by commands, {dict(story.did)}")
    assert story.ledger.outcomes["acknowledged"], "somebody got on"
    assert story.did["toggle"]
    assert story.did["append placed"]


def test_the_same_seed_gives_the_same_history() -> None:
    assert ServedStory(1).run() == ServedStory(1).run()
