"""A client or handle that was closed says just that, at every call, however often it is closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.client import Client
from persist_lib.errors import InvalidUsage, LeaseExpired, PersistError
from persist_lib.relation.held import kept_of
from persist_lib.relation.reader import ReadHandle
from persist_lib.relation.writer import WriteHandle
from tests.unit.client.public_calls import LEGAL, USES_UP, Place, call, callable_of
from tests.worlds import SCHEMA, World, row


@pytest.fixture(params=["memory", "file"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Client]:
    url = "memory:" if request.param == "memory" else f"file:{tmp_path}/data"
    with persist.open(url) as client:
        with client.open_writer("s", SCHEMA) as write:
            write.compare_and_append([row(1)], 0, 1)
        yield client


HARMLESS = {"Client.even_if_paused", "Client.metrics", "Client.charge", "Client.policy", "Client.close"}
"""What a closed client tells all the same: it asks nothing of the location."""


def test_a_closed_client_says_that_it_is_closed_at_every_call(tmp_path: Path) -> None:
    place, calls = Place(tmp_path), dict[str, dict[str, Any]]()
    for what in (one for one in LEGAL if one.startswith("Client.") and one not in HARMLESS):
        if what.startswith(USES_UP):
            place.renew()
        calls[what] = LEGAL[what][0](place)
    calls["Client.compare_and_append_many"] = {"appends": []}  # as others have closed writers among them
    for _ in range(2):
        place.client.close()
        for what, arguments in calls.items():
            with pytest.raises(InvalidUsage, match=r"this client of .* was closed.*persist\.open") as caught:
                call(callable_of(what, place), arguments)
            assert "SQLite" not in caught.value.message, what
    assert place.client.metrics().cost.requests >= 0
    place.close()


WRITER: dict[str, Callable[[WriteHandle], Any]] = {
    "id": lambda write: write.id,
    "compare_and_append": lambda write: write.compare_and_append([row(2, time=1)], 1, 2),
    "append_async": lambda write: write.append_async([row(2, time=1)], 1, 2),
    "append": lambda write: write.append([row(2, time=1)], 1, 2),
    "advance_upper": lambda write: write.advance_upper(2),
    "advance_upper behind": lambda write: write.advance_upper(0),
    "finish": lambda write: write.finish(),
}
READER: dict[str, Callable[[ReadHandle], Any]] = {
    "snapshot": lambda read: read.snapshot(0),
    "changes": lambda read: read.changes(0),
    "listen": lambda read: read.listen(0),
    "wait_for_upper": lambda read: read.wait_for_upper(1),
    "downgrade_since": lambda read: read.downgrade_since(0),
    "acquire": lambda read: kept_of(read).acquire(0),
}


@pytest.mark.parametrize("call", WRITER)
@pytest.mark.parametrize("used", [False, True])
def test_a_closed_writer_says_that_it_was_closed(client: Client, call: str, *, used: bool) -> None:
    write = client.open_writer("s", SCHEMA)
    if used:
        write.append_async([row(9, time=1)], 1, 2).result()
    for _ in range(2):
        write.close()
        with pytest.raises(LeaseExpired, match=r"this writer was closed.*open a new (handle|one)") as caught:
            WRITER[call](write)
        assert "its lease ended" not in caught.value.message
    write.flush()


@pytest.mark.parametrize("call", READER)
@pytest.mark.parametrize("read_only", [False, True])
def test_a_closed_reader_says_that_it_was_closed(client: Client, call: str, *, read_only: bool) -> None:
    with persist.open(client.location, read_only=True) if read_only else client as owner:
        read = owner.open_reader("s")
        for _ in range(2):
            read.close()
            expected = (LeaseExpired, InvalidUsage) if call == "downgrade_since" else LeaseExpired
            with pytest.raises(expected, match=r"was closed.*open a new one|read-only handle") as caught:
                READER[call](read)
            assert "its lease ended" not in caught.value.message


@pytest.mark.parametrize("call", [*WRITER, *READER])
def test_a_handle_of_a_closed_client_says_that_the_client_was_closed(client: Client, call: str) -> None:
    write, read = client.open_shard("s", SCHEMA)
    for _ in range(2):
        client.close()
        with pytest.raises(PersistError, match=r"client.* was closed") as caught:
            WRITER[call](write) if call in WRITER else READER[call](read)
        assert isinstance(caught.value, LeaseExpired)
        assert "SQLite" not in caught.value.message


def test_what_was_known_last_can_still_be_asked_of_a_handle_of_a_closed_client(client: Client) -> None:
    write, read = client.open_shard("s", SCHEMA)
    client.close()
    assert (write.upper, read.upper, read.since) == (persist.at(1), persist.at(1), persist.at(0))
    for handle in (write, read):
        with pytest.raises(InvalidUsage, match=r"this client of .* was closed"):
            handle.fetch_upper()


def test_a_reader_whose_lease_ended_is_told_so_and_not_that_it_was_closed(world: World) -> None:
    client, other = world.client(), world.client()
    client.open_writer("s", SCHEMA).compare_and_append([row(1)], 0, 1)
    read = client.open_reader("s")
    world.clock.advance(3600)
    other.expire("s")
    with pytest.raises(LeaseExpired, match="its lease ended without a heartbeat") as caught:
        read.snapshot(0)
    assert "was closed" not in caught.value.message
    assert "open a new reader" in caught.value.message


def test_a_writer_whose_lease_ended_is_told_that_the_next_call_registers_anew_and_it_does(world: World) -> None:
    client, other = world.client(), world.client()
    write = client.open_writer("s", SCHEMA)
    write.compare_and_append([row(1)], 0, 1)
    world.clock.advance(3600)
    other.expire("s")
    with pytest.raises(LeaseExpired, match="next call on its handle registers again by itself") as caught:
        write.compare_and_append([row(2, time=1)], 1, 2)
    assert "open a new" not in caught.value.message
    assert write.compare_and_append([row(2, time=1)], 1, 2).upper == persist.at(2)
