"""Shards to survey, and what is asked of their location."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import persist_lib as persist
from persist_lib.format.survey_cache import PREFIX
from persist_lib.location.api import Blob, Consensus
from persist_lib.location.wrap.around import AroundBlob, AroundConsensus, Operation
from tests.faults.test_collection_commands import Died, Dying
from tests.worlds import SCHEMA, World, row

T = TypeVar("T")


def make(client: persist.Client, *names: str, appends: int = 1) -> None:
    for name in names:
        with client.open_writer(name, SCHEMA) as write:
            append(write, appends)


def append(write: persist.WriteHandle, times: int = 1) -> None:
    for _ in range(times):
        at = write.fetch_upper().time or 0
        write.compare_and_append([row(at, time=at)], at, at + 1)


def move(client: persist.Client, *names: str) -> None:
    make(client, *names)


def asked(world: World, call: Callable[[], Any]) -> dict[str, int]:
    """What a call asks of the location, by kind."""
    world.requests.clear()
    call()
    kinds = [request.kind for request in world.requests]
    return {kind: kinds.count(kind) for kind in kinds}


def stored(world: World, prefix: str = PREFIX) -> list[str]:
    return sorted(entry.key for entry in world.inner.blob.list(prefix))


class Meanwhile(AroundConsensus):
    """Another process acts just before or after the heads are read."""

    def __init__(self, inner: Consensus, act: Callable[[], object], *, after: bool = False) -> None:
        super().__init__(inner)
        self.act, self.after = act, after

    def around(self, operation: Operation, call: Callable[[], Any]) -> Any:
        if operation.kind != "heads":
            return call()
        steps = (call, self.act) if self.after else (self.act, call)
        return [step() for step in steps][0 if self.after else 1]


class Rival(AroundBlob):
    """Just before or after an object is set, another client does something, once."""

    act: Callable[[], object] | None = None

    def __init__(self, inner: Blob, *, after: bool = False) -> None:
        super().__init__(inner)
        self.after = after

    def around(self, operation: Operation, call: Callable[[], Any]) -> Any:
        act = self.act if operation.kind == "set" else None
        if act is None:
            return call()
        self.act = None
        steps = (call, act) if self.after else (act, call)
        return [step() for step in steps][0 if self.after else 1]


def deaths(
    numbers: Iterable[int], config: persist.Config, life: Callable[[persist.Client], T],
    act: Callable[[persist.Client], object], *, happens: bool,
) -> Iterator[tuple[int, persist.Client, T]]:  # fmt: skip
    """The one that acts dies at each of these requests, up to its own last: the request, another client, the life."""
    for n in numbers:
        world = World()
        lived = life(world.client(config))
        plan = Dying(None, happens=happens)
        dying = world.client(config, plan=plan)
        plan.seen, plan.k = 0, n
        with suppress(Died):
            act(dying)
        is_whole, plan.k = plan.seen < n, None
        world.clock.advance(120)
        yield n, world.client(config), lived
        world.close()
        if is_whole:
            return
    raise AssertionError("it never came to its end")
