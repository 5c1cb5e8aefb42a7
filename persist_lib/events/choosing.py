"""What `-i` and `-o` of a program mean: where its log comes from, and where it goes on."""

from __future__ import annotations

from typing import NamedTuple

from persist_lib.errors import NotFound
from persist_lib.events.api import Store
from persist_lib.events.specifier import DEFAULT, parse_specifier
from persist_lib.events.store import open_store


class Chosen(NamedTuple):
    """The arguments `store` and `source` of a loop. They open nothing yet."""

    store: Store
    source: Store | None


def choose(given_input: str | None = None, given_output: str | None = None) -> Chosen:
    """Take a program's options `-i` and `-o`, which are specifiers of stores. Each defaults to `disk` (./events).

    If both name the same store, the log is there. Otherwise it is moved from the input to the output first; an input
    that was not given counts only if there is a log. So with `-o` alone, a log in ./events is taken along, and the same
    command goes on in the output from then on. Raises InvalidUsage for what names no store.
    """
    source, target = (parse_specifier(DEFAULT if given is None else given) for given in (given_input, given_output))
    store = open_store(target)
    if source == target:
        return Chosen(store, None)
    origin = open_store(source)
    if given_input is None and not _is_there(origin):
        return Chosen(store, None)
    return Chosen(store, origin)


def _is_there(store: Store) -> bool:
    try:
        store.reader().close()
    except NotFound:
        return False
    return True
