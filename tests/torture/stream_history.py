"""Whether a recorded history of a stream is linearizable: as if each call and each read had happened at one moment.

The calls of all runtimes, in their order, have a definite state after each of them. A read must show one of these
states: of a moment between its begin and its end, and not an earlier one than a read that ended before it began.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Contents = tuple[int, frozenset[int], frozenset[int]]
"""How far it is sealed, and the ids of updates that are sealed and unsealed. Each update has an id of its own."""
FIRST: Contents = (0, frozenset(), frozenset())


class Call(NamedTuple):
    """A call as the runtime that made it saw it: a write of `id` at `time`, or a seal up to `time` where id is 0.

    `made` and `ended` are of one clock that all processes share; `ended` is None where it is not known whether it took
    effect, and -1 where it certainly did not.
    """

    id: int
    time: int
    made: int
    ended: int | None


class Read(NamedTuple):
    """A read, and what it found."""

    began: int
    ended: int
    found: Contents


class Runtime(NamedTuple):
    """The calls of one runtime in their order, and what it found when it began."""

    epoch: int
    first: Read
    calls: Sequence[Call]


def problems(runtimes: Sequence[Runtime], reads: Sequence[Read], last: Contents) -> list[str]:
    """What is wrong with a history that ends with the contents `last`; empty if nothing is."""
    found: list[str] = []
    ordered: list[Call] = []
    times: dict[int, int] = {}
    state = FIRST
    runtimes = sorted(runtimes)
    ends = [*(one.first.found for one in runtimes[1:]), last]
    for one, end in zip(runtimes, ends, strict=True):
        if one.first.found != state:
            return [*found, f"epoch {one.epoch} began with {_short(one.first.found)}, not {_short(state)}"]
        taken = _taken(one.calls, state, end, times)
        if taken is None:
            return [*found, f"no prefix of the calls of epoch {one.epoch} has what was there after it: {_short(end)}"]
        ordered += one.calls[:taken]
        state = end
    return found + _reads(ordered, times, sorted(reads))


def after(state: Contents, call: Call, times: dict[int, int]) -> Contents:
    """The contents after a call. `times` remembers at which time each update is."""
    upper, sealed, unsealed = state
    if call.id:
        times[call.id] = call.time
        return upper, sealed, unsealed | {call.id}
    upper = max(upper, call.time)
    moved = {id_ for id_ in unsealed if times[id_] < upper}
    return upper, sealed | moved, unsealed - moved


def _taken(calls: Sequence[Call], state: Contents, end: Contents, times: dict[int, int]) -> int | None:
    """How many of the calls took effect: all that were acknowledged, none that failed, and the contents are `end`."""
    least = max([n + 1 for n, call in enumerate(calls) if call.ended is not None and call.ended >= 0], default=0)
    most = min([n for n, call in enumerate(calls) if call.ended == -1], default=len(calls))
    for taken in range(len(calls) + 1):
        if least <= taken <= most and state == end:
            return taken
        if taken < len(calls):
            state = after(state, calls[taken], times)
    return None


def _reads(calls: Sequence[Call], times: dict[int, int], reads: Sequence[Read]) -> list[str]:
    places: dict[Contents, tuple[int, int]] = {FIRST: (0, 0)}
    state = FIRST
    for place, call in enumerate(calls, start=1):
        state = after(state, call, times)
        places[state] = (places.get(state, (place, place))[0], place)
    found, done = list[str](), list[tuple[int, int]]()
    for read in reads:
        if (between := places.get(read.found)) is None:
            found.append(f"a read found what was there at no moment: {_short(read.found)}")
            continue
        least = max([n for n, call in enumerate(calls, 1) if (call.ended or read.ended) < read.began], default=0)
        earlier = max([place for ended, place in done if ended < read.began], default=0)
        most = max([n for n, call in enumerate(calls, 1) if call.made < read.ended], default=0)
        place = max(between[0], least, earlier)
        if place > min(between[1], most):
            found.append(
                f"a read of [{read.began}, {read.ended}] found {_short(read.found)}, of calls {between}. {least} were "
                f"acknowledged before it, {most} were made, and a read before it had {earlier}"
            )
        done.append((read.ended, place))
    return found


def _short(state: Contents) -> str:
    return f"upper {state[0]}, {len(state[1])} sealed and {len(state[2])} unsealed"
