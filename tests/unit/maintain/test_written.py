"""The bytes ever written: by appends and by compactions, since ever, and for each byte appended."""

from __future__ import annotations

from typing import Any

import pytest

import persist_lib as persist
from persist_lib.core.state import INLINE_TOTAL_BYTES
from tests.shards import EAGER, TINY, filled
from tests.worlds import SCHEMA, World, row


def test_what_was_written_is_what_the_store_was_sent(world: World) -> None:
    client = world.client(TINY)
    filled(client, 12)
    sent = sent_parts(world)
    census = client.census("s")
    assert (census.appended_bytes, census.maintained_bytes, census.write_amplification) == (sent, 0, 0.0)
    for round_ in range(3):
        done = client.compact("s", policy=EAGER)
        before, census = census, client.census("s")
        assert census.maintained_bytes - before.maintained_bytes == done.bytes_out
        assert census.appended_bytes + census.maintained_bytes == sent_parts(world)
        with client.open_writer("s", SCHEMA) as write:
            write.compare_and_append([row(1, time=12 + round_)], 12 + round_, 13 + round_)
        census = client.census("s")
    assert census.write_amplification == pytest.approx(census.maintained_bytes / census.appended_bytes)
    assert 0 < (census.write_amplification or 0) < 4
    for _ in range(3):
        client.maintain("s")
    assert client.census("s").appended_bytes == census.appended_bytes, (
        "garbage is deleted, and was written all the same"
    )
    assert world.client(TINY).census("s").maintained_bytes == client.census("s").maintained_bytes, (
        "from rollup and rows"
    )


def sent_parts(world: World) -> int:
    return sum(one.size for one in world.requests if one.kind == "set" and one.key.endswith(".parquet"))


def test_inline_batches_count_when_appended_and_their_merge_counts_as_maintenance(world: World) -> None:
    client = world.client(persist.Config(inline_bytes=256 * 1024))
    with client.open_writer("s", SCHEMA) as write:
        time = 0
        while not client.census("s").maintained_bytes:
            rows = [row(id_, f"{time}-{id_:>200}", time=time) for id_ in range(600)]
            write.compare_and_append(rows, time, time + 1)
            time += 1
            assert time < 40
    census = client.census("s")
    assert census.appended_bytes > INLINE_TOTAL_BYTES // 2
    assert census.maintained_bytes == sent_parts(world), "the writer's own upkeep"


@pytest.mark.parametrize("format_", [1, 2])
def test_an_upgraded_shard_counts_from_its_upgrade_on(world: World, format_: int) -> None:
    client = world.client(TINY.model_copy(update={"format": format_}))
    filled(client, 6)
    client.compact("s", policy=EAGER)
    census = client.census("s")
    assert (census.appended_bytes, census.maintained_bytes, census.write_amplification) == (0, 0, None)
    client.upgrade("s")
    assert client.census("s").write_amplification is None, "nothing was appended since"
    size = client.census("s").size
    with client.open_writer("s", SCHEMA) as write:
        write.compare_and_append([row(1, time=6)], 6, 7)
    census = client.census("s")
    assert census.appended_bytes == census.size - size
    client.compact("s", policy=EAGER)
    assert client.census("s").maintained_bytes == client.census("s").size
    for _ in range(3):
        client.maintain("s")
    assert world.client(TINY).census("s").appended_bytes == census.appended_bytes


def test_the_figures_are_told_in_words_and_for_machines(world: World) -> None:
    from persist_lib.cli.json_values import jsonable  # noqa: PLC0415
    from persist_lib.cli.render import census_lines  # noqa: PLC0415

    client = world.client(TINY)
    client.open_writer("s", SCHEMA).close()
    assert dict(census_lines(client.census("s")))["written"] == "0 B appended, 0 B by compactions"
    filled(client, 3, shard="t")
    client.compact("t", policy=EAGER)
    census: Any = client.census("t")
    assert dict(census_lines(census))["written"].endswith(f": {census.write_amplification:.2f} times as much")
    assert jsonable(census)["maintained_bytes"] == census.maintained_bytes
