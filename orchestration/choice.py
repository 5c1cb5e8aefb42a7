"""Which shards a run visits: those that it was told, or those on which one of its duties is due."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import dagster as dg

from orchestration.duties import DUTIES, Duty
from orchestration.reports import listed
from persist_lib.maintain.survey import Survey


@dataclass(frozen=True)
class Choice:
    """The shards to visit, the most urgent first, and how many there are in the location."""

    shards: tuple[str, ...]
    there: int
    paused: int = 0
    """How many are not visited, as what is due there is paused."""

    @property
    def idle(self) -> int:
        """How many shards have nothing due."""
        return self.there - len(self.shards) - self.paused

    @property
    def says(self) -> str:
        """How many shards are paused, after what is said of the others; nothing for none."""
        return f"; on {self.paused} of them it is paused" if self.paused else ""


def triggers_of(duties: Sequence[Duty]) -> list[Duty]:
    """The duties for which a shard is visited. That it has changed, and so is to be counted, is no work for others."""
    return [duty for duty in duties if duty != "census"] if 1 < len(duties) < len(DUTIES) else list(duties)


def due(survey: Survey, duties: Sequence[Duty]) -> Choice:
    """The shards on which one of the duties is due."""
    found = dict.fromkeys(shard for duty in triggers_of(duties) for shard in survey.due(duty))
    paused = {shard for duty in triggers_of(duties) for shard in survey.paused(duty)}
    return Choice(tuple(found), len(survey.heads), len(paused.difference(found)))


def told(survey: Survey, shards: Iterable[str]) -> Choice:
    """The shards that a run was told to visit. Raises Failure if one does not exist, before anything is done."""
    names = tuple(dict.fromkeys(shards))
    if unknown := [name for name in names if name not in survey.heads]:
        raise dg.Failure(
            f"there are no shards {listed([repr(name) for name in unknown])}. Nothing was done. The location has "
            f"{len(survey.heads)} shards: {listed(sorted(survey.heads))}. Correct `shards` or the partitions of the run"
        )
    return Choice(names, len(survey.heads))
