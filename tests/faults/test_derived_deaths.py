"""A source over a collection whose instance, or whose command, dies before or after any request: all stays the same."""

from __future__ import annotations

import os
from contextlib import suppress

import pytest

from persist_lib.errors import PersistError
from persist_lib.sources import Collection, Sources
from tests.faults.test_collection_commands import Died, Dying
from tests.ingests import CONFIG
from tests.unit.sources.test_derived import LESS, OUTPUT, Place, row

ALL = os.environ.get("PERSIST_FAULTS") == "all"


@pytest.mark.parametrize("happens", [True, False])
@pytest.mark.parametrize("what", ["ingest", "create", "drop", "reset"])
def test_another_one_goes_on_where_one_died(what: str, happens: bool) -> None:
    total = story(Dying(None, happens=True), what)
    assert total > 5
    for k in range(1, total + 1) if ALL else range(1 + 7 * happens, total + 1, 31):
        story(Dying(k, happens=happens), what)


def story(dying: Dying, what: str) -> int:
    place = Place()
    try:
        for n in range(4):
            place.write.upsert([row(1, n), row(n + 2, n)])
        place.controller.alter("in", retention=2)
        place.controller.tend()
        theirs = Sources(place.world.client(CONFIG, plan=dying).controller())
        if what != "create":
            place.create(command="one")
            place.catch_up()
            place.write.upsert([row(1, 50)])
            place.write.delete([3])
        with suppress(Died):
            if what == "ingest":
                instance = theirs.open("out")
                instance.step()
                place.world.clock.advance(2)
                instance.step()
            elif what == "create":
                theirs.create("out", Collection("in"), OUTPUT, decoding=LESS, command="one")
            else:
                (theirs.drop if what == "drop" else theirs.reset)("out")
        place.write.upsert([row(9, 9)])
        place.world.clock.advance(30)
        if what == "reset":
            place.sources.reset("out")
        elif what == "drop":
            with suppress(PersistError):
                place.sources.drop("out")
            assert place.controller.list() == ["in"]
            assert {one.id for one in place.controller.capabilities("in") if one.kind == "hold"} == {"collection"}
        if what in ("create", "drop"):
            place.create(command="one")
        place.catch_up()
        place.check_same()
        assert place.rows() == place.rows("in")
        holds = [one.id for one in place.controller.capabilities("in") if one.kind == "hold"]
        assert len(holds) == 2, "its own, and that of the collection"
        return dying.seen
    finally:
        dying.k = None
        place.world.close()
