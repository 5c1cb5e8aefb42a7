"""What a power cut after any operation of a recorded history may leave, and whether that is found to be right."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from persist_lib.errors import PersistError
from tests.counted import count
from tests.powercut.disk import Disk, Event, Said, Synced, fates, moments
from tests.powercut.work import ACKED


class History(NamedTuple):
    """What was asked for, what happened on disk, and who judges a disk by what was said before the cut."""

    todo: Any
    events: list[Event]
    folders: set[int]
    judge: Callable[[Path, History, list[Said], random.Random], None]


def look(history: History, at: dict[int, list[str]], rng: random.Random, place: Path) -> int:
    """Cut the power after so many events, with each of these fates; answers how many disks were right."""
    disk, choices, right = Disk(), fates(rng), 0
    for number, event in enumerate([*history.events, None]):
        for name in at.get(number, ()):
            rng_of_cut = random.Random(rng.getrandbits(32))
            disk.image(choices[name](), history.folders, place)
            try:
                history.judge(place, history, disk.said, rng_of_cut)
            except Exception as error:
                error.add_note(f"cut after event {number} of {len(history.events)}, kept: {name}")
                raise
            shutil.rmtree(place)
            right += 1
        if event is not None:
            disk.follow(event)
    count("power cuts", images=right)
    return right


def sample(history: History, rng: random.Random, cuts: int) -> dict[int, list[str]]:
    """The worst moments with the worst fates, and any with any."""
    worst, names = [*moments(history.events)], [*fates(rng)]
    chosen: dict[int, list[str]] = {}
    for _ in range(cuts):
        number = rng.choice(worst) if rng.random() < 0.8 else rng.randrange(len(history.events) + 1)
        chosen.setdefault(number, []).append(rng.choice(names))
    return chosen


def forgetting(history: History, is_forgotten: Callable[[int | None], bool]) -> History:
    """The same without some fsyncs: what code that forgot them would have done."""
    events = [one for one in history.events if not (isinstance(one, Synced) and is_forgotten(one.node))]
    return history._replace(events=events)


def finds(history: History, rng: random.Random, place: Path, names: Sequence[str] = ("nothing",)) -> bool:
    """Whether some cut right after an acknowledgement is found to have harmed."""
    acks = [n + 1 for n, event in enumerate(history.events) if isinstance(event, Said) and event.word == ACKED]
    try:
        look(history, {number: list(names) for number in acks}, rng, place)
    except (AssertionError, PersistError):
        shutil.rmtree(place)
        return True
    return False
