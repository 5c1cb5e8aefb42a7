"""Producers: no number is committed twice, by whatever door, from whatever process, however late."""

from __future__ import annotations

import pytest

import persist_lib as persist
from tests.worlds import SCHEMA, row


def test_a_number_that_was_committed_is_refused_and_the_error_says_where_it_is(world):
    client = world.client()
    write, read = client.open_shard("s", SCHEMA)
    done = write.compare_and_append([row(1)], 0, 1, producer=("query", 4))
    for other in (write, world.client().open_writer("s", SCHEMA)):
        for number in (4, 3):
            with pytest.raises(persist.AlreadyProduced, match="continue after 4") as caught:
                other.compare_and_append([row(2, "w", 1)], 1, 2, producer=("query", number))
            error = caught.value
            assert (error.producer, error.sequence, error.last) == ("query", number, 4)
            assert (error.seqno, error.upper) == (done.seqno, done.upper)
    assert read.snapshot(diff=True).to_arrow().num_rows == 1
    assert client.inspect("s").seqno == done.seqno, "nothing was written, and no writer was registered for it"


def test_an_append_to_several_shards_takes_a_producer(world):
    client = world.client()
    write, read = client.open_shard("s", SCHEMA)

    def append(number: int) -> object:
        upper = write.fetch_upper().time
        return client.compare_and_append_many(
            [persist.Append(write, [row(number, "w", upper)], upper, upper + 1, ("query", number))]
        )

    for number in (0, 1, 7):
        append(number)
        with pytest.raises(persist.AlreadyProduced):
            append(number)
    assert read.snapshot(diff=True).to_arrow().num_rows == 3
    assert client.producers("s")["query"].sequence == 7
    assert client.census("s").producers == 1


def test_a_token_answers_before_the_number_does(world):
    write = world.client().open_writer("s", SCHEMA)
    first = write.compare_and_append([row(1)], 0, 1, token=b"t", producer=("query", 4))
    again = write.compare_and_append([row(1)], 0, 1, token=b"t", producer=("query", 4))
    assert (again.seqno, again.attempts) == (first.seqno, 0)


def test_a_name_is_forgotten_only_at_the_number_that_was_seen(world):
    client = world.client()
    write = client.open_writer("s", SCHEMA)
    write.compare_and_append([row(1)], 0, 1, producer=("query", 4))
    with pytest.raises(persist.InvalidUsage, match="at 4 by now, not at 3"):
        client.forget_producer("s", "query", expected=3)
    with pytest.raises(persist.InvalidUsage, match="no producer 'nobody'"):
        client.forget_producer("s", "nobody", expected=3)
    client.forget_producer("s", "query", expected=4)
    assert client.producers("s") == {}
    write.compare_and_append([row(1, "w", 1)], 1, 2, producer=("query", 4))


def test_a_shard_of_an_older_format_says_what_to_do():
    with persist.open("memory:", config=persist.Config(format=2)) as client:
        write = client.open_writer("s", SCHEMA)
        with pytest.raises(persist.InvalidUsage, match="persist shard upgrade"):
            write.compare_and_append([row(1)], 0, 1, producer=("query", 4))
        client.upgrade("s")
        write.compare_and_append([row(1)], 0, 1, producer=("query", 4))
