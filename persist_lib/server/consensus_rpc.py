"""The operations of a Consensus as a server offers them: arguments, the rights that they need, and what they show.

A row that a client wrote itself may hold any change, so writing one needs all rights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from persist_lib.core.rights import ALL, ANY, MAINTAIN, Needed
from persist_lib.format import wire
from persist_lib.ids import SeqNo
from persist_lib.location.api import Consensus, Newest, Row
from persist_lib.server.access import Caller


def _none(_: Any) -> Iterable[str]:
    return ()


def _whole(value: Any, _: Caller) -> Any:
    return value


def _first(given: tuple[str, Any]) -> Iterable[str]:
    return (given[0],)


@dataclass(frozen=True, slots=True)
class Raw:
    """One operation: its arguments' type, what it does, which rights it needs on which shards, and what it shows."""

    kind: Any
    call: Callable[[Consensus, Any], Any]
    needed: Needed = ()
    shards: Callable[[Any], Iterable[str]] = _none
    shown: Callable[[Any, Caller], Any] = _whole


def _scan(consensus: Consensus, given: tuple[str, SeqNo, int]) -> tuple[list[Row], bool]:
    rows = consensus.scan(*given)
    fit = wire.rows_that_fit(rows, lambda row: len(row.data))
    return rows[:fit], fit == len(rows)


def _visible(names: Iterable[str], caller: Caller) -> list[str]:
    return [name for name in names if caller.rights_on(name)]


RAW: Mapping[str, Raw] = {
    "now": Raw(type(None), lambda _consensus, _given: None),
    "head": Raw(str, lambda consensus, given: consensus.head(given), ANY, lambda given: (given,)),
    "scan": Raw(tuple[str, SeqNo, int], _scan, ANY, _first),
    "compare_and_set": Raw(
        tuple[str, Newest | None, bytes], lambda consensus, given: consensus.compare_and_set(*given), ALL, _first
    ),
    "compare_and_set_many": Raw(
        dict[str, tuple[Newest | None, bytes]],
        lambda consensus, given: consensus.compare_and_set_many(given),
        ALL,
        lambda given: given.keys(),
    ),
    "truncate": Raw(tuple[str, SeqNo], lambda consensus, given: consensus.truncate(*given), MAINTAIN, _first),
    "rewind": Raw(tuple[str, SeqNo, Newest], lambda consensus, given: consensus.rewind(*given), ALL, _first),
    "list_keys": Raw(type(None), lambda consensus, _given: list(consensus.list_keys()), shown=_visible),
    "heads": Raw(
        list[str] | None,
        lambda consensus, given: consensus.heads(given),
        shown=lambda heads, caller: {name: heads[name] for name in _visible(heads, caller)},
    ),
}
