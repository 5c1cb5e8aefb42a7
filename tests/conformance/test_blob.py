"""What every Blob promises."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from persist_lib.errors import Corrupt, InvalidName, InvalidUsage
from persist_lib.location.api import Blob, BlobEntry
from persist_lib.location.wrap.around import listed, next_page
from tests.conformance import racers
from tests.conformance.conftest import PROCESSES, Race
from tests.conformance.stores import SHARED_BLOBS, BlobKind

AWKWARD = [
    "s/a b+c%20d.parquet",
    "s/ümläut-日本語-🦉",
    "s/quote'double\"back\\slash",
    "s/semi;amp&hash#question?star*",
    "s/<tag>&amp;",
    "s/UPPER",
    "s/upper",
    "s/a..b",
    "s/~tilde/-dash/_under/=equals/@at",
    "s/" + "x" * 255,
    "s/" + "/".join(["deep"] * 50),
]
INVALID = ["", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "a/./b", ".tmp/x", "a/.hidden", "a\0b", "a\nb", "x" * 256]
INVALID += ["é" * 128, "/".join(["x" * 200] * 6), "\ud800"]


def test_an_object_is_got_as_it_was_set(blob: Blob) -> None:
    big = os.urandom(9 * 1024 * 1024 + 7)
    for key, data in {"s/empty": b"", "s/small": b"abc", "s/zeros": bytes(5000), "s/big": big}.items():
        blob.set(key, data)
        assert blob.get(key) == data


def test_a_view_of_any_item_size_is_set_as_its_bytes(blob: Blob) -> None:
    blob.set("s/view", memoryview(b"01234567").cast("I"))
    assert blob.get("s/view") == b"01234567"


def test_what_was_set_does_not_change_with_the_caller_s_buffer(blob: Blob) -> None:
    buffer = bytearray(b"before")
    blob.set("s/buffer", memoryview(buffer))
    buffer[:] = b"after!"
    assert blob.get("s/buffer") == b"before"


def test_a_missing_object_is_none_and_not_empty(blob: Blob) -> None:
    blob.set("s/w/part", b"x")
    for key in ("nowhere", "s/nothing", "s/w", "s", "s/w/part/below"):
        assert blob.get(key) is None
        assert blob.get_range(key, 0, 1) is None


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 10, b"0123456789"),
        (0, 0, b""),
        (3, 3, b""),
        (2, 5, b"234"),
        (9, 10, b"9"),
        (8, 99, b"89"),
        (10, 12, b""),
        (50, 60, b""),
        (0, 1 << 62, b"0123456789"),
    ],
)
def test_a_range_is_cut_at_the_end_of_the_object(blob: Blob, start: int, end: int, expected: bytes) -> None:
    blob.set("s/digits", b"0123456789")
    assert blob.get_range("s/digits", start, end) == expected


@pytest.mark.parametrize(("start", "end"), [(-1, 3), (3, 2), (-5, -2)])
def test_a_range_that_is_none_is_refused(blob: Blob, start: int, end: int) -> None:
    blob.set("s/digits", b"0123456789")
    with pytest.raises(InvalidUsage):
        blob.get_range("s/digits", start, end)


def test_a_range_of_an_empty_object_is_empty_and_not_missing(blob: Blob) -> None:
    blob.set("s/empty", b"")
    assert blob.get_range("s/empty", 0, 5) == b""


def test_setting_the_same_bytes_again_succeeds(blob: Blob) -> None:
    blob.set("s/key", b"once")
    blob.set("s/key", b"once")
    assert blob.get("s/key") == b"once"


@pytest.mark.parametrize("other", [b"other", b"", b"once more", b"onc"])
def test_setting_other_bytes_raises_and_changes_nothing(blob: Blob, other: bytes) -> None:
    blob.set("s/key", b"once")
    with pytest.raises(Corrupt, match="s/key"):
        blob.set("s/key", other)
    assert blob.get("s/key") == b"once"
    assert [*blob.list("s/")] == [BlobEntry("s/key", 4)]


def test_delete_answers_whether_there_was_one(blob: Blob) -> None:
    blob.set("s/w/key", b"x")
    assert not blob.delete("s/w")
    assert blob.delete("s/w/key")
    assert not blob.delete("s/w/key")
    assert not blob.delete("s/never/was")
    assert blob.get("s/w/key") is None
    assert [*blob.list("")] == []


def test_delete_many_deletes_all_and_takes_no_offence_at_missing_ones(blob: Blob) -> None:
    keys = [f"s/w{n % 3}/{n}" for n in range(30)]
    for key in keys:
        blob.set(key, b"x")
    blob.set("s/w0/stays", b"x")
    assert blob.delete_many([*keys, "s/missing", "t/missing", keys[0]]) == {}
    assert [entry.key for entry in blob.list("")] == ["s/w0/stays"]
    assert blob.delete_many([]) == {}


def test_a_key_can_be_set_after_all_others_of_its_directory_were_deleted(blob: Blob) -> None:
    for n in range(3):
        blob.set(f"s/w/{n}", b"x")
        assert blob.delete(f"s/w/{n}")
        assert blob.delete_many([f"s/w/{n}"]) == {}


def test_list_answers_every_object_below_the_prefix_with_its_size(blob: Blob) -> None:
    objects = {"a/1": b"1", "a/b/2": b"22", "a/b/c/3": b"333", "a2/4": b"4444", "ab": b"5", "b/a/6": b""}
    for key, data in objects.items():
        blob.set(key, data)
    for prefix in ("a/", "a2/", "a/b/", "b/", "", "nothing/", "a/1/", "ab/"):
        expected = {BlobEntry(key, len(data)) for key, data in objects.items() if key.startswith(prefix)}
        listed = [*blob.list(prefix)]
        assert set(listed) == expected
        assert len(listed) == len(expected)


def test_listing_and_deleting_go_on_beyond_a_page(blob: Blob, blob_kind: BlobKind) -> None:
    keys = [f"s/w/{n}" for n in range(blob_kind.more_than_a_page)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: blob.set(key, b"x"), [*keys, "s/v/before", "s/x/after"]))
    assert sorted(entry.key for entry in blob.list("s/w/")) == sorted(keys)
    assert sorted(entry.key for entry in blob.list("")) == ["s/v/before", *sorted(keys), "s/x/after"]
    assert blob.delete_many([*keys, "s/w/never-there"]) == {}
    assert sorted(entry.key for entry in blob.list("")) == ["s/v/before", "s/x/after"]


def test_a_listing_in_pages_is_the_listing_also_from_the_middle(blob: Blob, blob_kind: BlobKind) -> None:
    """It comes in the order of keys. Stores that have no pages answer all of it at once."""
    keys = sorted(f"s/w{n % 3}/{n}" for n in range(blob_kind.more_than_a_page))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: blob.set(key, b"x"), [*keys, "s0", "r/x", "t/x"]))
    assert sorted(entry.key for entry in listed(blob, "s/")) == keys
    for after in (keys[0], keys[len(keys) // 2], keys[-1], "s/w1/", "s/zzz"):
        page = next_page(blob, "s/", after)
        found, left = [entry.key for entry in page.entries], [key for key in keys if key > after]
        assert found == left[: len(found)]
        assert page.is_last is (len(found) == len(left))
    assert list(listed(blob, "nothing/")) == []


def test_list_never_misses_what_stays_while_other_objects_come_and_go(blob: Blob) -> None:
    for n in range(5):
        blob.set(f"s/stays/{n}", b"x")

    def come_and_go() -> None:
        for n in range(60):
            blob.set(f"s/{n}/x", b"x")
            blob.delete(f"s/{n}/x")

    with ThreadPoolExecutor(1) as pool:
        churn = pool.submit(come_and_go)
        while not churn.done():
            stays = {entry.key for entry in blob.list("s/") if entry.key.startswith("s/stays/")}
            assert stays == {f"s/stays/{n}" for n in range(5)}
        churn.result()


@pytest.mark.parametrize("key", AWKWARD)
def test_awkward_keys_are_keys(blob: Blob, blob_kind: BlobKind, key: str) -> None:
    if any(mark in key for mark in blob_kind.refuses):
        for attempt in (lambda: blob.set(key, b"x"), lambda: blob.get(key), lambda: blob.delete(key)):
            with pytest.raises(InvalidName):
                attempt()
        assert [*blob.list("")] == []
        return
    blob.set(key, key.encode())
    assert blob.get(key) == key.encode()
    assert [*blob.list("s/")] == [BlobEntry(key, len(key.encode()))]
    assert blob.delete(key)


def test_keys_that_differ_only_in_case_or_in_normal_form_are_two(blob: Blob) -> None:
    keys = ["s/Key", "s/key", "s/\u00e9", "s/e\u0301"]
    for key in keys:
        blob.set(key, key.encode())
    assert [blob.get(key) for key in keys] == [key.encode() for key in keys]


@pytest.mark.parametrize("key", INVALID)
def test_what_cannot_be_a_key_is_refused_by_everything(blob: Blob, key: str) -> None:
    for call in (blob.get, blob.delete, lambda k: blob.set(k, b"x"), lambda k: blob.get_range(k, 0, 1)):
        with pytest.raises(InvalidName):
            call(key)
    with pytest.raises(InvalidName):
        blob.delete_many([key])
    assert [*blob.list("")] == []


@pytest.mark.parametrize("prefix", ["a", "/", "a//", "../", "./", ".tmp/"])
def test_what_cannot_be_a_prefix_is_refused_at_once(blob: Blob, prefix: str) -> None:
    with pytest.raises(InvalidName):
        blob.list(prefix)


def test_of_threads_that_set_a_key_one_wins(blob: Blob) -> None:
    with ThreadPoolExecutor(8) as pool:
        for n in range(5):
            won = list(pool.map(lambda who, n=n: racers.set_once(blob, f"s/{n}", f"{who}".encode()), range(8)))
            assert won.count(True) == 1
            assert blob.get(f"s/{n}") == f"{won.index(True)}".encode()


def test_of_threads_that_set_a_key_to_the_same_bytes_all_succeed(blob: Blob) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: blob.set("s/same", b"same"), range(16)))
    assert blob.get("s/same") == b"same"


def test_another_opening_sees_what_was_set(blob: Blob, blob_kind: BlobKind, blob_url: str) -> None:
    other = blob_kind.open(blob_url)
    blob.set("s/key", b"x")
    assert other.get("s/key") == b"x"
    assert other.delete("s/key")
    assert blob.get("s/key") is None
    other.close()


def test_closing_twice_is_fine_and_loses_nothing(blob_kind: BlobKind, blob_url: str) -> None:
    blob = blob_kind.open(blob_url)
    blob.set("s/key", b"x")
    blob.close()
    blob.close()
    assert blob_kind.open(blob_url).get("s/key") == b"x"


def test_read_only_reads_and_refuses_to_write(blob: Blob, blob_kind: BlobKind, blob_url: str) -> None:
    blob.set("s/key", b"abc")
    reader = blob_kind.open(blob_url, read_only=True)
    assert reader.get("s/key") == b"abc"
    assert reader.get_range("s/key", 1, 2) == b"b"
    assert [*reader.list("")] == [BlobEntry("s/key", 3)]
    for write in (
        lambda: reader.set("s/x", b""),
        lambda: reader.delete("s/key"),
        lambda: reader.delete_many(["s/key"]),
    ):
        with pytest.raises(InvalidUsage, match="read_only"):
            write()
    assert [*blob.list("")] == [BlobEntry("s/key", 3)]
    reader.close()


@pytest.mark.parametrize("blob_name", SHARED_BLOBS, indirect=True)
def test_a_forked_child_uses_it_as_well_as_its_parent(blob: Blob) -> None:
    blob.set("s/parent", b"x")
    if (child := os.fork()) == 0:
        try:
            blob.set("s/child", b"y")
            os._exit(0 if blob.get("s/parent") == b"x" else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert blob.get("s/child") == b"y"
    blob.set("s/after", b"z")


@pytest.mark.parametrize("blob_name", SHARED_BLOBS, indirect=True)
def test_of_processes_that_set_a_key_one_wins(blob: Blob, blob_name: str, blob_url: str, race: Race) -> None:
    rounds = 8
    won = race([(racers.set_in_process, blob_name, blob_url, who, rounds) for who in range(PROCESSES)])
    for n in range(rounds):
        winners = [who for who in range(PROCESSES) if won[who][n]]
        assert [blob.get(f"raced/{n}/key")] == [f"{who}".encode() for who in winners]
    assert len([*blob.list("")]) == rounds
