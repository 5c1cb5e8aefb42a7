"""Consensus on S3 alone: nobody wins a place that truncation has freed, and no stray is ever read as a row."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.errors import Corrupt, Indeterminate, InvalidUsage, Missing
from persist_lib.ids import SeqNo
from persist_lib.location import open_location
from persist_lib.location.api import Newest, Row
from persist_lib.location.objects import consensus as objects_consensus
from persist_lib.location.objects.blob import enter
from persist_lib.location.objects.consensus import KEPT_BYTES, RECENT_S, ObjectsConsensus
from persist_lib.location.scheme import Opening
from persist_lib.shard import log
from persist_lib.testing import ManualClock
from tests import servers
from tests.faults.proxy import Proxy
from tests.logs import after

pytestmark = pytest.mark.slow

servers.use_test_credentials()


@pytest.fixture
def url() -> str:
    return f"s3+cas://{servers.BUCKET}/{os.urandom(8).hex()}?endpoint={servers.s3_server().url}&path_style=true"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def opened(url: str, clock: ManualClock) -> Iterator[Callable[[], ObjectsConsensus]]:
    made: list[ObjectsConsensus] = []

    def make() -> ObjectsConsensus:
        made.append(ObjectsConsensus(enter(url, Opening(create=True)), runtime=clock.runtime(len(made)), page=4))
        return made[-1]

    yield make
    for consensus in made:
        consensus.close()


class Acts:
    """A client before or after one of whose operations somebody else acts, once."""

    def __init__(self, inner: Any, operation: str, act: Callable[[], object], *, after: bool = False) -> None:
        self.inner, self.operation, self.act, self.after, self.done = inner, operation, act, after, False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)
        if name != self.operation or self.done:
            return method

        def call(**arguments: Any) -> Any:
            self.done = True
            if not self.after:
                self.act()
            answer = method(**arguments)
            if self.after:
                self.act()
            return answer

        return call


def interpose(
    consensus: ObjectsConsensus, monkeypatch: pytest.MonkeyPatch, operation: str, act: Callable[[], object], **how: bool
) -> None:
    acts = Acts(consensus._objects.clients.get(), operation, act, **how)
    monkeypatch.setattr(consensus._objects.clients, "get", lambda: acts)


def fill(consensus: ObjectsConsensus, first: int, last: int) -> None:
    for n in range(first, last + 1):
        assert consensus.compare_and_set("s", after(n - 1), b"%d" % n)


def rows(first: int, last: int) -> list[Row]:
    return [Row(SeqNo(n), b"%d" % n) for n in range(first, last + 1)]


@pytest.mark.parametrize("stale", [None, 1, 3])
def test_a_stale_client_that_writes_into_a_freed_place_has_not_won_and_is_never_read(
    opened: Callable[[], ObjectsConsensus], monkeypatch: pytest.MonkeyPatch, stale: int | None
) -> None:
    late, busy = opened(), opened()
    fill(busy, 1, 3) if stale else None
    assert late.scan("s", SeqNo(0), stale or 99) == (rows(1, stale) if stale else [])

    def advance_and_truncate() -> None:
        fill(busy, 4 if stale else 1, 7)
        assert busy.truncate("s", SeqNo(7)) == 6

    interpose(late, monkeypatch, "put_object", advance_and_truncate)
    with pytest.raises(Indeterminate, match="truncated to v7"):
        late.compare_and_set("s", after(stale or 0), b"stray")
    monkeypatch.undo()
    for reader in (late, busy, opened()):
        assert reader.head("s") == rows(7, 7)[0]
        for limit in (1, 2, 99):
            assert reader.scan("s", SeqNo(0), limit) == rows(7, 7)
            assert reader.scan("s", SeqNo((stale or 0) + 1), limit) == rows(7, 7)
    fill(opened(), 8, 8)
    assert busy.truncate("s", SeqNo(8)) == 2, "the stray is swept with the row"


def test_a_stale_client_is_told_that_it_lost_without_writing_anything(
    opened: Callable[[], ObjectsConsensus], clock: ManualClock
) -> None:
    late, busy = opened(), opened()
    fill(late, 1, 3)
    fill(busy, 4, 7)
    busy.truncate("s", SeqNo(7))
    clock.sleep(RECENT_S + 1)
    for expected in (0, 1, 3, 5):
        assert not late.compare_and_set("s", after(expected), b"stale")
    assert [*late._names("s", SeqNo(0))] == [7]


def test_a_winner_whose_row_was_truncated_before_it_could_be_sure_is_in_doubt_and_not_wrong(
    opened: Callable[[], ObjectsConsensus], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = opened(), opened()
    fill(one, 1, 3)

    def go_on() -> None:
        fill(other, 5, 6)
        other.truncate("s", SeqNo(6))

    interpose(one, monkeypatch, "put_object", go_on, after=True)
    with pytest.raises(Indeterminate):
        one.compare_and_set("s", after(3), b"4")
    monkeypatch.undo()
    assert one.scan("s", SeqNo(0), 9) == rows(6, 6)


def test_a_scan_that_meets_a_truncation_and_a_stray_reads_neither_a_gap_nor_the_stray(
    opened: Callable[[], ObjectsConsensus], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, busy = opened(), opened()
    fill(busy, 1, 6)
    assert reader.scan("s", SeqNo(0), 1) == rows(1, 1)

    def truncate_and_stray() -> None:
        busy.truncate("s", SeqNo(6))
        at = busy._objects.at(busy._row("s", SeqNo(3)))
        busy._objects.clients.get().put_object(**at, Body=b"stray", IfNoneMatch="*")

    interpose(reader, monkeypatch, "get_object", truncate_and_stray)
    assert reader.scan("s", SeqNo(2), 99) == rows(6, 6)
    monkeypatch.undo()
    assert reader.scan("s", SeqNo(3), 1) == rows(6, 6)


def test_truncation_that_died_after_raising_the_floor_is_finished_by_the_next(
    opened: Callable[[], ObjectsConsensus], monkeypatch: pytest.MonkeyPatch
) -> None:
    dying, next_ = opened(), opened()
    fill(dying, 1, 5)

    def die() -> None:
        raise KeyboardInterrupt

    interpose(dying, monkeypatch, "delete_objects", die)
    with pytest.raises(KeyboardInterrupt):
        dying.truncate("s", SeqNo(4))
    assert next_.scan("s", SeqNo(0), 99) == rows(4, 5)
    assert not next_.compare_and_set("s", after(3), b"!")
    assert next_.truncate("s", SeqNo(4)) == 3
    assert next_.truncate("s", SeqNo(4)) == 0


def test_of_two_truncations_the_floor_keeps_the_higher(
    opened: Callable[[], ObjectsConsensus], monkeypatch: pytest.MonkeyPatch
) -> None:
    low, high = opened(), opened()
    fill(low, 1, 6)
    interpose(low, monkeypatch, "put_object", lambda: high.truncate("s", SeqNo(6)))
    assert low.truncate("s", SeqNo(3)) == 0
    assert high.scan("s", SeqNo(0), 9) == rows(6, 6)


@pytest.mark.parametrize("seqno", [1, 3])
def test_a_truncation_whose_row_another_one_has_deleted_by_now_has_nothing_to_do(
    opened: Callable[[], ObjectsConsensus], monkeypatch: pytest.MonkeyPatch, seqno: int
) -> None:
    """It is no attempt to pass the newest row, though its own is not there."""
    low, high = opened(), opened()
    fill(low, 1, 6)
    interpose(low, monkeypatch, "head_object", lambda: high.truncate("s", SeqNo(5)))
    assert low.truncate("s", SeqNo(seqno)) == 0
    assert high.scan("s", SeqNo(0), 9) == rows(5, 6)


def test_a_row_that_is_lost_is_damage_and_no_end_of_the_log(opened: Callable[[], ObjectsConsensus]) -> None:
    consensus = opened()
    fill(consensus, 1, 5)
    consensus._objects.clients.get().delete_object(**consensus._objects.at(consensus._row("s", SeqNo(3))))
    for reader in (consensus, opened()):
        with pytest.raises(Missing, match="gap"):
            reader.scan("s", SeqNo(1), 99)
    consensus._objects.clients.get().put_object(**consensus._objects.at(consensus._floor_of("s")), Body=b"")
    with pytest.raises(Corrupt, match="floor"):
        consensus.scan("s", SeqNo(4), 99)


def test_a_row_that_another_one_replaced_is_not_followed_once_that_can_be_seen(
    opened: Callable[[], ObjectsConsensus], clock: ManualClock
) -> None:
    """An older copy of the bucket was restored, and others came back to the seqno that this client saw."""
    live, restoring = opened(), opened()
    fill(live, 1, 5)
    for seqno in (4, 5):
        restoring._objects.clients.get().delete_object(**restoring._objects.at(restoring._row("s", SeqNo(seqno))))
    others = opened()
    for seqno in (4, 5):
        assert others.compare_and_set("s", after(seqno - 1), b"other %d" % seqno)
    clock.sleep(RECENT_S + 1)
    assert not live.compare_and_set("s", Newest(SeqNo(5), b"5"), b"6")
    assert others.compare_and_set("s", Newest(SeqNo(5), b"other"), b"other 6")


def test_a_newest_row_that_is_known_is_read_again_only_if_its_object_is_another(
    opened: Callable[[], ObjectsConsensus], monkeypatch: pytest.MonkeyPatch
) -> None:
    live, other = opened(), opened()
    fill(live, 1, 5)
    with monkeypatch.context() as patch:
        patch.setattr(live._objects, "get", None)
        assert live.scan("s", SeqNo(5), 99) == [live.head("s")] == rows(5, 5)
    at = other._objects.at(other._row("s", SeqNo(5)))
    other._objects.clients.get().put_object(**at, Body=b"6")
    assert live.scan("s", SeqNo(5), 99) == [Row(SeqNo(5), b"6")]
    assert live.scan("s", SeqNo(4), 99) == [*rows(4, 4), Row(SeqNo(5), b"6")]


@pytest.mark.parametrize("size", [KEPT_BYTES, KEPT_BYTES + 1])
def test_a_row_is_whole_whether_it_is_kept_or_too_large(opened: Callable[[], ObjectsConsensus], size: int) -> None:
    consensus, large = opened(), bytes(size)
    assert consensus.compare_and_set("s", None, large)
    for _ in range(2):
        assert consensus.scan("s", SeqNo(1), 99) == [consensus.head("s")] == [Row(SeqNo(1), large)]
    assert consensus.compare_and_set("s", Newest(SeqNo(1), large[:4]), b"2")


def test_of_few_keys_the_last_row_is_kept(
    opened: Callable[[], ObjectsConsensus], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects_consensus, "KEPT_ROWS", 2)
    consensus = opened()
    for key in "abc":
        assert consensus.compare_and_set(key, None, b"1")
        assert consensus.head("a") == Row(SeqNo(1), b"1")
    assert [*consensus._kept] == ["c", "a"]
    assert all(consensus.head(key) for key in "abc")
    assert [*consensus._told] == ["b", "c"]


def test_a_stray_with_the_bytes_of_a_known_row_is_no_row(opened: Callable[[], ObjectsConsensus]) -> None:
    reader, busy = opened(), opened()
    fill(busy, 1, 3)
    assert reader.head("s") == rows(3, 3)[0]
    fill(busy, 4, 7)
    busy.truncate("s", SeqNo(7))
    busy._objects.clients.get().put_object(**busy._objects.at(busy._row("s", SeqNo(3))), Body=b"3")
    for limit in (1, 2, 99):
        assert reader.scan("s", SeqNo(3), limit) == rows(7, 7)


def test_rows_that_are_lost_before_a_known_one_are_damage(opened: Callable[[], ObjectsConsensus]) -> None:
    consensus = opened()
    fill(consensus, 1, 5)
    consensus._objects.clients.get().delete_object(**consensus._objects.at(consensus._row("s", SeqNo(4))))
    with pytest.raises(Missing, match="gap"):
        consensus.scan("s", SeqNo(4), 99)


def test_the_blobs_and_the_log_of_one_location_share_connections_and_are_opened_by_one_request(url: str) -> None:
    open_location(url, create=True).close()
    with Proxy(servers.s3_server().port) as proxy:
        location = open_location(url.replace(f":{servers.s3_server().port}", f":{proxy.port}"))
        assert proxy.requests == 1
        location.close()
        location.close()
    for call in (lambda: location.blob.get("s/x"), lambda: location.consensus.head("s")):
        with pytest.raises(InvalidUsage, match="closed"):
            call()


def test_rows_that_were_there_are_read_while_the_log_is_listed(
    opened: Callable[[], ObjectsConsensus], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(opened(), 1, 5)
    with closing(ObjectsConsensus(enter(url, Opening()))) as consensus:
        assert consensus.head("s") == rows(5, 5)[0]
        fill(opened(), 6, 7)
        objects = consensus._objects
        reading, get, entries = {"log": threading.Event(), "floor": threading.Event()}, objects.get, objects.entries

        def get_and_tell(name: str, *asked: Any) -> Any:
            reading[name.split("/", maxsplit=1)[0]].set()
            return get(name, *asked)

        def list_later(*asked: Any) -> Any:
            for what, is_read in reading.items():
                assert is_read.wait(60), f"the {what} is not read before the listing is there"
            return entries(*asked)

        monkeypatch.setattr(objects, "get", get_and_tell)
        monkeypatch.setattr(objects, "entries", list_later)
        assert consensus.scan("s", SeqNo(2), 99) == rows(2, 7)


def test_new_rows_and_the_floor_are_read_at_the_same_time(
    opened: Callable[[], ObjectsConsensus], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(opened(), 1, 2)
    with closing(ObjectsConsensus(enter(url, Opening()))) as consensus:
        assert consensus.scan("s", SeqNo(1), 99) == rows(1, 2)
        fill(opened(), 3, 3)
        together, get = threading.Barrier(2), consensus._objects.get

        def get_together(*asked: Any) -> Any:
            together.wait(60)
            return get(*asked)

        monkeypatch.setattr(consensus._objects, "get", get_together)
        assert consensus.scan("s", SeqNo(2), 99) == rows(2, 3)


def test_what_was_read_while_the_log_was_listed_and_truncated_does_not_count(
    opened: Callable[[], ObjectsConsensus], monkeypatch: pytest.MonkeyPatch
) -> None:
    consensus, other = opened(), opened()
    fill(other, 1, 7)
    assert consensus.scan("s", SeqNo(1), 99) == rows(1, 7)  # and knows a floor
    interpose(consensus, monkeypatch, "get_object", lambda: other.truncate("s", SeqNo(6)), after=True)
    assert consensus.scan("s", SeqNo(2), 99) == rows(6, 7)


@pytest.mark.parametrize(
    ("config", "every", "threads"),
    [({}, 32, 16), ({"lease_ms": 60_000}, 32, 16), ({"rollup_every": 128}, 128, 16), ({"read_threads": 4}, 32, 4)],
)
def test_a_client_rolls_up_more_often_and_gets_more_at_a_time_unless_it_is_said(
    url: str, config: dict[str, int], every: int, threads: int
) -> None:
    with persist.open(url, config=persist.Config(**config)) as client:
        with client.open_writer("s", persist.Schema.bytes()) as write:
            for n in range(40):
                write.compare_and_append([((b"%d" % n, b""), n, 1)], n, n + 1)
            made = client.inspect("s").state.rollups
        assert (client.config.rollup_every, client.config.read_threads) == (every, threads)
        assert [at // every for at in made] == ([1] if every == 32 else [])


def test_a_client_opens_a_shard_by_its_rollup_and_the_rows_at_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with persist.open(url) as client, client.open_writer("s", persist.Schema.bytes()) as write:
        for n in range(40):
            write.compare_and_append([((b"%d" % n, b""), n, 1)], n, n + 1)
    listing, fetch = threading.Event(), log.fetch_rollup

    def fetch_later(*asked: Any) -> Any:
        assert listing.wait(60), "the rollup is fetched before the rows are asked for"
        return fetch(*asked)

    def scan_and_tell(*asked: Any) -> Any:
        listing.set()
        return scan(*asked)

    with persist.open(url) as client:
        scan = client.consensus.scan
        monkeypatch.setattr(log, "fetch_rollup", fetch_later)
        monkeypatch.setattr(client.consensus, "scan", scan_and_tell)
        assert client.inspect("s").seqno > 40


def test_more_than_a_thousand_rows_and_keys_are_listed_and_truncated(url: str) -> None:
    consensus = ObjectsConsensus(enter(url, Opening(create=True)))
    client = consensus._objects.clients.get()
    rows, keys = [("s", n) for n in range(1, 1006)], [(f"t{n}", 1) for n in range(1005)]
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda at: client.put_object(**consensus._objects.at(consensus._row(at[0], SeqNo(at[1]))), Body=b"x"),
                [*rows, *keys],
            )
        )
    assert consensus.head("s") == Row(SeqNo(1005), b"x")
    assert sorted(consensus.list_keys()) == sorted(["s", *(key for key, _ in keys)])
    assert consensus.truncate("s", SeqNo(1004)) == 1003
    assert [row.seqno for row in consensus.scan("s", SeqNo(0), 9999)] == [1004, 1005]
    assert [*consensus._names("s", SeqNo(0))] == [1004, 1005], "what was truncated is deleted"
    consensus.close()


def test_one_url_opens_blobs_and_consensus_and_several_keys_at_once_are_refused(url: str) -> None:
    with open_location(url, create=True) as location:
        location.blob.set("s/x", b"x")
        location.consensus.compare_and_set("s", None, b"x")
        with pytest.raises(InvalidUsage, match="PostgreSQL"):
            location.consensus.compare_and_set_many({"s": (after(1), b"x")})
        assert [entry.key for entry in location.blob.list("")] == ["s/x"]
    with open_location(url, read_only=True) as reader:
        assert reader.consensus.head("s") == Row(SeqNo(1), b"x")
