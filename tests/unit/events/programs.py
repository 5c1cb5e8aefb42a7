"""A program whose steps and releases a test can hold, fail and count."""

from __future__ import annotations

import threading
from collections.abc import Callable

from persist_lib.events.api import Effect, Input, Program

LONG_S = 5.0


class Counter:
    """The state is the ids of the events that were applied, in a list that each step changes. Each has an effect."""

    def __init__(self, snapshot_every: int = 10_000, *, snapshots: bool = True, version: str = "1") -> None:
        self.computed: list[int] = []
        self.released: list[str] = []
        self.on_step: Callable[[Input], object] = lambda _: None
        self.on_release: Callable[[Effect], object] = lambda _: None
        self.program: Program[list[int]] = Program(
            self.step, list, self.release, self.encode if snapshots else None, self.decode if snapshots else None,
            snapshot_every, version,
        )  # fmt: skip

    def step(self, state: list[int], event: Input) -> tuple[list[int], list[str]]:
        state.append(event.id)
        self.on_step(event)
        self.computed.append(event.id)
        return state, [f"{event.id}:{event.payload.decode()}"]

    def release(self, effect: Effect) -> None:
        self.on_release(effect)
        self.released.append(effect.value)

    @staticmethod
    def encode(state: list[int]) -> bytes:
        return ",".join(map(str, state)).encode()

    @staticmethod
    def decode(data: bytes) -> list[int]:
        return [int(part) for part in data.decode().split(",") if part]


class Gate:
    """Holds whoever comes to it until it is opened."""

    def __init__(self) -> None:
        self._open, self.has_come = threading.Event(), threading.Event()

    def __call__(self, *_: object) -> None:
        self.has_come.set()
        assert self._open.wait(LONG_S)

    def open(self) -> None:
        self._open.set()


def raising(error: BaseException, at: int) -> Callable[[Input | Effect], None]:
    """Raises at one event."""

    def strike(what: Input | Effect) -> None:
        if (what.id if isinstance(what, Input) else what.event_id) == at:
            raise error

    return strike
