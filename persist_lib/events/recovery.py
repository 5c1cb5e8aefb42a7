"""How a loop starts: it becomes the writer, and has the state back by computing what the log holds.

The effects of events up to the released-through mark are not released again. Those behind it are, before any new event
is taken: they may or may not have been released before the mark was written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from typing import Generic, NamedTuple

from persist_lib.arguments import parse_integer
from persist_lib.errors import Determinate, InvalidUsage, NotFound, NotReleased
from persist_lib.events.api import Effect, Event, Input, Program, Reader, State, Store, Writer, compute, decode_snapshot
from persist_lib.events.in_flight import release_failed, said
from persist_lib.events.log import check_here, check_released, write_released
from persist_lib.events.migrate import Moved, Progress, move, quiet
from persist_lib.events.store import name_of

log = logging.getLogger("persist.events")


def take(store: Store, source: Store | None, *, both: bool, progress: Progress = quiet) -> Moved:
    """Become the writer of a log, or move it here first. Raises Refused if it continues elsewhere."""
    if source is not None:
        return move(source, store, both=both, progress=progress)
    if both:
        raise InvalidUsage("both is for two stores: name the other one as the source")
    # Where there is no log, the writer makes it, and where a paused writer has claimed it, decides where it ends.
    with suppress(NotFound, Determinate), store.reader() as reader:
        check_here(reader, name_of(store))
    with ExitStack() as held:
        writer = held.enter_context(store.writer(owner="event loop"))
        return Moved(writer, held.pop_all())


class Started(NamedTuple, Generic[State]):
    """A state, the event that it follows, and the event of the snapshot that it was computed from (0: none)."""

    state: State
    last: int
    snapshot: int


def begin(program: Program[State], reader: Reader, writer: Writer, name: str) -> Started[State]:
    """Compute the state of a log, release the effects behind the mark, and move the mark to the last event.

    Raises Refused for a log that was moved until it was claimed, HistoryRegressed for a mark beyond the log, and
    NotReleased when an event cannot be computed, or an effect not be released. The mark then says how far this start
    came.
    """
    check_here(reader, name)
    released = check_released(reader, name)
    done = released

    def release(effects: Iterable[Effect], event_id: int) -> None:
        nonlocal done
        for effect in effects if event_id > released else ():
            try:
                program.release(effect)
            except Exception as error:
                raise release_failed(name, effect, error) from error
        done = max(done, event_id)

    try:
        started = _computed(program, reader, name, reader.last, released, release)
    finally:
        if done > released:
            write_released(writer, done).result()
    return started


def replay(
    store: Store, program: Program[State], *, through: int | None = None, snapshots: bool = True
) -> tuple[State, int]:
    """Return the state after the event `through` (None: the last one), and the id of that event. Releases nothing.

    Without `snapshots` all events are computed, from the first. Raises NotFound where there is no log, InvalidUsage for
    an event that it does not have, and NotReleased with the cause for an event that cannot be computed.
    """
    with store.reader() as reader:
        last = reader.last if through is None else parse_integer(through, "through")
        if last > reader.last:
            raise InvalidUsage(f"the log ends at event {reader.last}: there is no event {last}", last=reader.last)
        started = _computed(program, reader, name_of(store), last, last if snapshots else 0, lambda *_: None)
    return started.state, started.last


def _computed(
    program: Program[State], reader: Reader, name: str, last: int, newest: int,
    release: Callable[[Iterable[Effect], int], None],
) -> Started[State]:  # fmt: skip
    """Compute up to `last` from the newest snapshot that is not beyond the event `newest`."""
    state, snapshot = _from_snapshot(program, reader, newest)
    for event in reader.replay(snapshot + 1, last):
        state, effects = _step(program, state, event, name)
        release(effects, event.id)
    return Started(state, last, snapshot)


def _step(program: Program[State], state: State, event: Event, name: str) -> tuple[State, list[Effect]]:
    try:
        return compute(program, state, Input(event.id, bytes(event.payload)))
    except Exception as error:
        raise NotReleased(
            f"{name}: event {event.id} is in the log and cannot be computed, so nothing from it on is released: "
            f"{said(error)}. Mend the program so that it refuses such an event by an effect, and start again",
            event_id=event.id,
        ) from error


def _from_snapshot(program: Program[State], reader: Reader, newest: int) -> tuple[State, int]:
    at_most = newest
    while program.decode is not None and at_most > 0 and (found := reader.newest_snapshot(at_most)) is not None:
        event_id, stored = found
        if (state := decode_snapshot(program, stored)) is not None:
            return state[0], event_id
        log.info("a snapshot at event %d was written by another version of the program: passed over", event_id)
        at_most = event_id - 1
    return program.initial(), 0
