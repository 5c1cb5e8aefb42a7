"""What a collection makes of the token of an earlier call, long after it, and of tokens that are not its own."""

from __future__ import annotations

from typing import Any

import pytest

import persist_lib as persist
from persist_lib.catalog.records import LAYER
from persist_lib.convert.by_key import without_times
from persist_lib.errors import Indeterminate
from persist_lib.frontier import at
from persist_lib.relation.registration import format_since, format_token
from tests.renditions import create
from tests.worlds import SCHEMA, World, row

ROWS = [{"id": 1, "word": "ours"}]


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("came", [True, False])
def test_a_token_from_before_since_is_known_or_in_doubt(world: World, came: bool, moves: bool) -> None:
    """And never a SinceViolation, which says nothing of the append."""
    controller, token = create(world.client()), format_token(world.client().runtime, at(2), at(3))
    with controller.open_writer("c") as others:
        others.compare_and_append([row(7)], 0, 2)
        if came:  # the first attempt, of which its caller heard nothing
            others.compare_and_append([row(1, "ours", 2)], 2, 3, token=token)
        others.advance_upper(3)
        if moves:
            controller.make_rendition("c", copy=True)
            controller.hand_over("c", 2, advance=True)
        others.advance_upper(20)
        controller.alter("c", retention=2)
        controller.tend("c")
        assert controller.describe("c").since > at(3)
        if came and not moves:
            assert (others.append_now(ROWS, token=token).upper, others.fetch_upper()) == (at(3), at(20))
        else:
            with pytest.raises(Indeterminate, match=r"not known any more: which rendition .* is given up") as told:
                others.append_now(ROWS, token=token)
            assert told.value.token == token
        assert others.fetch_upper() == at(20), "nothing was written"


def test_a_token_of_a_place_that_is_ahead_is_refused(world: World) -> None:
    controller, token = create(world.client()), format_token(world.client().runtime, at(9), at(10))
    writes: list[Any] = [controller.open_writer("c"), world.client().open_writer("s", SCHEMA)]
    for write in writes:
        with pytest.raises(persist.UpperMismatch):
            write.append_now(ROWS, token=token)


def test_an_append_that_a_server_placed_is_judged_in_the_shard_that_has_it(world: World) -> None:
    client = world.client()
    with create(client, shards=1).open_writer("c") as write:
        (name,) = write._timeline().last.rendition.names
        lone = client.open_writer(name, SCHEMA, layer=LAYER)
        lost = format_since(client.runtime, lone.machine.fetch().seqno)
        (table,) = without_times(SCHEMA, ROWS)
        table = table.select([*SCHEMA.names, "_diff"])
        placed = lone._append_placed(table, client.runtime.deadline(9), None, None, None)
        assert write.append_now(ROWS, token=placed.token).upper == placed.upper == at(1)
        with pytest.raises(Indeterminate, match="Read the collection later to find out"):
            write.append_now(ROWS, token=lost)
        with pytest.raises(persist.InvalidUsage, match="only a token"):
            write.upsert(ROWS, token=placed.token)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_definite_append_has_its_token_in_every_shard(world: World, shards: int) -> None:
    controller, token = create(world.client(), "append", shards=shards), b"mine"
    rows = [row(id_) for id_ in range(9)]
    for _ in range(2):
        with world.client().controller().open_writer("c") as write:
            answer = write.append(rows, 0, 1, token=token)
            assert (answer.upper, answer.token) == (at(1), token)
    for name in controller.describe("c").active.shards:
        assert controller.client.judge_append(name, token, at(0), at(1)).answer == "committed"
    with controller.open_reader("c") as read, controller.open_writer("c") as write:
        assert len(read.snapshot().to_pylist()) == 9
        with pytest.raises(persist.InvalidUsage):
            write.append(rows, 0, 1, token="text")  # type: ignore[arg-type]
